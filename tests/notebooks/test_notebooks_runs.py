"""The notebooks that read runs say what the runs say: their tables and figures against the formulas of the runs."""

import re
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from figures_helpers import MEAN_OF_SEEDS, SCHEMES, activation, final_loss
from notebook_helpers import (
    NOTEBOOKS,
    execute,
    figures_in,
    printed,
    schemes_of,
    skip_cost,
    tables_in,
    widgets_in,
    write_runs,
)

DATA = NOTEBOOKS.parent / "data"
# Each takes a kernel of its own: one always, the others when asked for.
SOME = [
    "00_start_here",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("01_curse_of_depth", "04_layer_skip")),
]
ALL = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("data") / "runs", statuses={("lns", 4): "not_learned"})


@pytest.fixture(scope="module")
def curse(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> nbformat.NotebookNode:
    return execute("01_curse_of_depth", tmp_path_factory.mktemp("01"), RUNS=str(runs))


@pytest.fixture(scope="module")
def stability(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> nbformat.NotebookNode:
    grid, bench = str(DATA / "gain_or_bound"), str(DATA / "bench")
    other = write_runs(tmp_path_factory.mktemp("other") / "runs", schemes=["bhyt"], seeds=[0], lr=4e-3)
    options = dict(RUNS=str(runs), GRID=grid, BENCH=bench, OTHER=str(other))
    return execute("02_bhyt_stability", tmp_path_factory.mktemp("02"), **options)


def lines_of(figure: dict) -> dict[str, list[float]]:
    return {trace["name"]: list(trace["y"]) for trace in figure["data"] if "scheme" in trace.get("meta", {})}


def rows_of(table: pd.DataFrame, **where: object) -> pd.DataFrame:
    """The rows of a shown table that have these texts."""
    for column, value in where.items():
        table = table[table[column] == str(value)]
    return table


def last_layer(scheme: str, depth: int, step: int) -> float:
    return MEAN_OF_SEEDS * activation(scheme, depth, step)


def test_start_here_says_how_far_schemes_are_apart_and_opens_the_explorer(tmp_path, runs):
    notebook = execute("00_start_here", tmp_path, RUNS=str(runs))
    assert len(widgets_in(notebook)) == 1 and not figures_in(notebook)
    (found,) = tables_in(notebook)
    for when, step in (("before training", 0), ("after training", 20)):
        (row,) = rows_of(found, depth=4, when=when).to_dict("records")
        high, low = last_layer("pre_rmsnorm", 4, step), last_layer("bhyt", 4, step)
        assert row["largest"] == f"Pre-LN {high:.3g}" and row["smallest"] == f"BHyT {low:.3g}"
        assert float(row["factor"]) == pytest.approx(high / low, abs=0.01)
        assert f"{float(row['factor']):.1f} {when} ({row['largest']}, {row['smallest']})" in printed(notebook)


def test_start_here_leads_to_every_other_notebook():
    notebook = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4)
    rows = [line for cell in notebook.cells for line in cell.source.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [name for name in ALL if name != "00_start_here"]


def test_the_curse_of_depth_shows_growth_loss_and_gradients_with_both_controls(curse):
    figures = figures_in(curse)
    titles = [re.split("[<:]", figure["layout"]["title"]["text"])[0] for figure in figures]
    assert titles == [
        "L2 norm of a token by layer",
        "L2 norm of a token by layer",
        "Variance over features by layer",
        "L2 norm of a token by layer, step 20",
        "L2 norm of a token after the last layer",
        "Loss by training step",
        "Gradient norm of the batch by layer",
        "Held-out loss against depth",
        "Loss added by leaving out one block",
        "Angle between the stream after two layers",
        "Ratios to Pre-LN",
        *(f"Which schemes train at depth {depth}" for depth in (256, 1000)),
    ]
    for figure, depth in zip(figures[-2:], ("256", "1000"), strict=True):
        assert f"depth {depth} " in figure["layout"]["title"]["subtitle"]["text"]
    for figure in figures[:-4]:
        assert set(SCHEMES) == schemes_of(figure)
    assert "depth 2, 4" in printed(curse)
    assert any("not learned" in cell for cell in tables_in(curse)[3]["4"])


def test_the_curse_of_depth_says_what_became_of_its_claims(curse):
    growth, gain, use, losses, sizes, losses_beside, tokens, searched, *printed, _ = tables_in(curse)
    for scheme, title in (("pre_rmsnorm", "Pre-LN"), ("bhyt", "BHyT")):
        (row,) = rows_of(growth, depth=4, scheme=title).to_dict("records")
        assert float(row["ratio"]) == pytest.approx(activation(scheme, 4, 20) / activation(scheme, 1, 20), abs=1e-3)
        assert row["verdict"] == "above 1" and row["seeds"] == "3"
        (row,) = rows_of(use, scheme=title).to_dict("records")
        deep = np.mean([skip_cost(scheme, layer, seed) for layer in (3, 4) for seed in range(3)])
        assert float(row["difference"]) == pytest.approx(deep, abs=1e-3) and row["verdict"] == "above 0"
    # No scheme of the formula learns more from its depth; LNS did not learn there at all.
    assert rows_of(gain, scheme="BHyT")["difference"].tolist() == ["+0.000"]
    assert float(rows_of(gain, scheme="LNS")["difference"].iloc[0]) < -1
    assert rows_of(losses, scheme="BHyT")["4"].tolist() == ["4.500"]
    (row,) = rows_of(tokens, scheme="BHyT").to_dict("records")  # without a search beside them, of these runs alone
    assert (row["loss_deep"], row["gain"], row["seeds"]) == ("4.5", "0.0", "3")
    assert rows_of(searched, scheme="BHyT").equals(rows_of(losses, scheme="BHyT"))
    for when, step in (("before training", 0), ("after training", 20)):
        (row,) = rows_of(sizes, depth=4, against="Pre-LN", when=when).to_dict("records")
        ratio = activation("bhyt", 4, step) / activation("pre_rmsnorm", 4, step)
        assert float(row["ratio"]) == pytest.approx(ratio, abs=1e-3) and row["verdict"] == "different: BHyT is lower"
    assert set(sizes["against"]) == {"Pre-LN", "Pre-LN, gain λ/κ", "BHyT without tanh"}
    (row,) = rows_of(losses_beside, depth=4, against="Pre-LN, gain λ/κ").to_dict("records")
    assert float(row["difference"]) == pytest.approx(-0.2, abs=1e-3) and row["seeds"] == "3"
    cells = {cell for table in printed for cell in table.to_numpy().ravel()}
    assert {"24.714", "1409.79", "44.86", "27.4"} <= cells, "BHyT's Tables 1 to 3, The Curse of Depth's Table 1"


def test_the_curse_of_depth_opens_a_widget_on_growth(curse):
    (widget,) = widgets_in(curse)
    assert "NormExplorer(" in widget
    growth = lines_of(figures_in(curse)[3])
    for scheme in SCHEMES:
        first = activation(scheme, 1, 20)
        assert growth[scheme] == pytest.approx([activation(scheme, layer, 20) / first for layer in range(5)])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name < "05"])
