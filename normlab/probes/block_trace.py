"""`BlockTrace`: the norms and branches that ran in a block, and which norm turned out to be which.

A few rows of what they read and returned are kept while the block runs. No module name is involved: at the block's end
`normlab.probes.decomposition` looks for the reading under which the residual stream adds up. Where none holds, no
branch is measured, the norm that reads the block's input is named by what comes next, and the reason is kept.

`KnownTrace`: the same of a block whose norms are known, where branches are not measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from normlab.probes.decomposition import BranchRun, NormRead, NormRun, Reading, Segment, find_reading
from normlab.probes.forward_call import Call, LastBlock, Run
from normlab.probes.layout import features_last, same_tensor
from normlab.probes.sites import Block, Branch, has_parts
from normlab.probes.stream_sums import Rows, count_different

FEW = 6  # different tokens below which a sum that is not a plain one may not be told
TRIES = 3  # calls after which a block that does not add up is given up: the search for a reading takes long


@dataclass(eq=False)
class KnownBlock:
    """A block, as earlier calls have shown it."""

    channels_first: bool
    takes_length_first: bool | None  # PyTorch's attention in it takes (length, batch); None without one
    length_first: bool | None = None  # it holds (length, batch), by what its attention has read; None: that is not told
    rearranges: bool = False  # its attention has read other rows
    sites: dict[NormRun, str] | None = None  # of its norms, once its stream has added up; of none that has two
    times: Counter[nn.Module] = field(default_factory=Counter)  # that each norm ran then
    lost: dict[str, str] = field(default_factory=dict)  # sites whose norm is not measured then, and why
    failures: list[str] = field(default_factory=list)  # why its stream did not add up, one per call
    adding: set[nn.Module] = field(default_factory=set)  # norms that add two tensors and read the sum
    joins: bool = False  # it returns a branch and the residual apart: the stream is their sum
    writes: dict[bool, bool] = field(default_factory=dict)  # into its input in place; of inference tensors, of others


class _Trace:
    """One block during one forward pass.

    Args:
        call, block, run: the call, the block that runs in it, and its run there.
        entered: the stream that it reads.
        known: what earlier calls told, and this one will add to.
    """

    def __init__(self, call: Call, block: Block, run: Run, entered: Tensor, known: KnownBlock):
        self.call, self.block, self.run, self.layer = call, block, run, run.layer
        self.width, self.known = entered.shape[-1], known
        self.lost: dict[str, str] = {}  # sites whose norm has run and is not measured, and why
        self.has_router = False  # that of a mixture has run
        self.has_experts = False  # the experts that it took are known
        self._times: Counter[nn.Module] = Counter()  # that each norm has run
        self.pair: LastBlock | None = None  # two tensors that it was given, until a norm has read one or their sum
        self.is_joined = False  # it was their sum
        self._enter(entered)

    def _enter(self, x: Tensor) -> None:
        self.entered = x
        self.wrote_into_input = False  # once the block has ended: then no update of it can be measured
        self._version = 0 if x.is_inference() else x._version
        self._may_write = self.known.writes.get(x.is_inference(), True)
        self._rows = Rows(x) if self._may_write else None

    def view(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """`x` with its features last: what a branch, or `norm`, reads or returns."""
        if norm is None or norm in self.block.activations:
            return features_last(x, self.known.channels_first, width=self.width)
        return features_last(x, self.known.channels_first, norm)

    def enter_sum(self, x: Tensor) -> None:
        """Take `x` for the stream that the block reads: the sum of two tensors that it was given."""
        self.is_joined = True
        self._enter(x)

    def forget_measured(self) -> None:
        """Have the stream measured anew, where the block may have written over what was measured, uncounted."""
        if self._may_write:
            self.call.measured = None

    def _begin_run(self, norm: nn.Module) -> int:
        """How often a norm that is about to run had run before."""
        if self._times:
            self.forget_measured()
        self._times[norm] += 1
        return self._times[norm] - 1

    def _note_writes(self) -> None:
        """Note whether the block has written into its input: by PyTorch's count, which misses some, and by values."""
        x, writes = self.entered, self.known.writes
        is_counted = not x.is_inference() and x._version != self._version
        is_seen = self._rows is not None and not self._rows.unchanged(x, self._rows.first)
        self.wrote_into_input = is_counted or is_seen
        writes[x.is_inference()] = self.wrote_into_input or writes.get(x.is_inference(), False)


