"""Statistics of a tensor: one number per token, in float32, or an array that streams and merges.

An array's merge is in `MERGE`, its metric in `READOUT`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import normlab_kernels as nk
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from normlab.probes.hooks import called_by
from normlab.probes.sites import Block, has_matrix, kind_of, shell_content

CHUNK_ELEMENTS = 1 << 19  # 2 MiB of float32: small against an activation, large against a call's overhead
FLAT = math.atanh(0.95)
ROUNDINGS = 4  # of the dtype: so far may equal features be from their mean
SAME = 0.02  # relative distance of a router's scores from ours: several roundings of bfloat16


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged if it is wider: squares of fp16 overflow at |x| >= 256."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def real_numbers(x: Tensor) -> Tensor:
    """`x`, or both parts of complex numbers, as Adam trains them."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


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


def block_statistics(before: Tensor, after: Tensor, update: Tensor | None, stream: Tensor | None = None) -> Tensor:
    """(3, tokens): ||update||/||stream||, cos(after, before), 1 - cos(after, before). All (..., d).

    The last is half the squared distance of the unit vectors: 1 - cos would lose its digits where a block is nearly the
    identity. Without `update` the first is ||after - before||/||before||. `stream` is what the update is added to;
    default: `before`.
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


# -- routers of mixtures ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Routing:
    """A branch that is made of experts.

    Args:
        experts: how many.
        scorer: the module that holds `scores`, (experts, features).
        scores: the matrix that scores the experts.
        takers: modules whose arguments or outputs may hold the experts that were taken.
    """

    experts: int
    scorer: nn.Module
    scores: nn.Parameter
    takers: tuple[nn.Module, ...]


def _expert_lists(branch: nn.Module) -> Iterator[tuple[nn.Module, int, set[int]]]:
    """(module that holds experts, how many, sizes of their matrices).

    A list or dict of modules that are alike, or matrices stacked in one parameter. A convolution's weight is none.
    """
    for module in branch.modules():
        items = list(module.children()) if isinstance(module, nn.ModuleList | nn.ModuleDict) else []
        stacked = [p.shape for p in module.parameters(recurse=False) if p.ndim == 3 and min(p.shape) > 1]
        if len(items) > 1 and all(has_matrix(item) and type(item) is type(items[0]) for item in items):
            yield module, len(items), {size for p in items[0].parameters() if p.ndim == 2 for size in p.shape}
        elif stacked and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            yield module, stacked[0][0], {size for shape in stacked for size in shape[1:]}


def routing_of(branch: nn.Module) -> Routing | None:
    """Find the matrix with one row per expert that scores a branch's experts; None without experts."""
    for holder, experts, sizes in _expert_lists(branch):
        inside = set(holder.modules()) - {holder}
        outer = [module for module in branch.modules() if module not in inside]
        for module in outer:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 2 and parameter.shape[0] == experts and parameter.shape[1] in sizes:
                    around = [m for m in outer if m is not branch and (m is holder or module in set(m.modules()))]
                    return Routing(experts, module, parameter, tuple(around))
    return None


def router_scores(routing: Routing, x: Tensor) -> Tensor:
    """(tokens, experts): W x + b, in float32. `x`: (..., features); b is a parameter `bias` of one number an expert."""
    bias = getattr(routing.scorer, "bias", None)
    own = bias.float() if isinstance(bias, Tensor) and bias.shape == (routing.experts,) else None
    scores = functional.linear(x.float(), routing.scores.float(), own)
    return scores.reshape(-1, routing.experts)


def router_entropy(scores: Tensor) -> Tensor:
    """(tokens,) in nats: entropy of softmax(scores) over the experts. `scores`: (tokens, experts)."""
    return torch.special.entr(scores.softmax(-1)).sum(-1)


