"""Notebooks run from a fresh kernel, show the figures they claim, and are committed as plain images."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from figures_helpers import MEAN_OF_SEEDS, SCHEMES, activation
from notebook_helpers import NOTEBOOKS, PLOTLY, execute, figures_in, printed, widgets_in, write_runs

from normlab.export.notebooks import ImageNotebook

GRID = str(NOTEBOOKS.parent / "data" / "gain_or_bound")
BENCH = NOTEBOOKS.parent / "data" / "bench"
ALL = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("data") / "runs", statuses={("lns", 4): "not_learned"})


@pytest.fixture(scope="module")
def curse(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> nbformat.NotebookNode:
    return execute("01_curse_of_depth", tmp_path_factory.mktemp("01"), RUNS=str(runs))


@pytest.fixture(scope="module")
def stability(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> nbformat.NotebookNode:
    folder = tmp_path_factory.mktemp("02")
    return execute("02_bhyt_stability", folder, RUNS=str(runs), GRID=GRID, BENCH=str(BENCH))


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


def test_the_curse_of_depth_shows_growth_loss_and_gradients_with_both_controls(curse: nbformat.NotebookNode):
    figures = figures_in(curse)
    titles = [figure["layout"]["title"]["text"].split("<")[0] for figure in figures]
    assert titles == [
        "L2 norm of a token by layer",
        "Variance over features by layer",
        "L2 norm of a token by layer, step 20",
        "L2 norm of a token after the last layer: before and after training",
        "Loss by training step",
        "Gradient norm of the batch by layer",
        "Held-out loss against depth",
    ]
    for figure in figures:
        assert {"pre_rmsnorm", "lns", "bhyt", "bhyt_linear", "rmsnorm_gain"} == schemes_of(figure)
    said = printed(curse)
    assert "depth 4, learning rate 0.001" in said
    assert "depth 4, at step 0" in said and "0.280 times Pre-LN's" in said and "0.169 times Pre-LN's" in said
    table = next(c for c in curse.cells if "pivot_table" in c.source).outputs[-1]["data"]["text/html"]
    assert "7.0 (not learned)" in table and ">4.5<" in table
    assert "the runs behind them" in said and ("no image was made" in said or "7 figures as images" in said)


def test_the_curse_of_depth_opens_a_widget_on_growth_and_says_what_became_of_its_claims(curse: nbformat.NotebookNode):
    (widget,) = widgets_in(curse)
    assert "NormExplorer(" in widget
    growth = lines_of(figures_in(curse)[2])
    for scheme in SCHEMES:
        first = activation(scheme, 1, 20)
        assert growth[scheme] == pytest.approx([activation(scheme, layer, 20) / first for layer in range(5)])
    by_depth = said_after(curse, "1. Last layer over first, depth ")
    assert [line.split(":")[0] for line in by_depth] == ["2", "4"]
    assert "Pre-LN 3.25" in by_depth[1] and "Pre-LN grows, as claimed" in by_depth[1]
    controls = said_after(curse, "2. Control ")
    assert len(controls) == 2 and all(line.endswith(": told apart from BHyT") for line in controls)
    # Neither is better at depth 4 than at depth 2 by more than Pre-LN is; LNS did not learn there at all.
    (lns, bhyt) = said_after(curse, "3. From depth 2 to 4 ")
    assert lns.startswith("LNS gains -") and bhyt.startswith("BHyT gains +0.000")
    assert all(line.endswith("NOT supported here") for line in (lns, bhyt))


@pytest.mark.parametrize(
    "name", ["00_start_here", "01_curse_of_depth", pytest.param("02_bhyt_stability", marks=pytest.mark.slow)]
)
def test_a_notebook_runs_on_one_run_and_compares_it_with_nothing(tmp_path: Path, name: str):
    single = write_runs(tmp_path / "data" / "runs", schemes=["lns"], depths=[3], seeds=[0])
    grid = {"GRID": GRID, "BENCH": str(BENCH)} if name.startswith("02") else {}
    said = printed(execute(name, tmp_path, RUNS=str(single), **grid))
    assert {"00": "fewer than two", "01": "no run of both", "02": "no run beside BHyT's"}[name[:2]] in said
    assert "times Pre-LN's (" not in said


def test_start_here_opens_the_explorer_and_its_static_twin(tmp_path: Path, runs: Path):
    notebook = execute("00_start_here", tmp_path, RUNS=str(runs))
    assert len(widgets_in(notebook)) == 1
    (figure,) = figures_in(notebook)
    lines = lines_of(figure)
    assert set(lines) == set(SCHEMES)
    assert lines["bhyt"] == pytest.approx([MEAN_OF_SEEDS * activation("bhyt", layer, 20) for layer in range(5)])
    assert "published" not in {trace["name"] for trace in figure["data"]}  # nor has the widget them when it opens
    before, after = said_after(notebook, "step ")
    assert before.startswith("0: Pre-LN") and before.endswith("3.6 times, not tenfold")
    assert after.startswith("20: Pre-LN") and after.endswith("5.9 times, not tenfold")


def test_start_here_leads_to_every_other_notebook():
    notebook = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4)
    rows = [line for cell in notebook.cells for line in cell.source.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [name for name in ALL if name != "00_start_here"]


def test_the_explorer_notebook_compares_with_the_reference_by_pairs(tmp_path: Path, runs: Path):
    notebook = execute("03_norm_explorer", tmp_path, RUNS=str(runs))
    opened, figure = figures_in(notebook)
    (line,) = [trace for trace in opened["data"] if trace["name"] == "lns"]
    assert line["y"][-1] == pytest.approx(MEAN_OF_SEEDS * activation("lns", 4, 20))
    (line,) = [trace for trace in figure["data"] if trace["name"] == "lns"]
    assert line["y"][-1] == pytest.approx(activation("lns", 4, 20) / activation("pre_rmsnorm", 4, 20))
    assert "paired by seed" in figure["layout"]["yaxis"]["title"]["text"]


def test_bhyt_stability_keeps_the_controls_and_measures_the_bound(stability: nbformat.NotebookNode):
    *drawn, saturation, intervene, stage, carried, bends = figures_in(stability)
    assert len(drawn) == 4
    for figure in drawn:
        assert schemes_of(figure) == {"pre_rmsnorm", "bhyt", "bhyt_linear", "rmsnorm_gain"}
    bound, measured, planted = (trace["y"] for trace in saturation["data"])
    assert all(share <= limit for share, limit in zip(measured, bound, strict=True)) and measured[0] > 0.2
    # Only the planted outlier is still beyond lambda at kappa = 10, and nothing is beyond sqrt(128) = 11.3.
    assert measured[-2] == 0.0 < planted[-2] <= bound[-2] and planted[-1] == 0.0
    ratios = [line.split() for line in printed(stability).split("layer  value")[1].strip().splitlines()[:8]]
    assert all(line[0] == str(layer) and 0.9 < float(line[1]) < 1.2 for layer, line in enumerate(ratios, 1))
    assert {"as it is size", "intervened size"} <= {trace["name"] for trace in intervene["data"]}
    trained = {trace["name"]: trace for trace in stage["data"]}
    for scheme in ("bhyt", "rmsnorm_gain"):  # both began, and all layers of a probe are there
        assert list(trained[f"{scheme} first"]["x"]) == list(range(9)) and trained[f"{scheme} train"]["y"]
    assert all(list(trace["x"]) == list(range(1, 9)) and min(trace["y"]) > 0 for trace in carried["data"])
    assert len(carried["data"]) == 2 and carried["data"][0]["y"] == pytest.approx([1.0] * 8, abs=0.3)
    pairs = list(zip(bends["data"][1]["x"], bends["data"][1]["y"], strict=True))
    assert {(0.2, 1.0), (1.0, 1.0), (5.0, 0.04)} <= set(pairs) and len(pairs) == 5
    said = printed(stability)
    generated = said.split("Generated tokens per second")[1].splitlines()[2:6]
    assert [line.split("  ")[1].strip() for line in generated] == [
        "Pre-LN",
        "BHyT",
        "BHyT without tanh",
        "Pre-LN, gain λ/κ",
    ]
    steps = pd.read_csv(BENCH / "training_cpu.csv").set_index("what").loc["bhyt step"]
    (whole,) = [line for line in said_after(stability, "BHyT ") if "times the time of Pre-LN's step" in line]
    assert f"{steps['ratio']:.3f} times" in whole and f"[{steps['low']:.3f}, {steps['high']:.3f}]" in whole
    assert whole.endswith("slower here") == (steps["low"] > 1) and "tokens_per_s" not in str(stability)


def test_bhyt_stability_says_which_of_its_criteria_were_met(stability: nbformat.NotebookNode):
    *_, stage, carried, _ = figures_in(stability)
    (bound,) = said_after(stability, "1. Largest share")
    assert "NOT met" in bound
    ratios = carried["data"][1]["y"]
    far = [ratio for ratio in ratios if max(ratio, 1 / ratio) > 2]
    (drift,) = said_after(stability, "2. Carried ratio")
    assert f"{len(far)} of 8 layers" in drift and ("NOT met" in drift) != bool(far)
    assert f": {max(ratios, key=lambda ratio: abs(math.log(ratio))):.2f} at layer" in drift
    controls = said_after(stability, "3. BHyT beside ")
    assert len(controls) == 2 and all(line.endswith(": NOT met") for line in controls)
    last = {trace["name"]: trace["y"][-1] for trace in stage["data"] if trace["name"].endswith(" last")}
    (theatre,) = said_after(stability, "4. Theatre")
    assert ("NOT met" in theatre) == (last["bhyt last"] < last["rmsnorm_gain last"])
    held_out = {trace["name"]: trace["y"][-1] for trace in stage["data"] if trace["name"].endswith(" held out")}
    for scheme, title in (("bhyt", "BHyT"), ("rmsnorm_gain", "Pre-LN, gain λ/κ")):
        (line,) = said_after(stability, f"{title}: held-out loss ")
        entropy, trigram = (number_after(line, level) for level in ("unigram entropy", "trigram loss"))
        assert line.startswith(f"{held_out[f'{scheme} held out']:.3f}")
        loss = held_out[f"{scheme} held out"]
        assert line.endswith("it has learned") == (loss < trigram) and ("learned nothing" in line) == (loss >= entropy)


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


def test_layer_skip_trains_models_that_learn_and_skips_every_block(tmp_path: Path):
    notebook = execute("04_layer_skip", tmp_path)
    costs, skip_map, contribution = figures_in(notebook)
    assert [trace["name"] for trace in costs["data"]] == ["pre_rmsnorm", "lns"]
    assert all(list(trace["x"]) == list(range(1, 9)) for trace in costs["data"])
    losses = said_after(notebook, "Pre-LN held-out loss ") + said_after(notebook, "LNS    held-out loss ")
    unigram = number_after(printed(notebook), "unigram entropy")
    for line in losses:
        loss = number_after(line, "")
        assert line.endswith(": finished") == (loss < number_after(line, "trigram loss")) and loss < unigram
    assert len(losses) == 2
    heat = next(trace for trace in skip_map["data"] if trace["type"] == "heatmap")
    assert list(heat["x"]) == list(range(1, 8)) and list(heat["y"]) == list(range(2, 9))
    assert {trace["name"] for trace in contribution["data"]} == {"attn", "mlp", "block"}
    # What it says of its claims is what its figure shows.
    cost = {trace["name"]: trace for trace in costs["data"]}
    low, high = (
        {
            name: [y + sign * bar for y, bar in zip(trace["y"], trace["error_y"][side], strict=True)]
            for name, trace in cost.items()
        }
        for sign, side in ((-1, "arrayminus"), (1, "array"))
    )
    (cheap,), (half,), (every,) = (said_after(notebook, f"{number}. ") for number in (1, 2, 3))
    assert ("not shown here" in cheap) == (max(high["pre_rmsnorm"][4:]) >= 0.1 * max(cost["pre_rmsnorm"]["y"]))
    ends = [[float(end) for end in part.split("]")[0].split(",")] for part in half.split("[")[1:]]
    assert ("not shown here" in half) == (ends[0][0] <= ends[1][1])
    idle = [block for block, value in enumerate(low["lns"], 1) if value <= 0]
    assert f"{len(idle)} of 8 blocks" in every and ("not shown here" in every) == bool(idle)


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