def test_any_cell_run_twice_gives_the_same(name, tmp_path, runs):
    """05 to 08 are run so for their own tests."""
    shown = execute(name, tmp_path, twice=True, RUNS=str(runs))
    assert figures_in(shown) and tables_in(shown)


@pytest.mark.parametrize("name", SOME)
def test_a_notebook_runs_on_one_run_and_compares_it_with_nothing(tmp_path, name):
    single = write_runs(tmp_path / "data" / "runs", schemes=["lns"], depths=[3], seeds=[0])
    tables = tables_in(execute(name, tmp_path, RUNS=str(single)))
    shown = " ".join(str(cell) for table in tables for cell in table.to_numpy().ravel())
    assert "different" not in shown and "equivalent" not in shown
    if name == "00_start_here":
        assert len(tables) == 1 and tables[0].empty
    else:
        assert "undecided, one seed: no interval" in shown


def test_the_explorer_notebook_compares_with_the_reference_by_pairs(tmp_path, runs):
    notebook = execute("03_norm_explorer", tmp_path, RUNS=str(runs))
    opened, figure = figures_in(notebook)
    (line,) = [trace for trace in opened["data"] if trace["name"] == "lns"]
    assert line["y"][-1] == pytest.approx(last_layer("lns", 4, 20))
    (line,) = [trace for trace in figure["data"] if trace["name"] == "lns"]
    assert line["y"][-1] == pytest.approx(activation("lns", 4, 20) / activation("pre_rmsnorm", 4, 20))
    assert "paired by seed" in figure["layout"]["yaxis"]["title"]["text"]


