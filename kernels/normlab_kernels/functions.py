"""The public functions: one row norm each, on whatever device the tensor is.

A CUDA tensor takes the Triton kernels, a CPU tensor the functions of `cpu.py`; under Triton's interpreter a CPU tensor
takes the kernels too, so that tests reach them. Every function takes any leading shape, keeps statistics in fp32, and
returns y in the dtype that x and the weight promote to.

`kernels` is "auto" (as above), "triton" (an error where the kernels cannot run) or "torch" (never the kernels). The
kernels round once, at the store; PyTorch's path rounds as Llama does, before the weight too.
"""

from __future__ import annotations

import torch

from normlab_kernels.dispatch import row_norm
from normlab_kernels.spec import Act, RowSpec, Stat

Tensor = torch.Tensor


def bhyt(
    x: Tensor, weight: Tensor, lam: Tensor, kappa: float = 10.0, eps: float = 1e-6, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """BHyT with its exact statistic: y = weight * tanh((lam/kappa) x rsqrt(ms + eps)), ms = mean(x^2) (arXiv
    2601.09719).

    Args:
        x: (..., d). weight: (d,). lam: one element. kappa, eps: constants.

    Returns:
        y (..., d) and ms (..., 1) in fp32; both carry gradients.
    """
    y, ms, _ = row_norm(x, weight, scale=lam, spec=RowSpec(Stat.RMS, Act.TANH, eps, kappa), kernels=kernels)
    assert ms is not None
    return y, ms


def bhyt_carried(
    x: Tensor,
    weight: Tensor,
    lam: Tensor,
    mean_square: Tensor,
    kappa: float = 10.0,
    eps: float = 1e-6,
    *,
    kernels: str = "auto",
) -> Tensor:
    """BHyT with a statistic from elsewhere: y = weight * tanh((lam/kappa) x rsqrt(mean_square + eps)); no reduction.

    `mean_square` is (..., 1), the statistic with the caller's correction already added; it gets a gradient.
    """
    return row_norm(
        x, weight, scale=lam, given=mean_square, spec=RowSpec(Stat.GIVEN, Act.TANH, eps, kappa), kernels=kernels
    )[0]


def add_bhyt(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    lam: Tensor,
    kappa: float = 10.0,
    eps: float = 1e-6,
    *,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """s = residual + x and BHyT of s in one pass: (s, y, ms). The sum is rounded once, and y is BHyT of the rounded
    s."""
    y, ms, s = row_norm(
        x, weight, scale=lam, residual=residual, spec=RowSpec(Stat.RMS, Act.TANH, eps, kappa), kernels=kernels
    )
    assert ms is not None and s is not None
    return s, y, ms


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, kernels: str = "auto") -> Tensor:
    """y = weight * x rsqrt(mean(x^2) + eps) (arXiv 1910.07467)."""
    return row_norm(x, weight, spec=RowSpec(Stat.RMS, Act.IDENTITY, eps), kernels=kernels)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """s = residual + x and RMSNorm of s in one pass: (s, y)."""
    y, _, s = row_norm(x, weight, residual=residual, spec=RowSpec(Stat.RMS, Act.IDENTITY, eps), kernels=kernels)
    assert s is not None
    return s, y


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, kernels: str = "auto"
) -> Tensor:
    """y = weight * (x - mean) rsqrt(var + eps) + bias, with the biased variance (arXiv 1607.06450)."""
    return row_norm(x, weight, bias=bias, spec=RowSpec(Stat.LAYER, Act.IDENTITY, eps), kernels=kernels)[0]


def dyt(x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor, *, kernels: str = "auto") -> Tensor:
    """y = weight * tanh(alpha x) + bias, alpha one element (arXiv 2503.10622)."""
    return row_norm(x, weight, bias=bias, scale=alpha, spec=RowSpec(Stat.NONE, Act.TANH), kernels=kernels)[0]


def derf(
    x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor, shift: Tensor, *, kernels: str = "auto"
) -> Tensor:
    """y = weight * erf(alpha x + shift) + bias, alpha and shift one element each (arXiv 2512.10938)."""
    return row_norm(x, weight, bias=bias, scale=alpha, shift=shift, spec=RowSpec(Stat.NONE, Act.ERF), kernels=kernels)[
        0
    ]
