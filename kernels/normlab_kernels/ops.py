"""Launches of the row norms, and their registration with PyTorch.

`launch_forward` and `launch_backward` are the bodies, on 2-D rows with None for what a function lacks. Eager calls
reach them through `RowNorm`, an autograd function. The compiler sees the custom ops
`normlab_kernels::row_norm` and its backward, over the same bodies. A custom op costs the host twice as much per call,
and `triton_op`s fail `opcheck` in the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction

from normlab_kernels import choices
from normlab_kernels.cpu import FirstDerivative, mean_square_gradient, refuse_batches, unit_stride
from normlab_kernels.device_math import APPROX, LIBRARY, PORTABLE
from normlab_kernels.launch import INTERPRETING, launch
from normlab_kernels.row_kernels import norm_backward_kernel, norm_forward_kernel, parameter_gradients_kernel
from normlab_kernels.spec import RowSpec, Stat
from normlab_kernels.split_kernels import row_pull_kernel, row_statistics_kernel

Tensor = torch.Tensor


def tanh_form(dtype: torch.dtype, backward: bool = False) -> int:
    """The form of tanh and erf: the approximate one where the result is stored in 16 bits.

    Backward, 1 - tanh^2 doubles its error, which bf16 hides and fp16 does not.
    """
    if INTERPRETING or torch.version.hip is not None:
        return PORTABLE
    return APPROX if dtype == torch.bfloat16 or (dtype == torch.float16 and not backward) else LIBRARY


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Without a GPU as if there were two, so that tests meet partial sums and programs that share the work."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _rows(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    """A matrix with last stride 1, and its row stride."""
    if tensor is None:
        return None, 0
    tensor = unit_stride(tensor)
    return tensor, tensor.stride(0)


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a dense tensor; `empty_like` takes half the time of `empty`."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        return torch.empty_like(tensor)
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)


def _inv_kappa(spec: RowSpec, scale: Tensor | None) -> float:
    """kappa divides a scale: without one the gain is 1."""
    return 1.0 if scale is None else 1.0 / float(spec.kappa)


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, direction: Tensor | None, given: Tensor | None, spec: RowSpec, *,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(y, residual + x, mean, ms) of 2-D x; no gradients. `correction` is added to `given`."""
    device, stat = x.device, spec.stat
    rows, width = x.shape
    y, total, mean, ms = made = _outputs(x, residual, weight, direction, spec)
    if rows == 0:
        return made
    chosen = choices.forward(width, ms is not None)
    p_x, stride_x = _rows(x)
    p_residual, stride_residual = _rows(residual)
    p_total, direction = total, dense(direction)
    if ms is not None and not chosen.whole:
        reduction = choices.reduction(width)
        launch(
            row_statistics_kernel, (rows,), device, p_x, p_residual, direction, total, mean, ms,
            rows, width, stride_x, stride_residual,
            STAT=stat, BLOCK=reduction.block, num_warps=reduction.warps,
        )  # fmt: skip
        if total is not None:
            p_x, stride_x, p_residual, p_total = total, width, None, None
    launch(
        norm_forward_kernel, (-(-rows // chosen.rows), -(-width // chosen.block)), device,
        p_x, p_residual, weight.contiguous(), dense(bias), scale, shift, direction, mean,
        dense(given) if ms is None else ms, dense(correction), y, p_total,
        rows, width, stride_x, stride_residual, int(correction is not None and correction.numel() > 1),
        float(spec.eps), _inv_kappa(spec, scale),
        STAT=stat, ACT=spec.act, FORM=tanh_form(y.dtype),
        WHOLE=chosen.whole and ms is not None, EVEN=width % chosen.block == 0,
        BLOCK=chosen.block, ROWS=chosen.rows, num_warps=chosen.warps,
    )  # fmt: skip
    return made


def _outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor, direction: Tensor | None, spec: RowSpec
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    dtype, total, mean, ms = x.dtype, None, None, None
    if residual is not None:
        dtype = torch.promote_types(dtype, residual.dtype)
        total = _like(x, dtype)
    if spec.reduces:
        ms = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
        mean = torch.empty_like(ms) if _keeps_mean(spec.stat, direction) else None
    return _like(x, torch.promote_types(dtype, weight.dtype)), total, mean, ms


def _keeps_mean(stat: int, direction: Tensor | None) -> bool:
    """True if a row keeps a second number with its mean square: its mean, or x . direction."""
    return stat == Stat.LAYER or stat == Stat.COMPRESSED or direction is not None


def launch_backward(
    grad: Tensor, grad_sum: Tensor | None, grad_ms: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, direction: Tensor | None, mean: Tensor | None, ms: Tensor | None,
    spec: RowSpec, wants: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dx, dweight, dbias, dscale, dshift, ddirection, dms), each of its tensor's shape and dtype. `wants` says which
    of the last six; what is not wanted is not computed, and None."""
    device, stat = x.device, spec.stat
    rows, width = x.shape
    want_weight, want_bias, want_scale, want_shift, want_direction, _ = wants
    dx, *gradients, dms = made = _gradients(x, weight, bias, scale, shift, direction, wants)
    if rows == 0:
        return dx, *(None if g is None else g.zero_() for g in gradients), dms
    chosen = choices.backward(width, ms is not None, direction is not None, x.element_size())
    (x_, stride_x), (grad_, stride_grad), (grad_sum, stride_sum) = _rows(x), _rows(grad), _rows(grad_sum)
    weight, ms, eps, inv_kappa = weight.contiguous(), dense(ms), float(spec.eps), _inv_kappa(spec, scale)
    columns = -(-width // chosen.block)
    programs = choices.backward_programs(-(-rows // chosen.rows), max(1, multiprocessors(device) // columns), chosen)
    functions = {"STAT": stat, "ACT": spec.act, "FORM": tanh_form(x.dtype, backward=True)}
    gated = None if direction is None else dense(bias)
    along = second = None
    if ms is not None and not chosen.whole and (stat != Stat.GIVEN or dms is not None):
        along, second = torch.empty(2, rows, dtype=torch.float32, device=device).unbind(0)
        reduction = choices.reduction(width)
        launch(
            row_pull_kernel, (rows,), device, grad_, x_, weight, scale, shift, gated, mean, ms, along, second,
            width, stride_grad, stride_x, eps, inv_kappa,
            **functions, BLOCK=reduction.block, num_warps=reduction.warps,
        )  # fmt: skip
    vectors = want_weight + want_bias + want_direction
    size = programs * (vectors * width + (want_scale + want_shift) * columns)
    parts = torch.empty(size, dtype=torch.float32, device=device) if size else None
    launch(
        norm_backward_kernel, (programs, columns), device,
        grad_, grad_sum, dense(grad_ms), x_, weight, scale, shift, gated, dense(direction), mean, ms,
        along, second, dx, dms, parts,
        rows, width, stride_grad, stride_sum, stride_x, eps, inv_kappa,
        **functions, WANT_WEIGHT=want_weight, WANT_BIAS=want_bias, WANT_SCALE=want_scale, WANT_SHIFT=want_shift,
        WANT_DIRECTION=want_direction,
        WHOLE=chosen.whole, EVEN=width % chosen.block == 0, BLOCK=chosen.block, ROWS=chosen.rows,
        STAGES=chosen.stages, num_warps=chosen.warps,
    )  # fmt: skip
    if size:
        finish = choices.finish(width)
        launch(
            parameter_gradients_kernel, (-(-width // finish.block) if vectors else 1,), device,
            parts, *gradients, programs, width, columns,
            BLOCK=finish.block, ROWS=finish.rows, num_warps=finish.warps,
        )  # fmt: skip
    return made


def _gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    direction: Tensor | None, wants: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Room for dx, dweight, dbias, dscale, dshift, ddirection and dms; None for what is not wanted."""
    parameters = (weight, bias, scale, shift, direction)
    made = [None if p is None or not want else _like(p, p.dtype) for p, want in zip(parameters, wants, strict=False)]
    dms = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device) if wants[5] else None
    return _like(x, x.dtype), *made, dms


def _save(ctx: Any, inputs: tuple[Any, ...], total: Tensor | None, mean: Tensor | None, ms: Tensor | None) -> None:
    x, residual, weight, bias, scale, shift, direction, given, ctx.spec = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        x if residual is None else total, weight, bias, scale, shift, direction, mean, ms if given is None else given
    )


