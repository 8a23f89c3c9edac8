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

In half precision a branch of a few percent is near the rounding of the stream, which is no noise: where c o is below
half a step of `before`, nothing is added. So a factor is one with which the sum, rounded, is `after`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from itertools import combinations

import torch
from torch import Tensor

CHECKED = 32  # tokens per call on which sums are checked
SLACK = 4.0  # eps that two tensors which say the same may be apart
GRIDS = (torch.bfloat16, torch.float16, torch.float32)  # that values may be rounded to, the coarsest first
TOLD = 0.02  # relative error up to which a factor is known
ROUNDED = 0.1  # the rounding of an element, as a share of what it may be off by
STEPS = 20  # of the fit of a rounded sum
SPARE = 4  # equations that differ, beyond the unknowns, that a fitted sum must hold in
SAMPLE = 1024  # elements that tell a dtype
ENOUGH = 64  # equations compared, to see whether they differ
LIKE = 1e-4  # relative distance below which two rows say the same
CLEAR = 8  # standard errors that a fitted factor must be, and roundings that what it adds is clear of
FAR = 100  # mean square, in units of what it may be off by, of what another sum leaves
NOISE = 1e-9  # relative error of a fit in float64, whose normal equations have a condition of up to 1e6


@dataclass(frozen=True)
class Sum:
    """A change of the stream as a sum of branch outputs.

    Args:
        form: as in the table above.
        parts: indices of the outputs.
        factors: what each is multiplied by: a number, or one per feature. NaN if rounding hides it.
        carry: what the stream is multiplied by.
    """

    form: str
    parts: tuple[int, ...]
    factors: tuple[float | Tensor, ...] = ()
    carry: float = 1.0


