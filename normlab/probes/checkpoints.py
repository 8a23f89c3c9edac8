"""Reentrant checkpoints: which run of a block one repeats in the backward pass, where its gradients come to be."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from normlab.probes.forward_call import Call, Run
from normlab.probes.layout import same_tensor
from normlab.probes.sites import Block

# The hooks on saved tensors that are on; before PyTorch 2.8 only the frames tell that a checkpoint runs.
_TOP_HOOKS: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def in_backward() -> bool:
    """True while autograd runs a backward pass in this thread: a forward that runs then is a checkpoint's."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """True inside a checkpoint that is not reentrant: one that takes what is saved for the backward pass.

    Other hooks take it too, such as those of `save_on_cpu`. They repeat nothing.
    """
    if _TOP_HOOKS is not None:
        hooks = _TOP_HOOKS(False)
        return hooks is not None and "checkpoint" in str(getattr(hooks[0], "__module__", ""))
    frame: Any = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


def _metadata(node: Any) -> dict[Any, Any]:
    """Notes at a node of the graph; PyTorch declares them as a method, and has them as an attribute."""
    return node.metadata


class Repeated:
    """A run of a block that a checkpoint repeats in the backward pass."""

    def __init__(self, block: Block, call: Call, run: Run, task: int):
        self.block, self.call, self.run, self.task = block, call, run, task
        self.is_second = run.is_repeated  # a second backward pass goes through it
        run.is_repeated = True
        self._times: Counter[nn.Module] = Counter()  # that each norm has run
        self._out: Any = None

    def norm_starts(self, norm: nn.Module) -> str | None:
        """Count a run of a norm. Its site; None if it is at none."""
        self._times[norm] += 1
        return self.run.sites.get((norm, self._times[norm] - 1))

    def end(self, out: Tensor) -> None:
        """Note what the block returns."""
        self._out = ref(out)

    def leads_to(self, x: Tensor) -> bool:
        """True if the block's output is `x`: the next one is repeated with it."""
        return self._out is not None and same_tensor(self._out(), x)


class _Repeating(threading.local):
    running: Repeated | None = None


class Checkpoints:
    """The calls whose gradients inside blocks come with a checkpoint's repetition, and the repetition that runs.

    Args:
        absent: where it is written what could not be told.

    Attributes:
        lost: layers of blocks of which it could not, at least once.
    """

    def __init__(self, absent: dict[str, str]) -> None:
        self._absent = absent
        self.lost: set[int] = set()
        self._waiting: WeakSet[Call] = WeakSet()
        self._key = object()  # of our marks on nodes of the graph
        self._local = _Repeating()

    @property
    def running(self) -> Repeated | None:
        """The run that is repeated in this thread."""
        return self._local.running

    def wait_for(self, call: Call) -> None:
        """Expect that the blocks of a call, which has ended, run again."""
        self._waiting.add(call)

    def forget_running(self) -> None:
        """Let no repetition run on."""
        self._local = _Repeating()

    def mark(self, x: Tensor, call: Call, run: Run) -> None:
        """Have the node of the graph that made a block's output tell which run that was."""
        if call.waits and x.grad_fn is not None:
            _metadata(x.grad_fn)[self._key] = (call, run)

    def find(self, block: Block, x: Tensor, begins: bool) -> Repeated | None:
        """The run of a block that a reentrant checkpoint repeats in the backward pass; None if it is not told.

        The node of the graph that repeats it tells. Else it is the address of what the block (`begins`) or its norm
        reads, which the checkpoint has kept.
        """
        if not self._waiting:
            return None
        node, before = torch._C._current_autograd_node(), self.running
        marked = None if node is None else _metadata(node).get(self._key)
        calls = list(self._waiting) if marked is None else [marked[0]]
        runs = [(call, run) for call in calls for run in call.runs.get(block.module, ())]
        if marked in runs:
            found = [marked]
        elif before is not None and before.leads_to(x):
            found = [(call, run) for call, run in runs if (call, run.layer) == (before.call, before.run.layer + 1)]
        elif marked is not None and len(runs) == 1:
            found = runs
        else:
            found = [(call, run) for call, run in runs if run.has_read(x)]
            found = [(call, run) for call, run in found if not run.is_repeated] or found
            if not found and not begins and before is not None and before.block is block:
                return before  # its first norm was found
        task = torch._C._current_graph_task_id()
        if len(found) != 1:
            which = "several" if found else "none"
            reason = f"a checkpoint repeats it on the input of {which} of the forward passes that wait for gradients"
            self._absent[f"gradients in {block.name}"], self._local.running = reason, None
            self.lost.add(block.layer)
        elif begins or before is None or (before.run, before.task) != (found[0][1], task):
            self._local.running = Repeated(block, found[0][0], found[0][1], task)
        return self.running
