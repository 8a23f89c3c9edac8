"""The notebooks that read runs say what the runs say: their tables and figures against the formulas of the runs."""

import re
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from figures_helpers import MEAN_OF_SEEDS, SCHEMES, activation
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

import normlab
from normlab.analysis.compare import compare
from normlab.analysis.selection import at_rate

DATA = NOTEBOOKS.parent / "data"
# Each takes a kernel of its own: one always, the others when asked for.
SOME = [
    "00_start_here",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("01_curse_of_depth", "04_layer_skip")),
]
ALL = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
OF_RUNS = [*(name for name in ALL if name < "05"), "10_larger_models"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("data") / "runs", statuses={("lns", 4): "not_learned"})


def reading(name: str, runs: Path) -> dict[str, str]:
    """The parameter by which a notebook takes runs: those of the reader's sweep, or of the grid that comes along."""
    return {"RUNS" if name.startswith(("00", "03")) else "GRID": str(runs)}


@pytest.fixture(scope="module")
def curse(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> nbformat.NotebookNode:
    return execute("01_curse_of_depth", tmp_path_factory.mktemp("01"), GRID=str(runs))


@pytest.fixture(scope="module")
def stability(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> nbformat.NotebookNode:
    return execute("02_bhyt_stability", tmp_path_factory.mktemp("02"), GRID=str(runs))


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
        ratio = f"{float(row['factor']):.1f} times the smallest"
        assert f"{ratio} ({row['largest']}, {row['smallest']}" in printed(notebook)


def test_start_here_leads_to_every_other_notebook():
    notebook = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4)
    rows = [line for cell in notebook.cells for line in cell.source.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [name for name in ALL if name != "00_start_here"]


def says(table: pd.DataFrame, claim: str) -> dict[str, str]:
    """What a table of `claims.tested` says of a claim."""
    (row,) = table[table.iloc[:, 0] == claim].to_dict("records")
    return row


def test_the_curse_of_depth_shows_growth_loss_and_the_papers_with_both_controls(curse):
    figures = figures_in(curse)
    titles = [re.split("[<:]", figure["layout"]["title"]["text"])[0] for figure in figures]
    assert titles == [
        "Variance over features by layer",
        "L2 norm of a token after the last layer",
        "Loss by training step",
        "Held-out loss against depth",
        "Ratios to Pre-LN",
        "Which schemes train at depth 256",
    ]
    for figure in figures[:4]:
        assert set(SCHEMES) == schemes_of(figure)


def test_the_curse_of_depth_says_what_became_of_its_claims(curse):
    growth, gain, losses, *printed, far, said = tables_in(curse)
    own = {scheme: activation(scheme, 4, 20) / activation(scheme, 1, 20) for scheme in SCHEMES}
    (row,) = rows_of(growth, depth=4, scheme="BHyT").to_dict("records")
    assert float(row["ratio"]) == pytest.approx(own["bhyt"], abs=1e-3)
    # These runs do not gain from depth; LNS did not learn there at all.
    assert rows_of(gain, scheme="BHyT")["difference"].tolist() == ["+0.000"]
    assert float(rows_of(gain, scheme="LNS")["difference"].iloc[0]) < -1
    assert rows_of(losses, scheme="BHyT")["4"].tolist() == ["4.500"]
    assert any("not learned" in cell for cell in losses["4"])
    cells = {cell for table in printed for cell in table.to_numpy().ravel()}
    assert {"24.71", "1410", "44.86", "27.4"} <= cells, "BHyT's Tables 1 to 3, The Curse of Depth's Table 1"
    assert "256 blocks" in far
    assert said.columns[0] == "at 4 blocks" and set(said["rates"]) == {"0.001"}
    three = "as claimed, 3 seeds (a claim needs 4)"
    grows = says(said, "Pre-LN's stream grows from block 1 to the last")
    assert grows["says"] == three and grows["ours"] == f"×{own['pre_rmsnorm']:.2f}"
    less = says(said, "LNS's stream grows less than Pre-LN's")
    assert less["says"] == three and less["ours"] == f"×{own['lns'] / own['pre_rmsnorm']:.2f}"
    assert says(said, "LNS's loss is below Pre-LN's")["says"] == f"not {three}"
    assert printed_first(curse).startswith(f"“Pre-LN's stream grows from block 1 to the last”: {three} (×")


def printed_first(notebook: nbformat.NotebookNode) -> str:
    return printed(notebook).splitlines()[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_RUNS)
def test_any_cell_run_twice_gives_the_same(name, tmp_path, runs):
    """06 and 07 are run so for their own tests."""
    shown = execute(name, tmp_path, twice=True, **reading(name, runs))
    assert tables_in(shown) and (figures_in(shown) or widgets_in(shown))


@pytest.mark.parametrize("name", SOME)
def test_a_notebook_runs_on_one_run_and_compares_it_with_nothing(tmp_path, name):
    single = write_runs(tmp_path / "data" / "runs", schemes=["lns"], depths=[3], seeds=[0])
    notebook = execute(name, tmp_path, **reading(name, single))
    shown = " ".join(str(cell) for table in tables_in(notebook) for cell in table.to_numpy().ravel())
    assert "different" not in shown and "equivalent" not in shown and " holds" not in printed(notebook)
    if name == "00_start_here":
        assert len(tables_in(notebook)) == 1 and tables_in(notebook)[0].empty
    else:
        assert "not run" in shown and "can be decided here" in printed(notebook)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in OF_RUNS])
