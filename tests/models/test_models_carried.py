"""BHyT's carried statistic: what c is, what it depends on, and when it is computed again."""

import copy

import pytest
import torch
from model_helpers import (
    assert_bits,
    assert_near,
    carrying_case,
    constant_of,
    constants,
    every_scheme,
    fresh_model,
    tiny_config,
    tiny_model,
    tokens,
)

from normlab import SCHEMES, NormlabForCausalLM
from normlab.models import NormlabModel

CARRYING = [name for name, scheme in SCHEMES.items() if scheme.carries_statistic]


@pytest.mark.parametrize("scheme", CARRYING)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [8, 16])  # 4 heads of 16 are wider than the model: d is its width all the same
def test_c_is_right_at_step_0_and_after_a_refresh(scheme, kv_heads, head_dim):
    model = fresh_model(scheme, num_key_value_heads=kv_heads, head_dim=head_dim, train_seq_len=24)
    for round_ in range(2):
        for layer in model.model.layers:
            assert layer.c_attn.dtype == torch.float32 and layer.c_attn.shape == ()
            assert_near(layer.c_attn, constant_of(layer, 24, 4, kv_heads), 1e-5, f"round {round_}")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.mul_(torch.randn(1))
                layer.self_attn.o_proj.weight.add_(0.1)
        model.refresh_carried()


def test_c_uses_the_configured_length_which_defaults_to_the_longest():
    short, long = fresh_model("bhyt", train_seq_len=16), fresh_model("bhyt", train_seq_len=64)
    default = fresh_model("bhyt", train_seq_len=None, max_position_embeddings=64)
    assert_near(constants(short), 4 * constants(long), 1e-6)
    assert_bits(constants(default), constants(long))


@every_scheme
def test_refresh_changes_c_and_nothing_else(scheme):
    model, ids = tiny_model(scheme), tokens()
    model(ids, labels=ids).loss.backward()
    before, gradients = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    model.refresh_carried()
    assert torch.equal(torch.get_rng_state(), random)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.requires_grad
        assert_bits(parameter.grad, gradient)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.endswith("c_attn")}
    assert bool(changed) == SCHEMES[scheme].carries_statistic


def test_refresh_under_mixed_precision_is_still_float32():
    model, cast = tiny_model("bhyt"), tiny_model("bhyt")
    model.refresh_carried()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.refresh_carried()
    assert_bits(constants(cast), constants(model))


@pytest.mark.parametrize("around", ["model", "backbone", "wrapper"])
def test_a_state_dict_without_c_is_complete_and_c_follows_from_its_weights(around):
    source, target = tiny_model("bhyt", seed=1), tiny_model("bhyt", seed=2)
    wrap = {"model": lambda m: m, "backbone": lambda m: m.model, "wrapper": lambda m: torch.nn.Sequential(m)}[around]
    state = {name: tensor for name, tensor in wrap(source).state_dict().items() if not name.endswith("c_attn")}
    assert not wrap(target).load_state_dict(state, strict=True).missing_keys
    source.refresh_carried()
    assert_bits(constants(target), constants(source))


def test_weights_without_c_assigned_to_a_model_without_memory_give_it_a_real_c():
    source = tiny_model("bhyt")
    with torch.device("meta"):
        target = NormlabForCausalLM(source.config)
    state = {name: tensor for name, tensor in source.state_dict().items() if not name.endswith("c_attn")}
    target.load_state_dict(state, assign=True)
    source.refresh_carried()
    assert_bits(constants(target), constants(source))
    assert all("c_attn" in dict(layer.named_buffers()) for layer in target.model.layers)


def test_a_state_dict_with_c_restores_it_as_saved():
    source, target = tiny_model("bhyt", seed=1), tiny_model("bhyt", seed=2)
    target.load_state_dict(source.state_dict())
    assert_bits(constants(target), constants(source))
    target.refresh_carried()
    assert not torch.equal(constants(target), constants(source)), "the saved c was the computed one: nothing shown"


def test_the_backbone_alone_starts_with_c_right_too():
    torch.manual_seed(0)
    for layer in NormlabModel(tiny_config("bhyt")).layers:
        assert_near(layer.c_attn, constant_of(layer, 24, 4, 2), 1e-5)


@carrying_case
@pytest.mark.parametrize("change", ["lam", "new lam", "kappa", "c", "loaded", "half"])
def test_a_correction_kept_in_evaluation_follows_what_it_is_made_of(scheme, extra, change):
    """The second forward pass is that of a model which never had a first one."""
    model, ids = tiny_model(scheme, **extra), tokens()
    with torch.no_grad():
        before = model(ids).logits
        kept = [layer.kept_growth for layer in model.model.layers]
        model(ids)
        assert kept[0] is not None and all(a is b.kept_growth for a, b in zip(kept, model.model.layers, strict=True))
        layer = model.model.layers[0]
        norm = layer.input_layernorm
        if change == "lam":
            norm.lam.mul_(30)
        elif change == "new lam":
            norm.lam = torch.nn.Parameter(30 * norm.lam)
        elif change == "kappa":
            norm.kappa /= 30
        elif change == "c":
            layer.c_attn.mul_(900)
        elif change == "loaded":
            model.load_state_dict({k: 30 * v if k.endswith("lam") else v for k, v in model.state_dict().items()})
        else:
            norm.lam.mul_(1.001)
            model(ids)
            model.to(torch.float16).to(torch.float32)
        again = model(ids).logits
        for layer in model.model.layers:
            layer.kept_growth = None
        assert_bits(again, model(ids).logits)
    assert not torch.equal(again, before)


def test_a_correction_is_not_kept_in_training():
    model = tiny_model("bhyt").train()
    model(tokens(), labels=tokens()).loss.backward()
    assert all(layer.kept_growth is None for layer in model.model.layers)


def test_causal_blocks_used_alone_ask_for_positions():
    layer = tiny_model("bhyt", carried="causal").model.layers[0]
    with pytest.raises(ValueError, match="position_ids"):
        layer.carried_mean_square(torch.ones(1, 3, 1), None)
