"""The choice of an implementation, and the checks that all implementations share."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from normlab_kernels import cpu
from normlab_kernels.reference import row_norm_reference
from normlab_kernels.spec import Act, RowSpec, Stat

TRITON_VERSIONS = (3, 4), (3, 10)  # from the first on, before the second; the range in pyproject.toml

try:  # the PyTorch path needs no Triton
    import triton

    TRITON = TRITON_VERSIONS[0] <= tuple(int(n) for n in triton.__version__.split(".")[:2]) < TRITON_VERSIONS[1]
except ImportError:
    TRITON = False
INTERPRETING = False
if TRITON:
    from normlab_kernels import ops
    from normlab_kernels.launch import INTERPRETING

Tensor = torch.Tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    direction: Tensor | None, given: Tensor | None,
) -> None:  # fmt: skip
    """ValueError with a sentence if the arguments do not fit."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x):
        raise ValueError("the norms take any leading shape: call them on the whole tensor instead of under torch.vmap")
    shape = x.shape
    if not x.is_floating_point() or not shape or shape[-1] == 0:
        raise ValueError(
            f"a norm needs a floating-point tensor of shape (..., d) with d >= 1, got {x.dtype} {tuple(shape)}"
        )
    for name, vector in (("weight", weight), ("bias", bias), ("direction", direction)):
        if vector is not None and vector.shape != shape[-1:]:
            raise ValueError(
                f"{name} must have shape ({shape[-1]},), the last dimension of x, got {tuple(vector.shape)}"
            )
    for name, scalar in (("scale", scale), ("shift", shift)):
        if scalar is not None and scalar.numel() != 1:
            raise ValueError(f"{name} must have one element, got shape {tuple(scalar.shape)}")
    if given is not None and given.shape != (*shape[:-1], 1):
        raise ValueError(f"mean_square must have shape {(*shape[:-1], 1)}, got {tuple(given.shape)}")


def _one_number(tensor: Tensor | None) -> Tensor | None:
    """A tensor of one number as (1,), so that its further dimensions do not become y's. Any other stays as it is."""
    return tensor.reshape(1) if tensor is not None and tensor.dim() > 1 and tensor.numel() == 1 else tensor


def check_combination(
    spec: RowSpec, bias: Tensor | None, scale: Tensor | None, direction: Tensor | None, given: Tensor | None,
    correction: Tensor | None,
) -> None:  # fmt: skip
    """ValueError with a sentence if the tensors are not those of the function."""
    if (given is not None) != (spec.stat == Stat.GIVEN):
        raise ValueError("given is the mean square of Stat.GIVEN: pass it with that statistic, and with no other")
    if correction is not None and given is None:
        raise ValueError("a correction is added to the given mean square: pass it with Stat.GIVEN")
    if spec.stat == Stat.OWN and scale is None:
        raise ValueError("Stat.OWN takes the sum of squares of the others from the scale: pass one")
    if direction is not None and bias is None:
        raise ValueError("a direction decides how much of the bias is added to the weight: pass a bias with it")


def refuse_transforms(*tensors: Tensor | None) -> None:
    """ValueError for a tensor with a tangent, and under torch.func.

    The kernels have no forward-mode derivative, and would drop it. PyTorch's own error names its autograd functions.
    """
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    ):
        raise ValueError('the norms have no forward-mode derivative: use torch.autograd, or kernels="torch" in fp64')
    if torch._C._are_functorch_transforms_active():
        raise ValueError('the norms refuse transforms of torch.func: use torch.autograd, or kernels="torch" in fp64')


