"""The notebooks on one's own model, on TransformerLens, and on gain or bound: what they show is what they compute."""

import argparse
import inspect
import os
import sys

import nbformat
import notebook_helpers
import pytest
from jupyter_client.manager import AsyncKernelManager
from notebook_helpers import (
    NOTEBOOKS,
    execute,
    figures_in,
    once_and_twice,
    printed,
    row_of,
    rows_in,
    schemes_of,
    tables_in,
    widgets_in,
    write_runs,
)
from transformers import AutoTokenizer

import normlab
from normlab.runs import find_runs, read_run

DATA = NOTEBOOKS.parent / "data"
GRID = str(DATA / "gain_or_bound")


@once_and_twice
def test_your_own_model_measures_three_kinds_of_models(tmp_path, executed):
    notebook = executed("06_your_own_model", tmp_path)
    size, contribution, by_hand, skipped = figures_in(notebook)
    depth = int(row_of(notebook, "LlamaForCausalLM")[1])
    lines = {trace["name"]: trace for trace in size["data"]}
    assert list(lines["block_out"]["x"]) == list(range(depth + 1)) and min(lines["block_out"]["y"]) > 0
    assert {"attn", "mlp", "block"} == {trace["name"] for trace in contribution["data"]}
    assert {len(trace["x"]) for trace in by_hand["data"] if trace["name"] == "block_out"} == {7}
    shown = {trace["name"]: trace["y"] for trace in skipped["data"]}
    assert shown["intervened size"][depth // 2] == pytest.approx(shown["intervened size"][depth // 2 - 1])
    assert shown["intervened size"][-1] != pytest.approx(shown["as it is size"][-1], rel=1e-4)
    # Blocks, norms in each, norms after them, what is missing, and the same bits while they are measured.
    assert row_of(notebook, "Qwen2ForCausalLM")[1:] == ["10", "2", "1", "nothing", "True"]
    assert row_of(notebook, "TransformerEncoder")[1:] == ["5", "2", "1", "nothing", "True"]
    assert row_of(notebook, "Small")[1:] == ["6", "2", "0", "norm after the blocks", "True"]
    assert row_of(notebook, "LlamaForCausalLM")[2:] == ["2", "1", "nothing", "True"]
    # The table is of the same stream as the figure.
    table = {int(row[2]): float(row[5]) for row in rows_in(notebook) if row[1:2] == ["block_out"]}
    assert [table[layer] for layer in range(depth + 1)] == pytest.approx(list(lines["block_out"]["y"]), abs=1e-3)
    assert len(widgets_in(notebook)) == 1


def test_a_model_of_your_own_reads_text_by_its_own_tokenizer():
    cells = nbformat.read(NOTEBOOKS / "06_your_own_model.ipynb", as_version=4).cells
    imports, chooses = (next(c.source for c in cells if c.id == name) for name in ("cell-02", "cell-03"))
    space = {"MODEL": str(normlab.find_model("pre_rmsnorm")), "FAST": True}
    exec(imports.replace("prepare(images=IMAGES);", "") + "\n" + chooses, space)
    text = AutoTokenizer.from_pretrained(space["MODEL"]).decode(space["tokens"].flatten())
    assert space["tokens"].shape == (4, 64) and text in inspect.getsource(argparse)


@once_and_twice
def test_transformer_lens_adds_up_and_only_the_slope_predicts_a_change(tmp_path, executed):
    pytest.importorskip("transformer_lens")
    notebook = executed("07_transformer_lens", tmp_path)
    assert "logits are bit for bit the model's: True" in printed(notebook)
    loss, unigram, trigram = map(float, row_of(notebook, "bhyt")[2:5])
    assert loss < unigram and (row_of(notebook, "bhyt")[5] == "finished") == (loss < trigram)
    changes, attribution, steep = figures_in(notebook)
    (sizes,) = [table for table in tables_in(notebook) if "TransformerLens cache" in table]
    assert len(sizes) > 4 and (sizes["apart"].astype(float) < 1e-5).all()
    lines = {trace["name"]: trace for trace in changes["data"]}
    measured = lines["jacobian"]["x"]
    reach = max(map(abs, measured))
    assert lines["jacobian"]["y"] == pytest.approx(measured, abs=0.02 * reach)
    for other in ("frozen", "linear"):
        assert max(abs(y - x) for x, y in zip(measured, lines[other]["y"], strict=True)) > 0.5 * reach
    found = {method: row_of(notebook, method)[1:] for method in ("frozen", "jacobian", "linear")}
    sums = {method: float(row[0]) for method, row in found.items()}
    logit = float(found["frozen"][1])
    assert sums["frozen"] == pytest.approx(logit, abs=1e-4) and abs(sums["jacobian"]) < 1e-3
    assert abs(sums["linear"] - logit) > 0.1
    assert {method: (row[2], row[4]) for method, row in found.items()} == {
        "frozen": ("True", "False"),
        "jacobian": ("False", "True"),
        "linear": ("False", "False"),
    }
    for figure in (attribution, steep):
        assert {"frozen", "jacobian"} == {trace["name"] for trace in figure["data"]}
    shares = dict(zip(attribution["data"][0]["x"], attribution["data"][0]["y"], strict=True))
    assert sum(shares.values()) == pytest.approx(logit, abs=1e-4) and "mlp 4" in shares
    as_it_is = float(row_of_index(notebook, "nothing")[0])
    assert float(row_of_index(notebook, "ln_final")[0]) > as_it_is


def row_of_index(notebook, name: str) -> list[str]:
    """The cells after the index `name`."""
    (row,) = [row[1:] for row in rows_in(notebook) if row[:1] == [name]]
    return row


@pytest.mark.slow
def test_without_transformer_lens_the_notebook_says_in_one_line_what_to_install(tmp_path, monkeypatch):
    absent = tmp_path / "absent" / "transformer_lens"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(absent.parent), *sys.path]))
    kernel = AsyncKernelManager(kernel_name="python3")  # one that starts with that path
    monkeypatch.setattr(notebook_helpers, "_kernel", lambda: kernel)
    notebook = execute("07_transformer_lens", tmp_path)
    (line,) = [line for line in printed(notebook).splitlines() if "TransformerLens" in line]
    assert "pip install 'normlab[lens]'" in line and "skipped" in line
    assert not figures_in(notebook) and any(list(table) == ["layer", "normlab.record"] for table in tables_in(notebook))


