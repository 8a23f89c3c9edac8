"""Every norm against its formula, written again here in float64: values, mean squares, errors.

Hard rows, strides and shapes are tested on the functions that norms call: kernels/tests.
"""

import math
from functools import partial

import pytest
import torch
from model_helpers import assert_bits, assert_near
from torch import nn

from normlab import norms
from normlab.errors import NormlabError
from normlab.norms import BHyT, DyT, LayerNorm, RMSNorm

LAM, KAPPA, ALPHA, EPS, SCALE = 2.7, 3.0, 1.3, 3e-4, 0.35
WIDTHS = (1, 3, 127, 128)


def moved(norm: nn.Module) -> nn.Module:
    """The norm with its vectors drawn, so that neither gamma nor beta is at a default."""
    draw = torch.Generator().manual_seed(norm.weight.numel())
    with torch.no_grad():
        norm.weight.copy_(0.3 + 1.5 * torch.rand(norm.weight.shape, generator=draw))
        if isinstance(norm, LayerNorm):
            norm.bias.copy_(torch.randn(norm.bias.shape, generator=draw))
    return norm


def ms64(x):
    return x.square().mean(-1, keepdim=True)


def layer_norm64(x, gamma, beta):
    centred = x - x.mean(-1, keepdim=True)
    return gamma * centred / (ms64(centred) + EPS).sqrt() + beta


def tanh_input64(x, p, ms):
    return p["lam"] / KAPPA * x / (ms + EPS).sqrt()


# name -> (module of width d, formula of (x, module's tensors, mean square) in float64)
NORMS = {
    "rms": (
        lambda d: RMSNorm(d, eps=EPS, gain=0.2),
        lambda x, p, ms: p["weight"] * x / (ms + EPS).sqrt(),
    ),
    "rms_scaled": (
        lambda d: RMSNorm(d, eps=EPS, scale=SCALE),
        lambda x, p, ms: SCALE * p["weight"] * x / (ms + EPS).sqrt(),
    ),
    "layer_norm": (lambda d: LayerNorm(d, eps=EPS), lambda x, p, ms: layer_norm64(x, p["weight"], p["bias"])),
    "dyt": (lambda d: DyT(d, alpha=ALPHA), lambda x, p, ms: p["weight"] * torch.tanh(p["alpha"] * x)),
    "bhyt": (
        lambda d: BHyT(d, LAM, KAPPA, eps=EPS),
        lambda x, p, ms: p["weight"] * torch.tanh(tanh_input64(x, p, ms)),
    ),
    "bhyt_fixed": (
        lambda d: BHyT(d, LAM, KAPPA, eps=EPS, learnable_lam=False),
        lambda x, p, ms: p["weight"] * torch.tanh(tanh_input64(x, p, ms)),
    ),
    "bhyt_linear": (
        lambda d: BHyT(d, LAM, KAPPA, eps=EPS, bounded=False),
        lambda x, p, ms: p["weight"] * tanh_input64(x, p, ms),
    ),
}
WITH_MEAN_SQUARE = ("rms", "rms_scaled", "bhyt", "bhyt_fixed", "bhyt_linear")
every_norm = pytest.mark.parametrize("name", NORMS)


def make(name: str, d: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return moved(NORMS[name][0](d)).to(dtype)


def formula(name: str, norm: nn.Module, x: torch.Tensor, ms: torch.Tensor | None = None) -> torch.Tensor:
    x = x.double()
    tensors = {key: value.double() for key, value in norm.state_dict().items()}
    return NORMS[name][1](x, tensors, ms64(x) if ms is None else ms.double())


def inputs(d: int, scale: float = 1.0, rows: int = 5) -> torch.Tensor:
    return scale * torch.randn(2, rows, d, generator=torch.Generator().manual_seed(d)) + 0.1 * scale


@every_norm
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0, 1e15])
def test_value_is_the_formula(name, d, scale):
    norm, x = make(name, d), inputs(d, scale)
    # Centring cancels digits: LayerNorm's error is that of x, not of x - mean.
    tolerance = 2e-4 if name == "layer_norm" else 2e-6
    assert_near(norm(x), formula(name, norm, x), tolerance)


@every_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_half_precision_loses_only_its_own_rounding(name, dtype, scale):
    norm = make(name, 128, dtype)
    x = (scale * torch.tanh(inputs(128))).to(dtype)  # up to 1e4, whose square overflows fp16
    y = norm(x)
    assert y.dtype == dtype and torch.isfinite(y).all()
    assert_near(y, formula(name, norm, x), 3 * torch.finfo(dtype).eps)


