"""Schemes in a training run: schedules, weights after a step, and rates, in a resumed run too."""

import pytest
import torch
from model_helpers import assert_state
from training_helpers import tiny

from normlab import NormlabForCausalLM
from normlab.training.distributed import accelerator_for
from normlab.training.loop import Training


def weights_of(run) -> NormlabForCausalLM:
    assert run.manifest["status"] in ("finished", "not_learned")
    return NormlabForCausalLM.from_pretrained(run.path)


def test_schedules_follow_the_steps_of_a_run_and_are_saved(text, go, tmp_path):
    model = weights_of(go(tiny(text, scheme="prores", model={"residual_warmup": 10}), tmp_path))
    assert [layer.mlp_residual.alpha.item() for layer in model.model.layers] == pytest.approx([0.8, 0.4])


def test_matrices_have_unit_length_after_a_run(text, go, tmp_path):
    model = weights_of(go(tiny(text, scheme="ngpt"), tmp_path))
    lengths = torch.linalg.vector_norm(model.model.layers[1].self_attn.q_proj.weight, dim=1)
    assert (lengths - 1).abs().max() < 1e-5


def test_the_optimizer_has_the_schemes_rates(text, corpus):
    config = tiny(text, scheme="complete_p", lr=0.01)
    training = Training(config, corpus, accelerator_for(config))
    block = training.model.model.layers[0]
    found = {p: group["initial_lr"] for group in training.optimizer.param_groups for p in group["params"]}
    assert found[block.mlp.up_proj.weight] == pytest.approx(0.01 * 256 / 32)
    assert found[block.input_layernorm.weight] == pytest.approx(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["ngpt", "prores", "tapernorm", "complete_p"])
def test_a_resumed_run_repeats_the_whole_one_bit_for_bit(scheme, text, go, stop, tmp_path):
    config = tiny(text, scheme=scheme)
    whole = go(config, tmp_path / "whole")
    stop(config, tmp_path / "two", 5)
    resumed = go(config, tmp_path / "two")
    assert resumed.manifest["measured"]["resumed_from_step"] == 5
    assert_state(weights_of(resumed), weights_of(whole).state_dict())
