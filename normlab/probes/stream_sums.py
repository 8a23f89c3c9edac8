"""Explain a change of the residual stream by what the branches returned.

A few tokens of every tensor are kept while a block runs (`Rows`). On them `explain` finds how `after` is made of
`before` and of branch outputs o:

    added       after = before + c o           c = 1 as a rule; Granite and others scale a branch afterwards
    scaled      after = a before + c o         DeepNorm
    contained   after = o                      the branch returns the stream with itself added: Bloom, MPT
    by feature  after = before + g * o         a learned scale per feature: BEiT, DINOv2
    dropped     after = before + m * o         dropout or stochastic depth: m is 0 or one constant
    by token    after = before + t * o         one factor per token: an output that is spread over several streams
    rearranged  after - before = rows of o     in another order or with others between: windows

The sums hold up to the rounding of the dtypes; what is further off is no explanation. Nor is a fit that few equations
allow: of one token or of equal tokens, anything is a sum of anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations

import torch
from torch import Tensor

CHECKED = 32  # tokens per call on which sums are checked
SLACK = 4.0  # roundings that a sum may be off by
SPARE = 4  # equations that differ, beyond the unknowns, that a fitted sum must hold in
ENOUGH = 64  # equations compared, to see whether they differ
LIKE = 1e-4  # relative distance below which two rows say the same
NOISE = 1e-9  # relative error of a fit in float64, whose normal equations have a condition of up to 1e6


@dataclass(frozen=True)
class Explanation:
    """A change of the stream as a sum of branch outputs.

    Args:
        form: as in the table above.
        parts: indices of the outputs.
        factors: what each is multiplied by: a number, or one per feature.
        carry: what the stream is multiplied by.
    """

    form: str
    parts: tuple[int, ...]
    factors: tuple[float | Tensor, ...] = ()
    carry: float = 1.0


class Rows:
    """The same few tokens of every tensor of a block, as float64.

    Attributes:
        first: those of the tensor that the block reads.
        eps: the coarsest rounding of the tensors seen.
    """

    def __init__(self, like: Tensor):
        self.width, self.shape = like.shape[-1], like.shape
        self.tokens = like.numel() // max(1, self.width)
        step = max(1, self.tokens // CHECKED)
        self._few = slice(max(0, -(-self.tokens // step) - CHECKED) * step, None, step)
        self._seen: list[tuple[Tensor, Tensor]] = []  # tensors and their rows
        self.first = self._taken(like)
        self.eps = torch.finfo(like.dtype).eps

    def note_rounding(self, x: Tensor) -> None:
        """Sums that `x` takes part in hold to its rounding."""
        self.eps = max(self.eps, torch.finfo(x.dtype).eps)

    def of(self, x: Tensor | None) -> Tensor | None:
        """The rows of a tensor of the same tokens and features, or of one vector for all streams of a token.

        None of any other tensor.
        """
        if x is None or x.shape[-1] != self.width:
            return None
        if len(self.shape) > 3 and x.shape[:-1] == self.shape[:-2]:
            return self._taken(x.unsqueeze(-2).expand(self.shape))
        if x.numel() != self.tokens * self.width:
            return None
        return self._taken(x)

    def _taken(self, x: Tensor) -> Tensor:
        rows = x.detach().reshape(self.tokens, self.width)[self._few].to(torch.float64, copy=True)
        for seen, kept in self._seen:  # the same object, so that `same` need not compare
            if seen is x and torch.equal(kept, rows):  # PyTorch does not count every write in place
                return kept
        self._seen.append((x, rows))
        return rows

    def unchanged(self, x: Tensor, kept: Tensor) -> bool:
        """True if the rows of `x` are still those that were kept: nothing was written over them."""
        now = self.of(x)
        return now is not None and torch.equal(now.nan_to_num(), kept.nan_to_num())

    def same(self, a: Tensor | None, b: Tensor | None) -> bool:
        """True if two sets of rows hold the same numbers, up to rounding."""
        if a is None or b is None or a.shape != b.shape:
            return False
        if a is b and all_finite(a):
            return len(a) > 0
        apart = size_of(a - b)
        if not math.isfinite(apart):
            kept = a.isfinite().all(1) & b.isfinite().all(1)
            a, b = a[kept], b[kept]
            apart = size_of(a - b)
        return len(a) > 0 and apart <= SLACK * self.eps * size_of(a)


def size_of(x: Tensor) -> float:
    """The Euclidean norm of all elements."""
    return float(torch.linalg.vector_norm(x))


def all_finite(*tensors: Tensor) -> bool:
    """True if no element of these rows is infinite or NaN: then their sum is not."""
    return math.isfinite(sum(float(x.sum()) for x in tensors))


def explain(before: Tensor, after: Tensor, outputs: Sequence[Tensor | None], eps: float) -> Explanation | None:
    """Find how `after` comes from `before` and `outputs`, or None.

    The latest output alone is tried first, then sums of several, then the others alone. Outputs that are zero are part
    of any sum.

    Args:
        before, after, outputs: rows x width each; None for an output of another shape.
        eps: relative rounding.
    """
    rows = {i: o for i, o in enumerate(outputs) if o is not None and o.shape == before.shape}
    working = {i: o for i, o in rows.items() if bool(o.any())} or dict(list(rows.items())[-1:])
    zero = rows.keys() - working.keys()
    if not all_finite(before, after, *working.values()):
        kept = before.isfinite().all(1) & after.isfinite().all(1)
        for o in working.values():
            kept &= o.isfinite().all(1)
        if not bool(kept.any()):
            return None
        before, after = before[kept], after[kept]
        working = {i: o[kept] for i, o in working.items()}
    there = list(working)
    sets: list[tuple[int, ...]] = [(i,) for i in there[-1:]]
    if len(there) <= 4:
        sets += [chosen for size in range(len(there), 1, -1) for chosen in combinations(there, size)]
    sets += [(i,) for i in reversed(there[:-1])]
    for form in (_linear, _contained, partial(_fitted, dim=0), _dropped, partial(_fitted, dim=1)):
        for chosen in sets:
            if form is not _linear and len(chosen) > 1:
                continue
            made = form(before, after, [working[i] for i in chosen], eps)
            if made is None:
                continue
            factors = dict(zip(chosen, made.factors, strict=False))
            if factors:
                factors |= dict.fromkeys(zero, 1.0)
            parts = tuple(sorted(factors)) or chosen
            return replace(made, parts=parts, factors=tuple(factors[i] for i in parts if factors))
    return None


def _allowed(terms: Sequence[Tensor], eps: float) -> float:
    """The size of the rounding of a sum of these terms."""
    return SLACK * eps * sum(map(size_of, terms))


def _fits(left: Tensor, terms: Sequence[Tensor], eps: float) -> bool:
    """True if what is left unexplained is no more than the rounding of a sum of these terms."""
    return size_of(left) <= _allowed(terms, eps)


def count_different(rows: Tensor) -> int:
    """Count the rows (n x width) that differ from every row before them by more than rounding."""
    apart = torch.cdist(rows, rows) > LIKE * rows.norm(dim=1)
    return int((apart | torch.ones_like(apart).triu()).all(1).sum())


def _is_determined(unknowns: int, *tensors: Tensor) -> bool:
    """True if these tensors (tokens x width) say more than `unknowns` can fit.

    Every element gives one equation; those that say the same count once. Of one token a norm is but a factor and a
    constant, so one token determines one unknown at most.
    """
    if unknowns > 1 and count_different(torch.cat(tensors, dim=1)) < 2:
        return False
    equations = torch.stack([x.flatten() for x in tensors], dim=1)
    return count_different(equations[:: max(1, len(equations) // ENOUGH)]) >= unknowns + SPARE


def _coefficients(target: Tensor, outputs: Sequence[Tensor]) -> list[float] | None:
    """The factors with which the outputs make the target, by least squares; None if they are not determined.

    The factor of a zero output is 1.
    """
    zero = [not bool(o.any()) for o in outputs]
    if any(zero):
        fitted = _coefficients(target, [o for o, is_zero in zip(outputs, zero, strict=True) if not is_zero])
        rest = iter(fitted or ())
        return None if fitted is None else [1.0 if is_zero else next(rest) for is_zero in zero]
    if not outputs or not _is_determined(len(outputs), target, *outputs):
        return None
    matrix = torch.stack([o.flatten() for o in outputs])
    gram = matrix @ matrix.T
    scale = gram.diagonal().rsqrt()
    normal = gram * scale[:, None] * scale
    if float(torch.linalg.cond(normal)) > 1e6:
        return None
    return (torch.linalg.solve(normal, scale * (matrix @ target.flatten())) * scale).tolist()


def _linear(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float) -> Explanation | None:
    """`added` and `scaled`."""
    change = after - before
    allowed = _allowed([before, after, *outputs], eps)
    left = reduce(torch.sub, outputs, change)
    if size_of(left) <= allowed and _ones_do(left, change, outputs, eps, before):
        return Explanation("added", (), (1.0,) * len(outputs))
    factors = _coefficients(change, outputs)
    if factors is not None and min(map(abs, factors)) > 0:
        left = change - sum(c * o for c, o in zip(factors, outputs, strict=True))
        if size_of(left) <= allowed and _matter(left, outputs, factors, after):
            return Explanation("added", (), tuple(factors))
    factors = _coefficients(after, [before, *outputs])
    if factors is not None and abs(factors[0]) * size_of(before) > 1e-3 * size_of(after):
        left = after - sum(c * o for c, o in zip(factors, [before, *outputs], strict=True))
        if size_of(left) <= allowed and _matter(left, outputs, factors[1:], after):
            return Explanation("scaled", (), tuple(factors[1:]), factors[0])
    return None


def _matter(left: Tensor, outputs: Sequence[Tensor], factors: Sequence[float], after: Tensor) -> bool:
    """True if what every output adds is well above what is left unexplained, and above the noise of the fit.

    Nothing may be left by chance: the fit of an output that was not added is its noise.
    """
    least = max(4 * size_of(left), NOISE * size_of(after))
    sizes = [abs(c) * size_of(o) for c, o in zip(factors, outputs, strict=True)]
    return all(size > least for size, o in zip(sizes, outputs, strict=True) if bool(o.any()))


def _ones_do(rest: Tensor, change: Tensor, outputs: list[Tensor], eps: float, before: Tensor) -> bool:
    """True if factors of 1, which leave `rest`, do as well as fitted ones, where rounding leaves that open."""
    left = size_of(rest)
    rounded = SLACK * eps * size_of(before)
    if all(size_of(o) <= rounded for o in outputs):  # added, they are lost in rounding
        return True
    if left <= 1e-4 * size_of(change) or not outputs:
        return True
    factors = _coefficients(change, outputs)
    if factors is None:
        return False
    fitted = size_of(change - sum(c * o for c, o in zip(factors, outputs, strict=True)))
    return left <= 1.02 * fitted


def _contained(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float) -> Explanation | None:
    if not _fits(after - outputs[0], [after], eps):
        return None
    # Trivially so where `after` is the branch's output itself: that must hold the stream as well.
    return Explanation("contained", ()) if contains(after, before) else None


def contains(after: Tensor, before: Tensor) -> bool:
    """True if `after` holds the stream `before`, by its projection."""
    return 0.5 < float((after * before).sum() / before.square().sum().clamp(min=1e-300)) < 2


def is_rearranged(before: Tensor, after: Tensor, output: Tensor, eps: float) -> bool:
    """True if every row of `after - before` is among the rows of `output` (..., width), in any order."""
    if output.shape[-1] != before.shape[-1]:
        return False
    kept = before.isfinite().all(1) & after.isfinite().all(1)
    before, after, change = before[kept], after[kept], (after - before)[kept]
    rows = output.detach().reshape(-1, output.shape[-1])
    sizes = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    allowed = SLACK * eps * (before.norm(dim=1) + after.norm(dim=1) + change.norm(dim=1))
    if not bool((change.norm(dim=1) > 4 * allowed).any()):  # lost in rounding, if all rows are that small
        return bool(len(allowed)) and bool((sizes <= allowed.max()).all())
    for row, slack in zip(change, allowed, strict=True):
        near = rows[(sizes - row.norm()).abs() <= slack].double()
        if not len(near) or float((near - row).norm(dim=1).min()) > float(slack):
            return False
    return True


def _fitted(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float, dim: int) -> Explanation | None:
    """`by feature` (`dim` 0) and `by token` (`dim` 1): one factor for each with which an output makes the change."""
    if before.shape[dim] < 6:
        return None
    change, o = after - before, outputs[0]
    square = o.square().sum(dim, keepdim=True)
    factor = torch.where(square > 0, (change * o).sum(dim, keepdim=True) / square.clamp(min=1e-300), 0)
    left, sizes = change - factor * o, [before, after, o]
    is_equal = _fits(factor * (o - o.mean(dim, keepdim=True)), sizes, eps)  # equal rows make any change
    if is_equal or not _fits(left, sizes, eps) or not _matter(left, [factor * o], [1.0], after):
        return None
    return Explanation("by token", ()) if dim else Explanation("by feature", (), (factor[0],))


def _dropped(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float) -> Explanation | None:
    if len(before) < 6:
        return None
    change, o = after - before, outputs[0]
    held = change.abs() > SLACK * eps * (before.abs() + after.abs() + o.abs())
    if not bool((o[held] != 0).all()) or not _is_determined(1, change[held], o[held]):
        return None
    ratio = float((change[held] / o[held]).median())
    if ratio > 0 and _fits(torch.where(held, change - ratio * o, change), [before, after, o], eps):
        return Explanation("dropped", (), (ratio,))
    return None
