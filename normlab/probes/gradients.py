"""Gradients as backward passes bring them: of several passes through one forward call their sum."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from operator import methodcaller
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from normlab.probes.decomposition import NormRead
from normlab.probes.forward_call import GRADIENTS, Call, Place, Staged
from normlab.probes.layout import features_last
from normlab.probes.returned_loss import HALF, is_half
from normlab.probes.statistics import at_least_float32, whole, without_autocast


class Pass(Enum):
    """What a backward pass adds to leaves' `.grad`."""

    LOOK = "nothing, as `torch.autograd.grad`"
    PART = "the gradients of some, as `backward(inputs=...)`"
    WHOLE = "the gradients of all"


def _pass_of(call: Call, is_retained: bool) -> Pass:
    """What the backward pass is that runs. One that is alone counts as whole, whatever it is."""
    if not is_retained and not call.passes:
        return Pass.WHOLE
    task = torch._C._current_graph_task_id()
    if task not in call.passes:
        call.passes[task] = _running_pass()
    return call.passes[task]


def _running_pass() -> Pass:
    """What the backward pass is that runs, by the nodes of the graph beneath the one that runs now."""
    running = torch._C._current_autograd_node()
    nodes: list[Any] = [running]
    seen, adds, is_whole = {None}, False, True
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        try:
            will_run = node is running or torch._C._will_engine_execute_node(node)  # autograd does not list the root
        except RuntimeError:  # a leaf whose gradient `autograd.grad` returns
            will_run = False
        is_whole &= will_run
        adds |= will_run and not node.next_functions
        nodes += [below for below, _ in node.next_functions] if will_run else []
    return Pass.WHOLE if is_whole else Pass.PART if adds else Pass.LOOK


@dataclass(eq=False, slots=True)
class Arrival:
    """The gradient at a tensor, of one pass or of whole passes summed.

    Args:
        places: where the tensor is read.
        staged: its norms; None if they could not be taken, or their scale is not known.
        of: which kind of pass.
        hook: by which it came, as long as the graph lives.
    """

    call: Call
    places: Sequence[Place | NormRead]
    staged: Staged | None
    of: Pass
    hook: ref[GradientHook]

    @property
    def is_open(self) -> bool:
        """True if a further pass may come."""
        hook = self.hook()
        return hook is not None and hook.is_retained

    @property
    def counts(self) -> bool:
        """False for a look at a forward call through which a pass went that adds to `.grad`."""
        return self.of is not Pass.LOOK or all(of is Pass.LOOK for of in self.call.passes.values())


