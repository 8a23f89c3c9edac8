"""The public functions: one row norm each, on whatever device the tensor is.

A CUDA tensor takes the Triton kernels, a CPU tensor the functions of `cpu.py`. Under Triton's interpreter a CPU tensor
takes the kernels too, so that tests reach them. Every function takes any leading shape, keeps statistics in fp32, and
returns y in the dtype that x and the weight promote to.

`kernels` is "auto" (as above), "triton" (an error where the kernels cannot run) or "torch" (never the kernels). The
kernels round once, at the store. PyTorch's path rounds as Llama does, before the weight too. A row's result does not
depend on the other rows: a token decoded alone has the bits it has in a prompt, up to a width of 32,768 where a CPU has
several threads.

The `add_` forms return s = residual + x first, rounded once, and the norm of the rounded s. These are the bits of an
addition followed by the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from normlab_kernels.dispatch import row_norm
from normlab_kernels.spec import FUNCTIONS, Act, RowSpec, Stat

Tensor = torch.Tensor


def by_name(name: str) -> Callable[[dict[str, Tensor]], Any]:
    """A function of `spec.FUNCTIONS`, at the default constants, of tensors by their names there."""
    public, *unbounded = name.split()
    target, inputs = globals()[public], FUNCTIONS[name].inputs
    options = {"bounded": False} if unbounded else {}
    return lambda tensors: target(*[tensors[key] for key in inputs], **options)


def _bhyt(stat: int, eps: float, kappa: float, bounded: bool) -> RowSpec:
    return RowSpec(stat, Act.TANH if bounded else Act.IDENTITY, eps, kappa)


def bhyt(
    x: Tensor, weight: Tensor, lam: Tensor, kappa: float = 10.0, eps: float = 1e-6, *, bounded: bool = True,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """BHyT with its exact statistic: y = weight * tanh((lam/kappa) x rsqrt(ms + eps)), ms = mean(x^2) (arXiv
    2601.09719).

    Args:
        x: (..., d). weight: (d,). lam: one element. kappa, eps: constants.
        bounded: false leaves the tanh out, in the same kernels, to compare speeds with.

    Returns:
        y (..., d) and ms (..., 1) in fp32; both carry gradients.
    """
    y, ms, _ = row_norm(x, weight, scale=lam, spec=_bhyt(Stat.RMS, eps, kappa, bounded), kernels=kernels)
    return y, ms


def bhyt_carried(
    x: Tensor, weight: Tensor, lam: Tensor, mean_square: Tensor, kappa: float = 10.0, eps: float = 1e-6, *,
    correction: Tensor | None = None, bounded: bool = True, kernels: str = "auto",
) -> Tensor:  # fmt: skip
    """BHyT with a statistic from elsewhere: y = weight * tanh((lam/kappa) x rsqrt(mean_square + eps)); no reduction.

    `mean_square` is (..., 1) and gets a gradient. `correction`, one number or one for each row, is a constant that is
    added to it, by the kernel where no gradient is wanted.
    """
    spec = _bhyt(Stat.GIVEN, eps, kappa, bounded)
    carried = {"given": mean_square, "correction": correction}
    return row_norm(x, weight, scale=lam, **carried, spec=spec, kernels=kernels)[0]


def add_bhyt(
    x: Tensor, residual: Tensor, weight: Tensor, lam: Tensor, kappa: float = 10.0, eps: float = 1e-6, *,
    bounded: bool = True, kernels: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """s = residual + x and `bhyt` of s in one pass: (s, y, ms)."""
    spec = _bhyt(Stat.RMS, eps, kappa, bounded)
    y, ms, s = row_norm(x, weight, scale=lam, residual=residual, spec=spec, kernels=kernels)
    return s, y, ms


def add_bhyt_carried(
    x: Tensor, residual: Tensor, weight: Tensor, lam: Tensor, mean_square: Tensor, kappa: float = 10.0,
    eps: float = 1e-6, *, correction: Tensor | None = None, bounded: bool = True, kernels: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """s = residual + x and `bhyt_carried` of s in one pass: (s, y)."""
    spec = _bhyt(Stat.GIVEN, eps, kappa, bounded)
    carried = {"given": mean_square, "correction": correction}
    y, _, s = row_norm(x, weight, scale=lam, **carried, residual=residual, spec=spec, kernels=kernels)
    return s, y


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, kernels: str = "auto") -> Tensor:
    """y = weight * x rsqrt(mean(x^2) + eps) (arXiv 1910.07467)."""
    return row_norm(x, weight, spec=RowSpec(Stat.RMS, Act.IDENTITY, eps), kernels=kernels)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """s = residual + x and RMSNorm of s in one pass: (s, y)."""
    y, _, s = row_norm(x, weight, residual=residual, spec=RowSpec(Stat.RMS, Act.IDENTITY, eps), kernels=kernels)
    return s, y


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, kernels: str = "auto"
) -> Tensor:
    """y = weight * (x - mean) rsqrt(var + eps) + bias, with the biased variance (arXiv 1607.06450)."""
    return row_norm(x, weight, bias=bias, spec=RowSpec(Stat.LAYER, Act.IDENTITY, eps), kernels=kernels)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """s = residual + x and LayerNorm of s in one pass: (s, y)."""
    spec = RowSpec(Stat.LAYER, Act.IDENTITY, eps)
    y, _, s = row_norm(x, weight, bias=bias, residual=residual, spec=spec, kernels=kernels)
    return s, y


def crms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, kernels: str = "auto") -> Tensor:
    """y = weight * x rsqrt((sum(x^2) + sum(x)^2) / (d + 1) + eps) (arXiv 2305.14858)."""
    return row_norm(x, weight, spec=RowSpec(Stat.COMPRESSED, Act.IDENTITY, eps), kernels=kernels)[0]


def add_crms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """s = residual + x and `crms_norm` of s in one pass: (s, y)."""
    y, _, s = row_norm(x, weight, residual=residual, spec=RowSpec(Stat.COMPRESSED, Act.IDENTITY, eps), kernels=kernels)
    return s, y


def seed_norm(
    x: Tensor, weight: Tensor, alpha: Tensor, beta: Tensor, eps: float = 1e-6, *, kernels: str = "auto"
) -> Tensor:
    """y = (tanh(x . beta) alpha + weight) * x rsqrt(mean(x^2) + eps), alpha and beta (d,) (arXiv 2510.22777)."""
    spec = RowSpec(Stat.RMS, Act.IDENTITY, eps)
    return row_norm(x, weight, bias=alpha, direction=beta, spec=spec, kernels=kernels)[0]


def add_seed_norm(
    x: Tensor, residual: Tensor, weight: Tensor, alpha: Tensor, beta: Tensor, eps: float = 1e-6, *,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """s = residual + x and `seed_norm` of s in one pass: (s, y)."""
    spec = RowSpec(Stat.RMS, Act.IDENTITY, eps)
    y, _, s = row_norm(x, weight, bias=alpha, direction=beta, residual=residual, spec=spec, kernels=kernels)
    return s, y


def isru(x: Tensor, weight: Tensor, square: Tensor, *, kernels: str = "auto") -> Tensor:
    """DyISRU: y = weight * sqrt(d) x rsqrt(|square| + x^2), square one element (arXiv 2503.21708)."""
    return row_norm(x, weight, scale=square, spec=RowSpec(Stat.OWN, Act.IDENTITY), kernels=kernels)[0]


def add_isru(
    x: Tensor, residual: Tensor, weight: Tensor, square: Tensor, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """s = residual + x and `isru` of s in one pass: (s, y)."""
    spec = RowSpec(Stat.OWN, Act.IDENTITY)
    y, _, s = row_norm(x, weight, scale=square, residual=residual, spec=spec, kernels=kernels)
    return s, y


def dyt(x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor, *, kernels: str = "auto") -> Tensor:
    """y = weight * tanh(alpha x) + bias, alpha one element (arXiv 2503.10622)."""
    return row_norm(x, weight, bias=bias, scale=alpha, spec=RowSpec(Stat.NONE, Act.TANH), kernels=kernels)[0]


def add_dyt(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """s = residual + x and DyT of s in one pass: (s, y)."""
    spec = RowSpec(Stat.NONE, Act.TANH)
    y, _, s = row_norm(x, weight, bias=bias, scale=alpha, residual=residual, spec=spec, kernels=kernels)
    return s, y


def derf(
    x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor, shift: Tensor, *, kernels: str = "auto"
) -> Tensor:
    """y = weight * erf(alpha x + shift) + bias, alpha and shift one element each (arXiv 2512.10938)."""
    spec = RowSpec(Stat.NONE, Act.ERF)
    return row_norm(x, weight, bias=bias, scale=alpha, shift=shift, spec=spec, kernels=kernels)[0]
