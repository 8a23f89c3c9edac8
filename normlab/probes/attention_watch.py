"""Follow attention calls to their scores: `AttentionWatch`, a mode under which fused and explicit attention is seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from normlab.errors import NormlabError
from normlab.probes.hooks import called_by, shards_itself
from normlab.probes.sites import Block
from normlab.probes.statistics import without_autocast

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
SPLIT = "tensor parallelism splits its heads over ranks, and one rank sees its own alone"


def has_split_heads(attention: nn.Module) -> bool:
    """True if tensor parallelism splits the weights of an attention that runs, and so its heads, over ranks.

    FSDP2 holds weights whole meanwhile. Those of a module inside it may be split over one dimension by FSDP2 itself.
    """
    inside = [m for m in attention.modules() if m is not attention and shards_itself(m)]
    sharded = {m for outer in inside for m in outer.modules()}

    def dimensions(weight: DTensor) -> int:
        over = zip(weight.placements, weight.device_mesh.shape, strict=True)
        return sum(size > 1 and not placement.is_replicate() for placement, size in over)

    weights = [(m, p) for m in attention.modules() for p in m.parameters(recurse=False) if isinstance(p, DTensor)]
    return any(dimensions(weight) > (module in sharded) for module, weight in weights)


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


def _as_one(calls: Sequence[Attention]) -> Attention:
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
        return _as_one(alike) if alike else None

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
                    owner = next((part for part in parts if part in self._kinds), parts[0] if parts else self._block)
                    kind = None if owner is None else self._kinds.get(owner)
                    if owner is not None and kind not in ("mlp", "cross") and has_split_heads(owner):
                        raise NormlabError(SPLIT)
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
