"""`Measurer`: which statistics to take of which tensor, as each passes by in a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normlab.probes import arrays
from normlab.probes.attention import AttentionWatch
from normlab.probes.branches import (
    block_statistics,
    bound_statistics,
    branch_statistics,
    carried_ratio,
    over_chunks,
    tanh_norm,
    tanh_statistics,
)
from normlab.probes.calls import Call, Place
from normlab.probes.metrics import KIND_STATISTICS, SITES, Metric
from normlab.probes.reducers import at_least_float32, token_statistics
from normlab.probes.roles import BlockFlow


def _same_shape(x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape == like.shape else x.reshape(like.shape)


class Measurer:
    """Takes the statistics that the chosen metrics need and stages them on the call. Never alters or keeps a tensor it
    is shown."""

    def __init__(self, metrics: Sequence[Metric]):
        self.kinds = {metric.kind for metric in metrics}
        self.statistics = dict(KIND_STATISTICS)
        needed = {metric.statistic for metric in metrics}
        self.statistics["activation"] = tuple(name for name in KIND_STATISTICS["activation"] if name in needed)

    @property
    def needs_branches(self) -> bool:
        """Whether what attention, the MLP and their output norms return matters."""
        return "branch" in self.kinds

    def activation(self, call: Call, place: Place, x: Tensor) -> None:
        """h itself, at a block's output or a norm's input."""
        if place[0] not in SITES or SITES[place[0]].takes != "activation":
            return
        if "activation" in self.kinds:
            self._stage(call, "activation", place, self._token_statistics(call, x), x.shape[-1])
        if "coordinate" in self.kinds and place[0] == "block_out":
            self._stage_arrays(call, "coordinate_peak", place, x)

    def _token_statistics(self, call: Call, x: Tensor) -> Tensor:
        """The statistics of x, read once when it is the very tensor that was read last (a block's output is often a
        norm's input)."""
        version = None if x.is_inference() else x._version  # counts writes in place
        last = call.measured
        if last is not None and version is not None and last[0] is x and last[1] == version:
            return last[2]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            values = token_statistics(x.detach(), self.statistics["activation"])
        call.measured = None if version is None else (x, version, values)
        return values

    def norm_input(self, call: Call, place: Place, norm: nn.Module, x: Tensor, mean_square: Tensor | None) -> None:
        """What a norm reads, and the statistic it is handed if it is handed one."""
        self.activation(call, place, x)
        carries = "carried" in self.kinds and mean_square is not None
        bends = tanh_norm(norm) if {"tanh", "bounded"} & self.kinds else None
        if not carries and bends is None:
            return
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            x, ms = x.detach(), None if mean_square is None else mean_square.detach().reshape(*x.shape[:-1], 1)
            if carries and ms is not None:
                ratio = carried_ratio(x, ms)
                self._stage(call, "carried", place, ratio, 1)
                positions, length = call.positions(x.device)
                for index, mask in enumerate(call.masks(x.device)):
                    table = arrays.by_position(ratio[0], positions, mask, length)
                    call.arrays.append(("carried_position", place, index, table))
            if bends is not None and "tanh" in self.kinds:
                self._stage(call, "tanh", place, tanh_statistics(bends, x, ms), x.shape[-1])
            if bends is not None and "bounded" in self.kinds and hasattr(bends, "lam") and hasattr(bends, "kappa"):
                self._stage(call, "bounded", place, bound_statistics(bends, x, ms), x.shape[-1])

    def block_end(self, call: Call, flow: BlockFlow, out: Tensor) -> None:
        """What attention and MLP added to the stream, and how the block changed it."""
        if not {"branch", "change", "spectrum"} & self.kinds:
            return
        flow.check_entered()
        layer = flow.block.index
        with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
            h, out = flow.entered.detach(), out.detach()
            adds = [None if t is None else _same_shape(t.detach(), h) for t in (flow.attention_add, flow.mlp_add)]
            if "branch" in self.kinds:
                self._branches(call, layer, h, adds, flow.mlp_stream)
            if {"branch", "change"} & self.kinds:
                update = adds[0] + adds[1] if adds[0] is not None and adds[1] is not None else None
                values = block_statistics(h, out, update)
                if "branch" in self.kinds:
                    self._stage(call, "branch", ("block", layer), values[:2], h.shape[-1])
                if "change" in self.kinds:
                    self._stage(call, "change", ("block", layer), values[2:], h.shape[-1])
            if "spectrum" in self.kinds:
                self._stage_arrays(call, "gram", ("block", layer), at_least_float32(out) - at_least_float32(h))

    def _branches(self, call: Call, layer: int, h: Tensor, adds: list[Tensor | None], stream: Tensor | None) -> None:
        attention, mlp = adds
        if attention is not None:
            self._stage(call, "branch", ("attn", layer), branch_statistics(h, attention), h.shape[-1])
        if mlp is None:
            return
        if stream is not None or attention is None:
            base = h if stream is None else _same_shape(stream.detach(), h)
            values = branch_statistics(base, mlp)
        else:
            values = over_chunks(lambda x, a, m: branch_statistics(at_least_float32(x) + a, m), h, attention, mlp)
        self._stage(call, "branch", ("mlp", layer), values, h.shape[-1])

    def attention(self, call: Call, layer: int, watch: AttentionWatch) -> None:
        """The scores that a watched block computed."""
        if watch.found is not None:
            self._stage(call, "attention", ("attn", layer), watch.found, 1)

    def _stage(self, call: Call, kind: str, place: Place, values: Tensor, width: int) -> None:
        call.values.append((kind, place, values, width))

    def _stage_arrays(self, call: Call, statistic: str, place: Place, x: Tensor) -> None:
        """An array for every mask. Few tokens separate the masks, so the long reduction is made once."""
        reduce = arrays.gram if statistic == "gram" else arrays.coordinate_peak
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            rows, masks = x.detach().reshape(-1, x.shape[-1]), call.masks(x.device)
            shared = masks.all(0)
            common = reduce(rows, shared)
            first, kept = call.first_tokens(x.device)
            for index, mask in enumerate(masks):
                extra = reduce(rows[first], (mask & ~shared)[first] & kept)
                call.arrays.append((statistic, place, index, arrays.MERGE[statistic](common, extra)))
