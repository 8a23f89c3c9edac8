"""The lowest version of every dependency is enough for record, the callback, runs and a figure.

What needs newer ones says so in one line. `.ci/try-lowest` installs the lowest versions and runs this file. It passes
with newer ones too.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainingArguments

import normlab
from normlab import NormlabError
from normlab.analysis.selection import summarize
from normlab.analysis.theory import predict_runs
from normlab.cli import main

pytestmark = pytest.mark.slow
TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
RUNS = Path(__file__).resolve().parents[1] / "data" / "grid"
LAYERS = 3
SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32},
    "gpt_neox": SHAPE,
    "llama": SHAPE,
    "mistral": SHAPE,
    "qwen2": SHAPE,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    """A tiny model of each family with random weights, in evaluation mode."""
    config = transformers.AutoConfig.for_model(request.param, **MODELS[request.param])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 64, (4, 16))


def layer_values(table: Any, site: str, metric: str) -> dict[int, float]:
    rows = table[(table["site"] == site) & (table["metric"] == metric) & (table["mask"] == "all")]
    return dict(zip(rows["layer"], rows["value"], strict=True))


def test_record_measures_what_the_model_hands_on_and_its_gradients(model, tokens):
    before = model(input_ids=tokens, labels=tokens, output_hidden_states=True)
    with normlab.record(model, metrics=["token_l2_mean", "grad_l2_mean"]) as recorded:
        loss = model(input_ids=tokens, labels=tokens).loss
        recorded.backward(loss)
    table = recorded.stats().to_pandas()
    assert torch.equal(loss, before.loss)
    inner = before.hidden_states[:LAYERS]  # the last one that transformers returns is behind the final norm
    expected = {layer: h.norm(dim=-1).mean().item() for layer, h in enumerate(inner)}
    found = layer_values(table, "block_out", "token_l2_mean")
    assert sorted(found) == list(range(LAYERS + 1))
    assert {layer: found[layer] for layer in expected} == pytest.approx(expected, rel=1e-5)
    gradients = layer_values(table, "block_in_grad", "grad_l2_mean")
    assert sorted(gradients) == list(range(1, LAYERS + 1)) and all(value > 0 for value in gradients.values())


def test_the_callback_measures_training_and_does_not_change_it(model, tokens, tmp_path):
    start = {name: value.clone() for name, value in model.state_dict().items()}
    weights = []
    callback = normlab.LayerStatsCallback(every=2)
    for callbacks in ([], [callback]):
        model.load_state_dict(start)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks).train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    table = callback.to_pandas()
    assert torch.equal(*weights)
    assert set(table["step"]) == {0, 2}
    for step, site, metric in ((0, "block_out", "token_l2_mean"), (2, "block_in_grad", "grad_l2_mean")):
        values = layer_values(table[table["step"] == step], site, metric)
        assert len(values) >= LAYERS and all(value > 0 for value in values.values())


def test_the_shipped_runs_are_one_table_that_is_drawn_and_compared():
    plotly = pytest.importorskip("plotly.graph_objects")
    runs = normlab.load_runs(RUNS, variants=False)
    assert set(runs["scheme"]) >= {"pre_rmsnorm", "lns", "bhyt"}
    assert str(runs["layer"].dtype) == "Int64" and runs["value"].dtype == float
    figure = normlab.figures.layer_growth(runs)
    assert isinstance(figure, plotly.Figure) and len(figure.data) > 20 and figure.to_json()
    compared = normlab.compare(runs, "pre_rmsnorm", "lns")
    assert len(compared) > 0


def test_a_model_of_our_own_runs_or_says_which_transformers_it_needs(tokens):
    def loss() -> float:
        config = normlab.NormlabConfig(scheme="bhyt", **SHAPE)
        return normlab.NormlabForCausalLM(config)(input_ids=tokens, labels=tokens).loss.item()

    if TRANSFORMERS < (5, 4):
        with pytest.raises(NormlabError, match=r"^a model of normlab's own needs transformers>=5\.4: pip install"):
            loss()
        configs = normlab.read_configs(RUNS)
        assert predict_runs(summarize(normlab.load_runs(RUNS)), 8, configs) is None
    else:
        assert 0 < loss() < 10


def test_the_command_trains_or_says_what_it_needs(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n\n".join(f"{i} is the number after {i - 1}." for i in range(2000)))
    small = "--depth 2 --width 32 --steps 2 --batch-size 2 --block-length 32 --vocab-size 300 --eval-blocks 2"
    places = ["--corpus", tmp_path / "text.txt", "--out", tmp_path / "runs", "--cache-dir", tmp_path / "cache"]
    status = main(["train", *small.split(), *map(str, places), "--quiet"])
    if all(importlib.util.find_spec(name) for name in ("accelerate", "datasets")) and TRANSFORMERS >= (5, 4):
        assert status == 0
        assert set(normlab.load_runs(tmp_path / "runs")["status"]) <= {"finished", "not_learned"}
    else:
        assert status == 2
        [line] = capsys.readouterr().err.splitlines()
        assert " needs " in line and "pip install" in line