@every_norm
def test_half_precision_input_with_float32_parameters_as_under_mixed_precision(name):
    norm, x = make(name, 127), inputs(127).bfloat16()
    assert_near(norm(x), formula(name, norm, x), 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layernorm_in_float32_keeps_a_stream_in_half_precision_on_a_cpu(dtype):
    norm, x = make("layer_norm", 127), inputs(127).to(dtype)
    assert norm(x).dtype == dtype
    assert_near(norm(x), formula("layer_norm", norm, x), torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@every_norm
def test_the_addition_and_the_norm_in_one_call_have_the_bits_of_the_two_steps(name, dtype):
    """A stream in half precision too, with parameters in float32."""
    norm, x, residual = make(name, 127), inputs(127).to(dtype), inputs(127).flip(-1).to(dtype)
    s = residual + x
    pairs = [(norm.add(x, residual), (s, norm(s)))]
    if isinstance(norm, BHyT):
        ms, correction = norms.base.mean_square(s), torch.ones(1)
        pairs.append((norm.add(x, residual, ms, correction), (s, norm(s, ms + correction))))
    for one, two in (pair for got, expected in pairs for pair in zip(got, expected, strict=True)):
        assert one.dtype == two.dtype and torch.equal(one, two)


@pytest.mark.parametrize("kind", [BHyT, partial(BHyT, bounded=False), norms.RMSNorm, norms.LayerNorm, norms.GatedNorm])
def test_a_residual_of_another_shape_is_refused_by_every_norm_and_not_repeated(kind):
    x = torch.randn(1, 3, 8)
    for one, other in ((x, x[0, :1]), (x[0, :1], x)):
        with pytest.raises(ValueError, match="residual must have the shape of x"):
            kind(8).add(one, other)


@pytest.mark.parametrize("bounded", [True, False])
def test_a_correction_of_one_element_gives_y_no_dimension(bounded):
    norm, x = BHyT(8, bounded=bounded), torch.randn(1, 3, 8)
    ms = x.square().mean(-1, keepdim=True)
    plain, deep = (norm.add(x, x, ms, torch.ones(shape))[1] for shape in (1, (1, 1, 1, 1)))
    assert torch.equal(deep, plain) and deep.shape == x.shape


def test_a_layernorm_may_have_no_bias():
    norm, x = make("layer_norm", 127), inputs(127)
    expected = norm(x) - norm.bias
    norm.bias = None
    assert_near(norm(x), expected, 1e-6)


@pytest.mark.parametrize("name", WITH_MEAN_SQUARE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", WIDTHS)
def test_mean_square_is_float32_uncentred_one_a_token_and_handed_back_changes_no_bit(name, d, dtype):
    norm, x = make(name, d, dtype), inputs(d, 300.0).to(dtype)
    y, ms = norm(x, return_mean_square=True)
    assert ms.shape == (2, 5, 1) and ms.dtype == torch.float32
    assert_near(ms, ms64(x.double()), 1e-6)
    assert_bits(y, norm(x))
    assert_bits(y, norm(x, mean_square=ms))


@pytest.mark.parametrize("name", WITH_MEAN_SQUARE)
def test_given_mean_square_is_used_as_given_plus_eps(name):
    norm, x = make(name, 33), inputs(33)
    given = torch.rand(2, 5, 1) * 4 * EPS
    assert_near(norm(x, mean_square=given), formula(name, norm, x, given), 2e-6)
    y, ms = norm(x, mean_square=given, return_mean_square=True)
    assert_bits(ms, given)
    assert_bits(y, norm(x, mean_square=given))


@pytest.mark.parametrize("name", ["dyt", "bhyt", "bhyt_linear"])
def test_tanh_input_is_the_argument_of_the_tanh(name):
    norm, x = make(name, 31), inputs(31)
    z = norm.tanh_input(x)
    assert z.dtype == torch.float32
    assert_near(norm.weight * (z if name == "bhyt_linear" else torch.tanh(z)), norm(x), 1e-6)
    if name != "dyt":
        given = torch.rand(2, 5, 1)
        assert_near(norm.tanh_input(x, given), LAM / KAPPA * x.double() / (given.double() + EPS).sqrt(), 2e-6)


@pytest.mark.parametrize("build", [RMSNorm, LayerNorm, DyT, BHyT])
@pytest.mark.parametrize("width", [0, -3])
def test_impossible_width_is_refused_in_one_line(build, width):
    with pytest.raises(NormlabError, match=f"hidden_size is {width}") as caught:
        build(width)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fields", [{"lam": 0.0}, {"lam": -1.0}, {"kappa": 0.0}, {"kappa": -2.0}, {"lam": math.nan}])
def test_lambda_and_kappa_must_be_positive(fields):
    with pytest.raises(NormlabError, match="positive") as caught:
        BHyT(8, **fields)
    assert "\n" not in str(caught.value)


AVERAGED = {"LayerNorm", "CRMSNorm"}  # they subtract a mean, so that their map holds on average
EVERY_NORM = sorted({name for name in norms.__all__ if name not in ("Norm", "NoNorm", "StartingMap")})


@pytest.mark.parametrize("name", EVERY_NORM)
def test_a_fresh_norm_is_its_starting_map(name):
    """Gains, slopes and functions of the theory are those that training begins with."""
    d = 1024
    norm = getattr(norms, name)(d).eval()
    start = norm.starting_map()
    for scale in (0.3, 1.0, 3.0):
        x = scale * torch.randn(1024, d, generator=torch.Generator().manual_seed(0))
        z = start.slope * x if start.eps is None else start.slope * x * (ms64(x) + start.eps).rsqrt()
        expected = start.gain * (z if start.function is None else start.function(z))
        y = norm(x).detach()
        assert (y.square().mean() / expected.square().mean()).sqrt() == pytest.approx(1, abs=0.03)
        if name not in AVERAGED:
            assert_near(y, expected, 1e-5)
