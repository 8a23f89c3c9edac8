"""Schemes in a training run: schedules, weights after a step, and rates, in a resumed run too."""

from dataclasses import replace

import accelerate
import pytest
import torch
from model_helpers import assert_state
from training_helpers import tiny, write_run

from normlab import NormlabError, NormlabForCausalLM, sweep
from normlab.norms import PowerNorm
from normlab.runs import read_run
from normlab.schemes import SCHEMES
from normlab.training.config import TrainConfig
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


class Mine(PowerNorm):
    """A norm of one's own."""


@pytest.mark.parametrize(("accumulate", "ranks"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("scheme", ["powernorm", "unified_norm", "mine"])
def test_norms_with_statistics_of_a_whole_batch_are_refused_where_a_step_is_several_passes(
    accumulate, ranks, scheme, text, corpus, monkeypatch
):
    mine = replace(SCHEMES["pre_rmsnorm"], name="mine", norm=lambda site: Mine(site.width))
    monkeypatch.setitem(SCHEMES, "mine", mine)
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", ranks)
    config = tiny(text, scheme=scheme, batch_size=4, accumulate=accumulate)
    with pytest.raises(NormlabError, match=f"^{scheme} has norms with running statistics, .*: train it on one rank, "):
        Training(config, corpus, accelerator_for(config))


def test_a_finished_run_of_an_earlier_version_that_trained_such_norms_in_parts_is_no_error(text, go, cache, tmp_path):
    path = write_run(tiny(text, scheme="powernorm", accumulate=2, batch_size=4), tmp_path)
    config = tiny(text, scheme="powernorm", batch_size=4)
    result = sweep([config], tmp_path, cache_dir=cache, workers=1, threads=1, progress=False)
    assert [each.name for each in result.runs] == [config.run_id] and not result.failures
    assert TrainConfig.from_dict(read_run(path).manifest["config"]).accumulate == 2


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["ngpt", "prores", "tapernorm", "complete_p"])
def test_a_resumed_run_repeats_the_whole_one_bit_for_bit(scheme, text, go, stop, tmp_path):
    config = tiny(text, scheme=scheme)
    whole = go(config, tmp_path / "whole")
    stop(config, tmp_path / "two", 5)
    resumed = go(config, tmp_path / "two")
    assert resumed.manifest["measured"]["resumed_from_step"] == 5
    assert_state(weights_of(resumed), weights_of(whole).state_dict())
