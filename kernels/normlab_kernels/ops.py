"""Launches of the row norms, and what PyTorch is told about them.

`launch_forward` and `launch_backward` are the bodies, on 2-D rows with None for what a function lacks. Eager calls
reach them through `RowNorm`, an autograd function; the compiler and functorch see the custom ops
`normlab_kernels::row_norm` and its backward, over the same bodies (a custom op costs the host twice as much a call, and
`triton_op`s fail `opcheck` in the interpreter).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton

from normlab_kernels import ladder
from normlab_kernels.cpu import mean_square_gradient, unit_stride
from normlab_kernels.device_math import APPROX, LIBRARY, PORTABLE
from normlab_kernels.launch import launch
from normlab_kernels.row_kernels import norm_backward_kernel, norm_forward_kernel, parameter_gradients_kernel
from normlab_kernels.spec import Act, RowSpec, Stat
from normlab_kernels.split_kernels import row_pull_kernel, row_statistics_kernel

Tensor = torch.Tensor
INTERPRETER_PROGRAMS = 3  # programs of a backward pass without a device: more than one, so that tests meet partial sums


def tanh_form(device: torch.device, *dtypes: torch.dtype) -> int:
    """Which form of tanh and erf: the approximate one only where every result is stored in 16 bits."""
    if device.type != "cuda" or torch.version.hip is not None:
        return PORTABLE
    return APPROX if all(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes) else LIBRARY


def backward_tanh_form(device: torch.device, dtype: torch.dtype) -> int:
    """1 - tanh^2 doubles the approximation's error, which bf16 hides and fp16 does not."""
    return tanh_form(device, torch.float32 if dtype == torch.float16 else dtype)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _programs(tiles: int, chosen: ladder.Launch, device: torch.device, columns: int) -> int:
    processors = _multiprocessors(device)
    if processors == 0:
        return max(1, min(tiles, INTERPRETER_PROGRAMS))
    return ladder.backward_programs(tiles, max(1, processors // columns), chosen)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, given: Tensor | None, spec: RowSpec, *, correction: Tensor | None = None,
    chosen: ladder.Launch | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(y, residual + x, mean, ms) of 2-D x; no gradients. `correction` is added to `given`."""
    stat, device = spec.stat, x.device
    rows, width = x.shape
    y, total, mean, ms = _outputs(x, residual, weight, stat)
    if rows == 0:
        return y, total, mean, ms
    chosen = chosen or ladder.forward(width, ms is not None)
    x = unit_stride(x)
    stride_residual, p_total = 0, total
    if residual is not None:
        residual = unit_stride(residual)
        stride_residual = residual.stride(0)
    if ms is not None and not chosen.whole:
        reduction = ladder.reduction(width)
        launch(
            row_statistics_kernel, (rows,), device, x, residual, total, mean, ms,
            rows, width, x.stride(0), stride_residual,
            STAT=int(stat), BLOCK=reduction.block, num_warps=reduction.warps,
        )  # fmt: skip
        if total is not None:
            x, residual, p_total = total, None, None
    launch(
        norm_forward_kernel, (triton.cdiv(rows, chosen.rows), triton.cdiv(width, chosen.block)), device,
        x, residual, weight.contiguous(), _dense(bias), scale, shift, mean, _dense(given) if ms is None else ms,
        _dense(correction), y, p_total,
        rows, width, x.stride(0), stride_residual, int(correction is not None and correction.numel() > 1),
        spec.eps, 1.0 / spec.kappa,
        STAT=int(stat), ACT=int(spec.act), FORM=tanh_form(device, y.dtype),
        WHOLE=chosen.whole and ms is not None, EVEN=width % chosen.block == 0,
        BLOCK=chosen.block, ROWS=chosen.rows, num_warps=chosen.warps,
    )  # fmt: skip
    return y, total, mean, ms


def _outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor, stat: int
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    dtype, total, mean, ms = x.dtype, None, None, None
    if residual is not None:
        dtype = dtype if residual.dtype == dtype else torch.promote_types(dtype, residual.dtype)
        total = torch.empty(x.shape, dtype=dtype, device=x.device)
    dtype = dtype if weight.dtype == dtype else torch.promote_types(dtype, weight.dtype)
    if stat == Stat.RMS or stat == Stat.LAYER:
        ms = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
        mean = torch.empty_like(ms) if stat == Stat.LAYER else None
    return torch.empty(x.shape, dtype=dtype, device=x.device), total, mean, ms


def launch_backward(
    grad: Tensor, grad_sum: Tensor | None, grad_ms: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, mean: Tensor | None, ms: Tensor | None, spec: RowSpec,
    wants: Sequence[bool], *, chosen: ladder.Launch | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dx, dweight, dbias, dscale, dshift, dms), each of its tensor's shape and dtype. `wants` says which of the last
    five; what is not wanted is not computed, and None."""
    stat, device = spec.stat, x.device
    rows, width = x.shape
    want_weight, want_bias, want_scale, want_shift, _ = wants
    dx, *gradients, dms = _gradients(x, weight, bias, scale, shift, wants)
    if rows == 0:
        return dx, *(None if g is None else g.zero_() for g in gradients), dms
    chosen = chosen or ladder.backward(width, stat != Stat.NONE)
    x, grad, weight = unit_stride(x), unit_stride(grad), weight.contiguous()
    stride_sum = 0
    if grad_sum is not None:
        grad_sum = unit_stride(grad_sum)
        stride_sum = grad_sum.stride(0)
    ms = _dense(ms)
    columns = triton.cdiv(width, chosen.block)
    programs = _programs(triton.cdiv(rows, chosen.rows), chosen, device, columns)
    functions = {"STAT": int(stat), "ACT": int(spec.act), "FORM": backward_tanh_form(device, x.dtype)}
    along = mean_q = None
    if stat != Stat.NONE and not chosen.whole and (stat != Stat.GIVEN or dms is not None):
        along, mean_q = torch.empty(2, rows, dtype=torch.float32, device=device).unbind(0)
        reduction = ladder.reduction(width)
        launch(
            row_pull_kernel, (rows,), device, grad, x, weight, scale, shift, mean, ms, along, mean_q,
            width, grad.stride(0), x.stride(0), spec.eps, 1.0 / spec.kappa,
            **functions, BLOCK=reduction.block, num_warps=reduction.warps,
        )  # fmt: skip
    size = programs * ((want_weight + want_bias) * width + (want_scale + want_shift) * columns)
    parts = torch.empty(size, dtype=torch.float32, device=device) if size else None
    launch(
        norm_backward_kernel, (programs, columns), device,
        grad, grad_sum, _dense(grad_ms), x, weight, scale, shift, mean, ms, along, mean_q, dx, dms, parts,
        rows, width, grad.stride(0), stride_sum, x.stride(0), spec.eps, 1.0 / spec.kappa,
        **functions, WANT_WEIGHT=want_weight, WANT_BIAS=want_bias, WANT_SCALE=want_scale, WANT_SHIFT=want_shift,
        WHOLE=chosen.whole, EVEN=width % chosen.block == 0, BLOCK=chosen.block, ROWS=chosen.rows,
        STAGES=chosen.stages, num_warps=chosen.warps,
    )  # fmt: skip
    if size:
        finish = ladder.finish(width)
        launch(
            parameter_gradients_kernel, (triton.cdiv(width, finish.block) if want_weight or want_bias else 1,), device,
            parts, *gradients, programs, width, columns,
            BLOCK=finish.block, ROWS=finish.rows, num_warps=finish.warps,
        )  # fmt: skip
    return dx, *gradients, dms


def _gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, wants: Sequence[bool]
) -> list[Any]:
    """Room for dx, dweight, dbias, dscale, dshift and dms; None for what is not wanted."""
    pairs = zip((weight, bias, scale, shift), wants, strict=False)
    parameters = [torch.empty(p.shape, dtype=p.dtype, device=x.device) if want else None for p, want in pairs]  # type: ignore[union-attr]
    dms = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device) if wants[4] else None
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device), *parameters, dms]


