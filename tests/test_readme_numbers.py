"""The numbers that the README and the page of findings quote are those of the shipped runs."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from quoted_numbers import FINDINGS, INTERVAL, NUMBER, README, ROOT

import normlab
from normlab.analysis import claims, rates
from normlab.analysis.compare import compare, compare_variants
from normlab.analysis.selection import choose, title_of

SMALL_GAIN, PLAIN = ("bhyt", "bhyt_exact", "rmsnorm_gain"), ("pre_rmsnorm", "lns", "lns_gain")


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return normlab.load_runs(ROOT / "data" / "runs")


def quoted(pattern: str, text: str = FINDINGS) -> list[str]:
    found = re.search(pattern.replace("NUMBER", NUMBER).replace("INTERVAL", INTERVAL), text)
    assert found is not None, pattern
    return list(found.groups())


def agrees(text: list[str], row: pd.Series) -> None:
    """Estimate and interval, each to the digits that are quoted."""
    for number, value in zip(text, row[["estimate", "low", "high"]], strict=True):
        digits = len(number.partition(".")[2])
        assert float(number) == pytest.approx(round(float(value), digits), abs=1e-9)


@pytest.mark.parametrize(
    ("scheme", "four", "eight", "before"),
    [
        ("bhyt", "4 layers is NUMBER INTERVAL of Pre-LN's", "8 layers NUMBER and", r"first step NUMBER and \d"),
        (
            "rmsnorm_gain",
            "the gain control's NUMBER INTERVAL",
            r"8 layers [\d.]+ and NUMBER;",
            r"first step [\d.]+ and NUMBER\.",
        ),
    ],
)
def test_the_last_layers_size_against_pre_ln(runs: pd.DataFrame, scheme: str, four: str, eight: str, before: str):
    (row,) = compare(runs, scheme, "pre_rmsnorm", "token_l2_mean", depth=4).to_dict("records")
    agrees(quoted(four), pd.Series(row))
    assert row["seeds"] == 3
    for sentence, step in ((eight, None), (before, 0)):
        row = compare(runs, scheme, "pre_rmsnorm", "token_l2_mean", depth=8, step=step).iloc[0]
        (number,) = quoted(sentence)
        assert float(number) == round(row["estimate"], len(number.partition(".")[2])) and row["seeds"] == 1


def test_what_a_lower_rate_makes_of_loss_and_size(runs: pd.DataFrame):
    low = normlab.load_runs(ROOT / "data" / "other_rates")
    found = rates.by_rate(runs, low, depth=4)
    assert set(found["scheme"]) == {title_of(scheme) for scheme in (*SMALL_GAIN, "lns")} and set(found["seeds"]) == {3}
    for row in found.itertuples():
        cells = quoted(rf"\| {re.escape(row.scheme)} \| {row.lr:g} \| NUMBER \| NUMBER \| NUMBER \| NUMBER \|")
        assert cells == [f"{row.loss:.2f}", f"{row.spread:.2f}", f"{row.token_l2:.1f}", f"{row.against:.2f}"]
    # By hand, of one cell.
    last = low[(low["scheme"] == "bhyt") & (low["depth"] == 4) & (low["metric"] == "token_l2_mean")]
    last = last[(last["site"] == "block_out") & (last["layer"] == 4) & (last["mask"] == "all") & (last["step"] == 6000)]
    by_hand = np.exp(np.log(last["value"]).mean())
    (shown,) = found[(found["scheme"] == "BHyT") & (found["lr"] == 0.004)]["token_l2"]
    assert shown == pytest.approx(by_hand) and len(last) == 3


def test_the_stream_is_largest_early(runs: pd.DataFrame):
    last = runs[(runs["metric"] == "token_l2_mean") & (runs["depth"] == 8) & (runs["layer"] == 8)]
    last = last[(last["site"] == "block_out") & (last["mask"] == "all")]
    for scheme, pattern in (("pre_rmsnorm", "Pre-LN's L2 norm is"), ("bhyt", "at the end, BHyT's")):
        sizes = last[last["scheme"] == scheme].set_index("step")["value"]
        found = re.search(pattern + r" (\d+) at step ([\d,]+) and (\d+) at the end", FINDINGS)
        assert found.groups() == (f"{sizes.max():.0f}", f"{sizes.idxmax():,}", f"{sizes[6000]:.0f}")
        assert sizes.idxmax() < 3000 and sizes.index.is_unique


def test_what_the_finals_say_of_the_searchs_rates(runs: pd.DataFrame):
    found = rates.finals(*(normlab.load_runs(ROOT / "data" / "runs" / name) for name in ("search", "finals")))
    losses = found.set_index(["depth", "scheme", "lr"]).loc[4]
    for scheme, low, high, pattern in (
        (
            "BHyT*",
            0.004,
            0.016,
            r"BHyT\*'s loss at 0\.004 is NUMBER and at 0\.016 NUMBER, after 6\.1M NUMBER and NUMBER",
        ),
        ("Pre-LN", 0.004, 0.008, r"Pre-LN's at 0\.004 and 0\.008 are NUMBER and NUMBER, after 6\.1M NUMBER and NUMBER"),
        ("LNS", 0.004, 0.008, r"LNS's are NUMBER and NUMBER, after 6\.1M NUMBER and NUMBER"),
    ):
        expected = [losses.loc[(scheme, lr), column] for column in losses for lr in (low, high)]
        assert [float(text) for text in quoted(pattern)] == [round(value, 2) for value in expected]
    best = found.loc[found.groupby(["scheme", "depth"])["loss_full"].idxmin()].set_index(["scheme", "depth"])["lr"]
    sixteen = found[(found["depth"] == 16) & (found["scheme"] == "BHyT")].set_index("lr")
    pattern = r"depth 16 BHyT's losses at 0\.016 and 0\.032 are NUMBER and NUMBER, after 6\.1M NUMBER and NUMBER"
    assert quoted(pattern) == [
        f"{value:.2f}" for column in sixteen[["loss_short", "loss_full"]] for value in sixteen[column]
    ]
    assert sixteen["loss_full"].idxmin() == 0.016 and runs.query("scheme == 'bhyt' and depth == 16").empty
    ahead = (
        losses.loc["LNS, trained gain", "loss_full"].loc[0.004]
        - losses.loc["LNS, trained gain", "loss_full"].loc[0.008]
    )
    assert quoted(r"trained gain, at 0\.004 here, is NUMBER nats better at 0\.008") == [f"{ahead:.2f}"]
    assert set(runs.query("scheme == 'lns_gain'")["lr"]) == {0.004}
    reported = runs.groupby(["scheme", "depth"], observed=True)["lr"].unique()
    for scheme in (*SMALL_GAIN, "pre_rmsnorm", "lns"):
        assert all(list(reported[scheme, depth]) == [best[title_of(scheme), 4]] for depth in (4, 8)), scheme


def table_rows(scheme: str, columns: int) -> list[str]:
    """The cells of the scheme's row in the table of that many columns that comes first."""
    found = re.search(rf"\| {re.escape(title_of(scheme))} \|((?: [^|]*\|){{{columns}}}) \|", FINDINGS)
    assert found is not None, scheme
    return [cell.strip() for cell in found.group(1).split("|")[:-1]]