@once_and_twice
def test_gain_or_bound_compares_pairs_that_differ_in_the_tanh_alone(tmp_path, executed):
    runs = write_runs(tmp_path / "data" / "runs", statuses={("lns", 4): "not_learned"})
    notebook = executed("08_gain_or_bound", tmp_path, RUNS=str(runs), GRID=GRID)
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
    # What the table near the top says of each condition is what the figures draw.
    for column, figure in ((3, loss), (5, size)):
        for trace in figure["data"]:
            row = next(row for row in rows_in(notebook) if trace["name"] in row)
            assert row[column + 1].split(":")[0] == trace["meta"]["verdict"]
            assert float(row[column].split()[0]) == pytest.approx(trace["x"][0], abs=6e-4)


def test_gain_or_bound_holds_its_runs_against_the_trigram_of_their_own_text():
    source = (NOTEBOOKS / "08_gain_or_bound.ipynb").read_text(encoding="utf-8")
    grid, pilots = ([read_run(path).manifest for path in find_runs(folder)] for folder in (GRID, DATA / "pilot"))
    texts = {run["corpus"]["content_hash"] for run in grid}
    levels = {run["trigram_loss"] for run in pilots if {run["corpus"]["content_hash"]} == texts}
    assert levels and all(f"TRIGRAM = {level:.3f} " in source for level in levels)
