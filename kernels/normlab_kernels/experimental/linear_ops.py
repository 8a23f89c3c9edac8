"""The fused projection as a PyTorch custom op: launch, shapes for the compiler, gradients through the row norm's
backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from normlab_kernels.experimental import linear_choices
from normlab_kernels.experimental.linear_kernel import linear_add_norm_kernel
from normlab_kernels.launch import INTERPRETING
from normlab_kernels.launch import launch as launch_kernel
from normlab_kernels.ops import backward_op, dense, multiprocessors, tanh_form
from normlab_kernels.spec import RowSpec

Tensor = torch.Tensor


@torch.library.custom_op("normlab_kernels::linear_add_norm", mutates_args=())
def linear_add_norm(
    a: Tensor, proj: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor,
    given: Tensor | None, stat: int, act: int, eps: float, kappa: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(h, y) of 2-D operands of one dtype whose rows are multiples of 16 bytes."""
    return launch_linear(a, proj, residual, weight, bias, scale, given, RowSpec(stat, act, eps, kappa))


def launch_linear(
    a: Tensor, proj: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor,
    given: Tensor | None, spec: RowSpec,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The body of `linear_add_norm`; no gradients."""
    h, y = _outputs(residual)
    rows, width = residual.shape
    name = torch.cuda.get_device_properties(a.device).name if a.is_cuda else a.device.type
    launch = linear_choices.product(name, rows, *proj.shape)
    tiles = triton.cdiv(rows, launch.block_m) * triton.cdiv(width, launch.block_n)
    programs = min(tiles, multiprocessors(a.device) * launch.programs)
    across = launch.block_n // launch.slices
    operands = (
        _descriptor(a, launch.block_m, launch.block_k),
        _descriptor(proj, launch.block_n, launch.block_k),
        _descriptor(residual, launch.block_m, launch.block_n if launch.from_residual else across),
    )
    launch_kernel(
        linear_add_norm_kernel, (programs,), a.device,
        *operands, *(_descriptor(t, launch.block_m, across) for t in (h, y)),
        weight.contiguous(), dense(bias), scale, dense(given),
        rows, width, a.shape[1], float(spec.eps), 1.0 / float(spec.kappa),
        ACT=spec.act, FORM=tanh_form(y.dtype), UPCAST=INTERPRETING and a.dtype == torch.bfloat16,
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, SLICES=launch.slices,
        GROUP=launch.group, PROGRAMS=programs,
        FLATTEN=launch.flatten, FROM_RESIDUAL=launch.from_residual, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return h, y


def _descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    """A descriptor of the tensor, made dense, from a multiple of 16 bytes on."""
    tensor = tensor.contiguous()
    return TensorDescriptor.from_tensor(tensor.clone() if tensor.data_ptr() % 16 else tensor, [*block])


def _outputs(residual: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    return h, torch.empty_like(h)


@linear_add_norm.register_fake
def _(a, proj, residual, weight, bias, scale, given, stat, act, eps, kappa):
    return _outputs(residual)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, proj, _, *norm = inputs[:7]
    ctx.set_materialize_grads(False)
    ctx.spec = RowSpec(*inputs[7:])
    ctx.save_for_backward(a, proj, *norm, output[0])


def _backward(ctx: Any, grad_h: Tensor | None, grad_y: Tensor | None) -> tuple[Any, ...]:
    a, proj, weight, bias, scale, given, h = ctx.saved_tensors
    dh, dweight, dbias, dscale, dms = grad_h, None, None, None, None
    need_a, need_proj, _, *wants, want_ms = ctx.needs_input_grad[:7]
    if grad_y is not None:
        saved, wants = (h, weight, bias, scale, None, None, None, given), [*wants, False, False, want_ms]
        dh, dweight, dbias, dscale, _, _, dms = backward_op(grad_y, grad_h, None, *saved, ctx.spec, wants)
    da = dh @ proj if need_a and dh is not None else None
    dproj = dh.t() @ a if need_proj and dh is not None else None
    return da, dproj, dh, dweight, dbias, dscale, dms, None, None, None, None


linear_add_norm.register_autograd(_backward, setup_context=_setup_context)
