"""What a scheme does in a training run: schedules, weights after a step, rates; and a resumed run goes on with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_helpers import tiny

from normlab import NormlabForCausalLM, runs
from normlab.training.distributed import accelerator_for
from normlab.training.loop import Training
from normlab.training.run import RunStopped, train

pytest_plugins = ["training_fixtures"]


def trained(text: Path, out: Path, cache: Path, **fields) -> NormlabForCausalLM:
    run = train(tiny(text, keep_weights=True, **fields), out, cache_dir=cache, progress=False)
    assert run.manifest["status"] in ("finished", "not_learned")
    return NormlabForCausalLM.from_pretrained(run.path)


def test_schedules_follow_the_steps_of_a_run_and_are_saved(text, corpus, tmp_path):
    model = trained(text, tmp_path, tmp_path / "cache", scheme="prores", model={"residual_warmup": 10})
    assert [layer.mlp_residual.alpha.item() for layer in model.model.layers] == pytest.approx([0.8, 0.4])


def test_matrices_have_unit_length_after_a_run(text, corpus, tmp_path):
    model = trained(text, tmp_path, tmp_path / "cache", scheme="ngpt")
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
def test_a_resumed_run_repeats_the_whole_one_bit_for_bit(scheme, text, corpus, tmp_path):
    config = tiny(text, scheme=scheme, keep_weights=True)
    whole = train(config, tmp_path / "whole", cache_dir=tmp_path / "cache", progress=False)

    def stop_at_five(step: int, rows: list) -> bool:
        return step < 5

    with pytest.raises(RunStopped):
        train(config, tmp_path / "two", cache_dir=tmp_path / "cache", progress=False, watch=stop_at_five)
    resumed = train(config, tmp_path / "two", cache_dir=tmp_path / "cache", progress=False)
    assert resumed.manifest["measured"]["resumed_from_step"] == 5
    first, second = (runs.read_run(run.path) for run in (whole, resumed))
    left, right = (NormlabForCausalLM.from_pretrained(run.path).state_dict() for run in (first, second))
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
