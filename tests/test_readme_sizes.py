"""The sizes of streams that the README and the page of findings quote are those of the shipped runs."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from quoted_numbers import FINDINGS, README, ROOT, SMALL_GAIN, agrees, quoted

import normlab
from normlab.analysis import claims, rates
from normlab.analysis.compare import compare
from normlab.analysis.selection import title_of


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return normlab.load_runs(ROOT / "data" / "runs")


@pytest.mark.parametrize(
    ("scheme", "four", "sixteen", "eight", "before"),
    [
        (
            "bhyt",
            "4 layers is NUMBER INTERVAL of Pre-LN's",
            "16 layers NUMBER INTERVAL and",
            "8 layers NUMBER and",
            r"first step, at 8 layers, NUMBER and \d",
        ),
        (
            "rmsnorm_gain",
            "the gain control's NUMBER INTERVAL",
            r"16 layers [\d.]+ \[[^]]+\] and NUMBER INTERVAL; before",
            r"8 layers [\d.]+ and NUMBER;",
            r"at 8 layers, [\d.]+ and NUMBER\.",
        ),
    ],
)
def test_the_last_layers_size_against_pre_ln(
    runs: pd.DataFrame, scheme: str, four: str, sixteen: str, eight: str, before: str
):
    for depth, sentence in ((4, four), (16, sixteen)):
        (row,) = compare(runs, scheme, "pre_rmsnorm", "token_l2_mean", depth=depth).to_dict("records")
        agrees(quoted(sentence), pd.Series(row))
        assert row["seeds"] == 3
    for sentence, step in ((eight, None), (before, 0)):
        row = compare(runs, scheme, "pre_rmsnorm", "token_l2_mean", depth=8, step=step).iloc[0]
        (number,) = quoted(sentence)
        assert float(number) == round(row["estimate"], len(number.partition(".")[2])) and row["seeds"] == 1


def test_what_a_lower_rate_makes_of_loss_and_size(runs: pd.DataFrame):
    low = normlab.load_runs(ROOT / "data" / "other_rates")
    found = rates.by_rate(runs, low, depth=4)
    assert set(found["scheme"]) == {title_of(scheme) for scheme in (*SMALL_GAIN, "lns", "lns_gain")} and set(
        found["seeds"]
    ) == {3}
    for row in found.itertuples():
        cells = quoted(rf"\| {re.escape(row.scheme)} \| {row.lr:g} \| NUMBER \| NUMBER \| NUMBER \| NUMBER \|")
        assert cells == [f"{row.loss:.2f}", f"{row.spread:.2f}", f"{row.token_l2:.1f}", f"{row.against:.2f}"]
    mean = found.set_index(["scheme", "lr"])["loss"]
    assert (
        mean["BHyT*", 0.004] <= mean["BHyT*", 0.016]
        and mean["Pre-LN, gain λ/κ", 0.002] <= mean["Pre-LN, gain λ/κ", 0.016]
    )
    assert "a lower rate is as good in the mean over three seeds" in FINDINGS
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


def test_one_block_makes_much_of_a_stream(runs: pd.DataFrame):
    shares = claims.growth(runs).query("depth == 16").set_index("a")["one_block"]
    ends = [f"{shares.min():.2f}", f"{shares.max():.2f}"]
    assert quoted("at 16 layers NUMBER to NUMBER of the last layer's size") == ends
    assert quoted("One block, the first or the second, makes NUMBER to NUMBER of what", README) == ends
    rows = runs[(runs["metric"] == "token_l2_mean") & (runs["site"] == "block_out") & (runs["mask"] == "all")]
    rows = rows[(rows["depth"] == 16) & (rows["step"] == 6000)].assign(log=lambda table: np.log(table["value"]))
    sizes = rows.pivot_table(index=["scheme", "seed"], columns="layer", values="value", observed=True)
    largest = sizes.diff(axis=1).idxmax(axis=1)
    by_hand = (sizes.diff(axis=1).max(axis=1) / sizes[16]).groupby("scheme", observed=True).mean()
    assert shares.sort_index().tolist() == pytest.approx(by_hand.sort_index().tolist())
    assert set(largest) == {1, 2} and set(largest["rmsnorm_gain"]) == {2} and sorted(largest["bhyt"]) == [1, 1, 2]
    assert sorted(largest["bhyt_exact"]) == [1, 2, 2] and "as in one of BHyT's three and two of BHyT*'s." in FINDINGS
    assert set(largest["pre_rmsnorm"]) == set(largest["lns"]) == set(largest["lns_gain"]) == {1}
    mean = np.exp(rows.groupby(["scheme", "layer"], observed=True)["log"].mean())
    steps = quoted(
        r"from NUMBER to (\d+) and LNS's from NUMBER to (\d+); in the gain control the second, from NUMBER to (\d+)"
    )
    expected = []
    for scheme, layer in (("pre_rmsnorm", 0), ("lns", 0), ("rmsnorm_gain", 1)):
        expected += [f"{mean[scheme, layer]:.1f}", f"{mean[scheme, layer + 1]:.0f}"]
    assert steps == expected


def test_streams_whose_size_norms_set(runs: pd.DataFrame):
    rows = runs[(runs["metric"] == "token_l2_mean") & (runs["site"] == "block_out") & (runs["mask"] == "all")]
    rows = rows[(rows["depth"] == 4) & (rows["layer"] == 4) & (rows["seed"] == 0)]
    size = rows.set_index(["scheme", "step"])["value"]
    ends = quoted(
        "last of 4 layers NUMBER before the first step and NUMBER at the end, and NUMBER and NUMBER, where Pre-LN's "
        "goes from NUMBER to NUMBER"
    )
    schemes = ("peri_ln", "post_rmsnorm", "pre_rmsnorm")
    assert ends == [f"{size[scheme, step]:.1f}" for scheme in schemes for step in (0, 6000)]
    assert all(abs(size[scheme, 6000] / size[scheme, 0] - 1) < 0.1 for scheme in schemes[:2])
    grown = quoted(
        "alone is Post-LN, goes from NUMBER to NUMBER, and that of DyT, which has no statistic, from NUMBER to NUMBER"
    )
    assert grown == [f"{size[scheme, step]:.1f}" for scheme in ("mix_ln", "dyt") for step in (0, 6000)]


def test_how_the_stream_of_lns_grows_and_that_of_bhyt(runs: pd.DataFrame):
    for layer, sentence, short in (
        (
            16,
            "LNS's stream is NUMBER INTERVAL of Pre-LN's after the last",
            "16 layers and NUMBER INTERVAL after the last",
        ),
        (
            1,
            "16 layers, and NUMBER INTERVAL after the first",
            "than Pre-LN's, NUMBER INTERVAL of it after the first of 16",
        ),
    ):
        row = compare(runs, "lns", "pre_rmsnorm", "token_l2_mean", depth=16, layer=layer).iloc[0]
        agrees(quoted(sentence), row)
        agrees(quoted(short, README), row)
    exact = compare(runs, "bhyt_exact", "bhyt", "token_l2_mean", depth=16).iloc[0]
    agrees(quoted(rf"BHyT\*'s is NUMBER INTERVAL times BHyT's \({exact['verdict']}\)"), exact)
    agrees(
        quoted(r"BHyT's \([a-z]+\), NUMBER INTERVAL of the gain control's and"),
        compare(runs, "bhyt_exact", "rmsnorm_gain", "token_l2_mean", depth=16).iloc[0],
    )
    beside = compare(runs, "bhyt_exact", "pre_rmsnorm", "token_l2_mean", depth=16).iloc[0]
    agrees(quoted(r"of the gain control's and NUMBER INTERVAL of Pre-LN's\."), beside)
    agrees(quoted(r"nats and a stream of NUMBER INTERVAL;", README), beside)
    grown = claims.growth(runs).query("depth == 16").set_index("a")
    agrees(quoted("to the last they grow by NUMBER INTERVAL and"), grown.loc["lns"])
    agrees(quoted(r"grow by [\d.]+ \[[^]]+\] and NUMBER INTERVAL, LNS early and Pre-LN late"), grown.loc["pre_rmsnorm"])
    half = quoted("half way it has made NUMBER of its growth, counted by its logarithm, Pre-LN NUMBER")
    assert half == [f"{grown.loc[scheme, 'first_half']:.2f}" for scheme in ("lns", "pre_rmsnorm")]
    (times,) = quoted("in between both grow NUMBER times", README)
    assert {f"{grown.loc[scheme, 'estimate']:.1f}" for scheme in ("lns", "pre_rmsnorm")} == {times}
    low = normlab.load_runs(ROOT / "data" / "other_rates")
    both = pd.concat([runs[runs["scheme"] == "pre_rmsnorm"], low[low["scheme"] == "bhyt"]])
    row = compare(both, "bhyt", "pre_rmsnorm", "token_l2_mean", depth=4).iloc[0]
    agrees(quoted("at Pre-LN's, NUMBER INTERVAL of Pre-LN's after the last of 4 layers", README), row)
    assert row["lr_a"] == row["lr_b"] == 0.004
    for scheme, depth, pattern in (
        ("bhyt", 4, "search chose it is NUMBER INTERVAL, and"),
        ("bhyt", 16, r"chose it is [\d.]+ \[[^]]+\], and NUMBER INTERVAL after 16 layers,"),
        ("rmsnorm_gain", 16, "as large as Pre-LN's, NUMBER INTERVAL"),
    ):
        agrees(quoted(pattern, README), compare(runs, scheme, "pre_rmsnorm", "token_l2_mean", depth=depth).iloc[0])


def test_lns_with_a_trained_gain_leads_with_a_stream_that_is_not_as_small(runs: pd.DataFrame):
    sizes = {
        other: compare(runs, "lns_gain", other, "token_l2_mean", depth=16).iloc[0] for other in ("lns", "pre_rmsnorm")
    }
    assert {other: row["verdict"] for other, row in sizes.items()} == {"lns": "different", "pre_rmsnorm": "undecided"}
    for other, sentence, short in (
        ("lns", "With a trained gain it is NUMBER INTERVAL times LNS's", r"of it, NUMBER INTERVAL times LNS's\."),
        (
            "pre_rmsnorm",
            r"times LNS's, NUMBER INTERVAL of Pre-LN's \(undecided\), at a loss",
            "stream NUMBER INTERVAL of it,",
        ),
    ):
        agrees(quoted(sentence), sizes[other])
        agrees(quoted(short, README), sizes[other])
    lead = compare(runs, "lns_gain", "pre_rmsnorm", "loss", depth=16).iloc[0]
    assert lead["verdict"] == "different" and lead["estimate"] < 0