class Arrivals:
    """What has arrived and is not merged yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # each device has a thread for its backward pass
        self._waiting: dict[Arrival, None] = {}

    def add(self, arrival: Arrival, instead_of: Arrival | None) -> None:
        """Add one, in place of that of the passes before. Where that is merged, its place has two."""
        with self._lock:
            if instead_of is not None:
                self._waiting.pop(instead_of, None)
            self._waiting[arrival] = None

    def take(self, with_open: bool) -> list[Arrival]:
        """Remove those that no further pass can reach, or all; and return what counts."""
        with self._lock:
            taken = [arrival for arrival in self._waiting if with_open or not arrival.is_open]
            for arrival in taken:
                del self._waiting[arrival]
        return [arrival for arrival in taken if arrival.counts]


Edge = tuple[Any, int]  # a node of autograd's graph, and which of its outputs

# Nodes that return the values they are given, in the same order or in another: casts, copies, views, permutations.
_SAME_VALUES = {"ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze"}
_PERMUTATIONS: dict[str, Callable[[Any], tuple[Any, ...]]] = {  # a tensor's method and its dimensions
    "T": lambda node: ("t",),
    "Transpose": lambda node: ("transpose", node._saved_dim0, node._saved_dim1),
    "Permute": lambda node: ("permute", *node._saved_dims),
}


def edge_of(x: Tensor) -> Edge:
    """Where the gradient of `x` arrives."""
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def source_of(x: Tensor, known: Container[Edge]) -> tuple[Edge, list[Callable[[Tensor], Tensor]]]:
    """Where the gradient arrives of what `x` is a copy or a view of, as in `norm(x.float())`; of `x` if it is none.

    The model goes on from that, so the gradient at the copy is of one path alone. Nothing is looked for behind what is
    `known`. The functions, in this order, arrange the values of the source as they are in `x`.
    """
    edge, arranged = edge_of(x), list[Callable[[Tensor], Tensor]]()
    while edge not in known:
        node = edge[0]
        name = node.name().partition("Backward")[0]
        if name not in _SAME_VALUES and name not in _PERMUTATIONS:
            break
        if name in _PERMUTATIONS:
            method, *dims = _PERMUTATIONS[name](node)
            # Autograd keeps a dimension without its sign, -1 as 2^64 - 1.
            arranged.append(methodcaller(method, *(dim - 2**64 if dim >= 2**63 else dim for dim in dims)))
        else:
            arranged.append(methodcaller("reshape", node._input_metadata[0].shape))
        edge = node.next_functions[0]
    return edge, arranged[::-1]


def is_beside(edge: Edge, starts: Container[Any], end: Any) -> bool:
    """True if a way between nodes passes by an edge, and leads through what that is made of.

    A norm that reads it reads a copy of the stream of its own, made in a way that `source_of` does not know.
    """
    node, made_of = edge[0], set()
    while (node := _made_of(node)) is not None:
        made_of.add(node)
    seen, ahead = {edge[0]}, [end] if made_of and end is not None else []
    while ahead:
        node = ahead.pop()
        if node in made_of:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [] if node in starts else [before for before, _ in node.next_functions]
    return False


def _made_of(node: Any) -> Any:
    """The one node that a node reads; None if it reads several."""
    before = {one for one, _ in node.next_functions if one is not None}
    return before.pop() if len(before) == 1 else None


NOT_RETURNED = (
    "the loss that was differentiated is not made of the one that the model returned: pass loss_tokens=<number of "
    "labels it is averaged over, 1 if it is summed>"
)
BESIDE = (
    "a term beside the returned loss was differentiated through its logits: pass loss_tokens=<number of labels that "
    "the sum is averaged over>"
)
ROWS = 32  # positions at which logits are compared
# Largest distance of a gradient from that of a label, which is about 1 long. A float32 loss may keep it in bfloat16,
# whose rounding is up to 0.003.
APART, APART_IN_HALF = 5e-3, 0.05
TIMES_ZERO = "the returned loss was multiplied by 0 before it was differentiated"


def watch_loss(loss: Tensor | None, calls: Sequence[Call]) -> None:
    """Note in `calls` the gradient that arrives at the loss that they returned: what it is multiplied by."""

    def note(gradient: Tensor) -> None:
        is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
        for call in calls:
            try:
                of, value = _pass_of(call, is_retained), float(whole(gradient))
            except Exception as error:  # the backward pass goes on
                call.absent[GRADIENTS] = f"{type(error).__name__}: {error}"
                continue
            if of is not Pass.WHOLE:
                call.loss_look = value
            else:
                call.loss_gradient = (call.loss_gradient or 0.0) + value

    if loss is not None and loss.requires_grad and calls:
        loss.register_hook(note)


class LogitsSample:
    """What arrives at a few positions of the logits, to tell whether the returned loss alone was differentiated.

    That loss averages over N labels y, so at each position arrives, times N and over what arrives at the loss,
    softmax(logits) - onehot(y), or 0. It is 0 everywhere if the loss is not made of these logits but of others, as
    where a copy is returned. Then a term is not told that is such a loss again, of the copy and of the same size.
    """

    def __init__(self, logits: Tensor, loss: Tensor) -> None:
        count = logits.shape[:-1].numel()
        at = torch.linspace(0, count - 1, min(ROWS, count), device=logits.device).long().unique()
        self._at = torch.unravel_index(at, logits.shape[:-1])
        self._softmax = logits.detach()[self._at].float().softmax(-1)
        self._apart = APART_IN_HALF if logits.dtype in HALF or is_half(loss) else APART
        self._least = torch.finfo(logits.dtype).smallest_normal * logits.shape[-1] ** 0.5  # that is not lost
        self._sum: Tensor | None = None  # of whole passes

    def add(self, gradient: Tensor) -> None:
        """Add what a whole pass brings."""
        rows = gradient.detach()[self._at].float()
        self._sum = rows if self._sum is None else self._sum + rows

    def has_more(self, call: Call) -> bool:
        """True if more arrived than comes from the returned loss. False also where it cannot be told."""
        if self._sum is None or not call.loss_gradient or call.loss_tokens is None:
            return False
        scale = call.loss_gradient / float(call.loss_tokens)
        gradient = self._sum / scale
        if not bool(gradient.isfinite().all()):
            return False
        rest = self._softmax - gradient
        rest.scatter_add_(-1, rest.argmax(-1, keepdim=True), rest.new_full((len(rest), 1), -1.0))
        distance = torch.minimum(gradient.norm(dim=-1), rest.norm(dim=-1))
        return bool(distance.max() > self._apart + self._least / abs(scale))


def watch_logits(logits: Tensor | None, loss: Tensor | None, calls: Sequence[Call]) -> None:
    """Have `calls` tell whether a term beside the loss that they returned is differentiated through its logits."""
    if logits is None or loss is None or not calls or not (logits.requires_grad and loss.requires_grad):
        return
    if not logits.numel() or isinstance(logits, DTensor):  # of which each rank has a part
        return
    with torch.no_grad():
        sample = LogitsSample(logits, loss)

    def note(gradient: Tensor) -> None:
        with suppress(Exception):  # the backward pass goes on
            is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
            if {_pass_of(call, is_retained) for call in calls} == {Pass.WHOLE}:
                sample.add(gradient)

    logits.register_hook(note)
    for call in calls:
        call.logits = sample


def _factor(call: Call, of: Pass) -> Any:
    """From the size of the gradient that has arrived to the summed loss's; None where the returned loss tells none."""
    arrived = call.loss_gradient if of is Pass.WHOLE else call.loss_look
    if not call.counts_labels or call.loss_tokens is None:
        return call.loss_tokens
    return call.loss_tokens / abs(arrived) if arrived else None