class Rows:
    """The same few tokens of every tensor of a block, as float64 on the device of the first.

    Attributes:
        first: those of the tensor that the block reads.
        eps: the coarsest rounding of the tensors seen.
    """

    def __init__(self, like: Tensor):
        self.width, self.shape = like.shape[-1], like.shape
        self.tokens = like.numel() // max(1, self.width)
        step = max(1, self.tokens // CHECKED)
        self._device = like.device
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
        rows = x.detach().reshape(self.tokens, self.width)[self._few].to(self._device, torch.float64, copy=True)
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
        size = SLACK * size_of(a)
        if not len(a) or apart > self.eps * size:
            return False
        fine = torch.finfo(torch.float32).eps
        if min(self.eps * size, apart) <= fine * size:
            return True
        # In half precision one may have been rounded once more. A small branch moves small elements further.
        further = (a - b).abs() - _noise([a, b], self.eps) / 2
        return size_of(further.clamp(min=0)) <= fine * size


def passes_on(read: Tensor, returned: Tensor, x: Tensor) -> str | None:
    """What a tensor `x` of the shape of `returned` holds of a block: "same" as it has returned; the "sum" of that and
    what it has read; any "other"; None where no row that it has returned is finite."""
    rows = Rows(returned)
    rows.note_rounding(x)
    before, found = rows.of(read), rows.of(x)
    if not bool(rows.first.isfinite().all(1).any()):
        return None
    if rows.same(found, rows.first):
        return "same"
    return "sum" if before is not None and rows.same(found, before + rows.first) else "other"


def size_of(x: Tensor) -> float:
    """The Euclidean norm of all elements."""
    return float(torch.linalg.vector_norm(x))


def all_finite(*tensors: Tensor) -> bool:
    """True if no element of these rows is infinite or NaN: then their sum is not."""
    return math.isfinite(sum(float(x.sum()) for x in tensors))


def explain(before: Tensor, after: Tensor, outputs: Sequence[Tensor | None], eps: float) -> Sum | None:
    """Find how `after` comes from `before` and `outputs`, or None.

    The sum of all is tried first, then sums of fewer, then each alone, the latest first. Outputs that are zero are part
    of any sum.

    Args:
        before, after, outputs: rows x width each, as float64; None for an output of another shape.
        eps: relative rounding.
    """
    rows = {i: o for i, o in enumerate(outputs) if o is not None and o.shape == before.shape}
    if not all_finite(before, after, *rows.values()):
        kept = before.isfinite().all(1) & after.isfinite().all(1)
        for o in rows.values():
            kept &= o.isfinite().all(1)
        if not bool(kept.any()):
            return None
        before, after = before[kept], after[kept]
        rows = {i: o[kept] for i, o in rows.items()}
    working = {i: o for i, o in rows.items() if bool(o.any())} or dict(list(rows.items())[-1:])
    zero = rows.keys() - working.keys()
    there = list(working)
    sets: list[tuple[int, ...]] = []
    if len(there) <= 4:
        sets += [chosen for size in range(len(there), 1, -1) for chosen in combinations(there, size)]
    sets += [(i,) for i in reversed(there)]
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


def _grid(x: Tensor, eps: float) -> torch.dtype:
    """The coarsest dtype, of no more than `eps`, that holds a sample of these values."""
    if eps <= torch.finfo(torch.float32).eps:
        return torch.float32 if eps == torch.finfo(torch.float32).eps else torch.float64
    few = x.flatten()[:: x.numel() // SAMPLE | 1]  # an odd step: no feature is always missed
    dtypes = (dtype for dtype in GRIDS if torch.finfo(dtype).eps <= eps)
    return next((dtype for dtype in dtypes if torch.equal(few.to(dtype).double(), few)), torch.float64)


def _allowed(terms: Sequence[Tensor], eps: float) -> float:
    """The size of what a sum of these terms may be off by: an eps of each, or about five roundings."""
    return sum(torch.finfo(_grid(x, eps)).eps * size_of(x) for x in terms)


def _noise(terms: Sequence[Tensor], eps: float) -> Tensor:
    """What every element of a sum of these terms may be off by."""
    kinds = ((x, torch.finfo(_grid(x, eps))) for x in terms)
    return reduce(torch.add, (kind.eps * (x.abs() + kind.tiny) for x, kind in kinds))


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


class _Sum:
    """A sum, `base` + c_1 x_1 + ..., that was rounded to `after`.

    Args:
        after, base, terms: rows x width each; no term is zero.
        eps: relative rounding.

    Attributes:
        base_last: the terms are added to each other, then to the base.
    """

    base_last = False

    def __init__(self, after: Tensor, base: Tensor, terms: Sequence[Tensor], eps: float):
        self.after, self.base, self.terms, self.eps = after, base, terms, eps
        self.grid = _grid(after, eps)

    @cached_property
    def noise(self) -> Tensor:
        return _noise([self.after, self.base, *self.terms], self.eps)

    @cached_property
    def _matrix(self) -> Tensor:
        return torch.stack([(x / self.noise).flatten() for x in self.terms])

    @cached_property
    def _normal(self) -> tuple[Tensor, Tensor]:
        """The normal equations' matrix with a diagonal of 1, and what scales it so."""
        gram = self._matrix @ self._matrix.T
        scale = gram.diagonal().rsqrt()
        return gram * scale[:, None] * scale, scale

    @cached_property
    def is_determined(self) -> bool:
        """True if there are equations enough, and terms that differ enough, to tell the factors."""
        if not _is_determined(len(self.terms), self.after - self.base, *self.terms):
            return False
        return float(torch.linalg.cond(self._normal[0])) < 1e6

    @cached_property
    def _inverse(self) -> Tensor:
        normal, scale = self._normal
        return torch.linalg.inv(normal) * scale[:, None] * scale

    def rounded(self, factors: Tensor) -> Tensor:
        """The sum with these factors, every step of it rounded."""
        parts = [self._round(c * x) for c, x in zip(factors.tolist(), self.terms, strict=True)]
        if self.base_last:
            return self._round(reduce(lambda x, y: self._round(x + y), parts) + self.base)
        return reduce(lambda x, y: self._round(x + y), parts, self.base)

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self.grid).double()

    def left(self, factors: Tensor) -> Tensor:
        """What the rounded sum leaves of every element, in units of what that may be off by."""
        return ((self.after - self.rounded(factors)) / self.noise).flatten()

    def correction(self, left: Tensor) -> Tensor:
        """What factors are off by that leave this."""
        return self._inverse @ (self._matrix @ left)

    def errors(self, left: Tensor) -> Tensor:
        """The standard errors of factors that leave this.

        They are those that leaving out each element gives, as few may tell nearly all; and no less than those that the
        rounding of all gives.
        """
        found = self.correction(left)
        share = self._inverse @ self._matrix  # of every element in each factor
        apart = (left - found @ self._matrix) / (1 - (share * self._matrix).sum(0)).clamp(min=1e-9)
        errors = torch.linalg.vector_norm(share * apart, dim=1)
        return torch.maximum(errors, ROUNDED * self._inverse.diagonal().sqrt())

    def fit(self) -> tuple[Tensor, Tensor]:
        """The factors, and what they leave. Those of another sum are not pursued."""
        factors = self.correction(((self.after - self.base) / self.noise).flatten())
        for _ in range(STEPS):
            left = self.left(factors)
            if float(left.square().mean()) > FAR:
                break
            step = self.correction(left)
            factors = factors + step  # the last one too: equations in float64 are not solved to its rounding
            if bool((step.abs() <= 1e-4 * factors.abs()).all()):
                break
        return factors, self.left(factors)

    def are_clear(self, factors: Tensor) -> list[bool]:
        """Whether each term is that large that no other factor can be taken for its own."""
        least = CLEAR * torch.finfo(self.grid).eps * size_of(self.after)
        return [abs(c) * size_of(x) > least for c, x in zip(factors.tolist(), self.terms, strict=True)]

    def told(self, factors: Tensor, left: Tensor, share: float) -> tuple[float, ...]:
        """The factors, NaN for one that is not known to a `share`: more or less of its term does no worse."""
        changes = torch.diag(share * factors)
        is_known = [True] * len(changes)
        if self.is_determined:
            is_known = (self.errors(left) <= share * factors.abs()).tolist()
        for i, is_clear in enumerate(self.are_clear(factors)):
            if is_known[i] and not is_clear:
                others = (self.left(factors + sign * changes[i]).abs() - left.abs() for sign in (1, -1))
                is_known[i] = all(int(worse.sign().sum()) >= SPARE for worse in others)
        return tuple(c if known else math.nan for c, known in zip(factors.tolist(), is_known, strict=True))


def _linear(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float) -> Sum | None:
    """`added` and `scaled`."""
    working = [o for o in outputs if bool(o.any())]
    left, allowed = reduce(torch.sub, working, after - before), _allowed([before, after, *working], eps)
    if size_of(left) <= allowed and (not working or size_of(left) <= 1e-4 * size_of(after - before)):
        return Sum("added", (), (1.0,) * len(outputs))
    if working:
        added = _Sum(after, before, working, eps)
        for factors_of in (_ones, _fitted_factors) if size_of(left) <= allowed else (_fitted_factors,):
            for added.base_last in (False, True)[: len(working)]:
                factors = factors_of(added)
                if factors is not None:
                    return Sum("added", (), factors)
    factors = _fitted_factors(_Sum(after, torch.zeros_like(before), [before, *working], eps))
    if factors is not None and abs(factors[0]) * size_of(before) > 1e-3 * size_of(after):
        return Sum("scaled", (), factors[1:] or (1.0,), factors[0])
    return None


def _ones(added: _Sum) -> tuple[float, ...] | None:
    """Factors of 1, NaN if rounding hides what one is; None if others do better."""
    ones = torch.ones(len(added.terms), dtype=torch.float64, device=added.after.device)
    if all(added.are_clear(ones)) and torch.equal(added.rounded(ones), added.after):
        return (1.0,) * len(ones)
    left = added.left(ones)
    if float(left.square().mean()) > 1:
        return None
    if added.is_determined and not bool((added.correction(left).abs() <= 4 * added.errors(left) + 1e-3).all()):
        return None
    least = torch.finfo(torch.float32).eps * size_of(added.after)  # below it a branch is next to nothing in any case
    told = added.told(ones, left, 0.25)
    return tuple(1.0 if size_of(o) <= least else c for o, c in zip(added.terms, told, strict=True))


def _fitted_factors(made: _Sum) -> tuple[float, ...] | None:
    """The factors of a sum, NaN for one that rounding hides; None if it does not hold, or holds by chance.

    What a term adds is well above what is left by chance, and above the noise of the fit.
    """
    if not made.is_determined:
        return None
    factors, left = made.fit()
    sizes = [abs(c) * size_of(x) for c, x in zip(factors.tolist(), made.terms, strict=True)]
    if float(left.square().mean()) > 1 or min(sizes) <= NOISE * size_of(made.after):
        return None
    return made.told(factors, left, TOLD) if bool((factors.abs() > CLEAR * made.errors(left)).all()) else None


def _contained(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float) -> Sum | None:
    if not _fits(after - outputs[0], [after], eps):
        return None
    # Trivially so where `after` is the branch's output itself: that must hold the stream as well.
    return Sum("contained", ()) if contains(after, before) else None


def contains(after: Tensor, before: Tensor) -> bool:
    """True if `after` holds the stream `before`, by its projection."""
    return 0.5 < float((after * before).sum() / before.square().sum().clamp(min=1e-300)) < 2


def is_rearranged(before: Tensor, after: Tensor, output: Tensor, eps: float) -> bool:
    """True if every row of `after - before` is among the rows of `output` (..., width), in any order."""
    change, allowed, rows, sizes = _row_by_row(before, after, output, eps)
    if not bool((change.norm(dim=1) > allowed).any()):
        return False
    for row, slack in zip(change, allowed / 2, strict=True):
        near = rows[(sizes - row.norm()).abs() <= slack].double()
        if not len(near) or float((near - row).norm(dim=1).min()) > float(slack):
            return False
    return True


def is_lost(before: Tensor, after: Tensor, output: Tensor, eps: float) -> bool:
    """True if no row of `output` (..., width) is above the rounding of the stream, which has not changed further."""
    change, allowed, _, sizes = _row_by_row(before, after, output, eps)
    return len(change) > 0 and bool((change.norm(dim=1) <= allowed).all()) and bool((sizes <= allowed.max()).all())


def _row_by_row(before: Tensor, after: Tensor, output: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The finite rows of the change, and what each may be off by; those of the output, and their sizes."""
    kept = before.isfinite().all(1) & after.isfinite().all(1) & (output.shape[-1] == before.shape[-1])
    before, after, change = before[kept], after[kept], (after - before)[kept]
    allowed = reduce(torch.add, (torch.finfo(_grid(x, eps)).eps * x.norm(dim=1) for x in (before, after, change)))
    rows = output.detach().reshape(-1, output.shape[-1])
    return change, allowed, rows, torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)


def _fitted(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float, dim: int) -> Sum | None:
    """`by feature` (`dim` 0) and `by token` (`dim` 1): one factor for each with which an output makes the change."""
    if before.shape[dim] < 6:
        return None
    change, o = after - before, outputs[0]
    square = o.square().sum(dim, keepdim=True)
    factor = torch.where(square > 0, (change * o).sum(dim, keepdim=True) / square.clamp(min=1e-300), 0)
    left, sizes = change - factor * o, [before, after, o]
    is_equal = _fits(factor * (o - o.mean(dim, keepdim=True)), sizes, eps)  # equal rows make any change
    if is_equal or not _fits(left, sizes, eps) or size_of(factor * o) <= max(4 * size_of(left), NOISE * size_of(after)):
        return None
    return Sum("by token", ()) if dim else Sum("by feature", (), (factor[0],))


def _dropped(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float) -> Sum | None:
    if len(before) < 6:
        return None
    change, o = after - before, outputs[0]
    held = change.abs() > _noise([before, after, o], eps)
    if not bool((o[held] != 0).all()) or not _is_determined(1, change[held], o[held]):
        return None
    ratio = float((change[held] / o[held]).median())
    if ratio > 0 and _fits(torch.where(held, change - ratio * o, change), [before, after, o], eps):
        return Sum("dropped", (), (ratio,))
    return None