class _CpuRowNorm(torch.autograd.Function):
    """cpu.forward and cpu.backward on 2-D rows.

    The context is filled in `forward`. A separate `setup_context` costs 15 us per call, a third of the norm at width
    128, because PyTorch binds the arguments anew each time.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None,
        given: Tensor | None, spec: RowSpec,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        y, ms = cpu.forward(x, weight, bias, scale, shift, given, spec)
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.save_for_backward(x, weight, scale, shift, given if ms is None else ms)
        return y, ms

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_ms: Tensor | None) -> tuple[Tensor | None, ...]:
        cpu.refuse_batches(grad, grad_ms)
        x, weight, scale, shift, ms = ctx.saved_tensors
        gradients: tuple[Tensor | None, ...]
        with torch.no_grad():
            if grad is None:
                gradients = None if grad_ms is None else cpu.mean_square_gradient(x, grad_ms, None), *(None,) * 5
            else:
                rows, needs = cpu.unit_stride(grad), ctx.needs_input_grad
                gradients = cpu.backward(rows, grad_ms, x, weight, scale, shift, ms, ctx.spec, needs)
        if torch.is_grad_enabled():
            gradients = cpu.FirstDerivative.apply(6, *gradients, grad, grad_ms, x, weight, scale, shift, ms)
        return *gradients, None


def row_norm(
    x: Tensor, weight: Tensor, *, spec: RowSpec, bias: Tensor | None = None, scale: Tensor | None = None,
    shift: Tensor | None = None, direction: Tensor | None = None, given: Tensor | None = None,
    correction: Tensor | None = None, residual: Tensor | None = None, kernels: str = "auto",
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """Compute (y, ms, s) of any row norm. None for what a norm does not have.

    With a residual, s = residual + x, and y is the norm of s. A `correction` is a constant that is added to the given
    mean square.

    Raises:
        ValueError: tensors that do not fit x, each other or the statistic, or a direction that the kernels lack.
    """
    check_combination(spec, bias, scale, direction, given, correction)
    check(x, weight, bias, scale, shift, direction, given)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}")
    if correction is not None and correction.numel() != 1 and correction.shape != (*x.shape[:-1], 1):
        raise ValueError(f"correction must have one element or mean_square's shape, got {tuple(correction.shape)}")
    scale, shift, correction = _one_number(scale), _one_number(shift), _one_number(correction)
    if chooses_kernels(x, kernels, weight, residual):
        if direction is not None and spec.stat != Stat.RMS:
            raise ValueError('the kernels have a direction with Stat.RMS alone: use kernels="torch"')
        return _triton_path(x, residual, weight, bias, scale, shift, direction, given, correction, spec)
    if given is not None and correction is not None:
        given = given + correction.detach()
    s = None
    if residual is not None:
        s = x = residual + x
    return *_torch_path(x, weight, bias, scale, shift, direction, given, spec), s


def takes_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """True if x goes to the Triton kernels: on CUDA with Triton installed, or anywhere in its interpreter.

    Never if x or another operand is fp64.
    """
    able = TRITON and (x.device.type == "cuda" or INTERPRETING) and x.dtype != torch.float64
    return able and not any(t is not None and t.dtype == torch.float64 for t in others)


def chooses_kernels(x: Tensor, kernels: str, *others: Tensor | None) -> bool:
    """True if the caller's choice, "auto", "triton" or "torch", means the Triton kernels for these operands."""
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(f'kernels is {kernels!r}: choose "auto", "triton" or "torch"')
    able = takes_kernels(x, *others)
    if kernels == "triton" and not able:
        dtypes = ", ".join(sorted({str(t.dtype) for t in (x, *others) if t is not None}))
        here = "Triton is not installed in a version they know"
        why = here if not TRITON else f"they take no {dtypes} tensor on {x.device}"
        raise ValueError(f'kernels="triton": the kernels cannot run, {why}; use "auto" or "torch"')
    return able and kernels != "torch"


def _triton_path(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, direction: Tensor | None, given: Tensor | None, correction: Tensor | None, spec: RowSpec,
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """Run the custom op under a compiler, and the same launches without it otherwise."""
    refuse_transforms(x, residual, weight, bias, scale, shift, direction, given)
    shape, device = x.shape, x.device
    for tensor in (residual, weight, bias, scale, shift, direction, given, correction):
        if tensor is not None and tensor.device != device:  # a kernel might read it before it is written
            raise ValueError(f"all tensors of a norm must be on one device, got {device} and {tensor.device}")
    if len(shape) != 2:
        x = x.reshape(-1, shape[-1])
        residual = None if residual is None else residual.reshape(-1, shape[-1])
    tensors = (x, residual, weight, bias, scale, shift, direction, given)
    watched = torch.compiler.is_compiling() or type(x) not in _PLAIN
    graph = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if given is not None:
        if correction is not None and (watched or graph):
            given, correction = given + correction.detach(), None
        tensors = *tensors[:7], given.reshape(-1, 1).float()
    total: Tensor | None
    ms: Tensor | None
    if watched:
        y, total, _, ms = ops.row_norm(*tensors, *spec)
    elif graph:
        y, total, ms = ops.RowNorm.apply(*tensors, spec)  # type: ignore[attr-defined]
    else:
        y, total, _, ms = ops.launch_forward(*tensors, spec, correction=correction)
    ms = ms if spec.stat == Stat.RMS else None
    total = None if residual is None else total
    if len(shape) != 2:
        y, total = y.view(shape), None if total is None else total.view(shape)
        ms = None if ms is None else ms.view(*shape[:-1], 1)
    return y, ms, total


def _torch_path(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    direction: Tensor | None, given: Tensor | None, spec: RowSpec,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute (y, ms) without Triton; ms only where the row was reduced for it.

    LayerNorm without a scale, shift, direction or activation is PyTorch's, one fused pass each way on a CPU. It runs in
    fp32, because it sums 16-bit weight gradients in 16 bits. What `cpu.py` lacks is the plain formula, of dense
    columns: the order of a sum depends on its strides.
    """
    width = x.shape[-1]
    is_plain = spec.act == Act.IDENTITY and scale is None and shift is None and direction is None
    if spec.stat == Stat.LAYER and is_plain:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        wide_bias = None if bias is None else bias.to(wide)
        y = torch.nn.functional.layer_norm(x.to(wide), (width,), weight.to(wide), wide_bias, spec.eps)
        return y.to(torch.promote_types(x.dtype, weight.dtype)), None
    fused = spec.stat in (Stat.RMS, Stat.GIVEN) or (spec.stat == Stat.NONE and scale is not None)
    fused = fused and direction is None and x.device.type == "cpu"
    if not fused or x.dtype == torch.float64 or x.numel() == 0 or torch.compiler.is_compiling():
        y, ms = row_norm_reference(cpu.unit_stride(x), weight, bias, scale, shift, given, spec, direction)
        return y, (ms if spec.stat == Stat.RMS else None)
    rows = None if given is None else given.reshape(-1, 1).float()
    refuse_transforms(x, weight, bias, scale, shift, rows)
    run = _CpuRowNorm.apply if torch.is_grad_enabled() else cpu.forward  # no gradients, no autograd
    out, ms = run(cpu.unit_stride(x.reshape(-1, width)), weight, bias, scale, shift, rows, spec)
    return out.view(x.shape), (None if ms is None else ms.view(*x.shape[:-1], 1))
