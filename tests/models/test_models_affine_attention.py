"""Affine-scaled attention: where it is Llama's, what its running mean takes in, masks, caches, saving."""

import math

import pytest
import torch
from model_helpers import assert_bits, assert_near, fresh_model, gradients, stepwise, tiny_model, tokens

from normlab import NormlabForCausalLM


def test_a_gate_that_is_open_with_a_mean_of_one_is_llamas_attention():
    plain, affine, ids = tiny_model("pre_rmsnorm"), fresh_model("pre_rmsnorm", affine_attention=True), tokens()
    missing = affine.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert {name.split("affine_")[1] for name in missing} == {"gate.weight", "mean"}
    with torch.no_grad():
        for layer in affine.model.layers:
            layer.self_attn.affine_mean.fill_(1.0)
            layer.self_attn.affine_gate = torch.nn.Linear(32, 4)
            torch.nn.init.zeros_(layer.self_attn.affine_gate.weight)
            torch.nn.init.constant_(layer.self_attn.affine_gate.bias, 7.0)  # beyond the end of the slope
        assert_near(affine(ids).logits, plain(ids).logits, 1e-6)


@pytest.mark.parametrize("scheme", ["pre_rmsnorm", "sub_ln"])
def test_a_gate_changes_no_other_weight_and_has_draws_of_its_own_in_each_block(scheme):
    plain, affine = (fresh_model(scheme, affine_attention=on) for on in (False, True))
    for name, tensor in plain.state_dict().items():
        assert_bits(affine.state_dict()[name], tensor, name)
    gates = [layer.self_attn.affine_gate.weight for layer in affine.model.layers]
    std = 0.02 if scheme == "pre_rmsnorm" else (2 / (32 + 4) * math.log(2 * 3)) ** 0.5
    assert len({gate[0, 0].item() for gate in gates}) == len(gates)
    assert torch.cat(gates).std().item() == pytest.approx(std, rel=0.15)
    again = fresh_model(scheme, affine_attention=True, seed=1)
    assert not torch.equal(again.model.layers[0].self_attn.affine_gate.weight, gates[0])


def test_the_running_mean_takes_in_a_step_once_however_often_it_is_computed():
    ids, once = tokens(2, 6), fresh_model("pre_rmsnorm", affine_attention=True).train()
    twice = fresh_model("pre_rmsnorm", affine_attention=True).train()
    for model, times in ((once, 1), (twice, 2)):
        model.set_schedules(0, 10)
        for _ in range(times):
            model(ids)
        model.eval()(ids)
        model.after_step(1, 10)
    for layer, other in zip(once.model.layers, twice.model.layers, strict=True):
        mean = layer.self_attn.affine_mean
        assert_bits(mean, other.self_attn.affine_mean)
        assert_near(mean, torch.full((4,), 0.05), 0.05)  # a tenth of about 1/2
    before = once.model.layers[0].self_attn.affine_mean.clone()
    once.after_step(2, 10)
    assert_bits(once.model.layers[0].self_attn.affine_mean, before)  # nothing was seen since


def test_padded_rows_and_cached_tokens_have_the_logits_of_the_row_by_itself(tmp_path):
    model, ids = tiny_model("pre_rmsnorm", affine_attention=True), tokens(1, 7)
    padded, mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1), torch.ones(1, 10, dtype=torch.long)
    mask[:, :3] = 0
    with torch.no_grad():
        whole = model(ids).logits
        assert_near(model(padded, attention_mask=mask).logits[:, 3:], whole, 1e-5)
        assert_near(stepwise(model, ids, 4), whole, 2e-5)
        model.save_pretrained(tmp_path)
        assert_bits(NormlabForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, whole)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert all(g.isfinite().all() for g in gradients(model, model(ids, labels=ids).loss).values())