def why_no_router_scores(scores: Tensor, returned: Any) -> str:
    """Say why `scores` cannot be taken for a router's own; empty if what it returns shows that they are.

    It returns them, or their softmax or sigmoid, of all experts; or of those whose indices it returns too. Of these
    they may add up to 1.
    """
    tokens, experts = scores.shape
    items = returned if isinstance(returned, tuple | list) else (returned,)
    rows = [x.detach().reshape(tokens, -1) for x in items if isinstance(x, Tensor) and is_by_token(x, tokens, experts)]
    readings = [scores, scores.softmax(-1), scores.sigmoid()]
    pairs = [(x.to(scores), y) for x in rows if x.is_floating_point() and x.shape == scores.shape for y in readings]
    for chosen in (x for x in rows if not x.is_floating_point() and bool(((x >= 0) & (x < experts)).all())):
        few = [y.gather(1, chosen.long()) for y in readings]
        few += [y / y.sum(-1, keepdim=True) for y in few[1:] if chosen.shape[1] > 1]
        pairs += [(x.to(scores), y) for x in rows if x.is_floating_point() and x.shape == chosen.shape for y in few]
    if any(bool((x - y).norm() <= SAME * y.norm()) for x, y in pairs):
        return ""
    if not pairs:
        return "the router returns no scores by which its weight times what it reads, plus its bias, can be checked"
    return "the router's scores are not its weight times what it reads, plus its bias"


def is_by_token(x: Tensor, tokens: int, most: int) -> bool:
    """True if a tensor holds one to `most` numbers for each token."""
    return x.ndim >= 2 and 0 < x.shape[-1] <= most and math.prod(x.shape[:-1]) == tokens


def taken_experts(values: Any, tokens: int, experts: int) -> Tensor | None:
    """The (tokens, k) indices of the experts taken, from a module's arguments or outputs; None without them.

    Of a dispatch mask, 1 where an expert takes a token, they are the columns; `experts` stands for those not taken.
    """
    items = values if isinstance(values, tuple | list) else (values,)
    whole = (v for v in items if isinstance(v, Tensor) and v.dtype in (torch.int32, torch.int64))
    rows = (v.reshape(tokens, -1) for v in whole if is_by_token(v, tokens, experts))
    taken = next((v for v in rows if bool(((v >= 0) & (v < experts)).all())), None)
    if taken is None or taken.shape[1] != experts or experts < 3 or bool(((taken != 0) & (taken != 1)).any()):
        return taken
    return torch.where(taken == 1, torch.arange(experts, device=taken.device), experts)


# -- attention -------------------------------------------------------------------------------------------------------