class KnownTrace(_Trace):
    """A block of whose norms earlier calls have told the sites. Nothing else is looked for, and nothing kept."""

    def __init__(self, call: Call, block: Block, run: Run, entered: Tensor, known: KnownBlock):
        super().__init__(call, block, run, entered, known)
        self.segments: tuple[Segment, ...] = ()
        self.sites = known.sites or {}
        self._reads: list[NormRead] = []  # at these sites

    def _ignore(self, *_: Any) -> None:
        """What `BlockTrace` keeps is not needed."""

    note_sum = norm_done = branch_starts = branch_done = _ignore

    def is_sum(self, norm: nn.Module, returned: Tensor) -> bool:
        """True if a norm adds the two tensors that it reads."""
        return norm in self.known.adding

    def adds_up_to(self, out: Tensor) -> bool:
        """False, as no reading is looked for."""
        return False

    def norm_starts(self, norm: nn.Module, x: Tensor) -> NormRead | None:
        """Note that a norm is about to run; None if it is at no site."""
        site = self.sites.get((norm, self._begin_run(norm)))
        if site is None:
            return None
        self._reads.append(NormRead(norm, self.layer, site=site))
        return self._reads[-1]

    def finish(self, out: Tensor, is_joined: bool) -> None:
        """Leave out norms that ran at another number of times than when their sites were found."""
        self._note_writes()
        self.lost = dict(self.known.lost)
        others = {read.norm for read in self._reads if self._times[read.norm] != self.known.times[read.norm]}
        for read in self._reads:
            if read.norm in others and read.site is not None:
                self.lost[read.site] = "the norm did not run as often as in the calls before"
                read.site = None
        if others:
            self.sites = {run: site for run, site in self.sites.items() if run[0] not in others}
            self.known.sites = None
        self.run.sites = self.sites

    release = _ignore


