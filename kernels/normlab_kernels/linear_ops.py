"""The fused projection as a PyTorch custom op: launch, shapes for the compiler, gradients through the row norm's
backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from normlab_kernels import ladder
from normlab_kernels.launch import launch as launch_kernel
from normlab_kernels.linear_kernel import linear_add_norm_kernel
from normlab_kernels.ops import backward_op, multiprocessors, tanh_form
from normlab_kernels.spec import RowSpec, Stat

Tensor = torch.Tensor


@torch.library.custom_op("normlab_kernels::linear_add_norm", mutates_args=())
def linear_add_norm(
    a: Tensor, proj: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor,
    given: Tensor | None, stat: int, act: int, eps: float, kappa: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(h, y) of 2-D operands of one dtype whose rows are multiples of 16 bytes."""
    launch = ladder.INTERPRETER_LINEAR
    if a.device.type == "cuda":
        win = ladder.fusion_win(torch.cuda.get_device_properties(a.device).name, a.shape[0], *proj.shape)
        launch = ladder.linear(residual.shape[1]) if win is None else win.launch
    return launch_linear(a, proj, residual, weight, bias, scale, given, stat, act, eps, kappa, launch)


def launch_linear(
    a: Tensor, proj: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor,
    given: Tensor | None, stat: int, act: int, eps: float, kappa: float, launch: ladder.LinearLaunch,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`linear_add_norm`, launched as asked; no gradients."""
    h, y = _outputs(residual)
    rows, width = residual.shape
    interpreting = a.device.type != "cuda"
    tiles = triton.cdiv(rows, launch.block_m) * triton.cdiv(width, launch.block_n)
    programs = min(tiles, (multiprocessors(a.device) or 2) * launch.programs)
    weight = weight.contiguous()
    pairs = ((a, launch.block_m), (proj, launch.block_n))
    operands = [TensorDescriptor.from_tensor(_aligned(t), [block, launch.block_k]) for t, block in pairs]
    slice_shape = [launch.block_m, launch.block_n // launch.slices]
    residual_shape = [launch.block_m, launch.block_n] if launch.from_residual else slice_shape
    operands.append(TensorDescriptor.from_tensor(_aligned(residual), residual_shape))
    outputs = [TensorDescriptor.from_tensor(t, slice_shape) for t in (h, y)]
    launch_kernel(
        linear_add_norm_kernel, (programs,), a.device,
        *operands, *outputs, weight, weight if bias is None else bias.contiguous(), scale,
        scale if given is None else given.contiguous(),
        rows, width, a.shape[1], eps, 1.0 / kappa,
        HAS_MS=stat == Stat.GIVEN, HAS_BIAS=bias is not None, ACT=act, FORM=tanh_form(a.device, y.dtype),
        UPCAST=interpreting and a.dtype == torch.bfloat16,
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, SLICES=launch.slices,
        GROUP=launch.group, PROGRAMS=programs,
        FLATTEN=launch.flatten, FROM_RESIDUAL=launch.from_residual, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return h, y


def _aligned(tensor: Tensor) -> Tensor:
    """Dense, from a multiple of 16 bytes on, as a descriptor has to be."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


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
        saved, wants = (h, weight, bias, scale, None, None, given), [*wants, False, want_ms]
        dh, dweight, dbias, dscale, _, dms = backward_op(grad_y, grad_h, None, *saved, ctx.spec, wants)
    da = dh @ proj if need_a and dh is not None else None
    dproj = dh.t() @ a if need_proj and dh is not None else None
    return da, dproj, dh, dweight, dbias, dscale, dms, None, None, None, None


linear_add_norm.register_autograd(_backward, setup_context=_setup_context)