def test_a_notebook_shows_the_runs_of_one_rate_where_there_are_several(tmp_path, runs, name):
    """As a grid has them: every scheme at several rates, one of them with more seeds."""
    both = write_runs(tmp_path / "data" / "runs", seeds=[0], lr=4e-3)
    for path in runs.iterdir():
        (both / path.name).symlink_to(path)
    notebook = execute(name, tmp_path, **reading(name, both))
    assert not [figure for figure in figures_in(notebook) if "keep the rows of one" in str(figure["layout"])]


def test_the_explorer_notebook_compares_with_the_reference_by_pairs(tmp_path, runs):
    notebook = execute("03_norm_explorer", tmp_path, RUNS=str(runs))
    assert len(widgets_in(notebook)) == 1
    (figure,) = figures_in(notebook)
    (line,) = [trace for trace in figure["data"] if trace["name"] == "lns"]
    ratio = activation("lns", 4, 20) / activation("pre_rmsnorm", 4, 20)
    assert line["y"][-1] == pytest.approx(ratio)
    assert "paired by seed" in figure["layout"]["yaxis"]["title"]["text"]
    assert says(tables_in(notebook)[0], "LNS's stream ends smaller")["ours"].startswith(f"×{ratio:.2f}")


@pytest.mark.slow
def test_bhyt_stability_keeps_the_controls_beside_it(stability):
    for figure in figures_in(stability)[2:6]:
        assert set(SCHEMES) == schemes_of(figure)
    *_, said, limits = tables_in(stability)
    ratio = activation("bhyt", 4, 20) / activation("bhyt_linear", 4, 20)
    assert says(said, "It ends smaller than without tanh")["ours"].startswith(f"×{ratio:.2f}")
    assert says(said, "BHyT's loss is below Pre-LN's")["ours"].startswith("+0.200")
    assert says(said, "Carrying a statistic costs no loss")["says"] == "not run"
    assert set(rows_of(limits, model="the one read above")["falsified"]) == {"no"}
    large = rows_of(limits, model="24 blocks, 512 wide")
    assert set(large["falsified"]) == {"yes"} and set(large["model"]) < set(limits["model"])
    assert "but not with 24 blocks, 512 wide (" in printed_first(stability)


@pytest.mark.slow
def test_bhyt_stability_shows_the_bound_and_the_carried_statistic_and_waits_for_start(stability):
    saturation, carried = figures_in(stability)[:2]
    assert [trace["name"] for trace in saturation["data"]][1:] == ["as it was trained", "one outlier feature"]
    assert [trace["name"] for trace in carried["data"]] == ["before training", "after training"]
    timed = pd.read_csv(DATA / "bench" / "training_cpu.csv").set_index("what")
    over, above, steps, reported, *_ = tables_in(stability)
    assert over["difference"].tolist() == ["+0.200"] and set(above["against"]) == {"Pre-LN, gain λ/κ"}
    (row,) = rows_of(steps, what="bhyt step").to_dict("records")
    assert float(row["ratio"]) == pytest.approx(timed.loc["bhyt step", "ratio"], rel=1e-3)
    assert reported["metric"].str.contains("speed_gain").all() and len(reported) >= 2
    assert ["Intervene(" in source or "TrainTheatre(" in source for source in widgets_in(stability)] == [True, True]


