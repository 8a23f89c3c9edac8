"""Notebooks run from a fresh kernel, show the figures they claim, and are committed as plain images."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from figures_helpers import SCHEMES, activation
from notebook_helpers import NOTEBOOKS, PLOTLY, execute, figures_in, printed, write_runs

from normlab.export import keep_images_only

WIDGET = "application/vnd.jupyter.widget-view+json"
ALL = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("data") / "runs", statuses={("lns", 4): "not_learned"})


def schemes_of(figure: dict) -> set[str]:
    return {trace["meta"]["scheme"] for trace in figure["data"] if "scheme" in trace.get("meta", {})}


@pytest.mark.parametrize("name", ALL)
def test_a_notebook_has_a_title_parameters_and_what_would_falsify_it(name: str):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.metadata.get("tags") == ["parameters"] and "FAST = True" in first.source
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "falsify" in prose and "**Claim" in prose and "## Exercises" in prose


@pytest.mark.parametrize("name", ALL)
def test_a_committed_notebook_is_small_and_shows_images_only(name: str):
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.stat().st_size < 1_500_000
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            assert PLOTLY not in output.get("data", {}) and "/root" not in str(output) and "/home" not in str(output)


def test_the_curse_of_depth_shows_growth_loss_and_gradients_with_both_controls(tmp_path: Path, runs: Path):
    notebook = execute("01_curse_of_depth", tmp_path, RUNS=str(runs))
    figures = figures_in(notebook)
    titles = [figure["layout"]["title"]["text"] for figure in figures]
    assert titles == [
        "L2 norm of a token by layer",
        "Variance over features by layer",
        "L2 norm of a token after the last layer: before and after training",
        "Loss by training step",
        "Gradient norm of the batch by layer",
        "Held-out loss against depth",
    ]
    for figure in figures:
        assert {"pre_rmsnorm", "lns", "bhyt", "bhyt_linear", "rmsnorm_gain"} == schemes_of(figure)
    said = printed(notebook)
    assert "depth 4, at step 0" in said and "0.280 times Pre-LN's" in said and "0.169 times Pre-LN's" in said
    table = next(c for c in notebook.cells if "pivot_table" in c.source).outputs[-1]["data"]["text/html"]
    assert "(not learned)" in table and "4.500" in table or "4.5" in table
    assert "the runs behind them" in said and ("no image was made" in said or "7 figures as images" in said)


def test_start_here_opens_the_explorer_and_its_static_twin(tmp_path: Path, runs: Path):
    notebook = execute("00_start_here", tmp_path, RUNS=str(runs))
    widgets = [o for c in notebook.cells for o in c.get("outputs", []) if WIDGET in o.get("data", {})]
    assert len(widgets) == 1
    (figure,) = figures_in(notebook)
    lines = {trace["name"]: trace["y"] for trace in figure["data"] if "scheme" in trace.get("meta", {})}
    assert set(lines) == set(SCHEMES)
    assert lines["bhyt"] == pytest.approx([1.01 * activation("bhyt", layer, 20) for layer in range(5)])


def test_the_explorer_notebook_compares_with_the_reference_by_pairs(tmp_path: Path, runs: Path):
    notebook = execute("03_norm_explorer", tmp_path, RUNS=str(runs))
    (figure,) = figures_in(notebook)
    (line,) = [trace for trace in figure["data"] if trace["name"] == "lns"]
    assert line["y"][-1] == pytest.approx(activation("lns", 4, 20) / activation("pre_rmsnorm", 4, 20))
    assert "paired by seed" in figure["layout"]["yaxis"]["title"]["text"]


def test_bhyt_stability_keeps_the_controls_and_measures_the_bound(tmp_path: Path, runs: Path):
    notebook = execute("02_bhyt_stability", tmp_path, RUNS=str(runs))
    *drawn, saturation, intervene = figures_in(notebook)
    assert len(drawn) == 4
    for figure in drawn:
        assert schemes_of(figure) == {"pre_rmsnorm", "bhyt", "bhyt_linear", "rmsnorm_gain"}
    bound, measured, planted = (trace["y"] for trace in saturation["data"])
    assert all(share <= limit for share, limit in zip(measured, bound, strict=True)) and measured[0] > 0.2
    # Only the planted outlier is still beyond lambda at kappa = 10, and nothing is beyond sqrt(128) = 11.3.
    assert measured[-2] == 0.0 < planted[-2] <= bound[-2] and planted[-1] == 0.0
    ratios = [line.split() for line in printed(notebook).split("layer  value")[1].strip().splitlines()]
    assert len(ratios) == 8 and all(0.9 < float(value) < 1.2 for _, value in ratios)
    assert {"as it is size", "intervened size"} <= {trace["name"] for trace in intervene["data"]}


def test_your_own_model_measures_two_kinds_of_models(tmp_path: Path):
    notebook = execute("06_your_own_model", tmp_path)
    size, contribution, by_hand, skipped = figures_in(notebook)
    lines = {trace["name"]: trace for trace in size["data"]}
    assert list(lines["block_out"]["x"]) == list(range(11)) and min(lines["block_out"]["y"]) > 0
    assert {"attn", "mlp", "block"} == {trace["name"] for trace in contribution["data"]}
    assert {len(trace["x"]) for trace in by_hand["data"] if trace["name"] == "block_out"} == {7}
    shown = {trace["name"]: trace["y"] for trace in skipped["data"]}
    assert shown["intervened size"][5] == pytest.approx(shown["intervened size"][4])


def test_keeping_images_only_drops_everything_that_needs_a_kernel(tmp_path: Path):
    outputs = [
        {"output_type": "display_data", "data": {PLOTLY: {}, "image/png": "iVBO"}, "metadata": {}},
        {"output_type": "display_data", "data": {PLOTLY: {}}, "metadata": {}},
        {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}, "metadata": {}},
        {"output_type": "stream", "name": "stderr", "text": "a warning"},
        {"output_type": "stream", "name": "stdout", "text": "a result"},
        {"output_type": "execute_result", "data": {"text/html": "<table>"}, "metadata": {}, "execution_count": 3},
    ]
    cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.from_dict(o) for o in outputs], execution_count=3)
    injected = nbformat.v4.new_code_cell("RUNS = '/somewhere'", metadata={"tags": ["injected-parameters"]})
    notebook = nbformat.v4.new_notebook(cells=[cell, injected])
    notebook.metadata["papermill"] = {"duration": 1.0}
    source, out = tmp_path / "executed.ipynb", tmp_path / "committed.ipynb"
    nbformat.write(notebook, source)
    assert keep_images_only(source, out) == 1
    kept = nbformat.read(out, as_version=4)
    nbformat.validate(kept)
    (cell,) = kept.cells
    assert [list(o.get("data", {"text": 0})) for o in cell.outputs] == [["image/png"], ["text"], ["text/html"]]
    assert cell.execution_count is None and "papermill" not in kept.metadata


def test_layer_skip_trains_models_that_learn_and_skips_every_block(tmp_path: Path):
    notebook = execute("04_layer_skip", tmp_path)
    costs, skip_map, contribution = figures_in(notebook)
    assert [trace["name"] for trace in costs["data"]] == ["pre_rmsnorm", "lns"]
    assert all(list(trace["x"]) == list(range(1, 9)) for trace in costs["data"])
    assert printed(notebook).count(": finished") == 2
    heat = next(trace for trace in skip_map["data"] if trace["type"] == "heatmap")
    assert list(heat["x"]) == list(range(1, 8)) and list(heat["y"]) == list(range(2, 9))
    assert {trace["name"] for trace in contribution["data"]} == {"attn", "mlp", "block"}