def _backward(
    ctx: Any, saved: tuple[Any, ...], run: Any, grad: Tensor | None, grad_sum: Tensor | None, grad_ms: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of the eight tensors. dx goes to x and to the residual; autograd gives each its dtype.

    Args:
        saved: the context's saved tensors, which a checkpoint unpacks once only.
        run: `launch_backward` or the custom op over it.
    """
    x, *parameters, mean, ms = saved
    _, added, *wants = ctx.needs_input_grad[:8]
    if grad is None:  # no parameter has a part in s or in ms, whatever a row holds
        dx, gradients, dms = grad_sum, [None] * 5, None
        if grad_ms is not None:
            dx = mean_square_gradient(x, grad_ms, grad_sum)
    else:
        dx, *gradients, dms = run(grad, grad_sum, grad_ms, x, *parameters, mean, ms, ctx.spec, wants)
    return dx, dx if added else None, *gradients, dms


class RowNorm(_SingleLevelFunction):
    """(y, residual + x, ms) of 2-D rows, eagerly. The context is filled in `forward`: see `dispatch._CpuRowNorm`. Not
    an `autograd.Function`, whose Python costs 5 us a call and serves functorch, which is refused."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        y, total, mean, ms = launch_forward(*inputs)
        _save(ctx, inputs, total, mean, ms)
        return y, total, ms if inputs[8].stat == Stat.RMS else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batches(*grads)
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *_backward(ctx, saved, launch_backward, *grads), None
        with torch.no_grad():
            gradients = _backward(ctx, saved, launch_backward, *grads)
        return *FirstDerivative.apply(len(gradients), *gradients, *grads, *saved), None


def _full(tensors: Sequence[Tensor | None], device: torch.device) -> tuple[Any, ...]:
    """A custom op returns tensors: an empty one for None."""
    return tuple(torch.empty(0, dtype=torch.float32, device=device) if t is None else t for t in tensors)


@torch.library.custom_op("normlab_kernels::row_norm", mutates_args=())
def row_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, direction: Tensor | None, given: Tensor | None, stat: int, act: int, eps: float, kappa: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`launch_forward` for the compiler; empty where the function has no such output."""
    spec = RowSpec(stat, act, eps, kappa)
    return _full(launch_forward(x, residual, weight, bias, scale, shift, direction, given, spec), x.device)


@row_norm.register_fake
def _(x, residual, weight, bias, scale, shift, direction, given, stat, act, eps, kappa):
    return _full(_outputs(x, residual, weight, direction, RowSpec(stat, act, eps, kappa)), x.device)


@torch.library.custom_op("normlab_kernels::row_norm_backward", mutates_args=())
def row_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, grad_ms: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, direction: Tensor | None, mean: Tensor | None, ms: Tensor | None,
    stat: int, act: int, eps: float, kappa: float, wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`launch_backward` for the compiler; empty where nothing is wanted."""
    spec = RowSpec(stat, act, eps, kappa)
    arguments = (grad, grad_sum, grad_ms, x, weight, bias, scale, shift, direction, mean, ms, spec, wants)
    return _full(launch_backward(*arguments), x.device)


@row_norm_backward.register_fake
def _(grad, grad_sum, grad_ms, x, weight, bias, scale, shift, direction, mean, ms, stat, act, eps, kappa, wants):
    return _full(_gradients(x, weight, bias, scale, shift, direction, wants), x.device)


def backward_op(*arguments: Any) -> tuple[Tensor | None, ...]:
    """`launch_backward` through the custom op."""
    *tensors, spec, wants = arguments
    made = row_norm_backward(*tensors, *spec, wants)
    return made[0], *(value if want else None for value, want in zip(made[1:], wants, strict=True))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    spec, (_, total, mean, ms) = RowSpec(*inputs[8:]), output
    ctx.added = inputs[1] is not None
    kept = mean if _keeps_mean(spec.stat, inputs[6]) else None
    _save(ctx, (*inputs[:8], spec), total, kept, ms if spec.reduces else None)


def _op_backward(ctx: Any, grad: Any, grad_sum: Any, _: Any, grad_ms: Any) -> tuple[Any, ...]:
    gradients = _backward(ctx, ctx.saved_tensors, backward_op, grad, grad_sum if ctx.added else None, grad_ms)
    return *gradients, None, None, None, None


row_norm.register_autograd(_op_backward, setup_context=_setup_context)
