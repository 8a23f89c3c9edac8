"""Experiments on compiled models are those of the model: no hook is ignored, however and when it was compiled."""

import pytest
import torch
from probe_zoo import tiny_llama
from torch import nn

import normlab
from normlab import probes
from normlab.errors import NormlabError
from normlab.probes.passes import hooked, instead

BATCH = {"input_ids": torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))}
QUIET = {"progress": False}


def compiled(x):
    return torch.compile(x, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    return model


def its_forward(model):
    model.forward = compiled(model.forward)
    return model


def its_blocks(model):
    for block in model.model.layers:
        block.compile(backend="eager")
    return model


def its_blocks_wrapped(model):
    model.model.layers = nn.ModuleList(map(compiled, model.model.layers))
    return model


STYLES = [in_place, compiled, its_forward, its_blocks, its_blocks_wrapped]
EXPERIMENTS = {
    "skip": lambda m: normlab.skip_sensitivity(m, [BATCH], **QUIET)["skip_delta_loss"],
    "parts": lambda m: normlab.skip_sensitivity(m, [BATCH], parts=["attention", "mlp"], **QUIET)["skip_delta_loss"],
    "spans": lambda m: probes.cheapest_spans(m, [BATCH], longest=2, **QUIET)["skip_delta_loss"],
    "future effect": lambda m: normlab.skip_future_effect(m, [BATCH], **QUIET)["value"],
    "angles": lambda m: normlab.angular_distance(m, [BATCH], **QUIET).to_numpy().ravel(),
    "jacobian": lambda m: normlab.jacobian_identity(m, [BATCH], **QUIET)["value"],
    "lens": lambda m: normlab.logit_lens_kl(m, [BATCH], **QUIET)["value"],
    "massive": lambda m: normlab.massive_activations(m, BATCH, least=0, ratio=3).table["value"],
    "sinks": lambda m: normlab.attention_sinks(m, BATCH, threshold=0.02, queries=1).table["weight"],
    "diff": lambda m: normlab.diff(tiny_llama(), m, BATCH).table["parts"],
    "diff from": lambda m: normlab.diff(m, tiny_llama(), BATCH).table["parts"],
}


@pytest.fixture(scope="module")
def right():
    return {name: list(experiment(tiny_llama())) for name, experiment in EXPERIMENTS.items()}


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_every_experiment_sees_through_compiled_code(style, used, right):
    model = style(tiny_llama())
    if used:
        with torch.no_grad():
            model(**BATCH, use_cache=False)
    found = {name: list(experiment(model)) for name, experiment in EXPERIMENTS.items()}
    assert {name: values == pytest.approx(right[name], abs=1e-6) for name, values in found.items()} == dict.fromkeys(
        found, True
    )


def test_a_hook_that_does_not_run_is_an_error():
    model = tiny_llama()
    first, second = model.model.layers[:2]
    for context in (hooked((second, lambda *_: None)), instead((second, lambda *_: None))):
        with pytest.raises(NormlabError, match="a LlamaDecoderLayer did not run in the model's pass"), context:
            first(torch.ones(1, 4, 32), position_embeddings=(torch.ones(1, 4, 8), torch.ones(1, 4, 8)))
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_blocks_whose_forward_is_called_by_itself_are_one_line():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
            self.embed, self.layers, self.head = nn.Embedding(64, 8), nn.ModuleList(blocks), nn.Linear(8, 64)

        def forward(self, input_ids):
            x = self.embed(input_ids)
            for block in self.layers:
                x = x + block.forward(x)
            return self.head(x)

    for experiment in (normlab.skip_sensitivity, normlab.logit_lens_kl, normlab.angular_distance):
        with pytest.raises(NormlabError, match="did not run in the model's pass, or was not called as a module"):
            experiment(Direct(), [BATCH], **QUIET)