SCORE_CHUNK = 1 << 19  # 2 MiB of float32 scores at a time: they stay in cache between passes
NOTHING = -80.0  # e^-80 is nothing next to 1, and unlike e^-inf it can be multiplied by its exponent
_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.einsum, torch.bmm, Tensor.bmm, torch.baddbmm)
_DIFFERENCES = (
    torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__, Tensor.sub_, Tensor.subtract_,
    Tensor.__isub__,
)  # fmt: skip
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_CASTS = ("to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "view", "reshape")


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


class _Scores:
    """The product of query and key on its way to the softmax.

    Attributes:
        scores: as last seen over the keys alone, before a number per row was taken away. The softmax is the same with
            and without it.
        latest: what came of them. It may have further columns, such as a learned sink's.
        first: the column of the first key in it.
        beside: the further columns, as they were joined to it.
        is_known: no step came that `scores` cannot follow.
    """

    def __init__(self, product: Tensor):
        self.scores = self.latest = product
        self.first = 0
        self.beside: list[Tensor] = []
        self.is_known = True
        self._is_shifted = False

    @property
    def keys(self) -> slice:
        """The columns of the keys in `latest`."""
        return slice(self.first, self.first + self.scores.shape[-1])

    def follow(self, func: Any, args: tuple, result: Any) -> None:
        """Note what a function made of `latest`, if it did."""
        if not isinstance(result, Tensor) or not result.is_floating_point() or _name(func).endswith("_like"):
            return
        if func in _JOINS:
            self._join(args[0], result)
            return
        keeps_rows = result.numel() == self.latest.numel() and result.shape[-1] == self.latest.shape[-1]
        if keeps_rows and any(x is self.latest for x in args):
            self._step(func, args, result)

    def _join(self, parts: Any, result: Tensor) -> None:
        place = next((i for i, part in enumerate(parts) if part is self.latest), None)
        if place is not None and result.shape[:-1] == self.latest.shape[:-1]:
            self.first += sum(part.shape[-1] for part in parts[:place])
            self.beside += [part for part in parts if part is not self.latest]
            self.latest = result

    def _step(self, func: Any, args: tuple, result: Tensor) -> None:
        if func in _DIFFERENCES and isinstance(args[1], Tensor) and args[1].shape[-1:] == (1,):
            self.is_known &= result is not self.scores  # else they were written over
            self._is_shifted = True
        elif not self._is_shifted:
            self.scores = result[..., self.keys] if result.shape[-1] > self.scores.shape[-1] else result
        elif _name(func) not in _CASTS:
            self.is_known = False
        self.latest = result


NO_SINK = "no learned sink takes part in its softmax"
IN_ONE_PIECE = (
    "PyTorch's fast path computes it in one piece: call torch.backends.mha.set_fastpath_enabled(False) before, or "
    "train()"
)


class Attention(NamedTuple):
    """What a watch keeps of an attention call, or of several whose heads belong together.

    Attributes:
        scores: (batch, heads, queries, 2), the largest score and the entropy of each row.
        keys: how many there are.
        part: the module that the block had called; None in the block's own code.
        kind: of the branch in which it is; None in none.
        is_product: the scores are known for a product of query and key.
        knows_size: the scores themselves are known, not only up to a number per row.
        beside: (batch, heads, queries), what the softmax gives to columns that are no keys; None without such columns.
        no_sink: why they are not a learned sink's; empty if they are. A sink's score is the same for every query.
    """

    scores: Tensor
    keys: int
    part: nn.Module | None = None
    kind: str | None = None
    is_product: bool = True
    knows_size: bool = True
    beside: Tensor | None = None
    no_sink: str = NO_SINK

    @property
    def shape(self) -> tuple[int, int]:
        """Batch and queries."""
        return self.scores.shape[0], self.scores.shape[2]

    def over(self, rows: Sequence[tuple[int, int]]) -> Attention | None:
        """It over one of these (batch, length), whose heads may be in its batch; None if it is over something else."""
        (batch, queries), heads = self.shape, self.scores.shape[1]
        if not self.is_product and not self.keys == queries != heads:
            return None  # a softmax over something else, such as streams or features
        for count, length in rows or [self.shape]:
            if length == queries and (batch == count or (heads == 1 and batch % count == 0)):
                scores = self.scores.reshape(count, -1, *self.scores.shape[2:])
                beside = None if self.beside is None else self.beside.reshape(count, -1, queries)
                return self._replace(scores=scores, beside=beside)
        return None


def _joined(calls: Sequence[Attention]) -> Attention:
    """The heads of several calls as those of one."""
    if len(calls) == 1:
        return calls[0]
    sinks = [call.beside for call in calls if call.beside is not None]
    return calls[0]._replace(
        scores=torch.cat([call.scores for call in calls], 1),
        knows_size=all(call.knows_size for call in calls),
        beside=torch.cat(sinks, 1) if len(sinks) == len(calls) else None,
        no_sink=next((call.no_sink for call in calls if call.no_sink), ""),
    )


def runs_in_one_piece(block: nn.Module) -> bool:
    """True if PyTorch may compute an `nn.MultiheadAttention` of the block by its fast path, which a watch would end."""
    attentions = [m for m in block.modules() if isinstance(m, nn.MultiheadAttention) and m.batch_first]
    return torch.backends.mha.get_fastpath_enabled() and any(
        not m.training and not (torch.is_grad_enabled() and any(p.requires_grad for p in m.parameters()))
        for m in attentions
    )


# PyTorch shows a mode the whole of multi_head_attention_forward: this one shows it the calls inside.
_INSIDE = FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda tensors: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)


