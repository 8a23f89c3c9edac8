"""BHyT's carried statistic: what c is, what it depends on, and which gradients pass through the correction."""

from __future__ import annotations

import copy

import pytest
import torch
from model_helpers import (
    assert_bits,
    assert_near,
    carrying_case,
    every_scheme,
    fresh_model,
    tiny_config,
    tiny_model,
    tokens,
)
from reference_model import as_float64, mean_square, next_token_loss, reference

from normlab import SCHEMES, NormlabForCausalLM
from normlab.models import NormlabModel

CARRYING = [name for name, scheme in SCHEMES.items() if scheme.carries_statistic]


def constant(layer, train_seq_len: int, heads: int, kv_heads: int) -> torch.Tensor:
    """c = ||W_V W_O||_F^2 / (T d), head by head in float64."""
    value, out = layer.self_attn.v_proj.weight.double(), layer.self_attn.o_proj.weight.double()
    width = value.shape[1]
    head_dim = value.shape[0] // kv_heads
    product = torch.zeros(width, width, dtype=torch.float64)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        head_rows = slice(head * head_dim, (head + 1) * head_dim)
        product += out[:, head_rows] @ value[shared * head_dim : (shared + 1) * head_dim]
    return product.square().sum() / (train_seq_len * width)


def constants(model) -> torch.Tensor:
    return torch.stack([layer.c_attn for layer in model.model.layers])


@pytest.mark.parametrize("scheme", CARRYING)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "head_dim", [8, 16]
)  # 4 heads of 16 are wider than the model: d is the model's width all the same
def test_c_is_right_at_step_0_and_after_a_refresh(scheme, kv_heads, head_dim):
    model = fresh_model(scheme, num_key_value_heads=kv_heads, head_dim=head_dim, train_seq_len=24)
    for round_ in range(2):
        for layer in model.model.layers:
            assert layer.c_attn.dtype == torch.float32 and layer.c_attn.shape == ()
            assert_near(layer.c_attn, constant(layer, 24, 4, kv_heads), 1e-5, f"round {round_}")
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


@pytest.mark.parametrize("scheme", CARRYING)
def test_c_never_depends_on_the_batch(scheme):
    model = tiny_model(scheme)
    before = constants(model).clone()
    for length in (3, 40, 1):
        model.train()
        model(tokens(1, length), labels=tokens(1, length)).loss.backward()
        model.eval().generate(tokens(1, length), max_new_tokens=2, do_sample=False)
    assert_bits(constants(model), before)
    model.refresh_carried()
    model(tokens(1, 3))
    refreshed = constants(model).clone()
    model(tokens(1, 40))
    model.refresh_carried()
    assert_bits(constants(model), refreshed)


@pytest.mark.parametrize("scheme", CARRYING)
def test_a_row_does_not_depend_on_the_rows_or_tokens_beside_it(scheme):
    for carried in ("uniform", "causal"):
        model, ids = tiny_model(scheme, carried=carried), tokens(3, 12)
        full = model(ids).logits
        assert_near(model(ids[:1]).logits, full[:1], 2e-6, "rows")
        assert_near(model(ids[:, :5]).logits, full[:, :5], 2e-6, "length")


@every_scheme
def test_refresh_changes_c_and_nothing_else(scheme):
    model = tiny_model(scheme)
    before = copy.deepcopy(model.state_dict())
    model.refresh_carried()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.endswith("c_attn")}
    assert bool(changed) == SCHEMES[scheme].carries_statistic


def test_refresh_under_mixed_precision_is_still_float32():
    model, cast = tiny_model("bhyt"), tiny_model("bhyt")
    model.refresh_carried()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.refresh_carried()
    assert_bits(constants(cast), constants(model))


def test_refresh_leaves_gradients_and_random_numbers_alone():
    model, ids = tiny_model("bhyt"), tokens()
    model(ids, labels=ids).loss.backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    model.refresh_carried()
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert_bits(parameter.grad, gradient)
        assert parameter.requires_grad


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
        assert_near(layer.c_attn, constant(layer, 24, 4, 2), 1e-5)


@carrying_case
def test_carried_mean_square_adds_the_correction_of_its_position(scheme, extra):
    model, ids = tiny_model(scheme, **extra), tokens(1, 9)
    layer, seen = model.model.layers[1], {}
    layer.post_attention_layernorm.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    hidden = model(ids, output_hidden_states=True).hidden_states[1].double()
    growth = layer.c_attn.double() * layer.input_layernorm.lam.double() ** 2 / 3.0**2
    if extra["carried"] == "causal":
        growth = growth * 24 / torch.arange(1, 10, dtype=torch.float64)[:, None]
    assert_near(seen["mean_square"], mean_square(hidden) + growth, 1e-6)
    assert seen["mean_square"].dtype == torch.float32


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


def test_exact_is_the_same_model_under_either_name():
    exact = tiny_model("bhyt", carried="exact")
    starred = NormlabForCausalLM(tiny_config("bhyt_exact")).eval()
    starred.load_state_dict(exact.state_dict())
    assert_bits(starred(tokens()).logits, exact(tokens()).logits)
    assert not any("c_attn" in name for name in exact.state_dict())


