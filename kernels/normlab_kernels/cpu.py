"""The row norms on a CPU: one autograd function that reads and writes memory as seldom as eager PyTorch allows.

It saves against the naive formula under autograd:

* Of x's size only the input is kept for the backward pass. The naive forms keep the normalised rows or the tanh too.
* The sum of squares is one pass (`vector_norm`), not a square and a mean.
* fp32 results are computed in place, by chunks of rows that stay in the cache. Backward has one temporary chunk.
* tanh is the most expensive operation: 2 ns per element in PyTorch 2.13, against 0.07 for a product. NumPy's takes
  0.16 ns, within 2 units in the last place, and is used where NumPy is installed.

Under `torch.compile` the caller gives the compiler the plain formula (`reference.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from normlab_kernels.spec import Act, RowSpec, Stat

try:
    import numpy as np
except ImportError:  # torch runs without NumPy; tanh is then PyTorch's
    np = None  # type: ignore[assignment]

CHUNK_ELEMENTS = 1 << 18  # 1 MiB in fp32; measured best of 2^13..2^18 at widths 128, 512 and 2048
_ERF_SLOPE = 1.1283791670955126  # 2/sqrt(pi)


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x with last stride 1, copied if it was not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def mean_square_gradient(x: torch.Tensor, grad_ms: torch.Tensor, grad_x: torch.Tensor | None) -> torch.Tensor:
    """dx = (2/d) x grad_ms + grad_x: all that reaches x when only its mean square (and x itself) is used."""
    dx = x.float() * (grad_ms * (2.0 / x.shape[-1]))
    return (dx if grad_x is None else dx.add_(grad_x)).to(x.dtype)


def refuse_batches(*grads: torch.Tensor | None) -> None:
    """ValueError for upstream gradients that are a batch of them, whose numbers no kernel can read."""
    if torch.compiler.is_compiling():
        return
    functorch = torch._C._functorch  # vectorize=True makes batches of the older kind
    if any(g is not None and (functorch.is_legacy_batchedtensor(g) or functorch.is_batchedtensor(g)) for g in grads):
        raise ValueError(
            "the norms take one upstream gradient at a time: leave out vectorize=True and is_grads_batched, "
            'or use kernels="torch" in fp64'
        )


class FirstDerivative(torch.autograd.Function):
    """Gradients whose derivative is an error: `apply(count, *gradients, *sources)` returns the `count` gradients.

    PyTorch's `once_differentiable` ties its error to no source. So `torch.autograd.grad` passes it by, and a second
    derivative lacks this norm's part without a word.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise RuntimeError('the norms have no second derivative: use kernels="torch" in fp64')


def tanh_(z: torch.Tensor) -> torch.Tensor:
    """tanh of a contiguous fp32 tensor in place, by NumPy when it can."""
    if np is None or type(z) is not torch.Tensor or z.dtype != torch.float32:
        return z.tanh_()
    array = z.numpy()
    np.tanh(array, out=array)
    return z


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    """mean(x^2) of every row, (rows, 1)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])


def _activate_(z: torch.Tensor, act: int) -> torch.Tensor:
    if act == Act.TANH:
        return tanh_(z)
    return z.erf_() if act == Act.ERF else z


def _scales(
    spec: RowSpec, ms: torch.Tensor | None, scale: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(rstd, factor): rsqrt(ms + eps), and what multiplies x, (scale / kappa) rstd, as far as the function has
    these."""
    rstd = None if ms is None else torch.add(ms, spec.eps).rsqrt_()
    gain = None if scale is None else scale.float() * (1.0 / spec.kappa)
    if rstd is None:
        assert gain is not None
        return None, gain
    return rstd, rstd if gain is None else rstd * gain


def chunks(rows: int, width: int) -> list[slice]:
    """All rows, some at a time."""
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    return [slice(start, start + step) for start in range(0, rows, step)]


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None,
    shift: torch.Tensor | None, given: torch.Tensor | None, spec: RowSpec,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(y, ms) of 2-D x; `given` is the carried (rows, 1) mean square, used in place of a reduction (ms is then
    None)."""
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    in_place = x.dtype == out.dtype == torch.float32  # z is then worked out where y will be
    squares = []
    for rows in chunks(*x.shape):
        values, target = x[rows].float(), out[rows]
        ms = None if given is None else given[rows]
        if spec.stat == Stat.RMS:
            ms = _mean_square(values)
            squares.append(ms)
        factor = _scales(spec, ms, scale)[1]
        z = torch.mul(values, factor, out=target) if in_place else values * factor
        if shift is not None:
            z.add_(shift)
        _activate_(z, spec.act)
        if in_place:
            z.mul_(weight)
        else:
            torch.mul(z.to(x.dtype), weight, out=target)  # round to x's dtype first, then the gain: Llama's order
        if bias is not None:
            target.add_(bias)
    if len(squares) > 1:
        return out, torch.cat(squares)
    return out, squares[0] if squares else None


def backward(
    grad: torch.Tensor, grad_ms: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor,
    scale: torch.Tensor | None, shift: torch.Tensor | None, ms: torch.Tensor | None, spec: RowSpec,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Gradients of 2-D x, weight, bias, scale, shift and given, the parameters' in fp32; `needs` = which are wanted."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    dms = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device) if needs[5] else None
    sums: dict[str, torch.Tensor] = {}  # over rows

    def add(name: str, value: torch.Tensor) -> None:
        sums[name] = sums[name].add_(value) if name in sums else value

    for rows in chunks(*x.shape):
        g, values = grad[rows].float(), x[rows].float()
        rstd, factor = _scales(spec, None if ms is None else ms[rows], scale)
        # Two buffers serve: t = act(z), later q x; and q = d loss / d z, which is worked out where dx will be.
        q = torch.empty_like(values) if dx is None or dx.dtype != torch.float32 else dx[rows]
        t = values * factor
        if shift is not None:
            t.add_(shift)
        slope = (t * t).neg_().exp_().mul_(_ERF_SLOPE) if spec.act == Act.ERF else None
        _activate_(t, spec.act)
        if needs[2]:
            add("bias", g.sum(0))
        if needs[1]:
            add("weight", torch.mul(g, t, out=q).sum(0))
        torch.mul(g, weight.float(), out=q)
        if spec.act == Act.TANH:
            torch.ops.aten.tanh_backward.grad_input(q, t, grad_input=q)
        elif slope is not None:
            q.mul_(slope)
        if needs[4]:
            add("shift", q.sum())
        if rstd is not None or needs[3]:
            along = torch.mul(q, values, out=t).sum(-1, keepdim=True)  # what d scale and d ms share
        if needs[3]:
            total = along.sum() if rstd is None else torch.dot(along.view(-1), rstd.view(-1))
            add("scale", total.mul_(1.0 / spec.kappa))
        q.mul_(factor)
        if rstd is not None:
            pull = along.mul_(factor).mul_(rstd).mul_(rstd).mul_(-0.5)  # d loss / d ms
            if dms is not None:
                dms[rows] = pull
            if spec.stat == Stat.RMS:
                if grad_ms is not None:
                    pull.add_(grad_ms[rows])
                q.addcmul_(values, pull.mul_(2.0 / x.shape[-1]))
        if dx is not None and dx.dtype != torch.float32:
            dx[rows] = q
    for name, parameter in (("scale", scale), ("shift", shift)):
        if name in sums and parameter is not None:
            sums[name] = sums[name].view(parameter.shape)
    return dx, *(sums.get(name) for name in ("weight", "bias", "scale", "shift")), dms
