"""Schemes in training: schedules, weights after a step, rates by width and depth."""

import pytest
import torch
from model_helpers import assert_bits, assert_near, fresh_model, optimizer_of, tokens

from normlab import NormlabError


def test_a_taper_calibrates_while_its_gate_is_open_and_ends_as_a_fixed_gain():
    """c = E[|gamma x|^2 / rms] / E[|gamma x|^2], running means whose first value is taken as it is, once per step."""
    model = fresh_model("tapernorm").train()
    norm = model.model.layers[0].input_layernorm
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    model.set_schedules(0, 100)
    means = torch.zeros(2, dtype=torch.float64)
    for step, parts in enumerate(([tokens(seed=3)], [tokens(seed=4), tokens(3, 7, seed=5)]), start=1):
        for _ in range(2):  # what is run again, as a checkpointed pass is, counts no more
            for ids in parts:
                model(ids)
        x = model.model.embed_tokens(torch.cat([ids.flatten() for ids in parts])).double()
        size = (norm.weight.double() * x).square().sum(-1)
        own = torch.stack([(size / (x.square().mean(-1) + norm.eps).sqrt()).mean(), size.mean()]).detach()
        means = own if step == 1 else 0.99 * means + 0.01 * own
        before = norm.inverse_rms.clone()
        model.after_step(step, 100)
        assert before != norm.inverse_rms
        assert_near(norm.inverse_rms, means[0] / means[1], 1e-5)
    found, x = norm.inverse_rms.clone(), x.float()
    model.after_step(50, 100)
    assert norm.gate.item() == pytest.approx(0.5)
    model(ids)
    model.after_step(51, 100)
    assert_bits(norm.inverse_rms, found)
    model.after_step(75, 100)
    assert norm.gate.item() == 0.0
    assert_near(norm(3 * x), 3 * norm(x), 1e-6)  # no statistic is left


def test_a_tapers_fixed_branch_copies_the_gain_when_the_taper_starts_and_is_trained_from_there():
    model, ids = fresh_model("tapernorm").train(), tokens()
    norm = model.model.layers[1].post_attention_layernorm
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    model.set_schedules(25, 100)
    assert_bits(norm.fixed_weight, torch.ones(32))
    model.after_step(26, 100)
    copied = norm.weight.detach().clone()
    assert_bits(norm.fixed_weight, copied)
    model.after_step(75, 100)
    found = torch.autograd.grad(model(ids, labels=ids).loss, [norm.weight, norm.fixed_weight])
    assert not found[0].any() and found[1].abs().min() > 0
    with torch.no_grad():
        norm.weight.mul_(3.0)
    assert_bits(norm.fixed_weight, copied)  # no longer tied to it


def test_deeper_branches_are_switched_on_later_and_stay_on():
    model = fresh_model("prores", residual_warmup=10)
    alphas = []
    for step in (0, 5, 10, 20, 1000):
        model.after_step(step, 1000)
        alphas.append([round(layer.mlp_residual.alpha.item(), 6) for layer in model.model.layers])
    assert alphas == [[0, 0, 0], [0.5, 0.25, 0.166667], [1, 0.5, 0.333333], [1, 1, 0.666667], [1, 1, 1]]


def test_every_matrix_of_ngpt_has_unit_length_along_the_stream_from_the_start_and_after_a_step():
    model = fresh_model("ngpt", pad_token_id=None)

    def lengths():
        for name, matrix in model.named_parameters():
            if matrix.dim() == 2:
                yield torch.linalg.vector_norm(matrix, dim=0 if name.split(".")[-2] in ("o_proj", "down_proj") else 1)

    assert all((length - 1).abs().max() < 1e-5 for length in lengths())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    assert any((length - 1).abs().max() > 0.1 for length in lengths())
    model.after_step(1, 10)
    assert all((length - 1).abs().max() < 1e-5 for length in lengths())
    assert model.decay_parameter_names() == []


def test_adapters_of_ngpt_and_the_frozen_matrices_below_them_stay_as_they_are_after_a_step():
    from peft import LoraConfig, get_peft_model

    model = fresh_model("ngpt", pad_token_id=None)
    options = {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["down_proj"], "init_lora_weights": False}
    adapted = get_peft_model(model, LoraConfig(r=2, **options))
    copies = {name: p for name, p in adapted.named_parameters() if "down_proj.modules_to_save" in name}
    with torch.no_grad():
        for copy in copies.values():
            copy.mul_(1.3)
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    model.after_step(1, 10)
    for name, p in adapted.named_parameters():
        if name in copies:  # trained whole
            assert_near(torch.linalg.vector_norm(p, dim=0), torch.ones(p.shape[1]), 1e-5)
        else:
            assert_bits(p, before[name], name)
    assert len(copies) == 3
    for name, p in adapted.named_parameters():
        p.requires_grad_("base_layer" in name).data.mul_(1.3)
    model.after_step(2, 10)
    columns = adapted.get_submodule("model.model.layers.1.self_attn.o_proj.base_layer").weight
    assert_near(torch.linalg.vector_norm(columns, dim=0), torch.ones(32), 1e-5)


def test_completep_learns_by_width_and_depth():
    fields = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5}
    model = fresh_model("complete_p", **fields)
    optimizer = optimizer_of(model, 1e-2)
    found = {
        p: (group["lr"], group["eps"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert len(found) == len(list(model.parameters()))
    m = 64 / 256
    block = model.model.layers[0]
    assert found[block.self_attn.q_proj.weight] == pytest.approx((1e-2 / m, 1e-8 / m / 2.5, 0.1 * m))
    assert found[block.input_layernorm.weight] == pytest.approx((1e-2, 1e-8 / m / 2.5, 0.0))
    assert found[model.model.embed_tokens.weight] == pytest.approx((1e-2, 1e-8 / m, 0.1))
    assert block.self_attn.q_proj.weight.std().item() == pytest.approx(0.02 / m**0.5, rel=0.1)


def test_schemes_without_rates_leave_the_optimizer_alone():
    model = fresh_model("pre_rmsnorm")
    optimizer = optimizer_of(model, 1e-2)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]


def test_a_factor_on_what_an_optimizer_lacks_is_refused():
    model = fresh_model("pre_rmsnorm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.apply_rates(optimizer, gain_lr_ratio=0.1)
    assert sorted(group["lr"] for group in optimizer.param_groups) == pytest.approx([0.01, 0.1])
    model = fresh_model("complete_p", hidden_size=64)
    with pytest.raises(NormlabError, match="scheme complete_p has a factor on eps, which SGD has not: use AdamW"):
        model.apply_rates(torch.optim.SGD(model.parameters(), lr=0.1))
