"""The notebooks on one's own model and on TransformerLens: what they show is what they compute."""

import argparse
import inspect
import os
import sys

import notebook_helpers
import pytest
from notebook_helpers import (
    execute,
    figures_in,
    once_and_twice,
    printed,
    tables_in,
    widgets_in,
)

import normlab
from normlab.notebook.models import own_model
from normlab.notebook.pages import Kernel
from normlab.release import shipped_models


@once_and_twice
def test_your_own_model_measures_three_kinds_of_models(tmp_path, executed):
    notebook = executed("06_your_own_model", tmp_path)
    size, contribution, by_hand, massive, bits = figures_in(notebook)
    found, table, own = tables_in(notebook)
    rows = {row["model"]: list(row.values())[1:] for part in (found, own) for row in part.to_dict("records")}
    depth = int(rows["LlamaForCausalLM"][0])
    lines = {trace["name"]: trace for trace in size["data"]}
    assert list(lines["block_out"]["x"]) == list(range(depth + 1)) and min(lines["block_out"]["y"]) > 0
    assert {"attn", "mlp", "block"} == {trace["name"] for trace in contribution["data"]}
    assert {len(trace["x"]) for trace in by_hand["data"] if trace["name"] == "block_out"} == {7}
    # Blocks, norms in each, norms after them, what is missing, and the same bits while they are measured.
    assert rows["Qwen2ForCausalLM"] == ["10", "2", "1", "nothing", "True"]
    assert rows["TransformerEncoder"] == ["5", "2", "1", "nothing", "True"]
    assert rows["Sequential"] == ["6", "2", "0", "norm after the blocks", "True"]
    assert rows["LlamaForCausalLM"][1:] == ["2", "1", "nothing", "True"]
    # The table is of the same stream as the figure.
    stream = table[table["site"] == "block_out"]["value"].astype(float).tolist()
    assert stream == pytest.approx(list(lines["block_out"]["y"]), rel=1e-3)
    assert len(widgets_in(notebook)) == 1
    # Outliers, of every model that comes with normlab; the sentence says what the figures show.
    models = shipped_models()
    assert len({trace["name"] for trace in massive["data"]}) == len(models)
    ratios = [trace["x"][0] for trace in massive["data"][: len(models)]]
    assert ("medians): in no model." in printed(notebook)) == (max(ratios) < 1000)
    costs = dict(zip(bits["data"][-1]["x"], bits["data"][-1]["y"], strict=True))
    most = max(costs, key=costs.get)
    assert f"{costs[most]:.2f} ({most}) nats per token" in printed(notebook)


def test_a_model_of_your_own_reads_text_by_its_own_tokenizer():
    name = str(normlab.find_model("pre_rmsnorm"))
    _, tokens, words = own_model(name, 64)
    text = words.decode(tokens.flatten())
    assert tokens.shape == (4, 64) and text in inspect.getsource(argparse)


@once_and_twice
def test_transformer_lens_adds_up_and_only_the_slope_predicts_a_change(tmp_path, executed):
    pytest.importorskip("transformer_lens")
    notebook = executed("07_transformer_lens", tmp_path)
    assert "logits are bit for bit the model's: True" in printed(notebook)
    judged, about, _, sizes, _, doubled = tables_in(notebook)
    loss, unigram, trigram = about.iloc[0, 1:4].astype(float)
    assert loss < unigram and (about["status"][0] == "finished") == (loss < trigram)
    (changes,) = figures_in(notebook)
    assert len(sizes) > 4 and (sizes["apart"].astype(float) < 1e-5).all()
    lines = {trace["name"]: trace for trace in changes["data"]}
    measured = lines["jacobian"]["x"]
    reach = max(map(abs, measured))
    assert lines["jacobian"]["y"] == pytest.approx(measured, abs=0.02 * reach)
    for other in ("frozen", "linear"):
        assert max(abs(y - x) for x, y in zip(measured, lines[other]["y"], strict=True)) > 0.5 * reach
    found = {row["method"]: list(row.values())[1:] for row in judged.to_dict("records")}
    sums = {method: float(row[0]) for method, row in found.items()}
    logit = float(found["frozen"][1])
    assert sums["frozen"] == pytest.approx(logit, abs=1e-4) and abs(sums["jacobian"]) < 1e-3
    assert abs(sums["linear"] - logit) > 0.1
    assert {method: (row[2], row[4]) for method, row in found.items()} == {
        "frozen": ("True", "False"),
        "jacobian": ("False", "True"),
        "linear": ("False", "False"),
    }
    assert len(widgets_in(notebook)) == 1
    losses = dict(zip(doubled.iloc[:, 0], doubled["loss"].astype(float), strict=True))
    assert losses["ln_final"] > losses["nothing"]


@pytest.mark.slow
def test_without_transformer_lens_the_notebook_ends_with_one_line_that_says_what_to_install(tmp_path, monkeypatch):
    absent = tmp_path / "absent" / "transformer_lens"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('not installed')")
    with Kernel(PYTHONPATH=os.pathsep.join([str(absent.parent), *sys.path])) as kernel:
        monkeypatch.setattr(notebook_helpers, "_kernel", lambda: kernel)
        notebook = execute("07_transformer_lens", tmp_path)
    (said,) = notebook.cells[-1].outputs
    assert said["traceback"] == ["the bridge needs TransformerLens: pip install 'normlab[lens]'"]
    assert not figures_in(notebook) and "lens" in notebook.cells[-1].source
