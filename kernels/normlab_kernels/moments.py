"""row_moments: the statistics of every row that the probes need, in one read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from normlab_kernels import cpu, dispatch

Tensor = torch.Tensor


class RowMoments(NamedTuple):
    """Statistics of each row of d numbers, in fp32 (fp64 for fp64 input). Sums are not divided by d."""

    m2: Tensor  # sum (x - mean)^2
    m4: Tensor  # sum (x - mean)^4
    max_abs: Tensor  # max |x|
    l2: Tensor  # sqrt(sum x^2)


def row_moments(x: Tensor) -> RowMoments:
    """Second and fourth central moment sums, max |x| and L2 norm over the last dimension of x (..., d); no gradients.

    On a GPU one kernel reads x once (rows wider than a program holds, twice). On a CPU the passes are over chunks of
    rows that stay in the cache. A row with a NaN has NaN everywhere. L2 overflows only where it is no fp32 number.

    Raises:
        ValueError: x is not floating-point, or has no last dimension or an empty one.
    """
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] == 0:
        got = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"row_moments needs a floating-point tensor (..., d) with d >= 1, got {got}")
    with torch.no_grad():
        rows = cpu.unit_stride(x.detach().reshape(-1, x.shape[-1]))
        if x.numel() and dispatch.takes_kernels(x):
            from normlab_kernels import moments_kernel

            run = moments_kernel.row_moments if torch.compiler.is_compiling() else moments_kernel.launch
            stacked = run(rows)
        else:
            stacked = _chunked(rows)
        return RowMoments(*(row.view(x.shape[:-1]) for row in stacked))


def row_moments_reference(x: Tensor) -> RowMoments:
    """The definitions, one after another."""
    x = x if x.dtype == torch.float64 else x.float()
    mean = x.mean(-1)
    centred = x - mean.unsqueeze(-1)
    m2, m4 = (centred.pow(k).sum(-1) for k in (2, 4))
    return RowMoments(m2, m4, x.abs().amax(-1), x.pow(2).sum(-1).sqrt())


def _chunked(rows: Tensor) -> Tensor:
    """(4, rows): PyTorch's passes on chunks of rows that stay in the cache."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    out = torch.empty(4, rows.shape[0], dtype=dtype, device=rows.device)
    for some in cpu.chunks(*rows.shape):
        x = rows[some].to(dtype)
        m2, m4, max_abs, l2 = out[:, some]
        torch.maximum(x.amax(-1), -x.amin(-1), out=max_abs)  # the infinity norm takes 20 times as long
        _, exponent = torch.frexp(max_abs.unsqueeze(-1))  # the norm of rows as large as 1, in powers of two: exact
        exponent.clamp_(min=-100, max=127)
        torch.ldexp(torch.linalg.vector_norm(torch.ldexp(x, -exponent), dim=-1), exponent.squeeze(-1), out=l2)
        centred = x - x.mean(-1, keepdim=True)
        square = centred.square_()
        torch.sum(square, -1, out=m2)
        torch.sum(square.mul_(square), -1, out=m4)
    return out
