"""The numbers that the README and the page of findings quote are those of the shipped runs."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from quoted_numbers import FINDINGS, INTERVAL, NUMBER, PLAIN, README, ROOT, SMALL_GAIN, agrees, quoted

import normlab
from normlab.analysis import claims
from normlab.analysis.compare import compare, compare_variants
from normlab.analysis.selection import choose, title_of
from normlab.analysis.verdicts import judged


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return normlab.load_runs(ROOT / "data" / "runs")


def table_rows(scheme: str, columns: int) -> list[str]:
    """The cells of the scheme's row in the table of that many columns that comes first."""
    found = re.search(rf"\| {re.escape(title_of(scheme))} \|((?: [^|]*\|){{{columns}}}) \|", FINDINGS)
    assert found is not None, scheme
    return [cell.strip() for cell in found.group(1).split("|")[:-1]]


def test_the_table_of_losses(runs: pd.DataFrame):
    about = choose(runs, depth=None).runs
    losses = about.groupby(["scheme", "depth"])["eval_loss"]
    mean, spread, seeds = losses.mean(), losses.max() - losses.min(), losses.count()
    for scheme in about["scheme"].unique():
        cells = table_rows(scheme, 5)
        for depth, cell in zip((4, 8, 16), cells, strict=False):
            assert cell == (f"{mean[scheme, depth]:.2f}" if (scheme, depth) in mean.index else "")
        for depth, cell in zip((4, 16), cells[3:], strict=True):
            if scheme == "pre_rmsnorm" or seeds.get((scheme, depth), 0) < 2:
                assert not cell
            else:
                (row,) = compare(runs, scheme, "pre_rmsnorm", "loss", depth=depth).to_dict("records")
                agrees(list(re.fullmatch(rf"{NUMBER} {INTERVAL}", cell).groups()), pd.Series(row))
    trigram = about["trigram_loss"].unique()
    assert quoted(r"\| trigram model \| NUMBER \| NUMBER \| NUMBER") == [f"{trigram[0]:.2f}"] * 3 and len(trigram) == 1
    assert (about["eval_loss"] < about["trigram_loss"]).all()
    for names, pattern in (
        (SMALL_GAIN, "depth 4 by up to NUMBER nats"),
        (["pre_rmsnorm_scaled_init"], "scaled init by NUMBER,"),
        (PLAIN, "Pre-LN and both LNS by up to NUMBER,"),
    ):
        assert [float(text) for text in quoted(pattern)] == [round(max(spread[name, 4] for name in names), 2)]
    apart = [compare(runs, name, "pre_rmsnorm", "loss", depth=4)["df"].item() for name in SMALL_GAIN]
    assert apart == [2, 2, 2] and "so each pair has its own spread there" in FINDINGS
    rates_of = about.groupby("scheme")["lr"].unique().apply(set)
    assert {name: rates_of[name] for name in (*SMALL_GAIN, *PLAIN)} == {
        **dict.fromkeys(PLAIN, {0.008}), **dict.fromkeys(SMALL_GAIN, {0.016}), "pre_rmsnorm": {0.004},
    }  # fmt: skip
    words = "0.002 for Peri-LN and DyT, 0.004 for Pre-LN, Post-LN, Mix-LN and scaled init, 0.008 for LNS and LNS, "
    assert words + "trained gain, 0.016 for BHyT, BHyT*, BHyT without tanh and Pre-LN, gain λ/κ." in FINDINGS
    for rate, names in (
        (0.002, ("peri_ln", "dyt")),
        (0.004, ("post_rmsnorm", "mix_ln", "pre_rmsnorm_scaled_init")),
        (0.016, ("bhyt_linear",)),
    ):
        assert all(rates_of[name] == {rate} for name in names)


