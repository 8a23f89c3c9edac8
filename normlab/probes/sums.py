"""Does the residual stream add up? What a branch's output is to the change of the stream that it should explain.

A few tokens of every tensor are kept while a block runs (`Rows`); `explain` finds on them how `after` is made of
`before` and of what the branches returned, or says that it is not:

    added       after = before + c o                 (c = 1 as a rule; Granite and others scale a branch afterwards)
    scaled      after = a before + c o               (DeepNorm)
    contained   after = o                            (the branch returns the stream with itself added: Bloom, MPT)
    by feature  after = before + g * o               (a learned scale a feature: BEiT, DINOv2)
    dropped     after = before + m * o               (dropout or stochastic depth between: m is 0 or one constant)
    by token    after = before + t * o               (one factor a token: streams that a branch's output is spread over)
    rearranged  after - before = the rows of o       (in another order or with others between: windows)

The sums are exact up to the rounding of the stream's and the branch's dtype; what is further off is no explanation.
Nor is a fit that few equations allow: of one token, of equal tokens, of a width of 2, anything is a sum of anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

CHECKED = 32  # tokens a call on which sums are checked
SLACK = 4.0  # roundings that a sum may be off by
SPARE = 4  # equations that differ, beyond the unknowns, that a fitted sum must hold in
ENOUGH = 64  # equations looked at, to see whether they differ
LIKE = 1e-4  # relative distance below which two rows say the same


@dataclass(frozen=True)
class Explanation:
    """How a change of the stream is made of branch outputs: `parts` are indices of the outputs, `factor` what each is
    multiplied by (a number, or one a feature), `carry` what the stream is multiplied by."""

    form: str
    parts: tuple[int, ...]
    factors: tuple[float | Tensor, ...] = ()
    carry: float = 1.0


class Rows:
    """The same few tokens of every tensor of a block, as float64."""

    def __init__(self, like: Tensor):
        self.width, self.shape = like.shape[-1], like.shape
        self.tokens = like.numel() // max(1, self.width)
        step = max(1, self.tokens // CHECKED)
        self.index = torch.arange(0, self.tokens, step, device=like.device)[-CHECKED:]

    def of(self, x: Tensor | None) -> Tensor | None:
        """The rows of a tensor that holds the same tokens and features, or one vector for all streams of a token; None
        of another."""
        if x is None or x.shape[-1] != self.width:
            return None
        if len(self.shape) > 3 and x.shape[:-1] == self.shape[:-2]:
            return x.detach().reshape(-1, self.width)[self.index // self.shape[-2]].double()
        if x.numel() != self.tokens * self.width:
            return None
        return x.detach().reshape(self.tokens, self.width)[self.index].double()


def rounding(*dtypes: torch.dtype) -> float:
    """The coarsest relative spacing of these float types."""
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def same(a: Tensor | None, b: Tensor | None, eps: float) -> bool:
    """Whether two sets of rows hold the same numbers, up to rounding."""
    if a is None or b is None or a.shape != b.shape:
        return False
    kept = a.isfinite().all(1) & b.isfinite().all(1)
    return bool(kept.any()) and bool((a[kept] - b[kept]).norm() <= eps * a[kept].norm())


def explain(before: Tensor, after: Tensor, outputs: Sequence[Tensor | None], eps: float) -> Explanation | None:
    """How `after` comes from `before` and `outputs` (rows x width each; None = of another shape), or None.

    The latest output alone is tried first, then sums of several, then the others alone. Outputs that are zero are part
    of any sum.
    """
    usable = [i for i, o in enumerate(outputs) if o is not None and o.shape == before.shape]
    working = [i for i in usable if bool(outputs[i].any())] or usable[-1:]  # type: ignore[union-attr]
    zero, usable = [i for i in usable if i not in working], working
    last = usable[-1:]
    sets = [tuple(last)] if last else []
    sets += [s for size in range(len(usable), 1, -1) for s in combinations(usable, size)] if len(usable) <= 4 else []
    sets += [(i,) for i in reversed(usable[:-1])]
    kept = before.isfinite().all(1) & after.isfinite().all(1)
    for i in usable:
        kept &= outputs[i].isfinite().all(1)  # type: ignore[union-attr]
    if not bool(kept.any()):
        return None
    before, after = before[kept], after[kept]
    rows = {i: outputs[i][kept] for i in usable}  # type: ignore[index]
    for forms in (_linear, _contained, _one_by_one, _by_token):
        for chosen in sets:
            found = forms(before, after, [rows[i] for i in chosen], eps)
            if found is not None:
                if not found.factors:
                    return Explanation(found.form, chosen)
                factors = dict(zip(chosen, found.factors, strict=True)) | dict.fromkeys(zero, 1.0)
                parts = tuple(sorted(factors))
                return Explanation(found.form, parts, tuple(factors[i] for i in parts), found.carry)
    return None


def _fits(left: Tensor, sizes: Sequence[Tensor], eps: float) -> bool:
    allowed = SLACK * eps * sum(float(size.norm()) for size in sizes)
    return float(left.norm()) <= allowed


def different(rows: Tensor) -> int:
    """How many rows (n x width) are unlike every row before them, by more than rounding."""
    apart = torch.cdist(rows, rows) > LIKE * rows.norm(dim=1)
    return int((apart | torch.ones_like(apart).triu()).all(1).sum())


def _determined(unknowns: int, *tensors: Tensor) -> bool:
    """Whether these tensors (tokens x width), of which every element gives one equation, say more than `unknowns` can
    fit, once what is said twice is counted once. Of one token a norm is but a factor and a constant: it determines one
    unknown at most."""
    if unknowns > 1 and different(torch.cat(tensors, dim=1)) < 2:
        return False
    equations = torch.stack([x.flatten() for x in tensors], dim=1)
    return different(equations[:: max(1, len(equations) // ENOUGH)]) >= unknowns + SPARE


def _coefficients(target: Tensor, outputs: Sequence[Tensor]) -> list[float] | None:
    """The factors with which the outputs make the target, by least squares; 1 of what is zero. None when they cannot be
    told."""
    zero = [not bool(o.any()) for o in outputs]
    if any(zero):
        fitted = _coefficients(target, [o for o, none in zip(outputs, zero, strict=True) if not none])
        rest = iter(fitted or ())
        return None if fitted is None else [1.0 if none else next(rest) for none in zero]
    if not outputs or not _determined(len(outputs), target, *outputs):
        return None
    matrix = torch.stack([o.flatten() for o in outputs])
    gram = matrix @ matrix.T
    scale = gram.diagonal().rsqrt()
    normal = gram * scale[:, None] * scale
    if float(torch.linalg.cond(normal)) > 1e6:
        return None
    return (torch.linalg.solve(normal, scale * (matrix @ target.flatten())) * scale).tolist()


def _linear(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float) -> Explanation | None:
    change, total = after - before, sum(outputs)
    sizes = [before, after, *outputs]
    ones = (1.0,) * len(outputs)
    if _fits(change - total, sizes, eps) and _is_better(change, outputs, eps, before):
        return Explanation("added", (), ones)
    found = _coefficients(change, outputs)
    if found is not None and min(map(abs, found)) > 0:
        left = change - sum(c * o for c, o in zip(found, outputs, strict=True))
        if _fits(left, sizes, eps) and _significant(left, outputs, found):
            return Explanation("added", (), tuple(found))
    found = _coefficients(after, [before, *outputs])
    if found is not None and abs(found[0]) * float(before.norm()) > 1e-3 * float(after.norm()):
        left = after - sum(c * o for c, o in zip(found, [before, *outputs], strict=True))
        if _fits(left, sizes, eps) and _significant(left, outputs, found[1:]):
            return Explanation("scaled", (), tuple(found[1:]), found[0])
    return None


def _significant(left: Tensor, outputs: Sequence[Tensor], found: Sequence[float]) -> bool:
    """Whether every output matters: what it adds is well above what is left unexplained."""
    sizes = [abs(c) * float(o.norm()) for c, o in zip(found, outputs, strict=True)]
    return all(size > 4 * float(left.norm()) for size, o in zip(sizes, outputs, strict=True) if bool(o.any()))


def _is_better(change: Tensor, outputs: list[Tensor], eps: float, before: Tensor) -> bool:
    """Whether factors of 1 do as well as fitted ones, where rounding leaves that open."""
    left = float((change - sum(outputs)).norm())
    rounded = SLACK * eps * float(before.norm())
    if all(float(o.norm()) <= rounded for o in outputs):  # added, they are lost in rounding
        return True
    if left <= 1e-4 * float(change.norm()) or not outputs:
        return True
    found = _coefficients(change, outputs)
    if found is None:
        return False
    fitted = float((change - sum(c * o for c, o in zip(found, outputs, strict=True))).norm())
    return left <= 1.02 * fitted


def _contained(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float) -> Explanation | None:
    if len(outputs) != 1 or not _fits(after - outputs[0], [after], eps):
        return None
    # Trivially so where the branch's output itself is looked at: it must hold the stream as well.
    return Explanation("contained", ()) if contained(before, after) else None


def contained(before: Tensor, after: Tensor) -> bool:
    """Whether `after` holds the stream `before`, by its projection."""
    return 0.5 < float((after * before).sum() / before.square().sum().clamp(min=1e-300)) < 2


def rearranged(before: Tensor, after: Tensor, output: Tensor, eps: float) -> bool:
    """Whether every row of `after - before` is among the rows of `output` (..., width), in whatever order: windows of
    an image, tokens with padding between."""
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


def _one_by_one(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float) -> Explanation | None:
    if len(outputs) != 1 or len(before) < 6:
        return None
    change, o = after - before, outputs[0]
    square = o.square().sum(0)
    factor = torch.where(square > 0, (change * o).sum(0) / square.clamp(min=1e-300), torch.zeros_like(square))
    sizes = [before, after, o]
    varies = not _fits(factor * (o - o.mean(0)), sizes, eps)  # of equal rows, any change is so made
    if varies and _fits(change - factor * o, sizes, eps) and _significant(change - factor * o, [factor * o], [1.0]):
        return Explanation("by feature", (), (factor,))
    held = change.abs() > SLACK * eps * (before.abs() + after.abs() + o.abs())
    if not bool((o[held] != 0).all()) or not _determined(1, change[held], o[held]):
        return None
    ratio = float((change[held] / o[held]).median())
    if ratio > 0 and _fits(torch.where(held, change - ratio * o, change), [before, after, o], eps):
        return Explanation("dropped", (), (ratio,))
    return None


def _by_token(before: Tensor, after: Tensor, outputs: list[Tensor], eps: float) -> Explanation | None:
    if len(outputs) != 1 or before.shape[1] < 6:
        return None
    change, o = after - before, outputs[0]
    factor = (change * o).sum(1, keepdim=True) / o.square().sum(1, keepdim=True).clamp(min=1e-300)
    left, sizes = change - factor * o, [before, after, o]
    varies = not _fits(factor * (o - o.mean(1, keepdim=True)), sizes, eps)  # of equal features, any change is so made
    if varies and _fits(left, sizes, eps) and _significant(left, [factor * o], [1.0]):
        return Explanation("by token", ())
    return None
