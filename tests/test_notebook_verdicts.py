"""What the notebooks say of the shipped runs, below "What would falsify", is what these runs hold."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from quoted_numbers import ROOT, agrees, quoted

import normlab
from normlab.analysis import claims, gain
from normlab.analysis.compare import compare
from normlab.analysis.selection import experiments_of
from normlab.widgets.change import Change, ask


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return normlab.load_runs(ROOT / "data" / "runs")


@pytest.fixture(scope="module")
def experiments() -> pd.DataFrame:
    return normlab.load_experiments(ROOT / "data" / "runs")


def said(name: str) -> str:
    """The paragraph of a notebook on the shipped runs."""
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    (found,) = (part for part in text.split("\n\n") if part.startswith("**In the shipped runs**"))
    return " ".join(found.replace("−", "-").split())


def test_by_how_much_sizes_differ(runs: pd.DataFrame):
    text, factors = said("00_start_here"), claims.extremes(runs).set_index(["when", "depth"])["factor"]
    before, after = factors["before training"], factors["after training"]
    ends = quoted(r"factor is (\d+) at 4 layers before training, NUMBER at 8 and NUMBER at 16", text)
    assert ends == [f"{before[4]:.0f}", *(f"{before[depth]:.1f}" for depth in (8, 16))]
    ends = quoted("after it, it is NUMBER, NUMBER and NUMBER: training takes", text)
    assert ends == [f"{after[depth]:.1f}" for depth in (4, 8, 16)]
    assert all(after[depth] < before[depth] / 2 for depth in (4, 8, 16)) and all(
        1.5 < after[depth] < 2.5 for depth in (8, 16)
    )
    of = runs.groupby("depth")["scheme"].unique()
    assert all({"peri_ln", "post_rmsnorm"} & set(of[depth]) == set() for depth in (8, 16))


def test_whether_depth_is_wasted(runs: pd.DataFrame, experiments: pd.DataFrame):
    text = said("01_curse_of_depth")
    agrees(
        quoted("Pre-LN is NUMBER INTERVAL times its first", text),
        claims.growth(runs).set_index(["a", "depth"]).loc["pre_rmsnorm", 16],
    )
    loss, size = (compare(runs, "rmsnorm_gain", "bhyt", name, depth=16).iloc[0] for name in ("loss", "token_l2_mean"))
    assert loss["verdict"] == "undecided" and size["verdict"] == "different" and size["seeds"] == 3
    agrees(quoted("but its last layer is NUMBER INTERVAL times BHyT's", text), size)
    gains, use = claims.depth_gain(runs, 4, 16).set_index("a"), claims.depth_use(experiments, 16).set_index("a")
    agrees(quoted("16 Pre-LN gains NUMBER INTERVAL nats", text), gains.loc["pre_rmsnorm"])
    agrees(quoted("nats, LNS NUMBER INTERVAL; and", text), gains.loc["lns"])
    agrees(quoted("deeper half costs NUMBER INTERVAL nats", text), use.loc["pre_rmsnorm"])
    agrees(quoted("one of LNS's NUMBER INTERVAL", text), use.loc["lns"])
    assert abs(gains.loc["lns", "estimate"] - gains.loc["pre_rmsnorm", "estimate"]) < 0.02
    share = claims.growth(runs).set_index(["a", "depth"]).loc[("pre_rmsnorm", 16), "one_block"]
    assert quoted("its first; one block of 16, the first, makes NUMBER of it", text) == [f"{share:.2f}"]


def test_whether_bhyt_is_stable(runs: pd.DataFrame):
    text = said("02_bhyt_stability")
    model, tokens = normlab.load_model("bhyt-d8"), normlab.load_held_out("bhyt-d8")[:8]
    parts = [
        kappa**2
        * ask(model, tokens, Change(kappa=kappa / model.config.kappa, exact=True))
        .profile("saturation", "attn_norm_in")
        .mean()
        for kappa in (1.5, 2, 3, 4, 6, 8, 10, 12)
    ]
    assert quoted("part of the bound is NUMBER in", text) == [f"{max(parts):.2f}"]
    last = runs[(runs["step"] == runs["step"].max()) & (runs["mask"] == "all")]
    carried = last[(last["metric"] == "carried_var_ratio") & (last["scheme"] == "bhyt")]["value"]
    assert quoted("ratio is NUMBER to NUMBER after", text) == [f"{carried.min():.2f}", f"{carried.max():.2f}"]
    assert carried.min() > 0.5 and carried.max() < 2
    beyond = last[(last["metric"] == "saturation") & last["scheme"].isin(["bhyt", "bhyt_exact"])]["value"].max()
    assert f"at most {1e6 * beyond:.0f} in a million" in text
    loss, size = (compare(runs, "rmsnorm_gain", "bhyt", name, depth=16).iloc[0] for name in ("loss", "token_l2_mean"))
    agrees(quoted("control is NUMBER INTERVAL nats from BHyT, undecided", text), loss)
    agrees(quoted("but NUMBER INTERVAL times its size", text), size)
    timed = pd.read_csv(ROOT / "data" / "bench" / "training_cpu.csv").set_index("what")
    assert quoted("a step takes NUMBER times Pre-LN's", text) == [f"{timed.loc['bhyt step', 'ratio']:.2f}"]


def test_which_blocks_a_model_needs(runs: pd.DataFrame, experiments: pd.DataFrame):
    text, use = said("04_layer_skip"), claims.depth_use(experiments, 16).set_index("a")
    assert quoted("`share_rest` of Pre-LN NUMBER", text) == [f"{use.loc['pre_rmsnorm', 'share_rest']:.2f}"]
    agrees(quoted("NUMBER INTERVAL nats for LNS", text), use.loc["lns"])
    agrees(quoted("NUMBER INTERVAL for Pre-LN", text), use.loc["pre_rmsnorm"])
    lns, plain = use.loc["lns"], use.loc["pre_rmsnorm"]
    assert lns["high"] < plain["estimate"]
    less = claims.depth_use(experiments, 16, reference="pre_rmsnorm").set_index("a")
    agrees(
        quoted("a difference of NUMBER INTERVAL, below zero by its own interval and undecided", text), less.loc["lns"]
    )
    agrees(quoted("With a trained gain LNS's blocks there cost NUMBER INTERVAL,", text), use.loc["lns_gain"])
    agrees(quoted("told apart from Pre-LN's, by NUMBER INTERVAL: less, not more", text), less.loc["lns_gain"])
    assert less.loc[["lns", "lns_gain"], "verdict"].tolist() == ["undecided", "different"]
    assert (less.loc[["lns", "lns_gain"], "high"] < 0).all()
    rows = experiments_of(experiments, "skip_delta_loss", "block").query("depth == 16")
    blocks = claims.means(rows.assign(depth=rows["layer"].astype(int)), "skip_delta_loss").query("a == 'lns'")
    assert f"met by {(blocks['low'] <= 0).sum()} of LNS's {len(blocks)} blocks" in text
    table = claims.learned(runs)
    assert (table["below_trigram"] == table["seeds"]).all() and "All models have learned." in text


def test_gain_or_bound(runs: pd.DataFrame):
    text, folder = said("08_gain_or_bound"), ROOT / "data" / "gain_or_bound"
    configs = gain.with_gain(normlab.load_configs(folder), normlab.NormlabConfig().kappa)
    grid = normlab.load_runs(folder)
    for metric, pattern in (("loss", "holds zero: loss NUMBER INTERVAL"), ("token_l2_mean", "size × NUMBER INTERVAL")):
        rows = gain.conditions(grid, configs, "bhyt", "bhyt_linear", metric)
        first = rows.iloc[0]
        agrees(quoted(pattern, text), first)
        assert first["condition"] == "g = 0.2, γ₀ = 1" and first["verdict"] == "undecided"
        if metric == "loss":
            assert (rows["verdict"] == "undecided").all()  # the claim: under every condition
    for scheme, pattern in (
        ("rmsnorm_gain", "last layer is NUMBER INTERVAL of Pre-LN's"),
        ("bhyt", "BHyT's NUMBER INTERVAL"),
    ):
        agrees(quoted(pattern, text), compare(runs, scheme, "pre_rmsnorm", "token_l2_mean", depth=16).iloc[0])
