"""The tanh of the kernels, in each of its forms."""

from __future__ import annotations

import pytest
import torch
from kernel_harness import DEVICE, INTERPRETING

triton = pytest.importorskip("triton", reason="pip install normlab-kernels[gpu]")
import triton.language as tl  # noqa: E402
from normlab_kernels import device_math  # noqa: E402

pytestmark = pytest.mark.kernels


@triton.jit
def erf_kernel(p_z, p_t, count, FORM: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    tl.store(p_t + offset, device_math.erf_16_bit(tl.load(p_z + offset, mask=mask), FORM), mask=mask)


@triton.jit
def tanh_kernel(p_z, p_t, count, FORM: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    tl.store(p_t + offset, device_math.tanh(tl.load(p_z + offset, mask=mask), FORM), mask=mask)


def tanh_of(z: torch.Tensor, form: int) -> torch.Tensor:
    t = torch.empty_like(z)
    tanh_kernel[(triton.cdiv(z.numel(), 16_384),)](z, t, z.numel(), FORM=form, BLOCK=16_384)
    return t


def arguments_of_tanh() -> torch.Tensor:
    size = torch.logspace(-37, 2, 60_000, dtype=torch.float64).float()
    return torch.cat([size, -size, torch.linspace(0.1, 3.0, 60_000)]).to(DEVICE)


@pytest.mark.parametrize("form", ["PORTABLE", "LIBRARY"])
def test_tanh_is_right_to_two_units_in_the_last_place(form: str) -> None:
    if form == "LIBRARY" and INTERPRETING:
        pytest.skip("libdevice needs a GPU")
    z = arguments_of_tanh()
    exact = torch.tanh(z.double())
    error = (tanh_of(z, getattr(device_math, form)).double() - exact).abs() / exact.abs()
    assert error.max() <= 2e-7


@pytest.mark.skipif(INTERPRETING, reason="inline assembly needs a GPU")
def test_approximate_tanh_is_right_to_eleven_bits() -> None:
    z = arguments_of_tanh()
    exact = torch.tanh(z.double())
    error = (tanh_of(z, device_math.APPROX).double() - exact).abs() / exact.abs()
    assert error[z.abs() > 1e-30].max() <= 2.0**-10.5


def test_tanh_of_special_values() -> None:
    z = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")], device=DEVICE)
    t = tanh_of(z, device_math.PORTABLE)
    assert t[:4].tolist() == [0.0, 0.0, 1.0, -1.0]
    assert t[4].isnan()


def test_erf_for_sixteen_bits_is_right_to_three_in_a_hundred_thousand_and_keeps_nan() -> None:
    z = torch.cat([arguments_of_tanh(), torch.tensor([float("inf"), -float("inf"), float("nan")], device=DEVICE)])
    t = torch.empty_like(z)
    form = device_math.PORTABLE if INTERPRETING else device_math.LIBRARY
    erf_kernel[(triton.cdiv(z.numel(), 16_384),)](z, t, z.numel(), FORM=form, BLOCK=16_384)
    exact = torch.erf(z.double())
    error = (t.double() - exact).abs() / exact.abs()
    assert error[:-3].nan_to_num(0.0).max() <= 3.5e-5
    assert t[-3:-1].to(torch.bfloat16).tolist() == [1.0, -1.0] and t[-1].isnan()