def test_which_blocks_do_the_work():
    experiments = normlab.load_experiments(ROOT / "data" / "runs")
    use = {depth: claims.depth_use(experiments, depth).set_index("a") for depth in (8, 16)}
    by_hand = experiments.query("metric == 'skip_delta_loss' and part == 'block' and depth == 16")
    cost = by_hand.pivot_table(index=["scheme", "seed"], columns="layer", values="value", observed=True)
    rest = cost.loc["lns"].drop(columns=1)
    assert use[16].loc["lns", "estimate"] == pytest.approx(cost.loc["lns"].loc[:, 9:].mean().mean())
    assert use[16].loc["lns", "share_rest"] == pytest.approx((rest.loc[:, 9:].sum(axis=1) / rest.sum(axis=1)).mean())
    section = FINDINGS[FINDINGS.index("| scheme | depth 8, one seed: cost") :].partition("Pre-LN's deep blocks")[0]
    for scheme in (*SMALL_GAIN, *PLAIN):
        title = re.escape(title_of(scheme))
        (cells,) = re.findall(
            rf"\| {title} \| ([\d.]+) \| ([\d.]+) \|(?: {NUMBER} {INTERVAL} \| {NUMBER} \|)?", section
        )
        eight = use[8].loc[scheme]
        assert list(cells[:2]) == [f"{eight[name]:.2f}" for name in ("estimate", "share_rest")] and eight["seeds"] == 1
        assert (scheme in use[16].index) == bool(cells[2])
        if cells[2]:
            deep = use[16].loc[scheme]
            agrees(list(cells[2:5]), deep)
            assert cells[5] == f"{deep['share_rest']:.2f}" and deep["seeds"] == 3
    for scheme, pattern in (
        ("lns", "half costs NUMBER INTERVAL nats, with"),
        ("lns_gain", "nats, with a trained gain NUMBER INTERVAL, of"),
        ("pre_rmsnorm", r"of Pre-LN's NUMBER INTERVAL\. -"),
    ):
        agrees(quoted(pattern, README), use[16].loc[scheme])
    mean = cost.groupby("scheme", observed=True).mean()
    assert (cost.max(axis=1) > cost.sum(axis=1) - cost.max(axis=1)).all() and len(cost) == 18
    first = quoted("others together: the first, NUMBER nats of Pre-LN's and NUMBER of LNS's")
    assert first == [f"{mean.loc[name, 1]:.1f}" for name in ("pre_rmsnorm", "lns")]
    idle = quoted(r"next to nothing \(NUMBER of the gain control's\), the second \(NUMBER\)")
    assert idle == [f"{mean.loc['rmsnorm_gain', 1]:.2f}", f"{mean.loc['rmsnorm_gain', 2]:.1f}"]
    assert set(cost.loc["pre_rmsnorm"].idxmax(axis=1)) | set(cost.loc["lns"].idxmax(axis=1)) == {1}
    assert set(cost.loc["rmsnorm_gain"].idxmax(axis=1)) == {2}
    plain = mean.loc["pre_rmsnorm"]
    last = quoted(r"do without \(NUMBER nats; blocks 2 to 8 cost NUMBER to NUMBER\)")
    assert last == [f"{value:.2f}" for value in (plain.loc[16], plain.loc[2:8].min(), plain.loc[2:8].max())]
    assert plain.loc[2:].idxmax() == 16 and use[16].loc["lns", "high"] < use[16].loc["pre_rmsnorm", "estimate"]
    less = claims.depth_use(experiments, 16, reference="pre_rmsnorm").set_index("a")
    for scheme, pattern, verdict in (
        (
            "lns",
            "a block of the deeper half NUMBER INTERVAL nats from one of Pre-LN's .undecided among all",
            "undecided",
        ),
        ("lns_gain", r"with a trained gain NUMBER INTERVAL .\*different\* among all", "different"),
    ):
        row = less.loc[scheme]
        agrees(quoted(pattern), row)
        assert row["verdict"] == verdict and row["seeds"] == 3 and row["high"] < 0


