"""Which implementation a call takes, and the checks that all implementations share."""

from __future__ import annotations

from typing import Any

import torch

from normlab_kernels import cpu
from normlab_kernels.reference import row_norm_reference
from normlab_kernels.spec import RowSpec, Stat

try:
    import triton

    from normlab_kernels import ops

    TRITON = True
    INTERPRETING = bool(triton.knobs.runtime.interpret)  # fixed when the kernels are decorated, at import
except ImportError:  # the PyTorch path needs no Triton
    TRITON = INTERPRETING = False

Tensor = torch.Tensor


def check(x: Tensor, weight: Tensor, bias: Tensor | None, one: dict[str, Tensor | None], given: Tensor | None) -> None:
    """ValueError with a sentence if the arguments do not fit; `one` are those with a single element."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x):
        raise ValueError("the norms take any leading shape: call them on the whole tensor instead of under torch.vmap")
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"a norm needs a floating-point tensor of shape (..., d), got {x.dtype} {tuple(x.shape)}")
    width = x.shape[-1]
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != (width,):
            raise ValueError(f"{name} must have shape ({width},), the last dimension of x, got {tuple(vector.shape)}")
    for name, scalar in one.items():
        if scalar is not None and scalar.numel() != 1:
            raise ValueError(f"{name} must have one element, got shape {tuple(scalar.shape)}")
    if given is not None and given.shape != (*x.shape[:-1], 1):
        raise ValueError(f"mean_square must have shape {(*x.shape[:-1], 1)}, got {tuple(given.shape)}")


class _CpuRowNorm(torch.autograd.Function):
    """cpu.forward and cpu.backward on 2-D rows; torch.func transforms refuse it with a sentence.

    The context is filled in `forward`: a separate `setup_context` costs 15 us a call (PyTorch binds the arguments anew
    each time), a third of the whole norm at width 128.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        given: Tensor | None,
        spec: RowSpec,
    ) -> tuple[Tensor, Tensor | None]:
        y, ms = cpu.forward(x, weight, bias, scale, shift, given, spec)
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.save_for_backward(x, weight, scale, shift, given if ms is None else ms)
        return y, ms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_ms: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, scale, shift, ms = ctx.saved_tensors
        if grad is None:
            if grad_ms is None:
                return (None,) * 7
            grad = torch.zeros((), dtype=x.dtype).expand(x.shape)
        grad = cpu.unit_stride(grad)
        dx, dms, sums = cpu.backward(grad, grad_ms, x, weight, scale, shift, ms, ctx.spec, ctx.needs_input_grad)

        def like(value: Tensor | None, parameter: Tensor | None) -> Tensor | None:
            return None if value is None or parameter is None else value.to(parameter.dtype).reshape(parameter.shape)

        return (
            dx,
            like(sums.weight, weight),
            like(sums.bias, weight),
            like(sums.scale, scale),
            like(sums.shift, shift),
            dms,
            None,
        )


def row_norm(
    x: Tensor,
    weight: Tensor,
    *,
    spec: RowSpec,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    given: Tensor | None = None,
    residual: Tensor | None = None,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(y, ms, s) of any row norm; s = residual + x when there is a residual, and then y is the norm of s."""
    check(x, weight, bias, {"scale": scale, "shift": shift}, given)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}")
    if chooses_kernels(x, kernels):
        return _triton_path(x, residual, weight, bias, scale, shift, given, spec)
    s = None
    if residual is not None:
        s = x = residual + x
    y, ms = _torch_path(x, weight, bias, scale, shift, given, spec)
    return y, ms, s


def takes_kernels(x: Tensor) -> bool:
    """Whether x goes to the Triton kernels: on CUDA with Triton there, or anywhere in its interpreter; never in
    fp64."""
    return TRITON and (x.device.type == "cuda" or INTERPRETING) and x.dtype != torch.float64


def chooses_kernels(x: Tensor, kernels: str) -> bool:
    """Whether the caller's choice, "auto", "triton" or "torch", means the Triton kernels for x."""
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(f'kernels is {kernels!r}: choose "auto", "triton" or "torch"')
    able = takes_kernels(x)
    if kernels == "triton" and not able:
        why = "Triton is not installed" if not TRITON else f"they take no {x.dtype} tensor on {x.device}"
        raise ValueError(f'kernels="triton": the kernels cannot run, {why}; use "auto" or "torch"')
    return able and kernels != "torch"


def _triton_path(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    given: Tensor | None,
    spec: RowSpec,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    shape, width = x.shape, x.shape[-1]
    y, total, _, ms = ops.row_norm(
        x.reshape(-1, width),
        None if residual is None else residual.reshape(-1, width),
        weight,
        bias,
        scale,
        shift,
        None if given is None else given.reshape(-1, 1).float(),
        int(spec.stat),
        int(spec.act),
        spec.eps,
        spec.kappa,
    )
    return (
        y.view(shape),
        ms.view(*shape[:-1], 1) if spec.stat is Stat.RMS else None,
        None if residual is None else total.view(shape),
    )


def _torch_path(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    given: Tensor | None,
    spec: RowSpec,
) -> tuple[Tensor, Tensor | None]:
    """(y, ms) without Triton; ms only where the row was reduced for it."""
    width = x.shape[-1]
    if spec.stat is Stat.LAYER:
        return _layer_norm(x, weight, bias, spec.eps), None
    if x.device.type != "cpu" or x.dtype == torch.float64 or x.numel() == 0 or torch.compiler.is_compiling():
        y, ms = row_norm_reference(x, weight, bias, scale, shift, given, spec)
        return y, (ms if spec.stat is Stat.RMS else None)
    rows = None if given is None else given.reshape(-1, 1).float()
    run = _CpuRowNorm.apply if torch.is_grad_enabled() else cpu.forward  # no gradients, no autograd
    out, ms = run(cpu.unit_stride(x.reshape(-1, width)), weight, bias, scale, shift, rows, spec)
    return out.view(x.shape), (None if ms is None else ms.view(*x.shape[:-1], 1))


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """PyTorch's own, which is one fused pass each way on a CPU already; in fp32, because it sums 16-bit weight
    gradients in 16 bits."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide_bias = None if bias is None else bias.to(wide)
    y = torch.nn.functional.layer_norm(x.to(wide), (x.shape[-1],), weight.to(wide), wide_bias, eps)
    return y.to(torch.promote_types(x.dtype, weight.dtype))
