"""Statistics of a tensor: one number per token, in float32, or an array that streams and merges.

An array's merge is in `MERGE`, its metric in `READOUT`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import normlab_kernels as nk
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from normlab.probes.sites import kind_of, shell_content

CHUNK_ELEMENTS = 1 << 19  # 2 MiB of float32: small against an activation, large against a call's overhead
FLAT = math.atanh(0.95)
ROUNDINGS = 4  # of the dtype: so far may equal features be from their mean


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged if it is wider: squares of fp16 overflow at |x| >= 256."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def real_numbers(x: Tensor) -> Tensor:
    """`x`, or both parts of complex numbers, as Adam trains them."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def whole(x: Tensor) -> Tensor:
    """`x`, gathered from all ranks if it is split over them."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which operations compute in the dtypes of what they are given."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


def over_chunks(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Apply `function` to matching row chunks of (tokens, d) tensors; join the results along their last dimension.

    Temporaries stay at a few MiB. A (tokens, 1) tensor is cut alike; None stays None.
    """
    first = next(t for t in tensors if t is not None)
    step = max(1, CHUNK_ELEMENTS // max(1, first.shape[-1]))
    flat = [None if t is None else t.reshape(-1, t.shape[-1]) for t in tensors]
    tokens = first.numel() // first.shape[-1]
    pieces = [function(*(None if t is None else t[i : i + step] for t in flat)) for i in range(0, max(1, tokens), step)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


# -- activations -----------------------------------------------------------------------------------------------------


def token_statistics(x: Tensor, names: Sequence[str]) -> Tensor:
    """Compute per-token statistics of an activation.

    On a GPU one kernel reads it once. Elsewhere it is read in chunks.

    Args:
        x: (..., d), any float dtype.
        names: some of l2, var, kurtosis, max_abs.

    Returns:
        (len(names), tokens), float32 (float64 for a float64 input). `var` is the biased variance over d. `kurtosis` is
        m4 / var^2. It is NaN for a token whose features are equal to rounding. From the kernel it is also NaN for a
        token whose fourth powers leave float32's range.
    """
    rows = x.reshape(-1, x.shape[-1])
    if nk.chooses_kernels(rows, "auto"):
        return _kernel_statistics(rows, names)
    return over_chunks(lambda part: row_statistics(part, names), rows)


def row_statistics(rows: Tensor, names: Sequence[str]) -> Tensor:
    """`token_statistics` of (tokens, d) at once and by PyTorch alone, so that it can be compiled."""
    rows = at_least_float32(rows)
    result: dict[str, Tensor] = {}
    if "l2" in names:
        result["l2"] = torch.linalg.vector_norm(rows, dim=-1)
    if "max_abs" in names:  # on a CPU 25 times as fast as the infinity norm
        result["max_abs"] = torch.maximum(rows.amax(dim=-1), -rows.amin(dim=-1))
    if "var" in names or "kurtosis" in names:
        mean = rows.mean(dim=-1, keepdim=True)
        squares = (rows - mean).square_()
        variance = result["var"] = squares.mean(dim=-1)
        if "kurtosis" in names:
            flat = variance <= mean[:, 0].mul(ROUNDINGS * torch.finfo(rows.dtype).eps).square_()
            # Dividing before squaring: var^2 underflows in float32 from var = 1e-23 on.
            kurtosis = squares.div_(variance[:, None]).square_().mean(dim=-1)
            result["kurtosis"] = kurtosis.masked_fill_(flat, torch.nan)
    return torch.stack([result[name] for name in names])


def _kernel_statistics(rows: Tensor, names: Sequence[str]) -> Tensor:
    moments, width = nk.row_moments(rows), rows.shape[-1]
    result = {"l2": moments.l2, "max_abs": moments.max_abs, "var": moments.m2 / width}
    if "kurtosis" in names:
        in_range = (moments.m4 > 1e-30) & (moments.m4 < torch.inf)
        in_range &= moments.m2.sqrt() > ROUNDINGS * torch.finfo(torch.float32).eps * moments.l2
        kurtosis = width * moments.m4.double() / moments.m2.double().square()
        result["kurtosis"] = torch.where(in_range, kurtosis, torch.nan).float()
    return torch.stack([result[name] for name in names])


# -- updates of the stream -------------------------------------------------------------------------------------------


def branch_statistics(h: Tensor, update: Tensor) -> Tensor:
    """(2, tokens): ||update||/||h|| and cos(update, h). `h` is the stream the update is added to; both (..., d)."""

    def reduce(u: Tensor, x: Tensor) -> Tensor:
        u, x = at_least_float32(u), at_least_float32(x)
        size, base = torch.linalg.vector_norm(u, dim=-1), torch.linalg.vector_norm(x, dim=-1)
        return torch.stack([size / base, torch.linalg.vecdot(u, x) / (size * base)])

    return over_chunks(reduce, update, h)


def block_statistics(before: Tensor, after: Tensor, update: Tensor | None, stream: Tensor | None) -> Tensor:
    """(3, tokens): ||update||/||stream||, cos(after, before), 1 - cos(after, before). All (..., d).

    The last is half the squared distance of the unit vectors: 1 - cos would lose its digits where a block is nearly the
    identity. Without `update` the first is ||after - before||/||before||. `stream` is what the update is added to;
    None: `before`.
    """

    def reduce(x: Tensor, y: Tensor, u: Tensor | None, h: Tensor | None) -> Tensor:
        x, y = at_least_float32(x), at_least_float32(y)
        u = y - x if u is None else at_least_float32(u)
        base = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        unit_x, unit_y = x / base, y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        added_to = base[:, 0] if h is None else torch.linalg.vector_norm(at_least_float32(h), dim=-1)
        ratio = torch.linalg.vector_norm(u, dim=-1) / added_to
        cosine = torch.linalg.vecdot(unit_x, unit_y)
        return torch.stack([ratio, cosine, torch.linalg.vector_norm(unit_x - unit_y, dim=-1).square() / 2])

    return over_chunks(reduce, before, after, update, stream)


# -- what norms read -------------------------------------------------------------------------------------------------


def tanh_norm(norm: nn.Module) -> Any | None:
    """The module that offers `tanh_input(x[, mean_square])`: `norm` itself or what it wraps; None without one."""
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
    """(3, tokens): share with |z| > lambda, its Chebyshev bound (ms/ms')/kappa^2, the bound on |z|.

    The last is lambda sqrt(d ms/ms')/kappa. ms' is the statistic that the norm uses: `mean_square`, or the exact one
    (then ms/ms' = 1). The bounds hold with eps > 0 too.
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
    """(1, tokens): exact mean square of x over the statistic that the norm was given."""
    return over_chunks(lambda rows, ms: (at_least_float32(rows).square().mean(-1) / ms[:, 0])[None], x, mean_square)


# -- streams that mix ------------------------------------------------------------------------------------------------


def mixers_of(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """(kind of sublayer, rule) of every rule in a block that mixes residual streams, as hyper-connections do.

    Such a rule has ``probe_role = "mixing"`` and a ``width``. It is called with the state (..., n d), stream by stream,
    and returns (write weights, mixing matrix (..., n, n)).
    """
    named = [(name, child) for name, child in block.named_children() if getattr(child, "probe_role", None) == "mixing"]
    return [(kind_of(name, child) or "block", child) for name, child in named]


@torch.no_grad()
def stream_statistics(rule: Any, state: Tensor) -> Tensor | None:
    """(3, tokens), float32: the mixing matrix M against identity and uniform, and the streams' likeness.

    ||M - I||_F/sqrt(n - 1), ||M - 1/n||_F/sqrt(n - 1), and the mean cosine of two streams. The identity gives 0 and 1,
    the uniform matrix 1 and 0. None for one stream.
    """
    streams = state.detach().float().unflatten(-1, (-1, rule.width)).flatten(0, -3)
    n = streams.shape[-2]
    if n == 1:
        return None
    mix = rule.forward(state.detach())[1].float().flatten(0, -3)
    identity = torch.eye(n, device=mix.device)
    uniform = torch.full_like(identity, 1 / n)
    distances = [torch.linalg.matrix_norm(mix - other) / (n - 1) ** 0.5 for other in (identity, uniform)]
    unit = functional.normalize(streams, dim=-1)
    cosine = (unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))) / (n * (n - 1))
    return torch.stack([*distances, cosine])


# -- arrays ----------------------------------------------------------------------------------------------------------


def gram(rows: Tensor, mask: Tensor) -> Tensor:
    """(d, d) float64: sum over the counted tokens of u u^T. `rows`: (tokens, d); `mask`: (tokens,) bool.

    float64 because a singular value is the root of an eigenvalue: in float32 those below 1e-3 of the largest would be
    noise.
    """
    dtype = torch.float32 if rows.device.type == "mps" else torch.float64
    kept = torch.where(mask[:, None], rows, 0).to(dtype)
    return kept.mT @ kept


def coordinate_peak(rows: Tensor, mask: Tensor) -> Tensor:
    """(d,): largest |h| of each feature over the counted tokens; 0 when none counts."""
    kept = torch.where(mask[:, None], rows, 0)
    return torch.maximum(kept.amax(0), -kept.amin(0)).double()


def by_position(values: Tensor, positions: Tensor, mask: Tensor, length: int) -> Tensor:
    """(2, length): number of counted tokens at each position, and the sum of their values.

    Args:
        values: (tokens,), one number per token.
        positions: (tokens,), the token's position among its row's real tokens.
        mask: (tokens,) bool.
        length: number of positions.
    """
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    table = torch.zeros(2, length, dtype=dtype, device=values.device)
    counted = torch.stack([mask.to(dtype), torch.where(mask, values, 0).to(dtype)])
    return table.index_add_(1, positions, counted)


def expert_counts(chosen: Tensor, mask: Tensor, experts: int) -> Tensor:
    """(experts,) float64: how many counted tokens took each expert. `chosen`: (tokens, k); `mask`: (tokens,)."""
    return torch.bincount(chosen[mask].reshape(-1), minlength=experts)[:experts].double()


def _add_padded(a: Tensor, b: Tensor) -> Tensor:
    """The sum of (2, positions) tables of unequal length."""
    length = max(a.shape[-1], b.shape[-1])
    return functional.pad(a, (0, length - a.shape[-1])) + functional.pad(b, (0, length - b.shape[-1]))


MERGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gram": torch.add,
    "coordinate_peak": torch.maximum,
    "carried_position": _add_padded,
    "expert_counts": torch.add,
}
FIXED_SHAPE = ("gram", "coordinate_peak", "expert_counts")  # a different one means a different model


def effective_rank(matrix: Tensor) -> float:
    """exp(H(p)), p_i = s_i / sum s, with s_i^2 the eigenvalues of a Gram matrix (Roy and Vetterli, 2007).

    NaN for zeros, and for a matrix that is not finite.
    """
    if not bool(matrix.isfinite().all()):
        return float("nan")
    singular = torch.linalg.eigvalsh(matrix.double()).clamp(min=0).sqrt()
    if not bool(singular.sum() > 0):
        return float("nan")
    return float(torch.special.entr(singular / singular.sum()).sum().exp())


def peak_ratio(peaks: Tensor) -> float:
    """Largest over median of the features' largest values: tens in a healthy layer, thousands in a massive one.

    Of two middle values the lower is the median.
    """
    middle = float(peaks.median())
    return float(peaks.max()) / middle if middle > 0 else float("nan")


def largest_load(counts: Tensor) -> float:
    """The largest expert's share of all choices over an even share: 1 where all are taken alike."""
    total = float(counts.sum())
    return float(counts.max()) * len(counts) / total if total > 0 else float("nan")


READOUT = {"gram": effective_rank, "coordinate_peak": peak_ratio, "expert_counts": largest_load}
