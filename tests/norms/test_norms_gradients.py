"""Gradients of every norm.

The norms compute statistics in float32 for every input, so ``gradcheck`` in float64 would measure that rounding.
Instead the formula passes gradcheck in float64. The norm's gradients agree with autograd through the formula to float32
precision. Finite differences through the norm, with steps wide enough for float32, confirm them.
"""

from __future__ import annotations

import pytest
import torch
from model_helpers import assert_bits, assert_near
from test_norms_formulas import EPS, KAPPA, NORMS, WIDTHS, WITH_MEAN_SQUARE, every_norm, inputs, make

from normlab.norms import BHyT, LayerNorm


def weighting(x: torch.Tensor) -> torch.Tensor:
    """A fixed random cotangent: sums would hide errors that cancel."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x.dtype)


def leaves(norm: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad)
        for name, tensor in norm.state_dict(keep_vars=True).items()
    }


@every_norm
def test_the_float64_formula_itself_passes_gradcheck(name):
    formula = NORMS[name][1]
    parameters = leaves(make(name, 5))
    x = inputs(5, rows=2).double().requires_grad_()
    names = list(parameters)
    assert torch.autograd.gradcheck(
        lambda x, *values: formula(x, dict(zip(names, values, strict=True))), (x, *parameters.values())
    )


@every_norm
@pytest.mark.parametrize("d", WIDTHS)
def test_gradients_are_those_of_the_formula(name, d):
    norm, x = make(name, d), inputs(d).requires_grad_()
    trained = dict(norm.named_parameters())
    ours = torch.autograd.grad((norm(x) * weighting(x)).sum(), [x, *trained.values()])
    x64, parameters = x.detach().double().requires_grad_(), leaves(norm)
    loss = (NORMS[name][1](x64, parameters) * weighting(x).double()).sum()
    expected = torch.autograd.grad(loss, [x64, *(parameters[key] for key in trained)])
    for which, gradient, target in zip(["x", *trained], ours, expected, strict=True):
        # At width 1 gradients are what eps leaves of a difference of equals: compare on the scale of the terms.
        size = max(target.abs().max().item(), 1.0 if d == 1 else 0.0)
        assert (gradient.double() - target).abs().max() <= 3e-5 * size, which


@every_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_follow_within_their_rounding(name, dtype):
    norm, x = make(name, 128, dtype), inputs(128).to(dtype).requires_grad_()
    trained = dict(norm.named_parameters())
    ours = torch.autograd.grad((norm(x) * weighting(x)).sum(), [x, *trained.values()])
    x64, parameters = x.detach().double().requires_grad_(), leaves(norm)
    loss = (NORMS[name][1](x64, parameters) * weighting(x).double()).sum()
    expected = torch.autograd.grad(loss, [x64, *(parameters[key] for key in trained)])
    for which, gradient, target in zip(["x", *trained], ours, expected, strict=True):
        assert gradient.dtype == dtype
        # lambda and alpha sum 1280 products of either sign: their error is relative to the terms, not to the sum.
        size = target.abs().max() if target.numel() > 1 else target.abs().max() + 10
        assert (gradient.double() - target).abs().max() <= 8 * torch.finfo(dtype).eps * size, which


@every_norm
def test_finite_differences_through_the_norm_itself(name):
    """Along random directions, by a fourth-order central difference whose step float32 resolves."""
    norm, x = make(name, 48), inputs(48)
    tensors = [x, *norm.parameters()]
    draw = torch.Generator().manual_seed(4)

    def value(step: float, directions: list[torch.Tensor]) -> float:
        moved = [tensor.detach() + step * direction for tensor, direction in zip(tensors, directions, strict=True)]
        named = dict(zip([key for key, _ in norm.named_parameters()], moved[1:], strict=True))
        return (torch.func.functional_call(norm, named, (moved[0],)).double() * weighting(x)).sum().item()

    x.requires_grad_()
    gradient = torch.autograd.grad((norm(x) * weighting(x)).sum(), tensors)
    for index in range(len(tensors)):
        directions = [torch.zeros_like(tensor) for tensor in tensors]
        directions[index] = torch.randn(tensors[index].shape, generator=draw)
        h = 0.02
        numeric = (
            8 * (value(h, directions) - value(-h, directions)) - value(2 * h, directions) + value(-2 * h, directions)
        ) / (12 * h)
        analytic = (gradient[index] * directions[index]).sum().item()
        assert numeric == pytest.approx(analytic, rel=2e-3, abs=2e-3), index


def test_layer_norm_passes_gradcheck_in_float64():
    norm = LayerNorm(5, eps=EPS).double()
    torch.nn.init.normal_(norm.bias)
    torch.nn.init.uniform_(norm.weight, 0.3, 1.5)
    assert torch.autograd.gradcheck(norm, inputs(5, rows=2).double().requires_grad_())


@pytest.mark.parametrize("name", WITH_MEAN_SQUARE)
def test_gradient_flows_into_a_given_mean_square_and_out_of_the_returned_one(name):
    norm, x = make(name, 24), inputs(24).requires_grad_()
    given = (0.2 + torch.rand(2, 5, 1)).requires_grad_()
    (through,) = torch.autograd.grad((norm(x.detach(), mean_square=given) * weighting(x)).sum(), given)
    given64 = given.detach().double().requires_grad_()
    x64 = x.detach().double()
    p = {key: value.double() for key, value in norm.state_dict().items()}
    z = x64 / (given64 + EPS).sqrt()
    if name.startswith("bhyt"):
        z = p["lam"] / KAPPA * z
        y = p["weight"] * (z if name == "bhyt_linear" else torch.tanh(z))
    else:
        y = norm.scale * p["weight"] * z
    (expected,) = torch.autograd.grad((y * weighting(x)).sum(), given64)
    assert_near(through, expected, 1e-5, "into the given one")

    cotangent = torch.randn(2, 5, 1, generator=torch.Generator().manual_seed(2))
    (out,) = torch.autograd.grad((norm(x, return_mean_square=True)[1] * cotangent).sum(), x)
    assert_near(out, 2 * x64 / 24 * cotangent, 1e-6, "out of the returned one")


def test_gradient_with_both_outputs_used_is_the_sum():
    """The carried statistic makes y and ms of one call both reach the loss."""
    norm, x = make("bhyt", 24), inputs(24).requires_grad_()
    y, ms = norm(x, return_mean_square=True)
    both = torch.autograd.grad((y * weighting(x)).sum() + ms.log().sum(), x)[0]
    y_only = torch.autograd.grad((norm(x) * weighting(x)).sum(), x)[0]
    ms_only = torch.autograd.grad(norm(x, return_mean_square=True)[1].log().sum(), x)[0]
    assert_near(both, y_only + ms_only, 1e-6)


@pytest.mark.parametrize("name", ["bhyt", "dyt"])
def test_a_frozen_gain_does_not_stop_the_other_gradients(name):
    norm, x = make(name, 24), inputs(24).requires_grad_()
    full = torch.autograd.grad((norm(x) * weighting(x)).sum(), x)[0]
    norm.weight.requires_grad_(False)
    scalar = norm.lam if name == "bhyt" else norm.alpha
    partial = torch.autograd.grad((norm(x) * weighting(x)).sum(), [x, scalar])
    assert_bits(partial[0], full)
    assert partial[1].abs() > 0


def test_lambda_that_is_not_learnable_is_saved_but_gets_no_gradient():
    norm = BHyT(8, 2.5, learnable_lam=False)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert list(norm.state_dict()) == ["weight", "lam"] and norm.lam.shape == (1,)
    norm(inputs(8)).sum().backward()
    assert norm.lam.grad is None and not norm.lam.requires_grad


def test_shapes_and_names_of_the_parameters():
    assert {name: tuple(p.shape) for name, p in BHyT(8).named_parameters()} == {"weight": (8,), "lam": (1,)}
    assert BHyT(8, 2.5, 7.0).lam.item() == 2.5 and BHyT(8, 2.5, 7.0).kappa == 7.0 and BHyT(8).eps == 1e-6
