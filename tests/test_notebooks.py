"""Notebooks run from a fresh kernel, show the figures they claim, and are committed as plain images."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
from figures_helpers import SCHEMES, activation
from notebook_helpers import NOTEBOOKS, PLOTLY, execute, figures_in, printed, write_runs

from normlab.export import keep_images_only

WIDGET = "application/vnd.jupyter.widget-view+json"
GRID = str(NOTEBOOKS.parent / "data" / "gain_or_bound")
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
    notebook = execute("02_bhyt_stability", tmp_path, RUNS=str(runs), GRID=GRID)
    *drawn, saturation, intervene, stage, carried, bends = figures_in(notebook)
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
    trained = {trace["name"]: trace for trace in stage["data"]}
    for scheme in ("bhyt", "rmsnorm_gain"):  # both began, and all layers of a probe are there
        assert list(trained[f"{scheme} first"]["x"]) == list(range(9)) and trained[f"{scheme} train"]["y"]
    assert all(list(trace["x"]) == list(range(1, 9)) and min(trace["y"]) > 0 for trace in carried["data"])
    assert len(carried["data"]) == 2 and carried["data"][0]["y"] == pytest.approx([1.0] * 8, abs=0.3)
    pairs = list(zip(bends["data"][1]["x"], bends["data"][1]["y"], strict=True))
    assert {(0.2, 1.0), (1.0, 1.0), (5.0, 0.04)} <= set(pairs) and len(pairs) == 5
    assert printed(notebook).split("Generated tokens per second")[1].count("%") == 4


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


def test_transformer_lens_adds_up_and_only_the_slope_predicts_a_change(tmp_path: Path):
    pytest.importorskip("transformer_lens")
    notebook = execute("07_transformer_lens", tmp_path)
    said = printed(notebook)
    assert "logits are bit for bit the model's: True" in said and ": finished" in said
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
