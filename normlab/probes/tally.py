"""What a recording has counted: the statistics of calls that are merged, how many there were, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from normlab.probes.accumulate import Accumulator
from normlab.probes.forward_call import Call, Place, Staged


class Tally:
    """What a recording has counted.

    Attributes:
        accumulator: the statistics of the calls that are merged.
        finished: calls that are not.
        calls, idle_calls: how many ran blocks, and how many none.
        layers: of the call with most.
        layers_run: those of which a block has run.
        loss_labels: how many labels the losses of all calls average over.
        awaited, reached: calls to which a gradient may still come, and to which one came.
        lost: where a gradient was left out.
    """

    def __init__(self, masks: Sequence[str], statistics: Mapping[str, Sequence[str]]) -> None:
        self.accumulator = Accumulator(masks, statistics)
        self.finished: list[Call] = []
        self.calls = self.idle_calls = self.layers = 0
        self.layers_run: set[int] = set()
        self.loss_labels: float | Tensor = 0.0
        self.awaited = self.reached = 0
        self.lost: set[Place] = set()

    def end(self, call: Call) -> None:
        """Count a call that has ended."""
        self.finished.append(call)
        self.calls += bool(call.layer)
        self.idle_calls += not call.layer
        self.layers = max(self.layers, call.layer)

    def take_finished(self) -> list[Call]:
        """The calls that are not merged yet, for the last time."""
        calls, self.finished = self.finished, []
        return calls

    def merge(self, call: Call, has_gradients: bool) -> None:
        """Merge what a call has measured; `has_gradients`: those of its loss are asked for."""
        self.accumulator.add(call, call.staged)
        call.staged = []
        if has_gradients and call.layer and call.loss_tokens is not None:
            self.loss_labels = self.loss_labels + call.loss_tokens
            call.is_awaited = bool(call.watched) and not call.is_reached
            self.awaited += call.is_awaited
        self.layers_run |= {run.layer for runs in call.runs.values() for run in runs}
        self.lost |= call.lost

    def merge_gradients(self, call: Call, gradients: Sequence[Staged]) -> None:
        """Merge gradients that have come to a call."""
        self.awaited -= call.is_awaited
        self.reached += not call.is_reached
        call.is_awaited, call.is_reached = False, True
        once, spoiled = call.first_gradients(gradients)
        self.accumulator.add(call, once)
        self.accumulator.forget("gradient", spoiled)
        self.lost |= call.lost