def test_what_twelve_more_blocks_buy(runs: pd.DataFrame):
    gains = claims.depth_gain(runs, 4, 16).query("seeds > 2").set_index("a")
    assert set(gains.index) == {"pre_rmsnorm", "lns", "lns_gain", *SMALL_GAIN}
    for scheme, sentence, short in (
        ("lns", "to 16, LNS gains NUMBER INTERVAL", r"LNS gains NUMBER INTERVAL and"),
        ("lns_gain", "nats, LNS with a trained gain NUMBER INTERVAL", "loss, LNS with a trained gain NUMBER INTERVAL"),
        (
            "pre_rmsnorm",
            "gain [^,]*, [^,]*, Pre-LN NUMBER INTERVAL",
            "Pre-LN gains NUMBER INTERVAL nats of held-out loss",
        ),
        ("bhyt", "and BHyT NUMBER INTERVAL .three seeds", "and BHyT NUMBER INTERVAL, by their own intervals alone"),
    ):
        agrees(quoted(sentence), gains.loc[scheme])
        agrees(quoted(short, README), gains.loc[scheme])
        assert gains.loc[scheme, "low"] > 0
    agrees(quoted(r"Held together with BHyT\*'s, NUMBER INTERVAL, and"), gains.loc["bhyt_exact"])
    agrees(quoted("and the gain control's, NUMBER INTERVAL, those"), gains.loc["rmsnorm_gain"])
    decided = gains[gains["verdict"] == "different"]
    assert set(decided.index) == {"pre_rmsnorm", "lns_gain"} and len(gains) == 6
    for sentence, text in (
        (r"from zero .Holm, p = NUMBER.;", FINDINGS),
        (r"among six schemes .Holm, p = NUMBER.", README),
    ):
        (largest,) = quoted(sentence, text)
        assert float(largest) == round(decided["p_holm"].max(), 2)
    assert "for BHyT* and the gain control depth is not shown to pay" in FINDINGS
    assert gains.loc[["bhyt_exact", "rmsnorm_gain"], "low"].max() < 0
    for scheme, pattern in (
        ("lns", "full-length finals, LNS is NUMBER INTERVAL and"),
        ("lns_gain", "LNS with a trained gain NUMBER INTERVAL nats from Pre-LN: both"),
    ):
        row = compare(runs, scheme, "pre_rmsnorm", "loss", depth=4).iloc[0]
        agrees(quoted(pattern), row)
        assert row["verdict"] == "different" and row["seeds"] == 3
    agrees(
        quoted("there, NUMBER INTERVAL at 4 layers", README),
        compare(runs, "lns", "pre_rmsnorm", "loss", depth=4).iloc[0],
    )
    twins = compare(runs, "lns_gain", "lns", "loss", depth=4).iloc[0]
    assert twins["verdict"] == "equivalent" and "both *different*, and *equivalent* to each other" in FINDINGS
    for scheme, long, short in (
        (
            "lns",
            "alike, LNS is NUMBER INTERVAL nats from Pre-LN,",
            "Its loss is NUMBER INTERVAL nats from Pre-LN's there",
        ),
        ("lns_gain", "LNS with a trained gain NUMBER INTERVAL, BHyT", "trained gain the loss is NUMBER INTERVAL nats"),
        (
            "bhyt",
            r"trained gain [^,]*, [^,]*, BHyT NUMBER INTERVAL, BHyT",
            "where its loss is NUMBER INTERVAL nats from Pre-LN's",
        ),
        ("bhyt_exact", r"BHyT\* NUMBER INTERVAL and the gain", "computed, comes to NUMBER INTERVAL nats"),
        ("rmsnorm_gain", "the gain control NUMBER INTERVAL: all five", "no tanh to NUMBER INTERVAL nats"),
    ):
        row = compare(runs, scheme, "pre_rmsnorm", "loss", depth=16).iloc[0]
        agrees(quoted(long), row)
        agrees(quoted(short, README), row)
        assert row["seeds"] == 3 and row["verdict"] == "different" and row["df"] == 10
    every = (*SMALL_GAIN, "lns", "lns_gain", "bhyt_linear", "pre_rmsnorm_scaled_init")
    assert {*every, "pre_rmsnorm"} == set(runs[runs["seed"] == 2]["scheme"])
    family = pd.concat([compare(runs, scheme, "pre_rmsnorm", "loss") for scheme in every])
    deep = judged(family[(family["depth"] == 16) & family["seeds"].gt(1)])
    assert set(deep["a"]) == {"lns", "lns_gain", *SMALL_GAIN} and (deep["verdict"] == "different").all()
    of_figure = judged(family[family["seeds"] > 0]).set_index(["a", "depth"])["verdict"]
    assert of_figure["lns_gain", 16] == "undecided"
    assert "notebook 01's figure LNS with a trained gain is *undecided*" in FINDINGS
    assert set(of_figure["lns"][[4, 16]]) == {"different"} and "at 4 layers: both *different*. The lead" in README
    twins = compare(runs, "lns_gain", "lns", "loss", depth=16).iloc[0]
    agrees(quoted(r"two LNS are NUMBER INTERVAL nats from each other .undecided"), twins)
    assert twins["verdict"] == "undecided"
    pairs = pd.concat([compare(runs, a, b, "loss", depth=16) for a, b in combinations(SMALL_GAIN, 2)])
    alone = pairs.set_index(["a", "b"])["verdict"].to_dict()
    assert alone.pop(("bhyt_exact", "rmsnorm_gain")) == "different" and set(alone.values()) == {"undecided"}
    assert set(judged(pairs)["verdict"]) == {"undecided"} and "(*undecided* among the three pairs)" in FINDINGS
    agrees(quoted("alone are told apart, by NUMBER INTERVAL nats"), pairs.set_index("a").loc["bhyt_exact"])
    size = compare(runs, "rmsnorm_gain", "bhyt", "token_l2_mean", depth=16).iloc[0]
    agrees(quoted("the gain control's is NUMBER INTERVAL times BHyT's"), size)
    assert size["verdict"] == "different"