def why_no_factor(call: Call) -> str:
    """Why gradients that have arrived are of no known scale."""
    return NOT_RETURNED if call.loss_gradient is None and call.loss_look is None else TIMES_ZERO


class GradientHook:
    """Takes the norms of the gradient at a tensor. It lives as long as the graph, and so does the sum that it keeps.

    Attributes:
        is_retained: the latest pass retained the graph.
    """

    is_retained = False

    def __init__(
        self,
        arrivals: Arrivals,
        call: Call,
        places: Sequence[Place | NormRead],
        arranged: Sequence[Callable[[Tensor], Tensor]],
        *layout: Any,
    ) -> None:
        self._arrivals, self._call, self._places = arrivals, call, places
        self._arranged, self._layout = arranged, layout
        self._sum: Tensor | None = None  # of whole passes, which have retained the graph
        self._arrival: Arrival | None = None  # with its norms

    def watch(self, edge: Edge, x: Tensor) -> None:
        """Take the gradient at an edge of the graph: that of `x`, or of what `x` is a copy of."""
        node, output = edge
        if edge == edge_of(x):
            x.register_hook(self)
        elif (leaf := getattr(node, "variable", None)) is not None:
            leaf.register_hook(self)
        else:
            node.register_prehook(lambda arrived: self(arrived[output]))

    def __call__(self, gradient: Tensor | None) -> None:
        call, before = self._call, None
        if gradient is None or call.loss_tokens is None or not self._places:  # a pass, or a gradient, was not whole
            return
        self.is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
        arrival = Arrival(call, self._places, None, Pass.WHOLE, ref(self))
        try:
            arrival.of = _pass_of(call, self.is_retained)
            with torch.no_grad(), without_autocast(gradient.device):
                for arrange in self._arranged:
                    gradient = arrange(gradient)
                vectors = features_last(gradient, *self._layout)
                if arrival.of is Pass.WHOLE:
                    before = self._arrival
                    if self._sum is not None:
                        vectors = at_least_float32(self._sum) + vectors
                    self._sum = vectors.clone() if self.is_retained else None  # a kernel may write into a gradient
                    self._arrival = arrival if self.is_retained else None
                if (factor := _factor(call, arrival.of)) is not None:
                    norms = torch.linalg.vector_norm(at_least_float32(vectors), dim=-1) * factor
                    arrival.staged = Staged("gradient", self._places[0], norms.reshape(1, -1), tuple(vectors.shape))
        except Exception as error:  # the backward pass goes on
            call.absent[GRADIENTS] = f"{type(error).__name__}: {error}"
        self._arrivals.add(arrival, before)
