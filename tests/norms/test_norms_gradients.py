"""Gradients of every norm.

The norms compute statistics in float32 for every input, so ``gradcheck`` in float64 would measure that rounding.
Instead the formula passes gradcheck in float64. The norm's gradients agree with autograd through the formula to float32
precision. Finite differences through the norm, with steps wide enough for float32, confirm them.
"""

import pytest
import torch
from model_helpers import assert_near
from test_norms_formulas import NORMS, WIDTHS, WITH_MEAN_SQUARE, every_norm, inputs, make, ms64

from normlab.norms import BHyT


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
    parameters = leaves(make(name, 5))
    x = inputs(5, rows=2).double().requires_grad_()
    names = list(parameters)
    assert torch.autograd.gradcheck(
        lambda x, *values: NORMS[name][1](x, dict(zip(names, values, strict=True)), ms64(x)), (x, *parameters.values())
    )


def gradients_here_and_of_the_formula(name, norm, x):
    """(name, our gradient, the formula's in float64) of the input and of every parameter."""
    x = x.requires_grad_()
    trained = dict(norm.named_parameters())
    ours = torch.autograd.grad((norm(x) * weighting(x)).sum(), [x, *trained.values()])
    x64, parameters = x.detach().double().requires_grad_(), leaves(norm)
    loss = (NORMS[name][1](x64, parameters, ms64(x64)) * weighting(x).double()).sum()
    expected = torch.autograd.grad(loss, [x64, *(parameters[key] for key in trained)])
    return zip(["x", *trained], ours, expected, strict=True)


@every_norm
@pytest.mark.parametrize("d", WIDTHS)
def test_gradients_are_those_of_the_formula(name, d):
    for which, gradient, target in gradients_here_and_of_the_formula(name, make(name, d), inputs(d)):
        # At width 1 gradients are what eps leaves of a difference of equals: compare on the scale of the terms.
        size = max(target.abs().max().item(), 1.0 if d == 1 else 0.0)
        assert (gradient.double() - target).abs().max() <= 3e-5 * size, which


@every_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_follow_within_their_rounding(name, dtype):
    norm, x = make(name, 128, dtype), inputs(128).to(dtype)
    for which, gradient, target in gradients_here_and_of_the_formula(name, norm, x):
        assert gradient.dtype == dtype
        # lambda and alpha sum 1280 products of either sign: their error is relative to the terms, not to the sum.
        size = target.abs().max() if target.numel() > 1 else target.abs().max() + 10
        assert (gradient.double() - target).abs().max() <= 8 * torch.finfo(dtype).eps * size, which


@every_norm
def test_gradients_of_parameters_in_half_precision_are_summed_over_many_rows_in_float32(name):
    """A sum of ones in bfloat16 stays at 256."""
    norm, x = make(name, 8, torch.bfloat16), inputs(8, rows=2000).to(torch.bfloat16)
    x64, parameters = x.double(), leaves(norm)
    up = weighting(x).abs()  # of one sign, so that a bias's sum grows
    (norm(x) * up).sum().backward()
    (NORMS[name][1](x64, parameters, ms64(x64)) * up.double()).sum().backward()
    for which, parameter in norm.named_parameters():
        target = parameters[which].grad
        assert (parameter.grad.double() - target).norm() <= 0.02 * target.norm(), which


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


@pytest.mark.parametrize("name", WITH_MEAN_SQUARE)
def test_gradient_flows_into_a_given_mean_square_and_out_of_the_returned_one(name):
    norm, x = make(name, 24), inputs(24).requires_grad_()
    given = (0.2 + torch.rand(2, 5, 1)).requires_grad_()
    (through,) = torch.autograd.grad((norm(x.detach(), mean_square=given) * weighting(x)).sum(), given)
    given64 = given.detach().double().requires_grad_()
    x64 = x.detach().double()
    (expected,) = torch.autograd.grad((NORMS[name][1](x64, leaves(norm), given64) * weighting(x)).sum(), given64)
    assert_near(through, expected, 1e-5, "into the given one")

    cotangent = torch.randn(2, 5, 1, generator=torch.Generator().manual_seed(2))
    (out,) = torch.autograd.grad((norm(x, return_mean_square=True)[1] * cotangent).sum(), x)
    assert_near(out, 2 * x64 / 24 * cotangent, 1e-6, "out of the returned one")


def test_lambda_that_is_not_learnable_is_saved_but_gets_no_gradient():
    norm = BHyT(8, 2.5, learnable_lam=False)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert list(norm.state_dict()) == ["weight", "lam"] and norm.lam.shape == (1,)
    norm(inputs(8)).sum().backward()
    assert norm.lam.grad is None and not norm.lam.requires_grad
