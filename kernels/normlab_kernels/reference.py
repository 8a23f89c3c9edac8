"""The formulas in plain PyTorch. Every kernel is checked against them, and a compiler is given them.

Rounding is Llama's. The statistic, z and the activation are fp32 (fp64 for fp64 input). They are rounded once to x's
dtype. The product with the weight has the dtype the two promote to. With a direction the gain is the row's, of fp32,
and there is one rounding, to that dtype.
"""

from __future__ import annotations

import torch

from normlab_kernels.spec import Act, RowSpec, Stat


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def row_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None,
    shift: torch.Tensor | None, given: torch.Tensor | None, spec: RowSpec, direction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(y, ms) of x (..., d); ms (..., 1) is the statistic used, None where there is none.

    >>> spec = RowSpec(Stat.RMS, Act.IDENTITY)
    >>> y, ms = row_norm_reference(torch.ones(2, 4), torch.ones(4), None, None, None, None, spec)
    >>> ms.flatten().tolist()
    [1.0, 1.0]
    """
    z = wide = _wide(x)
    ms = None
    if spec.stat == Stat.RMS:
        ms = z.pow(2).mean(-1, keepdim=True)
    elif spec.stat == Stat.LAYER:
        z = z - z.mean(-1, keepdim=True)
        ms = z.pow(2).mean(-1, keepdim=True)
    elif spec.stat == Stat.GIVEN:
        assert given is not None
        ms = _wide(given)
    elif spec.stat == Stat.COMPRESSED:
        ms = (z.pow(2).sum(-1, keepdim=True) + z.sum(-1, keepdim=True).pow(2)) / (x.shape[-1] + 1)
    if ms is not None:
        rstd = torch.rsqrt(ms + spec.eps)
        z = z * (rstd if scale is None else rstd * (_wide(scale) / spec.kappa))
    elif spec.stat == Stat.OWN:
        assert scale is not None
        z = z * torch.rsqrt(_wide(scale).abs() + z.pow(2)) * x.shape[-1] ** 0.5
    elif scale is not None:
        z = z * (_wide(scale) / spec.kappa)
    if shift is not None:
        z = z + _wide(shift)
    if spec.act == Act.TANH:
        z = torch.tanh(z)
    elif spec.act == Act.ERF:
        z = torch.erf(z)
    if direction is not None:
        assert bias is not None
        gate = torch.tanh((wide * _wide(direction)).sum(-1, keepdim=True))
        gain = gate * _wide(bias) + _wide(weight)
        return (gain * z).to(torch.promote_types(x.dtype, weight.dtype)), ms
    y = z.to(x.dtype) * weight
    return (y if bias is None else (y + bias).to(y.dtype)), ms
