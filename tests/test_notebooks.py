"""Notebooks run from a fresh kernel, show the figures they claim, and are committed as plain images."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from notebook_helpers import NOTEBOOKS, PLOTLY, execute, figures_in, printed, write_runs

from normlab.export import keep_images_only

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
    assert "falsify" in prose and "**Claim**" in prose and "## Exercises" in prose


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
