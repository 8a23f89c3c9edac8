"""From tensors that pass by to running statistics, kept on the layers' devices.

A statistic is streamed as (count, mean, M2, max), merged by Chan's rule.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from normlab.probes import statistics
from normlab.probes.attention_watch import NO_SINK, AttentionWatch
from normlab.probes.block_trace import BlockTrace, Trace
from normlab.probes.checkpoints import Repeated
from normlab.probes.decomposition import NormRead, additions
from normlab.probes.forward_call import GRADIENTS, Call, Place, Staged
from normlab.probes.gradients import BESIDE, Arrivals, GradientHook, edge_of, is_beside, source_of, why_no_factor
from normlab.probes.metrics import GRADIENT_SITES, KIND_STATISTICS, SITES, Metric
from normlab.probes.routing import Routing, router_entropy, router_scores, taken_experts, why_no_router_scores
from normlab.probes.statistics import MERGE, at_least_float32, without_autocast

if TYPE_CHECKING:
    import pandas


# -- moments ---------------------------------------------------------------------------------------------------------


def merge_moments(count_a, mean_a, m2_a, count_b, mean_b, m2_b):
    """(count, mean, M2) of two sets from those of each (Chan, Golub and LeVeque); tensors or arrays."""
    total = count_a + count_b
    share, delta = count_b / total.clip(min=1), mean_b - mean_a
    return total, mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share


def with_batch(state: Tensor, values: Tensor, masks: Tensor) -> Tensor:
    """Running moments with one more batch.

    Args:
        state: (4, rows, masks, statistics): count, mean, M2, max.
        values: (rows, statistics, tokens). A token that no mask counts may hold NaN.
        masks: (masks, tokens) bool.
    """
    keep = masks[None, :, None, :]
    wide = values.to(state.dtype)[:, None]
    count = keep.sum(-1).to(state.dtype).expand(len(values), -1, values.shape[1])
    mean = torch.where(keep, wide, 0).sum(-1) / count.clamp(min=1)
    m2 = torch.where(keep, wide - mean[..., None], 0).square().sum(-1)
    peak = torch.where(keep, wide, -torch.inf).amax(-1)
    merged = merge_moments(state[0], state[1], state[2], count, mean, m2)
    return torch.stack([*merged, torch.maximum(state[3], peak)])


class _Moments:
    """Running moments of one kind on one device: (4, places, masks, statistics).

    They are a few hundred numbers, so float64, where the device has it, is free, and thousands of merged batches lose
    nothing.
    """

    def __init__(self, masks: Sequence[str], names: Sequence[str], device: torch.device):
        self.masks, self.names = masks, names
        self.widths: dict[Place, int] = {}  # of the places in order
        self.state = self._empty(0, torch.float32 if device.type == "mps" else torch.float64, device)

    def _empty(self, places: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        state = torch.zeros(4, places, len(self.masks), len(self.names), dtype=dtype, device=device)
        state[3] = -torch.inf
        return state

    def add(self, values: Mapping[Place, Tensor], masks: Tensor) -> None:
        """Merge the (statistics, tokens) of places whose width is known; `masks`: (masks, tokens)."""
        rows = {place: row for row, place in enumerate(self.widths)}
        new = self._empty(len(rows) - self.state.shape[1], self.state.dtype, self.state.device)
        self.state = torch.cat([self.state, new], dim=1)
        at = torch.as_tensor([rows[place] for place in values], device=masks.device)
        self.state[:, at] = with_batch(self.state[:, at], torch.stack(list(values.values())), masks)

    def empty(self) -> list[tuple[str, int, str]]:
        """(site, layer, mask) without a token."""
        counted = (self.state[0] > 0).any(-1).tolist()
        rows = zip(self.widths, counted, strict=True)
        return [(*place, mask) for place, row in rows for mask, has in zip(self.masks, row, strict=True) if not has]

    def forget(self, places: Iterable[Place]) -> None:
        """Begin anew at these places."""
        rows = [row for row, place in enumerate(self.widths) if place in set(places)]
        if rows:
            self.state[:, rows] = self._empty(len(rows), self.state.dtype, self.state.device)

    def table(self) -> pandas.DataFrame:
        """One row per place, mask and statistic, where a token was counted."""
        import pandas

        rows = [(*place, mask, name) for place in self.widths for mask in self.masks for name in self.names]
        table: dict[str, Any] = {
            name: [row[i] for row in rows] for i, name in enumerate(("site", "layer", "mask", "statistic"))
        }
        numbers = self.state.cpu().double().flatten(1).numpy()
        each = len(self.masks) * len(self.names)
        table |= zip(("count", "mean", "m2", "peak"), numbers, strict=True)
        table["width"] = [width for width in self.widths.values() for _ in range(each)]
        result = pandas.DataFrame(table)
        return result if bool((numbers[0] > 0).all()) else result[result["count"] > 0]


class Accumulator:
    """Running statistics by kind and device."""

    def __init__(self, masks: Sequence[str], statistics: Mapping[str, Sequence[str]]):
        self.masks = tuple(masks)
        self.statistics = statistics
        self.kinds: set[str] = set()  # that have been measured
        self._moments: dict[tuple[str, torch.device], _Moments] = {}
        self._arrays: dict[tuple[str, Place], Tensor] = {}  # (masks, ...)
        self._counted: dict[tuple[str, Place], Any] = {}  # (masks,): a token was counted

    def add(self, call: Call, measured: Iterable[Staged]) -> None:
        """Merge what one call has staged. What a norm without a site has read is left out.

        Outside inference mode: tensors made inside it could not be updated outside.
        """
        groups: dict[tuple[str, torch.device, tuple[int, ...]], dict[Place, Tensor]] = defaultdict(dict)
        with torch.inference_mode(False), torch.no_grad():
            for kind, where, values, shape in measured:
                place = _place(where)
                if place is None:
                    continue
                if kind in MERGE:
                    with _losing(call, [place]):
                        self._merge_array(call, kind, place, values, shape)
                    continue
                groups[kind, values.device, shape][place] = values
            for (kind, _, shape), group in groups.items():
                with _losing(call, group):
                    self._merge(call, kind, group, shape)

    def _merge_array(self, call: Call, kind: str, place: Place, values: Tensor, shape: tuple[int, ...]) -> None:
        self.kinds.add(kind)
        masks = call.tokens.masks(values.device, shape[:-1])
        if masks is not None:
            self._counted[kind, place] = self._counted.get((kind, place), False) | masks.any(1)
        before = self._arrays.get((kind, place))
        self._arrays[kind, place] = values.clone() if before is None else MERGE[kind](before, values)

    def _merge(self, call: Call, kind: str, group: dict[Place, Tensor], shape: tuple[int, ...]) -> None:
        device = next(iter(group.values())).device
        masks = call.tokens.masks(device, shape[:-1])
        if masks is None:
            return
        self.kinds.add(kind)
        if (kind, device) not in self._moments:
            self._moments[kind, device] = _Moments(self.masks, self.statistics[kind], device)
        moments = self._moments[kind, device]
        fitting = {place: x for place, x in group.items() if moments.widths.setdefault(place, shape[-1]) == shape[-1]}
        if fitting:
            moments.add(fitting, masks)
        for site, layer in group.keys() - fitting.keys():
            call.absent[f"{site} {layer}"] = "its width differs between calls"

    def places(self, kind: str) -> set[Place]:
        """Where something of a kind was merged."""
        return {place for (of, _), moments in self._moments.items() if of == kind for place in moments.widths}

    def without_tokens(self) -> list[tuple[str, int, str]]:
        """(site, layer, mask) of which no token was counted, so that they have no rows."""
        found = [row for (kind, _), moments in self._moments.items() if kind != "gradient" for row in moments.empty()]
        return list(dict.fromkeys(found))

    def forget(self, kind: str, places: Iterable[Place]) -> None:
        """Drop what was merged at these places."""
        for (of, _), moments in self._moments.items():
            if of == kind:
                moments.forget(places)

    def results(self) -> tuple[pandas.DataFrame, dict[tuple[str, int, str, str], Tensor]]:
        """Everything so far, on the CPU: the moments as a table, and arrays by (site, layer, mask, statistic)."""
        import pandas

        found = self._moments.values() or [_Moments((), (), torch.device("cpu"))]
        tables = [moments.table() for moments in found]
        arrays = {
            (*place, mask, statistic): array
            for (statistic, place), of_masks in self._arrays.items()
            for mask, array, has_tokens in zip(
                self.masks, of_masks.cpu(), self._counted[statistic, place].tolist(), strict=True
            )
            if has_tokens
        }
        return pandas.concat(tables, ignore_index=True), arrays


@contextmanager
def _losing(call: Call, places: Iterable[Place]) -> Iterator[None]:
    """Leave out what is measured at these places where it raises, with the reason: no training ends by it."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        for place in places:
            if place[0] in GRADIENT_SITES.values():
                call.lose_gradient(place, why)
            else:
                call.absent["{} {}".format(*place)] = why


