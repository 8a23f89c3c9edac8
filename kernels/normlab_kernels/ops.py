"""The row norm as PyTorch custom ops: launches, shapes for the compiler, gradients.

`normlab_kernels::row_norm` and its backward take 2-D rows and every function's arguments; what a function lacks is
None going in and an empty tensor coming out. They are custom ops (not `triton_op`s) so that `opcheck`,
`torch.compile(fullgraph=True)` and plain autograd see the same thing, in Triton's interpreter too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from normlab_kernels import ladder
from normlab_kernels.cpu import unit_stride
from normlab_kernels.device_math import APPROX, LIBRARY, PORTABLE
from normlab_kernels.launch import on_device
from normlab_kernels.row_kernels import norm_backward_kernel, norm_forward_kernel
from normlab_kernels.spec import Stat
from normlab_kernels.split_kernels import row_pull_kernel, row_statistics_kernel

Tensor = torch.Tensor
INTERPRETER_PROGRAMS = 3  # programs of a backward pass without a device: more than one, so that tests meet partial sums


def tanh_form(device: torch.device, *dtypes: torch.dtype) -> int:
    """Which form of tanh: the approximate one only where every result is stored in 16 bits."""
    if device.type != "cuda" or torch.version.hip is not None:
        return PORTABLE
    return APPROX if all(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes) else LIBRARY


def backward_tanh_form(device: torch.device, dtype: torch.dtype) -> int:
    """1 - tanh^2 doubles the approximation's error, which bf16 hides and fp16 does not."""
    return tanh_form(device, torch.float32 if dtype == torch.float16 else dtype)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _programs(tiles: int, launch: ladder.Launch, device: torch.device, columns: int) -> int:
    processors = _multiprocessors(device)
    if processors == 0:
        return max(1, min(tiles, INTERPRETER_PROGRAMS))
    return ladder.backward_programs(tiles, max(1, processors // columns), launch)


def _empty(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=x.device)


@torch.library.custom_op("normlab_kernels::row_norm", mutates_args=())
def row_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    given: Tensor | None,
    stat: int,
    act: int,
    eps: float,
    kappa: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, residual + x, mean, ms) of 2-D x; empty where the function has none."""
    launch = ladder.forward(x.shape[1], stat in (Stat.RMS, Stat.LAYER))
    return launch_forward(x, residual, weight, bias, scale, shift, given, stat, act, eps, kappa, launch)


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    given: Tensor | None,
    stat: int,
    act: int,
    eps: float,
    kappa: float,
    launch: ladder.Launch,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`row_norm`, launched as asked; no gradients."""
    y, total, mean, ms = _outputs(x, residual, weight, stat)
    rows, width = x.shape
    if x.numel() == 0:
        return y, total, mean, ms.zero_()
    x = unit_stride(x)
    residual_rows = x if residual is None else unit_stride(residual)
    reduces = stat in (Stat.RMS, Stat.LAYER)
    has_residual = residual is not None
    if reduces and not launch.whole:
        reduction = ladder.reduction(width)
        on_device(row_statistics_kernel, (rows,), x.device)(
            x, residual_rows, total, mean, ms, rows, width, x.stride(0), residual_rows.stride(0),
            STAT=stat, HAS_RESIDUAL=has_residual, BLOCK=reduction.block, num_warps=reduction.warps,
        )  # fmt: skip
        if has_residual:
            x, has_residual = total, False
    grid = (triton.cdiv(rows, launch.rows), triton.cdiv(width, launch.block))
    on_device(norm_forward_kernel, grid, x.device)(
        x, residual_rows, weight.contiguous(), _or(bias, weight), _or(scale, weight), _or(shift, weight),
        mean, _or(given, ms), y, total,
        rows, width, x.stride(0), residual_rows.stride(0), eps, 1.0 / kappa,
        STAT=stat, ACT=act, FORM=tanh_form(x.device, y.dtype), HAS_RESIDUAL=has_residual, HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None, HAS_SHIFT=shift is not None,
        WHOLE=launch.whole and reduces, EVEN=width % launch.block == 0,
        BLOCK=launch.block, ROWS=launch.rows, num_warps=launch.warps,
    )  # fmt: skip
    return y, total, mean, ms


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A dense tensor for the kernel: the argument, or a stand-in that it will not read."""
    return other if tensor is None else tensor.contiguous()


def _outputs(x: Tensor, residual: Tensor | None, weight: Tensor, stat: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    total_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = torch.empty(x.shape, dtype=torch.promote_types(total_dtype, weight.dtype), device=x.device)
    total = _empty(x) if residual is None else torch.empty(x.shape, dtype=total_dtype, device=x.device)
    mean = torch.empty(rows, 1, dtype=torch.float32, device=x.device) if stat == Stat.LAYER else _empty(x)
    reduces = stat in (Stat.RMS, Stat.LAYER)
    ms = torch.empty(rows, 1, dtype=torch.float32, device=x.device) if reduces else _empty(x)
    return y, total, mean, ms


@row_norm.register_fake
def _(x, residual, weight, bias, scale, shift, given, stat, act, eps, kappa):
    return _outputs(x, residual, weight, stat)


@torch.library.custom_op("normlab_kernels::row_norm_backward", mutates_args=())
def row_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    grad_ms: Tensor | None,
    x: Tensor,
    weight: Tensor,
    has_bias: bool,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor | None,
    ms: Tensor | None,
    stat: int,
    act: int,
    eps: float,
    kappa: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias, dscale, dshift, dms), the parameters' in fp32; empty where the function has none."""
    launch = ladder.backward(x.shape[1], stat != Stat.NONE)
    return launch_backward(
        grad, grad_sum, grad_ms, x, weight, has_bias, scale, shift, mean, ms, stat, act, eps, kappa, launch
    )


def launch_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    grad_ms: Tensor | None,
    x: Tensor,
    weight: Tensor,
    has_bias: bool,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor | None,
    ms: Tensor | None,
    stat: int,
    act: int,
    eps: float,
    kappa: float,
    launch: ladder.Launch,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`row_norm_backward`, launched as asked."""
    rows, width = x.shape
    dx, dms = _backward_rows(x, stat)
    if x.numel() == 0:
        zero = torch.zeros(width, device=x.device)
        return dx, zero, zero.clone(), zero.new_zeros(1), zero.new_zeros(1), dms
    x, grad = unit_stride(x), unit_stride(grad)
    grad_sum_rows = grad if grad_sum is None else unit_stride(grad_sum)
    whole = launch.whole and stat != Stat.NONE
    columns = triton.cdiv(width, launch.block)
    programs = _programs(triton.cdiv(rows, launch.rows), launch, x.device, columns)
    form = backward_tanh_form(x.device, x.dtype)
    unused = _or(ms, dms)
    along = mean_q = dms
    if stat != Stat.NONE and not whole:
        along, mean_q = torch.empty(2, rows, dtype=torch.float32, device=x.device).unbind(0)
        reduction = ladder.reduction(width)
        on_device(row_pull_kernel, (rows,), x.device)(
            grad, x, weight.contiguous(), _or(scale, weight), _or(shift, weight), _or(mean, unused), unused,
            along, mean_q, width, grad.stride(0), x.stride(0), eps, 1.0 / kappa,
            STAT=stat, ACT=act, FORM=form, HAS_SCALE=scale is not None, HAS_SHIFT=shift is not None,
            BLOCK=reduction.block, num_warps=reduction.warps,
        )  # fmt: skip
    dweight = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    dbias = torch.empty_like(dweight) if has_bias else dweight
    dscale, dshift = torch.empty(2, programs * columns, dtype=torch.float32, device=x.device).unbind(0)
    on_device(norm_backward_kernel, (programs, columns), x.device)(
        grad, grad_sum_rows, _or(grad_ms, unused), x, weight.contiguous(), _or(scale, weight), _or(shift, weight),
        _or(mean, unused), unused, along, mean_q, dx, dms, dweight, dbias, dscale, dshift,
        rows, width, grad.stride(0), grad_sum_rows.stride(0), x.stride(0), eps, 1.0 / kappa,
        STAT=stat, ACT=act, FORM=form, HAS_GRAD_SUM=grad_sum is not None, HAS_GRAD_MS=grad_ms is not None,
        HAS_BIAS=has_bias, HAS_SCALE=scale is not None, HAS_SHIFT=shift is not None,
        WHOLE=whole, EVEN=width % launch.block == 0, BLOCK=launch.block, ROWS=launch.rows,
        STAGES=launch.stages, num_warps=launch.warps,
    )  # fmt: skip
    one = _empty(x)
    return (
        dx,
        dweight.sum(0),
        dbias.sum(0) if has_bias else one,
        dscale.sum(0, keepdim=True) if scale is not None else one.clone(),
        dshift.sum(0, keepdim=True) if shift is not None else one.clone(),
        dms,
    )


def _backward_rows(x: Tensor, stat: int) -> tuple[Tensor, Tensor]:
    dms = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device) if stat == Stat.GIVEN else _empty(x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), dms


@row_norm_backward.register_fake
def _(grad, grad_sum, grad_ms, x, weight, has_bias, scale, shift, mean, ms, stat, act, eps, kappa):
    dx, dms = _backward_rows(x, stat)

    def vector(present: bool, size: Any) -> Tensor:
        return torch.empty(size if present else 0, dtype=torch.float32, device=x.device)

    width = x.shape[1]
    dscale, dshift = vector(scale is not None, 1), vector(shift is not None, 1)
    return dx, vector(True, width), vector(has_bias, width), dscale, dshift, dms


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, scale, shift, given, *ctx.constants = inputs
    _, total, mean, ms = output
    ctx.set_materialize_grads(False)
    ctx.has_bias = bias is not None
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.x_dtype = x.dtype
    stat = ctx.constants[0]
    kept_ms = given if stat == Stat.GIVEN else (None if stat == Stat.NONE else ms)
    rows = x if residual is None else total
    ctx.save_for_backward(rows, weight, scale, shift, mean if stat == Stat.LAYER else None, kept_ms)


def _backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: Tensor | None, grad_ms: Tensor | None) -> Any:
    x, weight, scale, shift, mean, ms = ctx.saved_tensors
    none = (None,) * 4
    if grad is None and grad_sum is None and grad_ms is None:
        return (None,) * 7 + none
    if grad is None:
        grad = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if ctx.residual_dtype is None:
        grad_sum = None
    if ctx.constants[0] != Stat.RMS:
        grad_ms = None
    dx, dweight, dbias, dscale, dshift, dms = row_norm_backward(
        grad, grad_sum, grad_ms, x, weight, ctx.has_bias, scale, shift, mean, ms, *ctx.constants
    )
    dresidual = None if ctx.residual_dtype is None else dx.to(ctx.residual_dtype)
    return (
        dx.to(ctx.x_dtype),
        dresidual,
        dweight.to(weight.dtype),
        dbias.to(weight.dtype) if ctx.has_bias else None,
        None if scale is None else dscale.to(scale.dtype).reshape(scale.shape),
        None if shift is None else dshift.to(shift.dtype).reshape(shift.shape),
        dms if ctx.constants[0] == Stat.GIVEN else None,
        *none,
    )


row_norm.register_autograd(_backward, setup_context=_setup_context)
