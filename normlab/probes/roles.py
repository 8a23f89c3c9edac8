"""Which norm is which, and what each branch adds to the residual stream: decided and checked while a block runs.

No module name is involved: while a block runs, its norms and branches are noted in order (`BlockFlow`), with a few
rows of what they read and return; at its end a reading is sought under which the stream adds up from the block's input
to its output, by `normlab.probes.sums`:

    a norm that reads the stream before a branch        -> `attn_norm_in`, `mlp_norm_in`, `cross_norm_in`,
                                                           `mixer_norm_in`: the branch's (Pre-LN; two before the first
                                                           of two parallel branches are theirs in order)
    a norm of a branch's output itself                  -> what the branch adds is that norm's output (Peri-LN, OLMo-2)
    a norm whose output is the stream that goes on      -> that of the branch before it (Post-LN): it reads x + f(x)

A change of the stream between two such points is `Segment`: the branches that ran in it, and how their outputs make
it. Where no reading adds up, no branch is measured, norms are named where they read the block's input, and the reason
is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.sites import Block
from normlab.probes.structure import Branch
from normlab.probes.sums import SLACK, Explanation, Rows, explain, rounding, same

MOST_STEPS = 2000  # readings tried before a block is given up


def same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    """True when both are the same values in memory (a view counts). Both must be alive: freed memory is soon used
    again."""
    if a is None or b is None:
        return False
    return a is b or (a.device == b.device and a.numel() == b.numel() and a.data_ptr() == b.data_ptr())


def read_by(block: nn.Module, state: Tensor) -> Tensor:
    """What a block reads of the state that it is given: all of it, or, of several streams, what its ``enter`` says."""
    enter = getattr(block, "enter", None)
    if enter is None:
        return state
    with torch.no_grad():
        return enter(state)


@dataclass(eq=False)
class NormRead:
    """A norm that has run: what it read and returned, and the site that it turns out to be at."""

    norm: nn.Module
    x: Tensor | None
    rows: Tensor | None
    out: Tensor | None = None
    out_rows: Tensor | None = None
    site: str | None = None
    place: tuple[str, int] | None = None  # site and layer, once both are known


@dataclass(eq=False)
class BranchRun:
    """A branch that has run: the rows it read, and what it returned (`kept`: a copy, since many models add the residual
    to it in place; `adds`: what is added, its own output or its output norm's)."""

    branch: Branch
    read: Tensor | None
    x: Tensor | None
    out: Tensor
    kept: Tensor | None
    rows: Tensor | None
    output_norm: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        """The module whose output is added to the stream."""
        return self.output_norm or self.branch.module


@dataclass(frozen=True)
class Segment:
    """A change of the stream: where it starts (`before`, with its rows) and ends (`after`; None = the block's output),
    the branches that made it, and how."""

    before: Tensor
    before_rows: Tensor
    after: Tensor | None
    runs: tuple[BranchRun, ...]
    made: Explanation


@dataclass(frozen=True)
class _State:
    """A reading up to some event."""

    stream: Tensor
    rows: Tensor
    pending: tuple[BranchRun, ...] = ()
    waiting: tuple[NormRead, ...] = ()  # norms that have read the stream for a branch to come
    sites: tuple[tuple[NormRead, str], ...] = ()
    segments: tuple[Segment, ...] = ()


class BlockFlow:
    """What has run so far in one block during one forward pass. Holds a few of its activations, until the block
    ends.

    `named`: the sites of the block's norms when an earlier call has told them and no branch is to be measured; nothing
    else is then looked at.
    """

    def __init__(
        self, block: Block, layer: int, entered: Tensor, keeps_branches: bool, named: dict[nn.Module, str] | None = None
    ):
        self.block, self.layer, self.entered, self.width = block, layer, entered, entered.shape[-1]
        self.keeps_branches = keeps_branches
        self.entered_version = None if entered.is_inference() else entered._version
        self.events: list[NormRead | BranchRun] = []
        self.segments: tuple[Segment, ...] | None = None  # None: the stream was not found to add up
        self.why = ""
        self._named = None if keeps_branches else named
        self._inputs: dict[nn.Module, tuple[Tensor | None, Tensor | None]] = {}
        self._steps = 0
        if self._named is None:
            self.rows = Rows(entered)
            self.first = self.rows.of(entered)
            self._eps = rounding(entered.dtype)

    # -- what runs -----------------------------------------------------------------------------------------------

    def norm_starts(self, norm: nn.Module, x: Tensor) -> NormRead | None:
        """A norm is about to read `x`; None for one that is known to be at no site, or that has run before."""
        if self._named is not None:
            site = self._named.get(norm)
            return None if site is None else NormRead(norm, None, None, site=site, place=(site, self.layer))
        if x.shape[-1] != self.rows.width:
            return None
        event = NormRead(norm, x, self.rows.of(x))
        self.events.append(event)
        return event

    def norm_done(self, norm: nn.Module, output: Tensor) -> None:
        """A norm has run."""
        norms = [event for event in self.events if isinstance(event, NormRead)]
        for read in reversed(norms):
            if read.norm is norm and read.out is None:
                read.out, read.out_rows = output, self.rows.of(output)
                return

    def branch_starts(self, branch: Branch, x: Tensor | None) -> None:
        """A branch is about to run."""
        if self._named is None:
            self._inputs[branch.module] = (x, self.rows.of(x))

    def branch_done(self, branch: Branch, output: Tensor) -> None:
        """A branch has run, or the part that holds it: that counts when the branch returned no change of the
        stream."""
        if self._named is not None:
            return
        self._eps = max(self._eps, rounding(output.dtype))
        x, read = self._inputs.pop(branch.module, (None, None))
        rows = self.rows.of(output)
        for earlier in self.events:
            if isinstance(earlier, BranchRun) and earlier.branch is branch and read is None and x is None:
                if earlier.rows is not None:
                    return
                self.events.remove(earlier)
                break
        kept = output.detach().clone() if self.keeps_branches and rows is not None else None
        self.events.append(BranchRun(branch, read, x, output, kept, rows))

    @property
    def sites(self) -> dict[nn.Module, str]:
        """The sites of the block's norms, once it has ended."""
        if self._named is not None:
            return self._named
        return {e.norm: e.site for e in self.events if isinstance(e, NormRead) and e.place is not None and e.site}

    @property
    def output_norms(self) -> set[nn.Module]:
        """The norms whose output is what a branch adds."""
        runs = [run for segment in self.segments or () for run in segment.runs]
        return {run.output_norm for run in runs if run.output_norm is not None}

    def check_entered(self) -> None:
        """Raises `NormlabError` when the block has written into its own input, so that update and input cannot be told
        apart."""
        if self.entered_version is not None and self.entered._version != self.entered_version:
            raise NormlabError(
                f"block {self.block.name} writes into its own input in place: relative_contribution, update_cosine, "
                "block_influence and update_effective_rank cannot be taken there; leave them out of `metrics`"
            )

    # -- the reading ---------------------------------------------------------------------------------------------

    def finish(self, out: Tensor) -> None:
        """Find the reading under which the block adds up to `out`; name its norms, list its segments."""
        if self._named is not None:
            self.segments = ()
            return
        self._eps = max(self._eps, rounding(out.dtype))
        last = self.rows.of(out)
        runs = [event for event in self.events if isinstance(event, BranchRun)]
        found = None
        if last is None:
            self.why = "the block changes the stream's shape"
        elif self.first is not None and runs:
            start = _State(self.entered, self.first)
            found = next(self._readings(0, start, last), None)
            kinds = " + ".join(dict.fromkeys(run.branch.kind for run in runs))
            self.why = "" if found else f"the block's output is not its input + {kinds}"
        else:
            self.why = "no branch was found in the block"
        if found is not None:
            self.segments = found.segments
            for read, site in found.sites:
                read.site = site
        elif self.first is not None:
            self._name_by_order()
        for event in self.events:  # a norm may say where it stands
            if isinstance(event, NormRead):
                event.site = getattr(event.norm, "probe_site", event.site)
        taken: set[str] = set()
        for event in self.events:  # two modules are never pooled at one site
            if isinstance(event, NormRead) and event.site is not None:
                if event.site in taken:
                    event.site = None
                else:
                    taken.add(event.site)
                    event.place = (event.site, self.layer)

    def release(self) -> None:
        """Let go of every activation: what was measured keeps the events, for their sites."""
        for note in self.events:
            if isinstance(note, NormRead):
                note.x = note.rows = note.out = note.out_rows = None

    def _same(self, a: Tensor | None, b: Tensor | None) -> bool:
        return same(a, b, SLACK * self._eps)

    def _name_by_order(self) -> None:
        """Norms of a block that does not add up: those that read its input are of the branches that come next."""
        kinds = [event.branch.kind for event in self.events if isinstance(event, BranchRun)]
        norms = [event for event in self.events if isinstance(event, NormRead) and event.rows is not None]
        position = 0
        for event in self.events:
            if isinstance(event, BranchRun):
                position += 1
            elif event in norms and position < len(kinds) and self._same(event.rows, self.first):
                event.site = f"{kinds[position]}_norm_in"
                break

    def _readings(self, i: int, state: _State, last: Tensor) -> Iterator[_State]:
        self._steps += 1
        if self._steps > MOST_STEPS:
            return
        if i == len(self.events):
            if not state.pending:
                if self._same(state.rows, last) and state.segments:
                    yield state
            else:
                yield from self._closed(state, None, last)
            return
        event = self.events[i]
        if isinstance(event, BranchRun):
            after = state
            if state.pending and event.read is not None and not self._same(event.read, state.rows):
                assert event.x is not None
                for closed in self._closed(state, event.x, event.read):
                    yield from self._readings(i + 1, self._run(closed, event), last)
            yield from self._readings(i + 1, self._run(after, event), last)
            return
        if event.rows is None:
            yield from self._readings(i + 1, state, last)
            return
        if self._same(event.rows, state.rows):
            before = replace(state, waiting=(*state.waiting, event))
            yield from self._readings(i + 1, before, last)
            if not state.pending:  # else a branch may have added next to nothing
                return
        if state.pending:
            newest = state.pending[-1]
            if event.out is not None and event.out_rows is not None and same_tensor(event.x, newest.out):
                normed = replace_run(newest, event)
                yield from self._readings(i + 1, replace(state, pending=(*state.pending[:-1], normed)), last)
            for closed in self._closed(state, event.x, event.rows):
                before = replace(closed, waiting=(*closed.waiting, event))
                yield from self._readings(i + 1, before, last)
                contained = closed.segments[-1].made.form == "contained"  # and a norm after it would not be of a sum
                if event.out is not None and event.out_rows is not None and not contained:
                    kind = closed.segments[-1].runs[-1].branch.kind
                    named = (*closed.sites, (event, f"{kind}_norm_in"))
                    after = replace(closed, stream=event.out, rows=event.out_rows, sites=named)
                    yield from self._readings(i + 1, after, last)
        yield from self._readings(i + 1, state, last)

    def _run(self, state: _State, event: BranchRun) -> _State:
        """The reading with a branch that ran; the norm that has waited longest is its own."""
        sites, waiting = state.sites, state.waiting
        if waiting:
            sites, waiting = (*sites, (waiting[0], f"{event.branch.kind}_norm_in")), waiting[1:]
        return replace(state, pending=(*state.pending, event), sites=sites, waiting=waiting)

    def _closed(self, state: _State, after: Tensor | None, rows: Tensor) -> Iterator[_State]:
        """The reading with the stream at `rows`, when the branches since its last point make the difference and none
        of their kinds is left out."""
        made = explain(state.rows, rows, [run.rows for run in state.pending], self._eps)
        if made is None:
            return
        kinds = {run.branch.kind for run in state.pending}
        runs = tuple(state.pending[part] for part in made.parts)
        if {run.branch.kind for run in runs} != kinds:
            return
        if made.form == "contained" and runs[0].output_norm is not None:  # a norm's output is no sum
            return
        segment = Segment(state.stream, state.rows, after, runs, made)
        stream = state.stream if after is None else after
        yield replace(state, stream=stream, rows=rows, pending=(), segments=(*state.segments, segment))


def replace_run(run: BranchRun, norm: NormRead) -> BranchRun:
    """The run with its output norm's output as what it adds."""
    assert norm.out is not None
    return BranchRun(run.branch, run.read, run.x, norm.out, norm.out.detach(), norm.out_rows, norm.norm)


def additions(segment: Segment, out: Tensor, rows: Rows) -> list[tuple[BranchRun, Tensor, Tensor]] | None:
    """(branch, the stream it is added to, what it adds) of every branch in a segment, shaped as the stream; None when
    a tensor that is needed has been written to since.

    Of branches that are added alike, the stream of each holds those before it.
    """
    made, after = segment.made, out if segment.after is None else segment.after
    if not _unchanged(rows, segment.before, segment.before_rows):
        return None
    base = segment.before.detach()
    if made.carry != 1.0:
        base = base * made.carry
    if made.form in ("contained", "dropped"):
        return [(segment.runs[0], base, after.detach().reshape(base.shape) - base)]
    found = []
    for run, factor in zip(segment.runs, made.factors, strict=True):
        if run.kept is None:
            return None
        adds = run.kept.reshape(base.shape)
        if isinstance(factor, Tensor):
            adds = adds * factor.to(adds.dtype)
        elif factor != 1.0:
            adds = adds * factor
        found.append((run, base, adds))
        if run is not segment.runs[-1]:
            base = base.to(torch.promote_types(base.dtype, torch.float32)) + adds
    return found


def _unchanged(rows: Rows, x: Tensor, kept: Tensor) -> bool:
    now = rows.of(x)
    return now is not None and torch.equal(now.nan_to_num(), kept.nan_to_num())


def kinds_of(segments: Sequence[Segment]) -> dict[str, int]:
    """How many branches of each kind the segments hold."""
    counts: dict[str, int] = {}
    for segment in segments:
        for kind in {run.branch.kind for run in segment.runs}:
            counts[kind] = counts.get(kind, 0) + 1
    return counts