def test_the_table_of_losses(runs: pd.DataFrame):
    about = choose(runs, depth=None).runs
    losses = about.groupby(["scheme", "depth"])["eval_loss"]
    mean, spread, seeds = losses.mean(), losses.max() - losses.min(), losses.count()
    for scheme in (*SMALL_GAIN, *PLAIN, "bhyt_linear"):
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
    for names, pattern in ((SMALL_GAIN, "depth 4 by up to NUMBER nats"), (PLAIN, "other three by up to NUMBER,")):
        assert [float(text) for text in quoted(pattern)] == [round(max(spread[name, 4] for name in names), 2)]
    apart = [compare(runs, name, "pre_rmsnorm", "loss", depth=4)["df"].item() for name in SMALL_GAIN]
    assert apart == [2, 2, 2] and "so each has its own spread there" in FINDINGS
    rates_of = about.groupby("scheme")["lr"].unique().apply(set)
    assert {name: rates_of[name] for name in (*SMALL_GAIN, *PLAIN)} == {
        **dict.fromkeys(PLAIN, {0.004}), **dict.fromkeys(SMALL_GAIN, {0.016}), "lns": {0.008},
    }  # fmt: skip
    words = "for LNS, 0.016 for BHyT, BHyT*, BHyT without tanh and Pre-LN, gain λ/κ."
    assert words in FINDINGS