def test_layer_skip_shows_what_every_run_measured_and_one_model_at_work(tmp_path, runs):
    notebook = execute("04_layer_skip", tmp_path, GRID=str(runs))
    skipped, angle, jacobian, lens, updates, left_out, void, *maps = figures_in(notebook)
    costs = lines_of(skipped)
    assert set(costs) == set(SCHEMES)
    expected = [np.mean([skip_cost("lns", layer, seed) for seed in range(3)]) for layer in range(1, 5)]
    assert costs["lns"] == pytest.approx(expected)
    assert lines_of(jacobian)["bhyt"] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert lines_of(lens)["bhyt"] == pytest.approx([4, 3, 2, 1, 0])
    assert all(trace["z"][0] == pytest.approx([0.1, 0.2, 0.3, 0.4]) for trace in angle["data"])
    use, against, deleted, said = tables_in(notebook)
    for table, part in ((use, "block"), (deleted, "deleted")):
        (row,) = rows_of(table, depth=4, scheme="BHyT").to_dict("records")
        deep = [skip_cost("bhyt", 3, seed, part) for seed in range(3)]
        assert float(row["difference"]) == pytest.approx(np.mean(deep), abs=1e-3)
    assert rows_of(against, scheme="BHyT")["against"].tolist() == ["Pre-LN"]
    gap = np.mean([skip_cost("lns", 3, seed) - skip_cost("pre_rmsnorm", 3, seed) for seed in range(3)])
    row = says(said, "A deep block is worth more in LNS than in Pre-LN")
    assert row["ours"].startswith(f"{gap:+.3f}") and row["says"].endswith("as claimed, 3 seeds (a claim needs 4)")
    assert len(widgets_in(notebook)) == 1
    assert {trace["name"] for trace in updates["data"]} == {"attn", "mlp", "block"}
    sizes = [1, 2, 3, 4]  # a quarter of the branches
    assert {trace["name"]: list(trace["x"]) for trace in left_out["data"]} == {"Pre-LN": sizes, "LNS": sizes}
    assert {trace["name"]: len(trace["x"]) for trace in void["data"]} == {"void": 8, "small": 8}
    assert [np.shape(each["data"][0]["z"]) for each in maps] == [(9, 17)] * 2
    deeper = [each["layout"]["xaxis"]["title"]["text"] for each in maps]
    assert deeper == ["layer of Pre-LN, 16 blocks", "layer of LNS, 16 blocks"]


def test_gain_or_bound_sets_the_control_beside_bhyt_at_each_rate_and_by_layer(tmp_path, runs):
    notebook = execute("08_gain_or_bound", tmp_path, GRID=str(runs))
    size, loss, ends, growth = figures_in(notebook)
    three = {"pre_rmsnorm", "bhyt", "rmsnorm_gain"}
    assert all(schemes_of(figure) >= three for figure in (size, loss, ends, growth))
    assert any("published" in each["text"] for each in ends["layout"]["annotations"])
    by_size, by_loss, limits, reached, said = tables_in(notebook)
    ratio = activation("bhyt", 4, 20) / activation("rmsnorm_gain", 4, 20)
    assert by_size["rate"].tolist() == ["0.001"] and float(by_size["ratio"].iloc[0]) == pytest.approx(ratio, abs=1e-3)
    assert len(by_loss) == 1 and limits["width"].tolist() == ["128", "512", "1024", "2048", "4096"]
    assert reached.empty, "these runs did not record it"
    smaller = says(said, "The control's stream ends smaller than Pre-LN's")
    below = activation("rmsnorm_gain", 4, 20) / activation("pre_rmsnorm", 4, 20)
    assert smaller["ours"].startswith(f"×{below:.2f}")
    assert smaller["says"] == ("" if below < 1 else "not ") + "as claimed, 3 seeds (a claim needs 4)"


def test_larger_models_are_asked_the_claims_of_the_small_ones(tmp_path, runs):
    notebook = execute("10_larger_models", tmp_path, GRID=str(runs))
    loss, layers, ends, growth, cost, blocks, size, published = figures_in(notebook)
    four = {"pre_rmsnorm", "lns", "bhyt", "rmsnorm_gain"}
    assert all(schemes_of(figure) >= four for figure in (loss, layers, ends, growth, cost, blocks))
    assert schemes_of(size) == four - {"lns"} and len(lines_of(blocks)["lns"]) == 24
    assert "perplexity" in str(published["layout"]["annotations"])
    both, by_rate, reached = tables_in(notebook)
    assert list(both) == ["claim", "4 blocks", "24 blocks", "sizes"] and len(both) == len(by_rate)
    assert set(reached["width"]) == {"512"} and set(reached["scheme"]) == {"BHyT"}
    ratio = activation("bhyt", 4, 20) / activation("rmsnorm_gain", 4, 20)
    smaller = says(both, "BHyT's stream ends smaller than its control's")
    assert smaller["4 blocks"].startswith(f"×{ratio:.2f} at rate 0.001: ")
    table = normlab.load_runs(DATA / "gpu")
    wide = compare(at_rate(table, 4e-3), "bhyt", "rmsnorm_gain", "token_l2_mean")["estimate"].item()
    assert smaller["24 blocks"].startswith(f"×{wide:.2f} at rate 0.004: ")
    agree = (ratio < 1) == (wide < 1)
    assert smaller["sizes"] == ("agree" if agree else "turn")
    assert f"the sizes agree on {both['sizes'].eq('agree').sum()}." in printed_first(notebook)


def test_the_kernels_notebook_has_one_figure_and_one_table(tmp_path):
    notebook = execute("05_kernels", tmp_path)
    (figure,), (table,) = figures_in(notebook), tables_in(notebook)
    assert {trace["name"] for trace in figure["data"]} >= {"normlab", "eager", "compile", "torch"}
    assert "the norms here run on cpu_1_thread" in printed(notebook) and "bhyt" in set(table["model"])