class BlockTrace(_Trace):
    """A block whose norms and branches are looked at, to find what each of them is.

    Holds a few of its activations until it ends. keeps_branches: what branches add is measured.
    """

    def __init__(self, call: Call, block: Block, run: Run, entered: Tensor, known: KnownBlock, keeps_branches: bool):
        super().__init__(call, block, run, entered, known)
        self.keeps_branches = keeps_branches
        self.events: list[NormRead | BranchRun] = []
        self.segments: tuple[Segment, ...] | None = None  # None: the stream was not found to add up
        self.why = ""  # it was not
        self._inputs: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}
        self._sums: dict[nn.Module, Tensor | None] = {}  # norms that read two tensors, and the rows of their sum
        self._returned: Tensor | None = None  # the rows of what the block itself returns, before other hooks

    def _enter(self, x: Tensor) -> None:
        super()._enter(x)
        self.rows = self._rows = self._rows or Rows(x)  # a few tokens of what the block reads, and of other tensors

    def note_sum(self, norm: nn.Module, x: Tensor, residual: Tensor) -> None:
        """Note that a norm is about to read two tensors, which it may add (in place)."""
        views = (self.rows.of(self.view(value, norm)) for value in (x, residual))
        parts = [rows for rows in views if rows is not None]
        self._sums[norm] = parts[0] + parts[1] if len(parts) == 2 else None

    def is_sum(self, norm: nn.Module, returned: Tensor) -> bool:
        """True if what a norm has returned besides is the sum of the two tensors that it read."""
        added = self._sums.get(norm)
        if added is not None and self.rows.same(self.rows.of(self.view(returned, norm)), added):
            self.known.adding.add(norm)
        return norm in self.known.adding

    def adds_up_to(self, out: Tensor) -> bool:
        """True if a reading of the block ends in `out`."""
        last = self.rows.of(out)
        return last is not None and bool(self.runs) and self._read_to(last) is not None

    def _read_to(self, last: Tensor) -> Reading | None:
        return find_reading(self.events, self.entered, last, self.rows)

    def norm_starts(self, norm: nn.Module, x: Tensor) -> NormRead | None:
        """Note that a norm (or an activation outside the branches) is about to read `x`; None if it is at no site."""
        time = self._begin_run(norm)
        if x.shape[-1] != self.width:
            return None
        is_norm = norm not in self.block.activations
        read = NormRead(norm, self.layer, x, self.rows.of(x), is_norm=is_norm, time=time)
        self.events.append(read)
        return read if is_norm else None

    def norm_done(self, output: Tensor, norm: nn.Module) -> None:
        """Note what a norm has returned."""
        for read in reversed(self._reads):
            if read.norm is norm and read.out is None:
                read.out = self.view(output, norm)
                read.out_rows = self.rows.of(read.out)
                if self.keeps_branches and any(same_tensor(run.out, read.x) for run in self.runs):
                    read.kept = read.out.detach().clone()
                return

    def branch_starts(self, x: Tensor, branch: Branch) -> None:
        """Note that a branch is about to read `x`."""
        view = self.view(x)
        self._inputs[branch.module] = (view, self.rows.of(view))

    def branch_done(self, output: Tensor, branch: Branch) -> None:
        """Note what a branch has returned, or the part that holds it.

        The part counts when the branch's own output is no change of the stream.
        """
        output = self.view(output)
        self.rows.note_rounding(output)
        x, read = self._inputs.pop(branch.module, (None, None))
        rows = self.rows.of(output)
        earlier = next((run for run in self.runs if run.branch is branch), None)
        if earlier is not None and x is None:
            if earlier.rows is not None:
                return
            x, read = earlier.x, earlier.read
            self.events.remove(earlier)
        kept = output.detach().clone() if self.keeps_branches and rows is not None else None
        self.events.append(BranchRun(branch, branch.kind, x, read, output, rows, kept))

    @property
    def runs(self) -> list[BranchRun]:
        """The branches that have run, in order."""
        return [event for event in self.events if isinstance(event, BranchRun)]

    @property
    def _reads(self) -> list[NormRead]:
        return [event for event in self.events if isinstance(event, NormRead)]

    @property
    def sites(self) -> dict[NormRun, str]:
        """The sites of the block's norms, once it has ended."""
        return {(read.norm, read.time): read.site for read in self._reads if read.site is not None}

    # -- the block's end ---------------------------------------------------------------------------------------------

    def note_returned(self, made: Tensor) -> None:
        """Note the stream that the block itself returns, which other hooks may change or write over."""
        self._returned = self.rows.of(made)

    def finish(self, out: Tensor, is_joined: bool) -> None:
        """Find the reading under which the block adds up; name its norms, list its segments.

        Where a hook changes what the block returns, the norms are named by the block itself, and the segments are those
        of what is passed on. There are none where that does not add up of the same branches.

        out: the stream that is passed on; `is_joined` where it is the sum of two tensors that the block returns.
        """
        self._note_writes()
        self.rows.note_rounding(out)
        last, own = self.rows.of(out), None if is_joined else self._returned
        passed_on, reading = self._find_readings(last, own)
        if reading is not None:
            self.segments = None if passed_on is None else passed_on.segments
            for read, site in reading.sites:
                read.site = site
            for read in reading.waiting:  # no branch came, and the block returns its output
                if any(self.rows.same(read.out_rows, rows) for rows in (own, last)):
                    read.site = f"{self.runs[-1].kind}_norm_in"
        elif bool(self.rows.first.any()):
            self._name_first_norm()
        self._settle_sites()
        self.run.sites = self.sites
        if reading is None:
            self._note_lost_sites()
        else:
            if self.known.sites is None:
                self._note_lost_norms(reading)
                self.known.lost = self.lost
            self.lost |= self.known.lost
            if len({norm for norm, _ in self.sites}) == len(self.sites):  # else branches that are dropped decide
                self.known.sites, self.known.times = self.sites, self._times

    def _find_readings(self, last: Tensor | None, own: Tensor | None) -> tuple[Reading | None, Reading | None]:
        """The readings of what is passed on, and of the block itself: one, but where a hook has changed `own`."""
        is_readable = bool(self.runs) and bool(self.rows.first.any()) and len(self.known.failures) < TRIES
        if is_readable and own is not None and not self.rows.same(own, last):
            passed_on = None if last is None else self._read_to(last)
            reading = self._read_to(own)  # what a hook changes is no failure of the block
            if reading is not None:
                if passed_on is not None and _branches(passed_on) == _branches(reading):
                    return passed_on, reading
                self.why = "a hook changes what the block returns"
                return None, reading
            if passed_on is not None:  # as where a hook adds the residual
                return passed_on, passed_on
        found = self._find_reading(last)
        return found, found

    def _find_reading(self, last: Tensor | None) -> Reading | None:
        if last is None:
            self.why = "the block changes the stream's shape"
        elif not bool(self.rows.first.any()):
            self.why = "the stream is zero"  # with and without it are the same
        elif len(self.known.failures) >= TRIES:
            self.why = self.known.failures[-1]
        elif not self.runs:
            self.why = "no branch was found in the block"
        else:
            reading = self._read_to(last)
            if reading is not None:
                return reading
            self.why = self._reason(last)
        return None

    def _name_first_norm(self) -> None:
        """Name the norm that reads the input of a block that does not add up: it is of the branch that comes next."""
        for i, event in enumerate(self.events):
            if isinstance(event, NormRead) and event.rows is not None and self.rows.same(event.rows, self.rows.first):
                later = next((run for run in self.events[i:] if isinstance(run, BranchRun)), None)
                if later is not None:
                    event.site = f"{later.kind}_norm_in"
                    return

    def _settle_sites(self) -> None:
        """Let norms say their site themselves, then keep one norm per site: two are never pooled."""
        taken: set[str] = set()
        for read in self._reads:
            read.site = getattr(read.norm, "probe_site", read.site)
            if read.site in taken:
                self.lost[read.site] = "a second norm of this site is left out"
                read.site, read.is_second = None, True
            elif read.site is not None:
                taken.add(read.site)

    def _note_lost_sites(self) -> None:
        named = {norm for norm, _ in self.sites}
        if named.issuperset(self.block.norms):
            return
        kinds = (branch.kind for branch in self.block.branches if branch.kind != "other")
        names = (f"{kind}_norm_in" for kind in kinds)
        self.lost |= {name: self.why for name in names if name not in self.sites.values()}

    def _note_lost_norms(self, reading: Reading) -> None:
        """Name every norm at the branches' sides that has no place in the reading of the stream.

        One that reads what a branch has returned is inside a branch. One that did not run may go with a branch that did
        not.
        """
        placed = {norm for norm, _ in self.sites}
        output_norms = (run.output_norm for segment in reading.segments for run in segment.runs)
        placed |= {norm for norm in output_norms if norm is not None}
        if placed and placed.issuperset(self.block.norms):
            return
        placed |= {read.norm for read in self._reads if read.is_second or self._is_of_a_branch(read)}
        # One that makes what a norm reads of the stream, such as a token shift, is none.
        streams = [self.rows.first, *(segment.after_rows for segment in reading.segments)]
        read_by_norms = [event.rows for event in self._reads if event.norm in placed]
        placed |= {
            read.norm
            for read in self._reads
            if self._is_among(read.rows, streams) and self._is_among(read.out_rows, read_by_norms)
        }
        names = {part: name for name, part in self.block.module.named_modules()}
        did_all_run = {run.branch for run in self.runs} >= set(self.block.branches)
        elsewhere = "reads neither the stream nor what a branch returned"
        for norm in self.block.norms:
            if norm not in placed and (self._times[norm] or did_all_run):
                name = names.get(norm, type(norm).__name__)
                self.lost[name] = f"it {elsewhere}" if self._times[norm] else "it did not run"
        if not placed and not self.lost and self._times:
            kinds = dict.fromkeys(run.kind for run in self.runs if run.kind != "other")
            self.lost |= dict.fromkeys((f"{kind}_norm_in" for kind in kinds), f"every norm inside {elsewhere}")

    def _is_among(self, rows: Tensor | None, others: Sequence[Tensor | None]) -> bool:
        return any(self.rows.same(rows, other) for other in others)

    def _is_of_a_branch(self, read: NormRead) -> bool:
        """True if a norm read what a branch has returned, and nothing else."""
        if read.norm in self._sums and read.norm not in self.known.adding:
            return False
        return any(same_tensor(read.x, run.out) or self.rows.same(read.rows, run.rows) for run in self.runs)

    def _reason(self, last: Tensor) -> str:
        """The reason that there is no reading."""
        first = self.rows.first
        kinds = " + ".join(dict.fromkeys(run.kind for run in self.runs))
        if self._ends_in_projection(last):
            return "the block has no residual connection: it ends in a projection"
        if not bool((first.isfinite().all(1) & last.isfinite().all(1)).any()):
            return "the stream is not finite"
        if self.rows.same(first, last):
            return f"what {kinds} add is lost in the rounding of the stream"
        count = count_different(first)
        if count < FEW:
            return f"the block's output is not its input + {kinds}, as far as {count} different tokens tell"
        advice = "if other modules add to it, name them: sites(model, attention=..., mlp=...)"
        if self.block.module.training:
            advice = f"in training one may have been dropped, by stochastic depth: try model.eval(); {advice}"
        why = f"the block's output is not its input + {kinds} ({advice})"
        if any(getattr(part, "probe_role", None) in ("residual", "mixing") for part in self.block.module.children()):
            why = f"the block joins {kinds} to the stream by a rule that is no plain sum"
        self.known.failures.append(why)
        return why

    @property
    def hidden(self) -> list[str]:
        """The kinds of branches that are part of the reading, but add what the rounding of the stream hides."""
        return list(dict.fromkeys(kind for segment in self.segments or () for kind in segment.hidden))

    def reason_without_part(self, run: BranchRun) -> str:
        """The reason that a branch which has run is no part of the reading."""
        parts = [part.branch for segment in self.segments or () for part in segment.runs]
        if run.branch in parts:
            return "it changes the stream together with another branch"
        others = [other for other in self.runs if other is not run]
        feeds = any(same_tensor(other.x, run.out) or self.rows.same(other.read, run.rows) for other in others)
        if self.block.module.training and not feeds and run.rows is not None:
            return "it was dropped in training, as by stochastic depth: what it returns does not reach the stream"
        return "what it returns goes into another branch, not into the stream"

    def _ends_in_projection(self, last: Tensor) -> bool:
        """True if the block returns what a single matrix returned, bare or through a norm and an activation."""
        x: Tensor | None = None
        for event in reversed(self.events):
            rows = event.rows if isinstance(event, BranchRun) else event.out_rows
            if not (same_tensor(event.out, x) if x is not None else self.rows.same(rows, last)):
                return False
            if isinstance(event, BranchRun):
                return not has_parts(event.branch.module)
            x = event.x
        return False

    def release(self) -> None:
        """Let go of every activation: what was measured keeps the norms' reads, for their sites."""
        for read in self._reads:
            read.x = read.rows = read.out = read.out_rows = read.kept = None


Trace = KnownTrace | BlockTrace


def _branches(reading: Reading) -> set[Branch]:
    """The branches that change the stream in a reading."""
    return {run.branch for segment in reading.segments for run in segment.runs}