def test_which_blocks_do_the_work():
    experiments = normlab.load_experiments(ROOT / "data" / "runs")
    shares = {depth: claims.depth_use(experiments, depth).set_index("a")["share"] for depth in (8, 16)}
    by_hand = experiments.query("metric == 'skip_delta_loss' and part == 'block' and depth == 16 and scheme == 'lns'")
    cost = by_hand.pivot_table(index="seed", columns="layer", values="value")
    assert shares[16]["lns"] == pytest.approx((cost.loc[:, 9:].sum(axis=1) / cost.sum(axis=1)).mean())
    eight = quoted("Pre-LN NUMBER, LNS NUMBER, LNS with a trained gain NUMBER, BHyT NUMBER, BHyT[*] NUMBER, the gain")
    names = ("pre_rmsnorm", "lns", "lns_gain", "bhyt", "bhyt_exact")
    assert eight == [f"{shares[8][name]:.2f}" for name in names]
    sixteen = quoted("At 16 layers: Pre-LN NUMBER, LNS NUMBER, the gain control NUMBER")
    assert sixteen == [f"{shares[16][name]:.2f}" for name in ("pre_rmsnorm", "lns", "rmsnorm_gain")]
    assert quoted("half has NUMBER of what leaving out single blocks costs, Pre-LN's NUMBER", README) == [
        sixteen[1],
        sixteen[0],
    ]


def test_what_twelve_more_blocks_buy(runs: pd.DataFrame):
    gains = claims.depth_gain(runs, 4, 16).query("seeds > 2").set_index("a")
    assert set(gains.index) == {"pre_rmsnorm", "lns"} and gains["verdict"].eq("different").all()
    for scheme, sentence in (
        ("lns", "to 16, LNS gains NUMBER INTERVAL"),
        ("pre_rmsnorm", "nats and Pre-LN NUMBER INTERVAL"),
    ):
        agrees(quoted(sentence), gains.loc[scheme])
    agrees(quoted("Pre-LN gains NUMBER INTERVAL nats of held-out loss", README), gains.loc["pre_rmsnorm"])
    agrees(quoted("held-out loss and LNS NUMBER INTERVAL", README), gains.loc["lns"])
    four, sixteen = (compare(runs, "lns", "pre_rmsnorm", "loss", depth=depth).iloc[0] for depth in (4, 16))
    agrees(quoted("16 layers LNS is NUMBER INTERVAL nats from Pre-LN, at the edge"), sixteen)
    assert four["verdict"] == "undecided" and abs(sixteen["high"]) < 0.005 and sixteen["seeds"] == 3
    mirrored = pd.Series({"estimate": -sixteen["estimate"], "low": -sixteen["high"], "high": -sixteen["low"]})
    agrees(quoted("its loss a little lower, by NUMBER INTERVAL", README), mirrored)
    size = compare(runs, "lns", "pre_rmsnorm", "token_l2_mean", depth=16).iloc[0]
    agrees(quoted("stream is smaller, NUMBER INTERVAL of Pre-LN's after 16", README), size)
    gain = compare(runs, "rmsnorm_gain", "pre_rmsnorm", "loss", depth=16).iloc[0]
    agrees(quoted("The gain control, two seeds, is NUMBER INTERVAL behind"), gain)
    assert gain["seeds"] == 2 and gain["verdict"] == "different"
    size = compare(runs, "rmsnorm_gain", "pre_rmsnorm", "token_l2_mean", depth=16).iloc[0]
    agrees(quoted("of 16 layers the gain control's is NUMBER INTERVAL of Pre-LN's"), size)
    paths = normlab.runs.find_runs(ROOT / "data" / "runs" / "search")
    manifests = [normlab.runs.read_run(path).manifest for path in paths]
    found = {
        (m["config"]["scheme"], m["config"]["lr"]): m["eval_loss"] for m in manifests if m["config"]["depth"] == 16
    }
    for sentence, rate in (
        (r"the same 0\.004 it is NUMBER ahead", 0.004),
        ("at its own best, 0.008, by NUMBER", 0.008),
    ):
        (number,) = quoted(sentence)
        assert float(number) == round(found["pre_rmsnorm", 0.004] - found["lns", rate], 2)
    for scheme, rate in (("pre_rmsnorm", 0.004), ("lns", 0.008)):
        assert min((loss, lr) for (name, lr), loss in found.items() if name == scheme)[1] == rate
    fewer = claims.by_tokens(normlab.load_runs(ROOT / "data" / "runs" / "search"), runs)
    gains = fewer.set_index(["scheme", "tokens"])["gain"]
    worse, better = quoted("16 layers are NUMBER nats worse than 4 for Pre-LN, and NUMBER better for LNS")
    least = fewer["tokens"].min()
    assert f"({least / 1e6:.1f}M; the" in FINDINGS and round(fewer["tokens"].max() / least) == 3
    assert (float(worse), float(better)) == (round(-gains["Pre-LN", least], 2), round(gains["LNS", least], 2))
    assert gains["Pre-LN", least] <= 0 and "a third of the tokens Pre-LN had gained nothing" in README