@pytest.mark.slow
def test_bhyt_stability_keeps_the_controls_beside_it(stability):
    for figure in figures_in(stability)[:4]:
        assert schemes_of(figure) == {"pre_rmsnorm", "bhyt", "bhyt_linear", "rmsnorm_gain"}
    sizes, losses, by_rate = tables_in(stability)[:3]
    (row,) = rows_of(sizes, depth=4, against="BHyT without tanh", when="after training").to_dict("records")
    ratio = activation("bhyt", 4, 20) / activation("bhyt_linear", 4, 20)
    assert float(row["ratio"]) == pytest.approx(ratio, abs=1e-3)
    assert rows_of(losses, depth=4, against="Pre-LN")["difference"].tolist() == ["+0.200"]
    assert by_rate["lr"].tolist() == ["0.001", "0.004"] and by_rate["seeds"].tolist() == ["3", "1"]
    losses = [final_loss("bhyt", seed) for seed in range(3)]
    assert by_rate["loss"].astype(float).tolist() == pytest.approx([np.mean(losses), losses[0]], abs=1e-3)


@pytest.mark.slow
def test_bhyt_stability_measures_the_bound_on_a_trained_model(stability):
    saturation = figures_in(stability)[4]
    bound, measured, planted = (
        [np.nan if share is None else share for share in trace["y"]] for trace in saturation["data"]
    )
    kappas = saturation["data"][0]["x"]
    assert bound == pytest.approx([1 / kappa**2 for kappa in kappas])
    for shares in (measured, planted):
        assert all(not share > limit for share, limit in zip(shares, bound, strict=True)) and shares[0] > 0.1
        assert np.isnan(shares[-1]), "at width 128 nothing is beyond lambda at kappa = 12"
    assert planted[kappas.index(10)] > 0, "the outlier is"
    (part,) = [table for table in tables_in(stability) if "largest part of the bound" in table]
    for condition, shares in (("as it was trained", measured), ("one outlier feature", planted)):
        expected = np.nanmax([share * kappa**2 for share, kappa in zip(shares, kappas, strict=True) if kappa > 1])
        assert expected < 1
        assert float(rows_of(part, condition=condition).iloc[0, 1]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_bhyt_stability_follows_the_carried_statistic_through_training(stability):
    carried = figures_in(stability)[5]
    assert [trace["name"] for trace in carried["data"]] == ["before training", "after training"]
    assert carried["data"][0]["y"] == pytest.approx([1.0] * 8, abs=0.3)
    (table,) = [table for table in tables_in(stability) if "within a factor of 2" in table]
    after = carried["data"][1]["y"]
    assert [float(value) for value in table["after training"]] == pytest.approx(after, abs=1e-3)
    assert [text == "True" for text in table["within a factor of 2"]] == [0.5 <= ratio <= 2 for ratio in after]


@pytest.mark.slow
def test_bhyt_stability_shows_the_shipped_times_and_its_own(stability):
    timed = pd.read_csv(DATA / "bench" / "training_cpu.csv").set_index("what")
    steps, reported, generated = tables_in(stability)[5:8]
    (row,) = rows_of(steps, what="bhyt step").to_dict("records")
    assert float(row["ratio"]) == pytest.approx(timed.loc["bhyt step", "ratio"], rel=1e-3)
    assert reported["metric"].str.contains("speed_gain").all() and len(reported) >= 2
    assert generated["model"].tolist()[0] == "Pre-LN" and generated["speedup"].iloc[0] == "1.00"
    assert {"BHyT", "BHyT*"} <= set(generated["model"])


@pytest.mark.slow
def test_bhyt_stability_trains_two_models_and_says_whether_they_learned(stability):
    intervene, stage = figures_in(stability)[6:]
    assert {"as it is size", "intervened size"} <= {trace["name"] for trace in intervene["data"]}
    trained = {trace["name"]: trace for trace in stage["data"]}
    final, bends = tables_in(stability)[-2:]
    for scheme, title in (("bhyt", "BHyT"), ("rmsnorm_gain", "Pre-LN, gain λ/κ")):
        assert list(trained[f"{scheme} first"]["x"]) == list(range(5)) and trained[f"{scheme} train"]["y"]
        (shown,) = rows_of(final, scheme=title)["4"]
        held_out = trained[f"{scheme} held out"]["y"][-1]
        assert shown.startswith(f"{held_out:.3f}")
        (trigram,) = rows_of(final, scheme="trigram model")["4"]
        assert ("not learned" in shown) == (held_out >= float(trigram))
    pairs = [(float(row["g"]), float(row["gamma0"])) for row in bends.to_dict("records")]
    assert pairs == [(0.2, 1.0), (1.0, 0.2), (1.0, 1.0), (2.0, 0.1), (5.0, 0.04)]


def test_layer_skip_shows_what_every_run_measured_and_one_model_at_work(tmp_path, runs):
    notebook = execute("04_layer_skip", tmp_path, RUNS=str(runs))
    skipped, deleted, attention, mlp, at_one_rate, angle, jacobian, lens, skip_map, *updates = figures_in(notebook)
    for figure, part in ((skipped, "block"), (deleted, "deleted"), (attention, "attention"), (mlp, "mlp")):
        costs = lines_of(figure)
        assert set(costs) == set(SCHEMES)
        expected = [np.mean([skip_cost("lns", layer, seed, part) for seed in range(3)]) for layer in range(1, 5)]
        assert costs["lns"] == pytest.approx(expected)
    assert lines_of(jacobian)["bhyt"] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert lines_of(lens)["bhyt"] == pytest.approx([4, 3, 2, 1, 0])
    assert all(trace["z"][0] == pytest.approx([0.1, 0.2, 0.3, 0.4]) for trace in angle["data"])
    use, beside, deleted_use, losses, woken = tables_in(notebook)
    assert set(lines_of(at_one_rate)) == {"pre_rmsnorm", "lns"} and len(lines_of(at_one_rate)["lns"]) == 16
    assert set(woken["lr"]) >= {"0.004", "0.008"} and woken["says"].str.contains("wakes deep layers").any()
    (row,) = rows_of(beside, depth=4, scheme="BHyT").to_dict("records")
    own, other = (
        np.mean([skip_cost(name, layer, seed) for layer in (3, 4) for seed in range(3)])
        for name in ("bhyt", "pre_rmsnorm")
    )
    assert row["against"] == "Pre-LN" and float(row["difference"]) == pytest.approx(own - other, abs=1e-3)
    for table, part in ((use, "block"), (deleted_use, "deleted")):
        (row,) = rows_of(table, depth=4, scheme="BHyT").to_dict("records")
        deep = [skip_cost("bhyt", layer, seed, part) for layer in (3, 4) for seed in range(3)]
        assert float(row["difference"]) == pytest.approx(np.mean(deep), abs=1e-3)
        every = [skip_cost("bhyt", layer, seed, part) for layer in (1, 2, 3, 4) for seed in range(3)]
        assert float(row["share"]) == pytest.approx(sum(deep) / sum(every), abs=1e-3)
    assert "not learned" in rows_of(losses, scheme="LNS")["4"].iloc[0]
    heat = next(trace for trace in skip_map["data"] if trace["type"] == "heatmap")
    assert list(heat["x"]) == list(range(1, 8)) and list(heat["y"]) == list(range(2, 9))
    assert [{trace["name"] for trace in figure["data"]} for figure in updates] == [{"attn", "mlp", "block"}] * 2