def _place(where: Place | NormRead, is_gradient: bool = False) -> Place | None:
    """The site and layer under which a statistic is listed; None if that is no site."""
    site, layer = (where.site, where.layer) if isinstance(where, NormRead) else where
    if is_gradient and site is not None:
        site = GRADIENT_SITES.get(site)
    return None if site is None or site not in SITES else (site, layer)


# -- statistics of what passes by ------------------------------------------------------------------------------------


class Measurer:
    """Takes the statistics that the metrics need and stages them on the call.

    Never alters a tensor. The call keeps a few no longer than until its block or the call itself has ended.
    """

    def __init__(self, metrics: Sequence[Metric]):
        self.kinds = {metric.kind for metric in metrics}
        self.watches_attention = not self.kinds.isdisjoint(("attention", "sink"))
        self.statistics = dict(KIND_STATISTICS)
        needed = {metric.statistic for metric in metrics}
        self.statistics["activation"] = tuple(name for name in KIND_STATISTICS["activation"] if name in needed)
        self.branches: dict[Place, dict[nn.Module, str]] = {}  # (kind, layer) -> whose outputs are added, and how
        self._arrivals = Arrivals()

    def activation(self, call: Call, where: Place | NormRead, x: Tensor) -> None:
        """Measure h itself, at a block's output or a norm's input."""
        if "activation" in self.kinds:
            call.stage("activation", where, self._token_statistics(call, x), x.shape)
        if "coordinate" in self.kinds and not isinstance(where, NormRead):
            kept = x.detach().clone() if call.tokens.awaits_attention else x  # which the block may write into
            call.tokens.once_rows_are_told(partial(self._stage_array, call, "coordinate_peak", where, kept))

    def _token_statistics(self, call: Call, x: Tensor) -> Tensor:
        """The statistics of x, computed once for a block's output that is also a norm's input."""
        version = None if x.is_inference() else x._version  # counts writes in place
        last = call.measured
        if last is not None and version is not None and last[0] is x and last[1] == version:
            return last[2]
        with torch.no_grad(), without_autocast(x.device):
            values = statistics.token_statistics(x.detach(), self.statistics["activation"])
        call.measured = None if version is None else (x, version, values)
        return values

    # -- gradients -----------------------------------------------------------------------------------------------

    def gradient(
        self,
        call: Call,
        where: Place | NormRead,
        x: Tensor,
        channels_first: bool,
        norm: nn.Module | None = None,
        repeated: Repeated | None = None,
    ) -> None:
        """Have the gradient at `x` reduced when it arrives; `repeated`: by a checkpoint, in the backward pass."""
        if "gradient" not in self.kinds:
            return
        # Of a view that is made without gradients PyTorch says that it requires them, if what it views does.
        is_apart = not torch.is_grad_enabled() and x._is_view() and x.grad_fn is None
        if not x.requires_grad or is_apart:
            if not torch.is_grad_enabled() and call.running is not None:  # as in a checkpoint
                call.waits = True
                call.running.reads.append(ref(x))
            return
        if not isinstance(where, NormRead):
            place = _place(where, is_gradient=True)
            if place is None:
                return
            # A checkpoint hands the repetition a tensor that has its hook already. One that comes a second time is
            # differentiated twice.
            is_watched = repeated is not None and not repeated.is_second
            if is_watched and place in {_place(other, True) for other in call.watched}:
                return
        call.watched.add(where)
        places: list[Place | NormRead] = [where]
        edge, arranged = (edge_of(x), ()) if norm is None else source_of(x, call.hooked)
        if repeated is None:  # else nobody would let go of the graph
            if edge in call.hooked:
                call.hooked[edge].append(where)
                return
            if norm is None:
                call.hooked.clear()
            call.hooked[edge] = places
        GradientHook(self._arrivals, call, places, arranged, channels_first, norm).watch(edge, x)
        if x._is_view() and edge == edge_of(x):
            call.views.append((x, x._version, places))

    def _leave_out_parts(self, call: Call) -> None:
        """Leave out gradients that part of the stream's passes by.

        So it is at views that the block has written to: autograd sees the write in what they view.
        """
        written = "the block writes in place into a view, and part of the gradient passes that by"
        parts = [(places, written) for x, version, places in call.views if x._version != version]
        copied = "the norm reads a copy of the stream, and the gradient is not seen where the model goes on"
        starts = [node for (node, _), places in call.hooked.items() if not isinstance(places[0], NormRead)]
        reads = [(edge, places) for edge, places in call.hooked.items() if isinstance(places[0], NormRead)]
        parts += [(places, copied) for edge, places in reads if is_beside(edge, starts, call.node)]
        for places, reason in parts:
            for where in places:
                if (place := _place(where, is_gradient=True)) is not None:
                    call.lose_gradient(place, reason)
            places.clear()
        call.views = []

    def take_gradients(self, with_open: bool) -> dict[Call, list[Staged]]:
        """The gradients that have arrived since the last time, by call; `with_open`: those that may grow, too."""
        by_call: dict[Call, list[Staged]] = defaultdict(list)
        arrivals = self._arrivals.take(with_open)
        calls = {arrival.call for arrival in arrivals if arrival.staged is not None}
        mixed = {call for call in calls if call.logits is not None and call.logits.has_more(call)}
        for arrival in arrivals:
            known = (place for where in arrival.places if (place := _place(where, is_gradient=True)) is not None)
            staged = arrival.staged
            if arrival.call in mixed:
                arrival.call.absent[GRADIENTS], staged = BESIDE, None
            elif staged is None:
                arrival.call.absent.setdefault(GRADIENTS, why_no_factor(arrival.call))
            by_call[arrival.call] += [] if staged is None else [staged._replace(where=place) for place in known]
        return by_call

    # -- norms ---------------------------------------------------------------------------------------------------

    def norm_input(
        self, call: Call, read: NormRead, x: Tensor, view: Tensor, mean_square: Tensor | None, channels_first: bool
    ) -> None:
        """Measure what a norm reads: `x`, with features last in `view`, and the statistic it is handed, if any."""
        self.activation(call, read, view)
        self.gradient(call, read, x, channels_first, read.norm)
        if not {"carried", "tanh", "bounded"} & self.kinds:
            return
        norm = statistics.tanh_norm(read.norm) if {"tanh", "bounded"} & self.kinds else None
        ms = None if mean_square is None else mean_square.detach().reshape(*view.shape[:-1], 1)
        tokens, view = tuple(view.shape[:-1]), view.detach()
        with torch.no_grad(), without_autocast(x.device):
            if ms is not None and "carried" in self.kinds:
                ratio = statistics.carried_ratio(view, ms)
                call.stage("carried", read, ratio, (*tokens, 1))
                call.tokens.once_rows_are_told(partial(self._stage_by_position, call, read, ratio[0], tokens))
            if norm is not None and "tanh" in self.kinds:
                call.stage("tanh", read, statistics.tanh_statistics(norm, view, ms), view.shape)
            if norm is not None and "bounded" in self.kinds and hasattr(norm, "lam") and hasattr(norm, "kappa"):
                call.stage("bounded", read, statistics.bound_statistics(norm, view, ms), view.shape)

    @staticmethod
    def _stage_by_position(call: Call, read: NormRead, ratio: Tensor, tokens: tuple[int, ...]) -> None:
        """Stage a ratio of each token by its position."""
        if (masks := call.tokens.masks(ratio.device, tokens)) is not None:
            positions, length = call.tokens.positions(ratio.device, tokens)
            tables = [statistics.by_position(ratio, positions, mask, length) for mask in masks]
            call.stage("carried_position", read, torch.stack(tables), (*tokens, 1))

    # -- blocks --------------------------------------------------------------------------------------------------

    def block_start(self, trace: Trace, x: Tensor, layer: int | None) -> None:
        """Measure what a block reads, if no block's output was that, as the output of `layer`; `x` holds the stream."""
        if layer is not None:
            self.activation(trace.call, ("block_out", layer), trace.entered)
        self.gradient(trace.call, ("block_in", trace.layer), x, trace.known.channels_first)

    def block_end(self, trace: Trace, out: Tensor) -> None:
        """Measure what the branches added to the stream, and how the block changed it."""
        self._leave_out_parts(trace.call)
        if "load" in self.kinds and trace.has_router and not trace.has_experts:
            reason = "no module of the mixture is given or returns the experts that were taken, as whole numbers"
            trace.call.absent.setdefault(f"expert_load_max {trace.layer}", reason)
        if not {"branch", "change", "spectrum"} & self.kinds:
            return
        modules: dict[Place, dict[nn.Module, str]] = defaultdict(dict)
        for segment in trace.segments or ():
            for run in segment.runs:
                modules[run.kind, trace.layer][run.module] = segment.made.form
        self.branches |= modules
        call, place = trace.call, ("block", trace.layer)
        h, out = trace.entered.detach(), out.detach()
        if trace.wrote_into_input:
            call.absent[f"block {trace.layer}"] = "the block writes into its own input in place"
            return
        if h.shape != out.shape:
            reason = f"the block changes the stream from {tuple(h.shape)} to {tuple(out.shape)}"
            call.absent[f"block {trace.layer}"] = reason
            return
        with torch.no_grad(), without_autocast(out.device):
            traced = trace if "branch" in self.kinds and isinstance(trace, BlockTrace) else None
            stream, update = (None, None) if traced is None else self._branches(traced, h, out)
            values = statistics.block_statistics(h, out, update, stream)
            if traced is not None and traced.segments is not None and not traced.hidden:
                call.stage("branch", place, values[:2], h.shape)
            if "change" in self.kinds:
                call.stage("change", place, values[2:], h.shape)
            if "spectrum" in self.kinds:
                self._stage_array(call, "gram", place, at_least_float32(out) - at_least_float32(h))

    def _branches(self, trace: BlockTrace, h: Tensor, out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Stage every branch of a block that adds up; return the stream that they are added to, None where that is what
        the block reads, and the sum of what they add."""
        call, layer = trace.call, trace.layer
        if trace.segments is None:
            call.absent |= {f"{branch.kind} {layer}": trace.why for branch in trace.block.branches}
            return None, None
        if trace.hidden:
            reason = f"what {' + '.join(trace.hidden)} add is lost in the rounding of the stream"
            call.absent |= {f"{kind} {layer}": reason for kind in ("block", *trace.hidden)}
        added: dict[str, Tensor] = {}
        streams: dict[str, Tensor] = {}
        for segment in trace.segments:
            parts = additions(segment, out, trace.rows)
            if parts is None:
                call.absent[f"block {layer}"] = "a tensor of the residual stream was written over in place"
                return None, None
            for run, stream, adds in parts:
                streams.setdefault(run.kind, stream.reshape(h.shape))
                adds = adds.reshape(h.shape)
                added[run.kind] = adds if run.kind not in added else at_least_float32(added[run.kind]) + adds
        # Branches of a kind that follow each other; those that run side by side count once.
        working = ([run.kind for run in segment.runs if run.kind != "other"] for segment in trace.segments)
        counts = Counter(kind for kinds in working for kind, _ in groupby(kinds))
        for kind, adds in added.items():
            if counts[kind] > 1:
                call.absent[f"{kind} {layer}"] = f"the block has {counts[kind]} branches of this kind in turn"
            elif kind in counts:
                values = statistics.branch_statistics(streams[kind], adds)
                call.stage("branch", (kind, layer), values, h.shape)
        for run in trace.runs:
            if run.kind not in added and run.kind not in {*trace.hidden, "other"}:
                call.absent[f"{run.kind} {layer}"] = trace.reason_without_part(run)
        follow = all(after.before is segment.after for segment, after in pairwise(trace.segments))
        scale = math.prod(segment.made.carry for segment in trace.segments) if follow else 1.0  # else a norm is between
        if scale != 1.0 and len(trace.segments) > 1:  # and so is what the first branch adds: the rest is added
            return None, at_least_float32(out) / scale - at_least_float32(h)
        if trace.hidden:
            return None, None
        first, *others = added.values()
        entering = trace.segments[0]
        is_read = entering.before is trace.entered and entering.made.carry == 1.0
        return None if is_read else next(iter(streams.values())), sum(others, first)

    def router(self, trace: Trace, x: Tensor, returned: Any, routing: Routing) -> None:
        """Measure what a router read and returned."""
        trace.has_router = True
        if "router" not in self.kinds or x.shape[-1] != routing.scores.shape[1]:
            return
        if routing.scores.is_meta:  # its product would be whatever lies in memory
            trace.call.absent[f"router_entropy {trace.layer}"] = "the router's weights are offloaded when it has run"
            return
        with torch.no_grad(), without_autocast(x.device):
            scores = router_scores(routing, x.detach())
            entropy = router_entropy(scores)
            if reason := why_no_router_scores(scores, returned):
                trace.call.absent[f"router_entropy {trace.layer}"] = reason
                return
        tokens = trace.entered.shape[:-1]
        tokens = tokens if math.prod(tokens) == len(entropy) else entropy.shape
        trace.call.stage("router", ("mlp", trace.layer), entropy[None], (*tokens, 1))

    def experts(self, trace: Trace, values: Any, routing: Routing) -> None:
        """Look for the experts that were taken in what a module of a mixture is given or returns; the first counts."""
        tokens = tuple(trace.entered.shape[:-1])
        if "load" not in self.kinds or trace.has_experts:
            return
        chosen, what = taken_experts(values, math.prod(tokens), routing.experts), "expert_load_max"
        if chosen is None:
            reason = "no module of the mixture is given or returns the experts that each token takes"
            trace.call.absent[f"{what} {trace.layer}"] = reason
            return
        trace.has_experts = True
        trace.call.absent.pop(f"{what} {trace.layer}", None)
        place = ("mlp", trace.layer)
        trace.call.tokens.once_rows_are_told(
            partial(self._stage_experts, trace.call, place, chosen.clone(), tokens, routing.experts)
        )

    @staticmethod
    def _stage_experts(call: Call, place: Place, chosen: Tensor, tokens: tuple[int, ...], experts: int) -> None:
        """Stage how many tokens took each expert."""
        if (masks := call.tokens.masks(chosen.device, tokens)) is not None:
            counts = [statistics.expert_counts(chosen, mask, experts) for mask in masks]
            call.stage("expert_counts", place, torch.stack(counts), (*tokens, 1))

    def streams(self, trace: Trace, state: Tensor, rule: nn.Module, kind: str) -> None:
        """Measure the streams that a rule is about to mix."""
        with without_autocast(state.device):
            values = statistics.stream_statistics(rule, state)
        if values is not None:
            trace.call.stage("streams", (kind, trace.layer), values, (*state.shape[:-1], 1))

    def attention(self, trace: Trace, watch: AttentionWatch) -> None:
        """Stage the statistics of the scores that a watched block computed."""
        call, place = trace.call, ("attn", trace.layer)
        found = watch.found(call.tokens.caller_rows())
        if found is None:
            if watch.why or watch.calls or trace.block.attention is not None:
                call.absent[f"attention {trace.layer}"] = watch.reason()
            return
        as_held = call.tokens.by_row_as_held
        shape = (*as_held(found.scores[:, 0, :, 0]).shape, 1)
        if "sink" in self.kinds and found.beside is not None and not found.no_sink:
            call.stage("sink", place, as_held(found.beside.mean(1)).reshape(1, -1), shape)
        elif "sink" in self.kinds and found.no_sink != NO_SINK:  # then the metric does not apply
            call.absent[f"sink_share {trace.layer}"] = found.no_sink
        if "attention" not in self.kinds:
            return
        if found.knows_size:
            call.stage("attention", place, as_held(found.scores[..., 0].amax(1)).reshape(1, -1), shape)
        else:
            reason = "of the scores only their distance from a row's maximum was seen"
            call.absent[f"attention_logit_max {trace.layer}"] = reason
        call.stage("entropy", place, as_held(found.scores[..., 1].mean(1)).reshape(1, -1), shape)

    def _stage_array(self, call: Call, statistic: str, place: Place, x: Tensor) -> None:
        """Stage an array for every mask. Few tokens separate the masks, so the long reduction is made once."""
        reduce, tokens = getattr(statistics, statistic), tuple(x.shape[:-1])
        with torch.no_grad(), without_autocast(x.device):
            rows, masks = x.detach().reshape(-1, x.shape[-1]), call.tokens.masks(x.device, tokens)
            if masks is None:
                return
            if not call.tokens.counts_first_tokens(x.device, tokens):
                call.stage(statistic, place, torch.stack([reduce(rows, mask) for mask in masks]), x.shape)
                return
            shared = masks.all(0)
            common, (first, kept) = reduce(rows, shared), call.tokens.first_tokens(x.device, tokens)
            extra = [reduce(rows[first], (mask & ~shared)[first] & kept) for mask in masks]
            call.stage(statistic, place, torch.stack([MERGE[statistic](common, more) for more in extra]), x.shape)