class AttentionWatch(TorchFunctionMode):
    """While active, keeps the statistics of every attention call: `calls`.

    Fused attention never holds its scores. They are computed again from its query and key, in chunks of queries.
    Explicit attention is followed from its product of query and key to its softmax. What counts are the scores of the
    keys. Another column of the softmax, such as a learned sink's, is none. The watched call is not altered.

    Attributes:
        calls: what was seen.
        why: what went wrong with the statistics.
    """

    def __init__(self, block: Block | None = None) -> None:
        super().__init__()
        self.forget(block)

    def forget(self, block: Block | None = None) -> None:
        """Wait for the attention calls of a block."""
        self.calls: list[Attention] = []
        self.why = ""
        self._block = None if block is None else block.module
        self._kinds = {} if block is None else {branch.whole: branch.kind for branch in block.branches}
        self._heads = 1  # that the batch of three dimensions holds besides the rows
        self._seen: _Scores | None = None

    def found(self, rows: Sequence[tuple[int, int]], keys: int | None = None) -> Attention | None:
        """The block's attention over one of these (batch, length), or over whatever it is; None without one.

        Heads that one part of the block computes in several calls are joined. A second part is left out. Where a branch
        of the block is attention by its name, it is that branch's. Cross-attention's it never is.
        """
        calls = [fit for call in self.calls if keys in (None, call.keys) and (fit := call.over(rows)) is not None]
        calls = [call for call in calls if call.kind == "attn"] or [call for call in calls if call.kind != "cross"]
        calls = [call for call in calls if call.is_product] or calls
        calls = [call for call in calls if call.keys == call.shape[1]] or calls  # a second sequence is another's
        alike = [call for call in calls if call.part is calls[0].part and call.shape == calls[0].shape]
        return _joined(alike) if alike else None

    def reason(self) -> str:
        """Say why none was found."""
        if self.why:
            return self.why
        if not self.calls:
            return "no attention was seen: it must be scaled_dot_product_attention or an explicit softmax"
        first = next((call for call in self.calls if call.kind != "cross"), None)
        if first is None:
            return "attention was seen in cross-attention alone"
        where = f"{first.shape[0]} x {first.shape[1]} queries and {first.keys} keys"
        return f"attention was seen over {where}, and not over the tokens alone"

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.why:
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            self._heads = args[4] if len(args) > 4 else kwargs["num_heads"]
            with self:
                result = _INSIDE(*args, **kwargs)
            self._heads = 1
            return result
        if func is functional.scaled_dot_product_attention:
            query, key = (*args, *(kwargs[name] for name in ("query", "key") if name in kwargs))[:2]
            if query.ndim in (3, 4):
                self._keep(query, lambda: Attention(self._reduced(score_chunks(*args, **kwargs)), key.shape[-2]))
        elif func in _SOFTMAX:
            x = args[0] if args else kwargs.get("input")
            over = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if isinstance(x, Tensor) and over in (-1, x.ndim - 1) and x.ndim in (3, 4):
                self._keep(x, lambda: self._explicit(x))
        result = func(*args, **kwargs)
        if func in _PRODUCTS:
            operands = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            if isinstance(result, Tensor) and result.ndim > 2 and all(x.ndim > 2 for x in operands[-2:]):
                self._seen = _Scores(result)
        elif self._seen is not None:
            self._seen.follow(func, args, result)
        return result

    def _by_head(self, x: Tensor, ndim: int) -> Tensor:
        """(batch, heads, ...) of what may have both in one dimension."""
        return x if x.ndim == ndim else x.unflatten(0, (-1, self._heads))

    def _reduced(self, chunks: Iterable[Tensor]) -> Tensor:
        return self.reduce(self._by_head(scores, 4) for scores in chunks)

    def _explicit(self, x: Tensor) -> Attention | None:
        """The scores of the keys, of which `x` enters the softmax."""
        seen = self._seen if self._seen is not None and self._seen.latest is x else None
        if seen is None and x.ndim == 3:
            return None  # as of a router, or of logits
        if seen is None:
            return Attention(
                self._reduced([x.float()]),
                x.shape[-1],
                is_product=False,
                knows_size=bool((x.amax(-1) != 0).any()),
                no_sink="no product of query and key was seen, so keys cannot be told from a learned sink",
            )
        keys, beside, no_sink = x[..., seen.keys], None, NO_SINK
        if keys.shape != x.shape:
            rest = torch.cat([x[..., : seen.keys.start], x[..., seen.keys.stop :]], -1)
            beside = self._by_head((rest.float().logsumexp(-1) - x.float().logsumexp(-1)).exp(), 3)
            is_sink = all(bool((part == part[..., :1, :]).all()) for part in seen.beside)
            no_sink = "" if is_sink else "its softmax has columns that are neither keys nor a learned sink's"
        scores = (seen.scores.reshape(keys.shape) if seen.is_known else keys).float()
        return Attention(
            self._reduced([scores]), keys.shape[-1], knows_size=seen.is_known, beside=beside, no_sink=no_sink
        )

    def _keep(self, like: Tensor, see: Callable[[], Attention | None]) -> None:
        try:
            with torch.no_grad(), without_autocast(like.device):
                if (seen := see()) is not None:
                    parts = called_by(self._block)
                    kind = next((self._kinds[part] for part in parts if part in self._kinds), None)
                    self.calls.append(seen._replace(part=next(iter(parts), None), kind=kind))
        except Exception as error:  # the watched model goes on
            self.why = str(error)
        self._seen = None

    def reduce(self, chunks: Iterable[Tensor]) -> Tensor:
        """Reduce the scores, in chunks of queries (batch, heads, queries, keys), to (batch, heads, queries, 2)."""
        return torch.cat([_score_statistics(scores) for scores in chunks], dim=2)


