"""linear_add_bhyt and linear_add_dyt: h = residual + a w^T and a norm of h, in one kernel or in two.

The fused kernel needs a row factor that is known before the product is done (a carried BHyT statistic, DyT's scalar).
It runs where the table in `linear_choices.py` says it was measured to win, or where the caller asks for it. Elsewhere
the product is `addmm` with the residual, followed by the norm's kernel. Both give the same function. One backward pass
serves both: the norm's, then two matrix products.
"""

from __future__ import annotations

from typing import Any

import torch

from normlab_kernels import dispatch
from normlab_kernels.experimental import linear_choices
from normlab_kernels.spec import Act, RowSpec, Stat

Tensor = torch.Tensor


def linear_add_bhyt(
    a: Tensor, proj_weight: Tensor, residual: Tensor, weight: Tensor, lam: Tensor, mean_square: Tensor,
    kappa: float = 10.0, eps: float = 1e-6, fused: bool | None = None, *, bounded: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h = residual + a proj_weight^T and y = weight * tanh((lam/kappa) h rsqrt(mean_square + eps)): (h, y).

    Args:
        a: (..., k). proj_weight: (d, k), as in nn.Linear. residual: (..., d). weight: (d,). lam: one element.
        mean_square: (..., 1), the carried statistic; it gets a gradient.
        fused: one kernel (True) or two (False). None asks the table of measurements. It takes two where the kernel
            cannot run: tiles of float32 operands do not fit a GPU's shared memory.
        bounded: false leaves the tanh out.

    Raises:
        ValueError: shapes that do not fit, or `fused=True` where the kernel cannot run.

    Source: the norm is arXiv 2601.09719; the fusion is this package's.
    """
    spec = RowSpec(Stat.GIVEN, Act.TANH if bounded else Act.IDENTITY, eps, kappa)
    return _linear_add_norm(a, proj_weight, residual, weight, None, lam, mean_square, spec, fused)


def linear_add_dyt(
    a: Tensor, proj_weight: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h = residual + a proj_weight^T and y = weight * tanh(alpha h) + bias: (h, y). As `linear_add_bhyt` otherwise."""
    return _linear_add_norm(a, proj_weight, residual, weight, bias, alpha, None, RowSpec(Stat.NONE, Act.TANH), fused)


def _linear_add_norm(
    a: Tensor, proj: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor,
    given: Tensor | None, spec: RowSpec, fused: bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if proj.dim() != 2 or a.shape[-1] != proj.shape[1] or residual.shape != (*a.shape[:-1], proj.shape[0]):
        raise ValueError(
            f"a (..., k), proj_weight (d, k) and residual (..., d) do not fit: "
            f"{tuple(a.shape)}, {tuple(proj.shape)}, {tuple(residual.shape)}"
        )
    dispatch.check(residual, weight, bias, scale, None, None, given)
    if fused and (reason := cannot_fuse(a, proj, residual, weight)):
        raise ValueError(f"linear_add: the fused kernel cannot run here, {reason}; use fused=None")
    if not (prefers_fused(a, proj, residual, weight) if fused is None else fused):
        norm: Any = {"bias": bias, "scale": scale, "given": given, "spec": spec}
        kind, dtype = a.device.type, a.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        if residual.dtype != dtype:  # addmm would round a stream in fp32 to the product's 16 bits
            y, _, h = dispatch.row_norm(torch.nn.functional.linear(a, proj), weight, residual=residual, **norm)
            return h, y
        h = torch.addmm(residual.reshape(-1, proj.shape[0]), a.reshape(-1, a.shape[-1]), proj.t()).view(residual.shape)
        return h, dispatch.row_norm(h, weight, **norm)[0]
    dispatch.refuse_transforms(a, proj, residual, weight, bias, scale, given)
    from normlab_kernels.experimental import linear_ops

    shape = residual.shape
    h, y = linear_ops.linear_add_norm(
        a.reshape(-1, a.shape[-1]), proj, residual.reshape(-1, shape[-1]), weight, bias, scale,
        None if given is None else given.reshape(-1, 1).float(), *spec,
    )  # fmt: skip
    return h.view(shape), y.view(shape)


def prefers_fused(a: Tensor, proj_weight: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """True if `fused=None` means one kernel for operands like these.

    It can run, and it was measured to win for as many rows, that width and that K on this device (`linear_choices.py`).
    """
    width, inner = proj_weight.shape
    name = torch.cuda.get_device_properties(a.device).name if a.is_cuda else a.device.type
    win = linear_choices.fusion_win(name, a.numel() // max(1, inner), width, inner)
    return win is not None and not cannot_fuse(a, proj_weight, residual, weight)


def cannot_fuse(a: Tensor, proj: Tensor, residual: Tensor, weight: Tensor) -> str:
    """Say why the fused kernel cannot take these operands; empty if it can."""
    if not dispatch.takes_kernels(a):
        return f"a {a.device.type} tensor of {a.dtype} does not reach the Triton kernels"
    dtypes = {str(tensor.dtype) for tensor in (a, proj, residual, weight)}
    if len(dtypes) > 1:
        return f"its operands must have one dtype, not {', '.join(sorted(dtypes))}"
    if a.dtype == torch.float32 and not dispatch.INTERPRETING:
        return "its tiles need 262 to 393 KB of shared memory in float32, more than the 227 KB there are"
    if a.is_cuda and torch.version.hip is None and torch.cuda.get_device_properties(a.device).major < 9:
        return "its tensor descriptors need compute capability 9.0"
    if any((size * a.element_size()) % 16 for size in proj.shape):
        return f"rows of {tuple(proj.shape)} are not multiples of 16 bytes"
    if not torch.compiler.is_compiling() and any(
        t.is_contiguous() and t.storage_offset() * t.element_size() % 16 for t in (a, proj, residual)
    ):  # what a compiler does not see, the launch copies
        return "its operands must start at a multiple of 16 bytes"
    if a.numel() == 0:
        return "there are no rows"
    return ""