def test_what_the_search_found(runs: pd.DataFrame):
    search = normlab.load_runs(ROOT / "data" / "runs" / "search")
    found = choose(search, depth=None).runs.set_index(["scheme", "depth"])
    assert f"rate; {search['tokens'].max() / 1e6:.1f}M tokens" in FINDINGS
    for scheme in ("pre_rmsnorm", "lns", "bhyt", "rmsnorm_gain"):
        cells = quoted(rf"\| {re.escape(title_of(scheme))} \| NUMBER \(NUMBER\) \| NUMBER \(NUMBER\) \|")
        rows = [found.loc[scheme, depth] for depth in (4, 16)]
        assert [float(cell) for cell in cells] == [v for row in rows for v in (round(row["eval_loss"], 2), row["lr"])]
    small = ["bhyt", "rmsnorm_gain"]
    sixteen = found["eval_loss"].xs(16, level="depth")
    assert sixteen[small].max() < sixteen["pre_rmsnorm"]
    behind = compare(runs, "rmsnorm_gain", "pre_rmsnorm", "loss", depth=16)["estimate"].item()
    assert behind > 0 and "are ahead of Pre-LN at 16 layers; after 6.1M the gain control is behind." in FINDINGS


def test_small_gains_come_out_in_two_groups(runs: pd.DataFrame):
    own = choose(runs, depth=4).runs
    losses = own[own["scheme"].isin(SMALL_GAIN)].sort_values("eval_loss")
    steps = np.diff(losses["eval_loss"])
    gap = int(steps.argmax()) + 1
    assert (
        len(losses) == 9
        and steps.max() > 0.2
        and set(losses["lr"]) == {0.016}
        and set(own["lr"]) == {0.004, 0.008, 0.016}
    )
    low, high = losses["eval_loss"].iloc[:gap], losses["eval_loss"].iloc[gap:]
    bounds = [f"{value:.2f}" for group in (low, high) for value in (group.min(), group.max())]
    counted = f"{len(low)} end at {bounds[0]} to {bounds[1]}, {len(high)} at {bounds[2]} to {bounds[3]}."
    assert f"of the nine models with a small gain, {counted}" in FINDINGS
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
    control = without_attention("runs", 16)
    control = (control[control.index.str.startswith("rmsnorm_gain-")] < 0.005).sum(axis=1)
    assert f"that of {control.iloc[0]} and {control.iloc[1]} of the gain control's sixteen" in FINDINGS
    assert len(control) == 2
    assert quoted("end NUMBER nats behind the other five", README) == [f"{high.mean() - low.mean():.2f}"]
    by_rate = rates.by_rate(runs, normlab.load_runs(ROOT / "data" / "other_rates"), depth=4)
    size = by_rate.set_index(["scheme", "lr"])["against"]
    assert quoted("NUMBER of Pre-LN's at depth 4", README) == [f"{size['BHyT', 0.004]:.2f}"]
    best = [f"{size[name, 0.016]:.2f}" for name in ("BHyT", "Pre-LN, gain λ/κ")]
    assert quoted("neither does .NUMBER and NUMBER.", README) == best


def test_the_same_without_the_tanh(runs: pd.DataFrame):
    about = choose(runs, depth=4).runs
    without = about[about["scheme"] == "bhyt_linear"].sort_values("seed")
    assert list(without["seed"]) == [0, 1, 2] and set(without["lr"]) == {0.016}
    ends = quoted(r"no search of its own\) ends at NUMBER, NUMBER and NUMBER: it needs no tanh to be in the first")
    assert ends == [f"{loss:.2f}" for loss in without["eval_loss"]]
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
    agrees(quoted(r"activations × NUMBER INTERVAL"), row("token_l2_mean", 50.0, 0.04))


def test_the_last_held_out_loss_of_every_run_is_its_lowest(runs: pd.DataFrame):
    assert "Of every run the last held-out loss is the lowest." in (ROOT / "data" / "README.md").read_text()
    others = (ROOT / "data" / "runs" / "search", ROOT / "data" / "runs" / "finals", ROOT / "data" / "other_rates")
    for table in (runs, *map(normlab.load_runs, others)):
        losses = table[(table["metric"] == "loss") & (table["split"] == "eval")].sort_values("step")
        by_run = losses.groupby("run", observed=True)["value"]
        assert (by_run.last() == by_run.min()).all()