def score_chunks(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Iterator[Tensor]:  # fmt: skip
    """Scores in chunks of queries from the arguments of `scaled_dot_product_attention`, (batch, heads, tokens, d_head).

    Without heads the scores have none either. Keys that are hidden from a whole chunk may be left out.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if query.ndim > 3 and key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    keys, transposed = key.shape[-2], key.float().transpose(-1, -2)
    step = max(1, SCORE_CHUNK // (math.prod(query.shape[:-2]) * keys))
    for start in range(0, query.shape[-2], step):
        rows = query[..., start : start + step, :]
        seen = min(keys, start + rows.shape[-2]) if is_causal else keys  # later keys are hidden from these queries
        scores = (rows.float() * scale) @ transposed[..., :seen]
        if is_causal:
            positions = torch.arange(start, start + rows.shape[-2], device=query.device)
            scores.masked_fill_(positions[:, None] < torch.arange(seen, device=query.device), -torch.inf)
        if attn_mask is not None:
            mask = attn_mask[..., start : start + step, :seen] if attn_mask.shape[-2] > 1 else attn_mask[..., :seen]
            scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask.float())
        yield scores


def _score_statistics(scores: Tensor) -> Tensor:
    """(batch, heads, queries, 2): the largest score over keys, and the entropy in nats.

    With t = s - max s: entropy = log(sum e^t) - sum(t e^t) / sum(e^t). That is one exponential per score and no
    logarithm.
    """
    largest = scores.amax(dim=-1)
    shifted = (scores - largest[..., None]).clamp_(min=NOTHING)
    weight = shifted.exp()
    total = weight.sum(-1)
    entropy = total.log() - torch.linalg.vecdot(weight, shifted) / total
    return torch.stack([largest, entropy], dim=-1)
