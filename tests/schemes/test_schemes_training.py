"""What schemes do while they are trained: schedules, weights after a step, rates by width and depth."""

from __future__ import annotations

import pytest
import torch
from model_helpers import assert_bits, assert_near, fresh_model, optimizer_of, tokens


def test_a_taper_calibrates_while_its_gate_is_open_and_ends_as_a_fixed_gain():
    model, ids = fresh_model("tapernorm").train(), tokens()
    norm = model.model.layers[0].input_layernorm
    norm.inverse_rms.fill_(0.0)
    model.set_schedules(0, 100)
    for _ in range(2):
        model(ids)
    x = model.model.embed_tokens(ids)
    inverse = (x.square().mean(-1) + norm.eps).rsqrt().mean()
    assert_near(norm.inverse_rms, inverse * (0.01 + 0.99 * 0.01), 1e-4)
    found = norm.inverse_rms.clone()
    model.after_step(50, 100)
    assert norm.gate.item() == pytest.approx(0.5)
    model(ids)
    assert_bits(norm.inverse_rms, found)
    model.after_step(75, 100)
    assert norm.gate.item() == 0.0
    assert_near(norm(3 * x), 3 * norm(x), 1e-6)  # no statistic is left


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
    assert found[block.self_attn.q_proj.weight] == pytest.approx((1e-2 / m, 1e-8 / m / 5, 0.1 * m))
    assert found[block.input_layernorm.weight] == pytest.approx((1e-2, 1e-8 / m / 5, 0.0))
    assert found[model.model.embed_tokens.weight] == pytest.approx((1e-2, 1e-8 / m, 0.1))
    assert block.self_attn.q_proj.weight.std().item() == pytest.approx(0.02 / m**0.5, rel=0.1)


def test_schemes_without_rates_leave_the_optimizer_alone():
    model = fresh_model("pre_rmsnorm")
    optimizer = optimizer_of(model, 1e-2)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