def test_small_gains_come_out_in_two_groups(runs: pd.DataFrame):
    own = choose(runs, depth=4).runs
    losses = own[own["scheme"].isin(SMALL_GAIN)].sort_values("eval_loss")
    steps = np.diff(losses["eval_loss"])
    gap = int(steps.argmax()) + 1
    assert len(losses) == 9 and steps.max() > 0.2 and set(losses["lr"]) == {0.016}
    low, high = losses["eval_loss"].iloc[:gap], losses["eval_loss"].iloc[gap:]
    bounds = [f"{value:.2f}" for group in (low, high) for value in (group.min(), group.max())]
    counted = f"{len(low)} end at {bounds[0]} to {bounds[1]}, {len(high)} at {bounds[2]} to {bounds[3]}."
    assert f"of the nine models of BHyT, BHyT* and the gain control {counted}" in FINDINGS
    assert "bhyt" not in set(losses["scheme"].iloc[gap:]) and "All three of BHyT are in the first" in FINDINGS

    def without_attention(folder: str, depth: int) -> pd.DataFrame:
        rows = normlab.load_experiments(ROOT / "data" / folder).query("metric == 'skip_delta_loss'")
        rows = rows[(rows["part"] == "attention") & (rows["depth"] == depth)]
        return rows.pivot_table(index="run", columns="layer", values="value", observed=True)

    second = without_attention("runs", 4)[2]
    numbers = [second[low.index].min(), second[low.index].max(), second[high.index].max()]
    assert quoted("costs NUMBER to NUMBER nats in the first group and at most NUMBER in the second") == [
        f"{number:.2f}" for number in numbers
    ]
    entropy = runs[(runs["metric"] == "attention_entropy") & (runs["layer"] == 2) & (runs["mask"] == "all")]
    entropy = entropy[entropy["step"] == 6000].set_index("run")["value"]
    assert entropy[high.index].min() > 3.5 and entropy[low.index].max() < 2, (
        "alike over t positions: log t, 3.88 in the mean"
    )
    lost = without_attention("other_rates", 8)
    (bhyt,) = (run for run in lost.index if run.startswith("bhyt-"))
    assert (lost.loc[bhyt] < 0.005).sum() == 4 and "of four of BHyT's eight blocks" in FINDINGS
    sixteen = without_attention("runs", 16)
    for scheme, words in (("rmsnorm_gain", "that of {}, {} and {} of the gain control's sixteen"),
                          ("bhyt", "sixteen, of {}, {} and {} of BHyT's and"),
                          ("bhyt_exact", "BHyT's and of {}, {} and {} of BHyT*'s, seed by seed")):  # fmt: skip
        counts = (sixteen[sixteen.index.str.startswith(f"{scheme}-d")] < 0.005).sum(axis=1)
        assert words.format(*counts.sort_index(key=lambda runs: runs.str.extract(r"-s(\d)-")[0])) in FINDINGS
    assert quoted("end NUMBER nats behind the other five", README) == [f"{high.mean() - low.mean():.2f}"]


def test_scaled_init_comes_out_in_two_groups_too(runs: pd.DataFrame):
    own = choose(runs, depth=4).runs.query("scheme == 'pre_rmsnorm_scaled_init'").sort_values("eval_loss")
    plain = choose(runs, depth=4).runs.query("scheme == 'pre_rmsnorm'")["eval_loss"]
    assert quoted("one ends at NUMBER, beside Pre-LN's, and two at NUMBER and NUMBER, and the second block's") == [
        f"{loss:.2f}" for loss in own["eval_loss"]
    ]
    assert own["eval_loss"].iloc[0] - plain.max() < 0.03 and set(own["lr"]) == {0.004}
    rows = normlab.load_experiments(ROOT / "data" / "runs").query("metric == 'skip_delta_loss' and layer == 2")
    cost = rows[rows["part"] == "attention"].set_index("run")["value"][own.index]
    found = quoted("attention costs NUMBER nats in the first, NUMBER and NUMBER in the two")
    assert found == [f"{value:.2f}" for value in (cost.iloc[0], cost.iloc[1:].min(), cost.iloc[1:].max())]