def _save(ctx: Any, inputs: tuple[Any, ...], total: Tensor | None, mean: Tensor | None, ms: Tensor | None) -> None:
    x, residual, weight, bias, scale, shift, given = inputs
    ctx.set_materialize_grads(False)
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.save_for_backward(
        x if residual is None else total, weight, bias, scale, shift, mean, given if given is not None else ms
    )


def _backward(
    ctx: Any, run: Any, spec: RowSpec, grad: Tensor | None, grad_sum: Tensor | None, grad_ms: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of the seven tensors; `run` is `launch_backward` or the custom op over it."""
    x, weight, bias, scale, shift, mean, ms = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    if residual_dtype is None:
        grad_sum = None
    if grad is None:  # no parameter has a part in s or in ms, whatever a row holds
        dx, parameters, dms = grad_sum, (None,) * 4, None
        if grad_ms is not None:
            dx = mean_square_gradient(x, grad_ms, grad_sum)
    else:
        _, _, *wants = ctx.needs_input_grad[:7]
        dx, *parameters, dms = run(grad, grad_sum, grad_ms, x, weight, bias, scale, shift, mean, ms, spec, wants)
    dresidual = None
    if dx is not None:
        dresidual = None if residual_dtype is None else dx.to(residual_dtype)
        dx = dx.to(x_dtype)
    return dx, dresidual, *parameters, dms


class RowNorm(torch.autograd.Function):
    """(y, residual + x, ms) of 2-D rows, eagerly. The context is filled in `forward`: see `dispatch._CpuRowNorm`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        y, total, mean, ms = launch_forward(*inputs)
        spec = inputs[-1]
        _save(ctx, inputs[:-1], total, mean, ms)
        ctx.spec = spec
        return y, total, ms if spec.stat == Stat.RMS else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, launch_backward, ctx.spec, *grads), None


