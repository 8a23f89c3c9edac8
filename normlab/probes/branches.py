"""What the branches of a block do to the residual stream, and what a norm's tanh sees: per-token statistics.

`branch_statistics`  relative contribution, update cosine and change of one update against the stream it is added to
`tanh_statistics`    share of saturated inputs and their largest size, for a norm that has a tanh
`bound_statistics`   lambda-saturation and the two bounds, for a tanh norm with lambda and kappa
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normlab.probes.reducers import CHUNK_ELEMENTS, at_least_float32
from normlab.probes.sites import shell_content

FLAT = math.atanh(0.95)


def over_chunks(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """`function` on matching row chunks of (tokens, d) tensors, results joined along their last dimension (tokens).

    Keeps temporaries at a few MiB whatever the batch. A tensor of one column (a per-token number) is cut alike; None
    stays None.
    """
    first = next(t for t in tensors if t is not None)
    step = max(1, CHUNK_ELEMENTS // max(1, first.shape[-1]))
    flat = [None if t is None else t.reshape(-1, t.shape[-1]) for t in tensors]
    tokens = first.numel() // first.shape[-1]
    pieces = [function(*(None if t is None else t[i : i + step] for t in flat)) for i in range(0, max(1, tokens), step)]
    return torch.cat(pieces, dim=-1)


def _ratio_and_cosine(update: Tensor, stream: Tensor) -> list[Tensor]:
    size, base = torch.linalg.vector_norm(update, dim=-1), torch.linalg.vector_norm(stream, dim=-1)
    return [size / base, torch.linalg.vecdot(update, stream) / (size * base)]


def branch_statistics(h: Tensor, update: Tensor) -> Tensor:
    """(2, tokens): ||update||/||h|| and cos(update, h). `h`: the stream the update is added to; both (..., d)."""
    return over_chunks(lambda u, x: torch.stack(_ratio_and_cosine(at_least_float32(u), at_least_float32(x))), update, h)


def block_statistics(before: Tensor, after: Tensor, update: Tensor | None) -> Tensor:
    """(3, tokens): ||update||/||before||, cos(after, before), 1 - cos(after, before). All (..., d).

    The last is half the squared distance of the unit vectors: 1 - cos would lose its digits where a block is nearly the
    identity. Without `update` (a branch was not found) the first is ||after - before||/||before||.
    """

    def reduce(x: Tensor, y: Tensor, u: Tensor | None) -> Tensor:
        x, y = at_least_float32(x), at_least_float32(y)
        u = y - x if u is None else at_least_float32(u)
        base = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        unit_x, unit_y = x / base, y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        ratio = torch.linalg.vector_norm(u, dim=-1) / base[:, 0]
        cosine = torch.linalg.vecdot(unit_x, unit_y)
        return torch.stack([ratio, cosine, torch.linalg.vector_norm(unit_x - unit_y, dim=-1).square() / 2])

    return over_chunks(reduce, before, after, update)


def tanh_norm(norm: nn.Module) -> Any | None:
    """The module, itself or inside a wrapper, that offers `tanh_input(x[, mean_square])`, the argument of its tanh;
    else None."""
    while norm is not None and not callable(getattr(norm, "tanh_input", None)):
        content = shell_content(norm)
        if content is None:
            return None
        norm = content
    return norm


def _tanh_input(norm: Any, x: Tensor, mean_square: Tensor | None) -> Tensor:
    return norm.tanh_input(x) if mean_square is None else norm.tanh_input(x, mean_square)


def tanh_statistics(norm: Any, x: Tensor, mean_square: Tensor | None) -> Tensor:
    """(2, tokens): share of a token's inputs with |tanh z| > 0.95, and its largest |z|."""

    def reduce(rows: Tensor, ms: Tensor | None) -> Tensor:
        z = _tanh_input(norm, rows, ms).abs()
        return torch.stack([(z > FLAT).to(z.dtype).mean(-1), z.amax(-1)])

    return over_chunks(reduce, x, mean_square)


def bound_statistics(norm: Any, x: Tensor, mean_square: Tensor | None) -> Tensor:
    """(3, tokens): share with |z| > lambda, its Chebyshev bound (ms/ms')/kappa^2, and the bound lambda sqrt(d
    ms/ms')/kappa on |z|.

    ms' is the statistic the norm uses: `mean_square`, or the exact one (then ms/ms' = 1). The bounds hold with eps > 0
    too.
    """
    lam, kappa = norm.lam.detach().float().abs(), float(norm.kappa)

    def reduce(rows: Tensor, ms: Tensor | None) -> Tensor:
        z = _tanh_input(norm, rows, ms).abs()
        exact = at_least_float32(rows).square().mean(-1)
        relative = torch.ones_like(exact) if ms is None else exact / ms[:, 0]
        peak = lam / kappa * (rows.shape[-1] * relative).sqrt()
        return torch.stack([(z > lam).to(z.dtype).mean(-1), relative / kappa**2, peak])

    return over_chunks(reduce, x, mean_square)


def carried_ratio(x: Tensor, mean_square: Tensor) -> Tensor:
    """(1, tokens): exact mean square of x over the statistic the norm was given."""
    return over_chunks(lambda rows, ms: (at_least_float32(rows).square().mean(-1) / ms[:, 0])[None], x, mean_square)