def test_the_same_without_the_tanh(runs: pd.DataFrame):
    about = choose(runs, depth=4).runs
    without = about[about["scheme"] == "bhyt_linear"].sort_values("seed")
    assert list(without["seed"]) == [0, 1, 2] and set(without["lr"]) == {0.016}
    ends = quoted(r"no search of its own\) ends at NUMBER, NUMBER and NUMBER: it needs no tanh to be in the first")
    assert ends == [f"{loss:.2f}" for loss in without["eval_loss"]]
    attention = normlab.load_experiments(ROOT / "data" / "runs").query("metric == 'skip_delta_loss'")
    attention = attention[(attention["part"] == "attention") & (attention["run"] == without.index[0])]
    kept = attention.set_index("layer")["value"]
    pattern = r"Its seed 0, at NUMBER, has its second block's attention \(NUMBER\) and has lost the fourth's \(NUMBER\)"
    assert quoted(pattern) == [ends[0], f"{kept[2]:.2f}", f"{kept[4]:.2f}"]
    best = about[about["scheme"].isin(SMALL_GAIN)]["eval_loss"].nsmallest(5).max()
    counted = {1: "one ends", 2: "two end", 3: "all end"}[int((without["eval_loss"] <= best).sum())]
    assert f"three models of depth 4 without it {counted} among the five best" in README
    loss, size = (compare(runs, "bhyt", "bhyt_linear", metric, depth=4).iloc[0] for metric in ("loss", "token_l2_mean"))
    agrees(quoted("BHyT's loss is NUMBER INTERVAL nats from that of the same without its tanh"), loss)
    agrees(quoted("without its tanh, its stream × NUMBER INTERVAL: both undecided"), size)
    assert loss["verdict"] == size["verdict"] == "undecided" and loss["seeds"] == size["seeds"] == 3


def test_what_the_tanh_adds():
    folder = ROOT / "data" / "gain_or_bound"
    grid, configs = normlab.load_runs(folder), normlab.load_configs(folder)
    by = ["width", "outlier_channels", "lam_input", "gamma0"]
    found = {  # all conditions, as notebook 08 shows them: one family, one pooled spread
        metric: compare_variants(grid, configs, "bhyt", "bhyt_linear", by, metric).set_index(by)
        for metric in ("token_l2_mean", "loss")
    }

    def row(metric: str, lam: float, gamma0: float) -> pd.Series:
        return found[metric].loc[(128, 0, lam, gamma0)]

    undecided = [row(metric, 2.0, 1.0)["verdict"] for metric in ("token_l2_mean", "loss")]
    assert undecided == ["undecided"] * 2 and row("token_l2_mean", 50.0, 0.04)["verdict"] == "different"
    agrees(quoted(r"last layer's L2 norm × NUMBER INTERVAL"), row("token_l2_mean", 2.0, 1.0))
    agrees(quoted(r"loss NUMBER INTERVAL"), row("loss", 2.0, 1.0))
    agrees(quoted(r"activations smaller, × NUMBER INTERVAL"), row("token_l2_mean", 50.0, 0.04))
    for other, sentence in (
        ("bhyt", "× NUMBER INTERVAL of BHyT and"),
        ("bhyt_linear", "and × NUMBER INTERVAL of the same"),
    ):
        control = compare_variants(grid, configs, "rmsnorm_gain", other, by, "token_l2_mean").set_index(by)
        agrees(quoted(sentence), control.loc[(128, 0, 2.0, 1.0)])
        assert control.loc[(128, 0, 2.0, 1.0), "verdict"] == "different"


def test_the_last_held_out_loss_of_every_run_is_its_lowest(runs: pd.DataFrame):
    assert "Of every run the last held-out loss is the lowest." in (ROOT / "data" / "README.md").read_text()
    others = (ROOT / "data" / "runs" / "search", ROOT / "data" / "runs" / "finals", ROOT / "data" / "other_rates")
    for table in (runs, *map(normlab.load_runs, others)):
        losses = table[(table["metric"] == "loss") & (table["split"] == "eval")].sort_values("step")
        by_run = losses.groupby("run", observed=True)["value"]
        assert (by_run.last() == by_run.min()).all()