@carrying_case
def test_position_T_is_where_causal_and_uniform_meet(scheme, extra):
    causal, uniform = tiny_model(scheme, carried="causal"), tiny_model(scheme, carried="uniform")
    at = {"position_ids": torch.full((1, 1), 23)}  # t + 1 = T = 24
    assert_near(causal(tokens(1, 1), **at).logits, uniform(tokens(1, 1), **at).logits, 1e-6)
    at = {"position_ids": torch.full((1, 1), 2)}
    gap = (causal(tokens(1, 1), **at).logits - uniform(tokens(1, 1), **at).logits).abs().max()
    assert gap > 1e-3


@pytest.mark.parametrize("layer_of_interest", [0, 2])
@carrying_case
def test_finite_differences_confirm_what_is_detached(scheme, extra, layer_of_interest):
    """The model's gradient is the loss's derivative with the correction's lambda held fixed.

    Differences are taken in float64 on the independent model, which the logits tests tie to ours.
    """
    model, ids = tiny_model(scheme, **extra), tokens()
    state = as_float64(model.state_dict())
    name = f"model.layers.{layer_of_interest}"

    def loss(key: str, change: torch.Tensor, hold_correction: bool) -> float:
        moved = {**state, key: state[key] + change}
        if hold_correction and key.endswith(
            "input_layernorm.lam"
        ):  # c lambda^2 stays if c takes back what lambda^2 gained
            moved[f"{name}.c_attn"] = state[f"{name}.c_attn"] * (state[key] / moved[key]).square().squeeze()
        return next_token_loss(reference(model.config, moved, ids).logits, ids).item()

    def slope(key: str, direction: torch.Tensor, hold_correction: bool = True, h: float = 1e-4) -> float:
        return (loss(key, h * direction, hold_correction) - loss(key, -h * direction, hold_correction)) / (2 * h)

    parameters = dict(model.named_parameters())
    watched = [
        f"{name}.{tail}"
        for tail in (
            "input_layernorm.lam",
            "input_layernorm.weight",
            "post_attention_layernorm.lam",
            "post_attention_layernorm.weight",
            "self_attn.v_proj.weight",
            "self_attn.o_proj.weight",
        )
    ] + ["model.embed_tokens.weight"]
    ours = torch.autograd.grad(model(ids, labels=ids).loss, [parameters[key] for key in watched])
    draw = torch.Generator().manual_seed(8)
    for key, gradient in zip(watched, ours, strict=True):
        direction = torch.randn(gradient.shape, generator=draw, dtype=torch.float64)
        analytic = (gradient.double() * direction).sum().item()
        assert analytic == pytest.approx(slope(key, direction), rel=2e-3, abs=2e-6), key
    one = torch.ones(1, dtype=torch.float64)
    free = slope(watched[0], one, hold_correction=False)
    assert abs(free - ours[0].item()) > 0.02 * abs(free), "lambda's way through the correction is too faint to tell"


@carrying_case
def test_mean_square_is_not_detached(scheme, extra):
    """Gradients reach the block's input through both rsqrt's: cutting the second one changes them."""
    model, ids = tiny_model(scheme, **extra), tokens()

    def embedding_gradient():
        return torch.autograd.grad(model(ids, labels=ids).loss, model.model.embed_tokens.weight)[0]

    whole = embedding_gradient()
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {"mean_square": kwargs["mean_square"].detach()}), with_kwargs=True
        )
    assert (embedding_gradient() - whole).abs().max() > 0.01 * whole.abs().max()


@carrying_case
def test_c_and_lambda_are_constants_in_the_correction(scheme, extra):
    model, ids = tiny_model(scheme, **extra), tokens()
    for layer in model.model.layers:
        layer.c_attn.requires_grad_(False)
        assert not layer.c_attn.requires_grad
    # With the output of every attention norm cut off, lambda_in can reach the loss through the correction only.
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda module, args, output: (output[0].detach(), output[1]))
    loss = model(ids, labels=ids).loss
    gradients = torch.autograd.grad(
        loss, [layer.input_layernorm.lam for layer in model.model.layers], allow_unused=True
    )
    assert all(gradient is None or not gradient.any() for gradient in gradients)


def test_planted_c_of_zero_reuses_the_attention_sites_statistic():
    model, ids = tiny_model("bhyt", num_hidden_layers=1), tokens()
    with torch.no_grad():
        model.model.layers[0].c_attn.zero_()
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    exact = tiny_model("bhyt_exact", num_hidden_layers=1)
    exact.load_state_dict({k: v for k, v in model.state_dict().items() if not k.endswith("c_attn")})
    assert_near(model(ids).logits, exact(ids).logits, 1e-6, "no attention output: the statistic does not grow")


def test_causal_blocks_used_alone_ask_for_positions():
    layer = tiny_model("bhyt", carried="causal").model.layers[0]
    with pytest.raises(ValueError, match="position_ids"):
        layer.carried_mean_square(torch.ones(1, 3, 1), None)


def test_at_init_c_predicts_the_growth_of_the_mean_square_over_T_uniform_tokens():
    """Attention that averages T independent unit-variance tokens adds c per channel."""
    width, heads, length = 64, 4, 16
    model = fresh_model(
        "bhyt", hidden_size=width, num_attention_heads=heads, num_key_value_heads=2, train_seq_len=length
    )
    attention = model.model.layers[0].self_attn
    x = torch.randn(400, length, width, generator=torch.Generator().manual_seed(0))
    value = attention.v_proj(x).view(400, length, 2, 16).repeat_interleave(2, dim=2).flatten(2)
    added = attention.o_proj(value.mean(1))
    assert added.square().mean().item() == pytest.approx(model.model.layers[0].c_attn.item(), rel=0.05)
