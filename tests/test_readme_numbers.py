"""The numbers that the README and the page of findings quote are those of the shipped runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import normlab
from normlab import runs as runs_folder
from normlab.analysis import claims, rates
from normlab.analysis.compare import compare, compare_variants
from normlab.analysis.selection import choose, title_of

ROOT = Path(__file__).resolve().parents[1]
README, FINDINGS = (
    " ".join((ROOT / name).read_text(encoding="utf-8").replace("−", "-").split())
    for name in ("README.md", "docs/findings.md")
)
ALL_BUT_RANK, LENS = "all forward metrics but effective rank", "TransformerLens run_with_cache"
NUMBER = r"([+-]?\d+\.\d+)"
INTERVAL = rf"\[{NUMBER}, {NUMBER}\]"


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


def test_which_text_the_pilot_chose():
    text = " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())
    ahead = {}
    manifests = [normlab.runs.read_run(path).manifest for path in normlab.runs.find_runs(ROOT / "data" / "pilot")]
    for corpus in ("stdlib", "english"):
        own = {m["config"]["depth"]: m for m in manifests if m["config"]["corpus"] == corpus}
        (found,) = re.findall(rf"\| `{corpus}` \| {NUMBER} \| {NUMBER} \| {NUMBER} \| {NUMBER} \|", text)
        values = [own[4]["eval_loss"], own[16]["eval_loss"], own[4]["trigram_loss"], own[4]["bigram_loss"]]
        assert list(map(float, found)) == [round(value, 3) for value in values]
        assert own[4]["trigram_loss"] == own[16]["trigram_loss"]
        ahead[corpus] = [own[depth]["trigram_loss"] - own[depth]["eval_loss"] for depth in (4, 16)]
    assert all(round(gap, 2) in (0.12, 0.13) for gap in ahead["stdlib"]) and max(ahead["english"]) < 0


def test_the_last_held_out_loss_of_every_run_is_its_lowest(runs: pd.DataFrame):
    assert "Of every run the last held-out loss is the lowest." in (ROOT / "data" / "README.md").read_text()
    others = (ROOT / "data" / "runs" / "search", ROOT / "data" / "runs" / "finals", ROOT / "data" / "other_rates")
    for table in (runs, *map(normlab.load_runs, others)):
        losses = table[(table["metric"] == "loss") & (table["split"] == "eval")].sort_values("step")
        by_run = losses.groupby("run", observed=True)["value"]
        assert (by_run.last() == by_run.min()).all()


def test_the_hours_that_the_sweep_took():
    text = " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())
    paths = [path for folder in ("runs", "other_rates") for path in (ROOT / "data" / folder).rglob("manifest.json")]
    manifests = [json.loads(path.read_bytes()) for path in paths]
    hours = sum(manifest["measured"]["wall_s"] for manifest in manifests) / 3600
    assert f"So far {len(manifests)} runs took {hours:.1f} hours of a core" in text
    searched, finals, low = (
        sum(where in path.parts for path in paths) for where in (runs_folder.SEARCH, runs_folder.FINALS, "other_rates")
    )
    assert f"{searched} of them in the search, {finals} in its finals, and {low} that stand in `other_rates/`" in text
    assert len({manifest["commit"] for manifest in manifests}) == 1


def test_who_trains_at_which_depth():
    text = " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())
    manifests = [json.loads(path.read_bytes()) for path in (ROOT / "data" / "depth").glob("*/manifest.json")]
    hours = sum(manifest["measured"]["wall_s"] for manifest in manifests) / 3600
    assert f"{len(manifests)} runs took {hours:.1f} hours of a core" in text
    (entropy,) = {manifest["corpus"]["unigram_entropy"] for manifest in manifests}
    (bigram,) = {manifest["bigram_loss"] for manifest in manifests}
    assert f"the unigram entropy, {entropy:.3f}" in text and f"a bigram model ({bigram:.3f})" in text
    found: dict[int, list[str]] = {16: [], 256: [], 1000: []}
    for manifest in manifests:
        trains = manifest["eval_loss"] is not None and manifest["eval_loss"] < entropy - 0.05
        outcome = "diverge" if manifest["status"] == "diverged" else "train" if trains else "stall"
        found[manifest["config"]["depth"]].append(outcome)
        assert not trains or manifest["eval_loss"] > bigram + 0.1
    for depth, all_of_them in found.items():
        train, stall, diverge = (all_of_them.count(word) for word in ("train", "stall", "diverge"))
        assert f"at {depth:,} blocks {train} train, {stall} stall and {diverge} diverge" in text
    assert f"{len(found[1000])} of them at 1,000" in text and len(found[16]) == len(found[256])
    assert len({manifest["commit"] for manifest in manifests}) == 1
    limit = [m for m in manifests if m["config"]["depth"] == 1000]
    best = min(limit, key=lambda m: m["eval_loss"] or 9)
    assert best["config"]["scheme"] == "lns" and f"LNS comes closest there ({best['eval_loss']:.3f})" in text
    assert len(limit) == 12 and not found[1000].count("train") and "at 1,000 none of twelve does" in FINDINGS
    slow = {"post_rmsnorm", "deepnorm", "keel"}
    alone = sum(m["measured"]["wall_s"] for m in limit if m["config"]["scheme"] in slow) / 3600
    assert round(alone) == 2 and "took two of them alone" in text
    counts = len(found[16]), found[16].count("train"), found[256].count("train")
    assert "Of {} schemes at one learning rate, {} train at 16 blocks and {} at 256".format(*counts) in README
    deep = {
        m["config"]["scheme"]
        for m in manifests
        if m["config"]["depth"] == 256 and (m["eval_loss"] or 9) < entropy - 0.05
    }
    assert deep == {"skip_init", "layer_scale", "fixnorm", "prores", "bhyt", "bhyt_linear", "lns"}


def test_what_bfloat16_and_the_compiler_gain():
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    table = pd.read_csv(ROOT / "data" / "bench" / "training_cpu.csv").set_index(["what", "base"])
    ratio = table.loc[("bfloat16 compiled step", "float32 step"), "ratio"]
    assert f"bfloat16 and compiled takes {ratio:.2f} of a float32 step" in text


def test_what_a_second_ray_worker_gains():
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    one, two = pd.read_csv(ROOT / "data" / "bench" / "ray_workers.csv").to_dict("records")
    sentence = (
        f"{two['ratio']:.2f} times as many by the clock, {100 * two['not_training']:.0f}% of the two workers' time"
    )
    assert sentence in text and (one["workers"], two["workers"], two["runs"], two["cores"]) == (1, 2, 6, 2)
    slower = one["run_s"] / two["run_s"]
    assert f"were each {100 * (slower - 1):.0f}% slower, without which it is {two['ratio'] / slower:.2f}" in text


def test_what_recording_costs_and_what_a_slider_waits():
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    table = pd.read_csv(ROOT / "data" / "bench" / "probes_cpu.csv").set_index(["pass", "case"])
    passes = table.loc["forward and backward", "cpu_ratio"]
    names = ("the same again", *(f"normlab, {what}" for what in ("default metrics and gradients", ALL_BUT_RANK)))
    again, default, most = (f"{passes[name]:.2f}" for name in names)
    assert f"a second bare one took {again}, recording the default metrics and gradients {default}," in text
    assert f"all forward metrics but the effective rank {most};" in text
    own, lens = (table.loc[("forward", name), "extra_peak_mib"] for name in ("normlab, default metrics", LENS))
    assert f"memory {own:.0f} MiB, of TransformerLens's whole cache {lens:,.0f} " in text
    moves = pd.read_csv(ROOT / "data" / "bench" / "latency.csv").query("control == 'all'").set_index("surface")
    lab, plain, page = (f"{moves.loc[name, 'median_ms']:.0f}" for name in ("JupyterLab", "FigureWidget", "page"))
    sentence = f"{lab} ms in JupyterLab, {plain} with plotly's own FigureWidget beside it, {page} in the page"
    assert sentence in text and set(moves["moves"]) == {200}


def test_precision_moves_the_loss_less_than_a_seed():
    text = " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())
    found_text = re.search(
        rf"ends at {NUMBER}\. Its twin in float32, not compiled, ends at {NUMBER}; .* at {NUMBER}:", text
    )
    paths = [*normlab.runs.find_runs(ROOT / "data" / "precision"), *normlab.runs.find_runs(ROOT / "data" / "pilot")]
    found = {}
    for manifest in (normlab.runs.read_run(path).manifest for path in paths):
        config = manifest["config"]
        if config["depth"] == 4 and config["corpus"] == "stdlib":
            found[config["dtype"], config["seed"]] = manifest["eval_loss"]
    half, full, seed = found["bfloat16", 0], found["float32", 0], found["bfloat16", 1]
    assert found_text is not None and [float(text) for text in found_text.groups()] == [
        round(x, 3) for x in (half, full, seed)
    ]
    assert abs(half - full) < abs(half - seed)


def test_what_a_model_loses_with_its_norms():
    text = " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())
    table = pd.read_csv(ROOT / "data" / "removal" / "pre_rmsnorm-d8.csv")
    (numbers,) = re.findall(rf"held-out loss {NUMBER} to {NUMBER} nats a token", text)
    assert list(map(float, numbers)) == [round(table["loss_before"].iloc[0], 3), round(table["loss_tuned"].iloc[-1], 3)]
    dear = table.assign(cost=table["loss_removed"] - table["loss_before"]).nlargest(2, "cost")
    assert sorted(dear["step"]) == [1, 17] and len(table) == 17 and (dear["cost"].round(1) == 0.1).all()


def test_no_short_run_beats_a_bigram_of_its_text():
    pilot = [normlab.runs.read_run(path).manifest for path in normlab.runs.find_runs(ROOT / "data" / "pilot")]
    bigram = {m["corpus"]["content_hash"]: m["bigram_loss"] for m in pilot}
    short = [normlab.runs.read_run(path) for path in (ROOT / "data" / "gain_or_bound").iterdir()]
    assert {run.manifest["config"]["steps"] for run in short} == {300}
    assert all(not run.eval_loss <= bigram[run.manifest["corpus"]["content_hash"]] for run in short)
