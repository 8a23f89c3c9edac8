"""Find which norm of a block is which, and what each branch adds to the stream.

`find_reading` goes through what ran in a block, in order, and looks for a reading under which the stream adds up:

    a norm that reads the stream before a branch     the branch's norm: `attn_norm_in`, `mlp_norm_in` ... (Pre-LN); two
                                                     before the first of two parallel branches are theirs in order
    a norm of a branch's output                      its output is what the branch adds (Peri-LN, OLMo-2)
    a norm whose output is the stream from there on  the norm of the branch before it (Post-LN), which reads x + f(x);
                                                     at a block's beginning that of the branch after it (MiniMax)
    an activation whose output is the stream         at no site (ResNet)
    a branch that reads another one's output         continues it: what the last one returns is added, under the first
                                                     one's kind (Inkling's convolution after attention)

A change of the stream between two such points is a `Segment`: the branches that ran in it, and how their outputs make
it (`normlab.probes.stream_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normlab.probes.layout import same_tensor
from normlab.probes.sites import Branch
from normlab.probes.stream_sums import Rows, Sum, contains, explain, is_lost, is_rearranged

NormRun = tuple[nn.Module, int]  # a norm, and how often it had run in the block before
MOST_STEPS = 2000  # readings tried before a block is given up
DIFFERENCES = ("contained", "dropped", "by token", "rearranged")  # forms of which the stream's difference is added


@dataclass(eq=False)
class NormRead:
    """A norm that has run in a block, or an activation outside the branches: that has `is_norm` False and no site."""

    norm: nn.Module
    layer: int
    x: Tensor | None = None  # what it read
    rows: Tensor | None = None
    out: Tensor | None = None  # what it returned
    out_rows: Tensor | None = None
    kept: Tensor | None = None  # a copy of `out`, where that may be what a branch adds
    site: str | None = None  # None until it is known, or where it is at none
    is_norm: bool = True
    time: int = 0  # how often the norm had run in the block before
    is_second: bool = False  # another norm has its site


@dataclass(eq=False)
class BranchRun:
    """A branch that has run."""

    branch: Branch
    kind: str  # or that of the branch which it continues
    x: Tensor | None  # what it read
    read: Tensor | None  # the rows of that
    out: Tensor
    rows: Tensor | None
    kept: Tensor | None  # a copy of `out`: many models add the residual to it in place
    output_norm: nn.Module | None = None  # its output is what the branch adds
    continues: bool = False  # it reads what an earlier branch returned, not the stream

    @property
    def module(self) -> nn.Module:
        """The module whose output is added to the stream."""
        return self.output_norm or self.branch.module


@dataclass(frozen=True)
class Segment:
    """A change of the stream: where it starts and ends (None = the block's output), and what made it."""

    before: Tensor
    before_rows: Tensor
    after: Tensor | None
    after_rows: Tensor
    runs: tuple[BranchRun, ...]
    made: Sum

    @property
    def hidden(self) -> tuple[str, ...]:
        """The kinds of the branches whose factor the rounding of the stream hides: what they add is not known."""
        factors = zip(self.runs, self.made.factors, strict=False)
        return tuple(run.kind for run, factor in factors if isinstance(factor, float) and math.isnan(factor))


# -- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """A reading of a block up to some event."""

    stream: Tensor
    rows: Tensor
    pending: tuple[BranchRun, ...] = ()  # that have run since the stream was last known
    waiting: tuple[NormRead, ...] = ()  # norms that have read the stream for a branch to come
    normed: tuple[NormRead, ...] = ()  # norms that have read the stream as it is
    start: NormRead | None = None  # the norm whose output is the stream, while no branch has run on it
    sites: tuple[tuple[NormRead, str], ...] = ()
    segments: tuple[Segment, ...] = ()

    def with_reader(self, norm: NormRead) -> Reading:
        """The reading with a norm that reads the stream for a branch to come."""
        return replace(self, waiting=(*self.waiting, norm), normed=(*self.normed, norm), start=None)

    def with_output_norm(self, norm: NormRead) -> Reading:
        """The reading with a norm of the newest branch's output: that is what the branch adds."""
        assert norm.out is not None
        newest = self.pending[-1]
        run = replace(newest, out=norm.out, kept=norm.kept, rows=norm.out_rows, output_norm=norm.norm)
        return replace(self, pending=(*self.pending[:-1], run))

    def with_stream_norm(self, norm: NormRead, kind: str) -> Reading:
        """The reading with a norm or an activation whose output is the stream from here on.

        Where the branch before has a norm already, it is that of the branch to come.
        """
        assert norm.out is not None and norm.out_rows is not None
        after = replace(self, stream=norm.out, rows=norm.out_rows, normed=())
        site = f"{kind}_norm_in"
        if not norm.is_norm:
            return after
        if any(taken == site for _, taken in self.sites):
            return replace(after, start=norm)
        return replace(after, sites=(*self.sites, (norm, site)))


def find_reading(events: Sequence[NormRead | BranchRun], entered: Tensor, last: Tensor, rows: Rows) -> Reading | None:
    """The first reading of `events` under which the stream goes from `entered` to the rows `last`, or None."""
    return next(_Search(events, last, rows).readings(0, Reading(entered, rows.first)), None)


class _Search:
    def __init__(self, events: Sequence[NormRead | BranchRun], last: Tensor, rows: Rows):
        self.events, self.last, self.same, self.eps = events, last, rows.same, rows.eps
        self.steps = 0

    def readings(self, i: int, state: Reading) -> Iterator[Reading]:
        """The readings that continue `state` from event `i` on and end at the block's output."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            return
        if i == len(self.events):
            if state.pending:
                ended = self.closed(state, None, self.last)
                if ended is not None:
                    yield ended
            elif self.same(state.rows, self.last) and state.segments:
                yield state
            return
        event = self.events[i]
        if isinstance(event, BranchRun):
            choices = self.after_branch(i, event, state)
        elif event.rows is not None:
            choices = self.after_norm(i, event, state)
        else:
            choices = iter((state,))
        for choice in choices:
            yield from self.readings(i + 1, choice)

    def after_branch(self, i: int, run: BranchRun, state: Reading) -> Iterator[Reading]:
        inner = None if state.pending else self.inner_norm(i, run)
        if inner is not None and inner.rows is not None and contains(inner.rows, state.rows):
            made = Sum("contained", (0,))  # the branch returns norm(x + f(x))
            whole = self.segment(self.with_run(state, run), inner.x, inner.rows, made)
            if whole is not None:
                yield whole.with_stream_norm(inner, run.kind)
        if state.pending and run.read is not None and not self.same(run.read, state.rows):
            closed = self.closed(state, run.x, run.read)
            if closed is not None:
                yield self.with_run(closed, run)
        yield self.with_run(state, run)

    def after_norm(self, i: int, norm: NormRead, state: Reading) -> Iterator[Reading]:
        assert norm.rows is not None
        if self.same(norm.rows, state.rows) and norm.is_norm:
            yield state.with_reader(norm)
            if not state.pending:  # else a branch may have added next to nothing
                if norm.out is not None and norm.out_rows is not None:
                    yield replace(state, stream=norm.out, rows=norm.out_rows, normed=(), start=norm)
                return
        if state.pending:
            reads_output = norm.out_rows is not None and same_tensor(norm.x, state.pending[-1].out)
            if reads_output:
                yield state.with_output_norm(norm)
            closed = self.closed(state, norm.x, norm.rows)
            if closed is not None:
                if norm.is_norm:
                    yield closed.with_reader(norm)
                made, runs = closed.segments[-1].made, closed.segments[-1].runs
                if norm.out_rows is not None and made.form != "contained":  # a norm after it would not be of a sum
                    yield closed.with_stream_norm(norm, runs[-1].kind)
            if not reads_output and norm.out_rows is not None and self.reads_rearranged(i, norm, state.pending[-1]):
                yield state.with_output_norm(norm)
        yield state

    def reads_rearranged(self, i: int, norm: NormRead, run: BranchRun) -> bool:
        """True if a norm right after a branch reads what that returned, in another order (Swin V2)."""
        before = self.events[i - 1]
        if not (isinstance(before, BranchRun) and before.branch is run.branch and norm.is_norm):
            return False
        assert norm.rows is not None
        return is_rearranged(torch.zeros_like(norm.rows), norm.rows, run.out, self.eps)

    def inner_norm(self, i: int, run: BranchRun) -> NormRead | None:
        """The norm inside a branch whose output the branch returns."""
        norms = [e for e in self.events[:i] if isinstance(e, NormRead) and e.is_norm and same_tensor(e.out, run.out)]
        inside = set(run.branch.whole.modules()) if norms else set()
        return next((e for e in norms if e.norm in inside and e.rows is not None and e.out_rows is not None), None)

    def with_run(self, state: Reading, run: BranchRun) -> Reading:
        """The reading with a branch that ran; the norm that has waited longest is its norm."""
        sites, waiting = state.sites, state.waiting
        if not waiting and state.start is not None and not state.pending:
            waiting = (state.start,)
        if waiting:
            sites, waiting = (*sites, (self.norm_after(waiting[0], run), f"{run.kind}_norm_in")), waiting[1:]
        run = replace(run, continues=bool(state.pending) and self.continues(state, run))
        return replace(state, pending=(*state.pending, run), sites=sites, waiting=waiting, start=None)

    def norm_after(self, first: NormRead, run: BranchRun) -> NormRead:
        """The norm between what has read the stream and a branch, if that is no norm by its name: a token shift."""
        if _is_named_norm(first) or run.read is None or first.out_rows is None or self.same(run.read, first.out_rows):
            return first
        norms = (event for event in self.events if isinstance(event, NormRead) and _is_named_norm(event))
        between = (n for n in norms if self.same(n.rows, first.out_rows) and self.same(run.read, n.out_rows))
        return next(between, first)

    def continues(self, state: Reading, run: BranchRun) -> bool:
        """True if a branch reads neither the stream nor a norm of it."""
        if run.x is not None and run.x.shape[-1] != state.rows.shape[-1]:
            return True
        sources = [state.rows, *(norm.out_rows for norm in state.normed)]
        return run.read is not None and not any(self.same(run.read, rows) for rows in sources)

    def closed(self, state: Reading, after: Tensor | None, rows: Tensor) -> Reading | None:
        """The reading with the stream at `rows`, if the pending branches make the difference."""
        pending = state.pending
        if after is None and not state.segments and bool(rows.any()) and torch.equal(state.rows, rows):
            # The block returns its very input, whatever its branches returned: gates and scales at 0.
            last = len(pending) - 1
            ends = tuple(i for i in range(len(pending)) if i == last or not pending[i + 1].continues)
            made: Sum | None = Sum("added", ends, (0.0,) * len(ends))
        else:
            made = explain(state.rows, rows, [run.rows for run in pending], self.eps)
        if made is None and is_rearranged(state.rows, rows, pending[-1].out, self.eps):
            made = Sum("rearranged", (len(pending) - 1,))
        elif made is None and is_lost(state.rows, rows, pending[-1].out, self.eps):
            made = Sum("rearranged", (len(pending) - 1,), (math.nan,))
        return None if made is None else self.segment(state, after, rows, made)

    def segment(self, state: Reading, after: Tensor | None, rows: Tensor, made: Sum) -> Reading | None:
        """The reading with one more segment; None if that leaves out a kind of branch that has run."""
        runs, used = [], set()
        for part in made.parts:
            # A branch that returns the stream itself continues the stream, not another branch.
            chain = [part] if made.form == "contained" else _chain(state.pending, part, made.parts)
            used |= set(chain)
            kinds = [state.pending[i].kind for i in chain if state.pending[i].kind != "other"]
            is_block = {"attn", "mlp"} <= set(kinds)  # a whole block of another width (MobileBERT)
            runs.append(replace(state.pending[part], kind=kinds[0] if kinds and not is_block else "other"))
        left = {run.kind for i, run in enumerate(state.pending) if i not in used}
        if not left <= {run.kind for run in runs}:
            return None
        if made.form == "contained" and runs[0].output_norm is not None:  # a norm's output is no sum
            return None
        segment = Segment(state.stream, state.rows, after, rows, tuple(runs), made)
        stream = state.stream if after is None else after
        return replace(state, stream=stream, rows=rows, pending=(), normed=(), segments=(*state.segments, segment))


def _is_named_norm(read: NormRead) -> bool:
    return getattr(read.norm, "probe_role", None) == "norm" or "norm" in type(read.norm).__name__.lower()


def _chain(pending: Sequence[BranchRun], part: int, parts: Sequence[int]) -> list[int]:
    """The branches from the first one that leads to `part`: each later one continues the one before it."""
    first = part
    while first > 0 and pending[first].continues and first - 1 not in parts:
        first -= 1
    return list(range(first, part + 1))


# -- what is added ---------------------------------------------------------------------------------------------------


def additions(segment: Segment, out: Tensor, rows: Rows) -> list[tuple[BranchRun, Tensor, Tensor]] | None:
    """(branch, the stream it is added to, what it adds) of every branch in a segment, shaped as the stream.

    Of branches that are added alike, the stream of each holds those before it. One that is hidden is left out. None
    if a tensor that is needed has been written to since.
    """
    made, after = segment.made, out if segment.after is None else segment.after
    if not rows.unchanged(segment.before, segment.before_rows):
        return None
    base = segment.before.detach()
    if made.carry != 1.0:
        base = base * made.carry
    if made.form in DIFFERENCES:
        if segment.hidden:
            return []
        if segment.after is not None and not rows.unchanged(after, segment.after_rows):
            return None
        return [(segment.runs[0], base, after.detach().reshape(base.shape) - base)]
    result = []
    for run, factor in zip(segment.runs, made.factors, strict=True):
        if run.kind in segment.hidden:
            continue
        adds = torch.zeros_like(base) if isinstance(factor, float) and factor == 0 else run.kept
        if adds is None and run.rows is not None and rows.unchanged(run.out, run.rows):
            adds = run.out.detach()
        if adds is None:
            return None
        if adds.shape[:-1] == base.shape[:-2]:  # one vector for all streams of a token
            adds = adds.unsqueeze(-2).expand(base.shape)
        adds = adds.reshape(base.shape)
        if isinstance(factor, Tensor):
            adds = adds * factor.to(adds.dtype)
        elif factor != 1.0:
            adds = adds * factor
        result.append((run, base, adds))
        if run is not segment.runs[-1]:
            base = base.to(torch.promote_types(base.dtype, torch.float32)) + adds
    return result
