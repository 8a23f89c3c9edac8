"""Notebooks run from a fresh kernel, show the figures they claim, and are committed as plain images."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from notebook_helpers import NOTEBOOKS, PLOTLY, execute, figures_in, printed, write_runs

from normlab.export.notebooks import ImageNotebook

GRID = str(NOTEBOOKS.parent / "data" / "gain_or_bound")
BENCH = NOTEBOOKS.parent / "data" / "bench"
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


def lines_of(figure: dict) -> dict[str, list[float]]:
    return {trace["name"]: list(trace["y"]) for trace in figure["data"] if "scheme" in trace.get("meta", {})}


def said_after(notebook: nbformat.NotebookNode, start: str) -> list[str]:
    """The printed lines that begin with `start`, without it."""
    lines = [line.strip() for line in printed(notebook).splitlines()]
    return [line.removeprefix(start).strip() for line in lines if line.startswith(start)]


def number_after(text: str, name: str) -> float:
    """The first number after a name."""
    found = re.search(rf"{re.escape(name)}\s*(\d+\.\d+)", text)
    assert found is not None, (name, text)
    return float(found[1])


def test_your_own_model_measures_two_kinds_of_models(tmp_path: Path):
    notebook = execute("06_your_own_model", tmp_path)
    size, contribution, by_hand, skipped = figures_in(notebook)
    lines = {trace["name"]: trace for trace in size["data"]}
    assert list(lines["block_out"]["x"]) == list(range(11)) and min(lines["block_out"]["y"]) > 0
    assert {"attn", "mlp", "block"} == {trace["name"] for trace in contribution["data"]}
    assert {len(trace["x"]) for trace in by_hand["data"] if trace["name"] == "block_out"} == {7}
    shown = {trace["name"]: trace["y"] for trace in skipped["data"]}
    assert shown["intervened size"][5] == pytest.approx(shown["intervened size"][4])


def test_keeping_images_only_drops_everything_that_needs_a_kernel():
    outputs = [
        {"output_type": "display_data", "data": {PLOTLY: {}, "image/png": "iVBO"}, "metadata": {}},
        {"output_type": "display_data", "data": {PLOTLY: {}}, "metadata": {}},
        {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}, "metadata": {}},
        {"output_type": "stream", "name": "stderr", "text": "a warning"},
        {"output_type": "stream", "name": "stdout", "text": "a result"},
        {
            "output_type": "execute_result",
            "data": {"text/html": "<table>", "text/plain": "<Styler at 0x7f>"},
            "metadata": {},
            "execution_count": 3,
        },
    ]
    cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.from_dict(o) for o in outputs], execution_count=3)
    injected = nbformat.v4.new_code_cell("RUNS = '/somewhere'", metadata={"tags": ["injected-parameters"]})
    notebook = nbformat.v4.new_notebook(cells=[cell, injected])
    notebook.metadata["papermill"] = {"duration": 1.0}
    kept = nbformat.reads(ImageNotebook().from_notebook_node(notebook)[0], as_version=4)
    nbformat.validate(kept)
    (cell,) = kept.cells
    assert [list(o.get("data", {"text": 0})) for o in cell.outputs] == [["image/png"], ["text"], ["text/html"]]
    assert cell.execution_count is None and "papermill" not in kept.metadata


def test_transformer_lens_adds_up_and_only_the_slope_predicts_a_change(tmp_path: Path):
    pytest.importorskip("transformer_lens")
    notebook = execute("07_transformer_lens", tmp_path)
    said = printed(notebook)
    assert "logits are bit for bit the model's: True" in said
    loss, *levels = (number_after(said, name) for name in ("held-out loss", "unigram entropy", "trigram loss"))
    assert loss < levels[0] and (": finished" in said) == (loss < levels[1])
    two_tools, changes, attribution, steep = figures_in(notebook)
    probed, cached = (trace["y"] for trace in two_tools["data"])
    assert cached == pytest.approx(probed, rel=1e-5)
    lines = {trace["name"]: trace for trace in changes["data"]}
    measured = lines["jacobian"]["x"]
    reach = max(map(abs, measured))
    assert lines["jacobian"]["y"] == pytest.approx(measured, abs=0.02 * reach)
    for other in ("frozen", "tanh ignored"):
        assert max(abs(y - x) for x, y in zip(measured, lines[other]["y"], strict=True)) > 0.5 * reach
    sums = [float(line.split("add up to")[1].split()[0]) for line in said.splitlines() if "add up to" in line]
    logit = float(next(line for line in said.splitlines() if line.startswith("frozen")).split()[-1])
    assert sums[0] == pytest.approx(logit, abs=1e-4) and abs(sums[1]) < 1e-3 and abs(sums[2] - logit) > 0.1
    for figure in (attribution, steep):
        assert {"frozen", "jacobian"} == {trace["name"] for trace in figure["data"]}
    shares = dict(zip(attribution["data"][0]["x"], attribution["data"][0]["y"], strict=True))
    assert sum(shares.values()) == pytest.approx(logit, abs=1e-4) and "mlp 4" in shares


def test_without_transformer_lens_the_notebook_says_in_one_line_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    absent = tmp_path / "absent" / "transformer_lens"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(absent.parent), *sys.path]))
    notebook = execute("07_transformer_lens", tmp_path)
    (line,) = [line for line in printed(notebook).splitlines() if "TransformerLens" in line]
    assert "pip install 'normlab[lens]'" in line and "skipped" in line
    (figure,) = figures_in(notebook)
    assert [trace["name"] for trace in figure["data"]] == ["normlab.record"]


def test_gain_or_bound_compares_pairs_that_differ_in_the_tanh_alone(tmp_path: Path, runs: Path):
    notebook = execute("08_gain_or_bound", tmp_path, RUNS=str(runs), GRID=GRID)
    growth, curves, loss, size, kurtosis = figures_in(notebook)
    assert schemes_of(growth) == {"pre_rmsnorm", "bhyt", "bhyt_linear", "rmsnorm_gain"}
    assert schemes_of(curves) == {"bhyt", "bhyt_linear"}
    panels = {(t["meta"]["scheme"], t["meta"]["panel"]): t for t in curves["data"] if t["mode"] == "lines"}
    gains = [0.2, 1.0, 2.0, 5.0]
    assert all(list(trace["x"]) == pytest.approx(gains) for trace in panels.values()) and len(panels) == 8
    # The same map for small inputs, so the same start; the further inputs reach, the more of them are flat.
    flat = panels["bhyt", "share of |tanh z| > 0.95"]["y"]
    assert flat[0] < 1e-3 < flat[1] < flat[2] < flat[3]
    assert [f["layout"]["xaxis"]["type"] for f in (loss, size, kurtosis)] == ["linear", "log", "log"]
    assert [f["layout"]["shapes"][0]["x0"] for f in (loss, size, kurtosis)] == [0, 1, 1]
    for figure in (loss, size, kurtosis):
        labels = list(figure["layout"]["yaxis"]["ticktext"])
        assert labels[:4] == ["g = 0.2, γ₀ = 1", "g = 1, γ₀ = 0.2", "g = 2, γ₀ = 0.1", "g = 5, γ₀ = 0.04"]
        assert {"g = 1, γ₀ = 1", "g = 0.2, γ₀ = 1, 2 outliers"} <= set(labels)
        assert len(labels) == len(figure["data"])
    assert "the tanh makes a difference under" in printed(notebook)