def _full(tensors: Sequence[Tensor | None], device: torch.device) -> tuple[Any, ...]:
    """A custom op returns tensors: an empty one for None."""
    return tuple(torch.empty(0, dtype=torch.float32, device=device) if t is None else t for t in tensors)


@torch.library.custom_op("normlab_kernels::row_norm", mutates_args=())
def row_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, given: Tensor | None, stat: int, act: int, eps: float, kappa: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`launch_forward` for the compiler; empty where the function has no such output."""
    spec = RowSpec(Stat(stat), Act(act), eps, kappa)
    return _full(launch_forward(x, residual, weight, bias, scale, shift, given, spec), x.device)


@row_norm.register_fake
def _(x, residual, weight, bias, scale, shift, given, stat, act, eps, kappa):
    return _full(_outputs(x, residual, weight, stat), x.device)


@torch.library.custom_op("normlab_kernels::row_norm_backward", mutates_args=())
def row_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, grad_ms: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, mean: Tensor | None, ms: Tensor | None, stat: int, act: int,
    eps: float, kappa: float, wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`launch_backward` for the compiler; empty where nothing is wanted."""
    spec = RowSpec(Stat(stat), Act(act), eps, kappa)
    arguments = (grad, grad_sum, grad_ms, x, weight, bias, scale, shift, mean, ms, spec, wants)
    return _full(launch_backward(*arguments), x.device)


@row_norm_backward.register_fake
def _(grad, grad_sum, grad_ms, x, weight, bias, scale, shift, mean, ms, stat, act, eps, kappa, wants):
    return _full(_gradients(x, weight, bias, scale, shift, wants), x.device)


def backward_op(*arguments: Any) -> tuple[Tensor | None, ...]:
    """`launch_backward` through the custom op."""
    *tensors, spec, wants = arguments
    made = row_norm_backward(*tensors, int(spec.stat), int(spec.act), spec.eps, spec.kappa, wants)
    return made[0], *(value if want else None for value, want in zip(made[1:], wants, strict=True))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, stat, act, eps, kappa = inputs
    ctx.spec = RowSpec(Stat(stat), Act(act), eps, kappa)
    _, total, mean, ms = output
    reduced = stat in (Stat.RMS, Stat.LAYER)
    _save(ctx, tuple(tensors), total, mean if stat == Stat.LAYER else None, ms if reduced else None)


def _op_backward(ctx: Any, grad: Any, grad_sum: Any, _: Any, grad_ms: Any) -> tuple[Any, ...]:
    grad_ms = grad_ms if ctx.spec.stat == Stat.RMS else None
    return *_backward(ctx, backward_op, ctx.spec, grad, grad_sum, grad_ms), None, None, None, None


row_norm.register_autograd(_op_backward, setup_context=_setup_context)
