"""One forward call of a model: the blocks that ran in it, and what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn

from normlab.probes.attention_watch import AttentionWatch
from normlab.probes.call_inputs import CallInputs, Entered, LossTokens
from normlab.probes.call_tokens import CallTokens
from normlab.probes.decomposition import NormRead, NormRun
from normlab.probes.layout import Refusal, same_tensor
from normlab.probes.stream_sums import Rows, passes_on

GRADIENTS = "gradients"  # in `absent`: why gradients of a forward pass are left out
Place = tuple[str, int]  # site, layer


@dataclass(eq=False)
class Run:
    """One run of a block in a call.

    Args:
        layer: in the call.
        reads: its input, and what norms in a checkpoint read, as long as they live. A checkpoint keeps what it needs to
            repeat.
        sites: of its norms.
        is_repeated: a checkpoint has run it again, for the gradients.
    """

    layer: int
    reads: list[ref[Tensor]]
    sites: Mapping[NormRun, str] = field(default_factory=dict)
    is_repeated: bool = False

    def has_read(self, x: Tensor) -> bool:
        """True if `x` holds what was read."""
        return any(same_tensor(read(), x) for read in self.reads)


def _descends(x: Tensor, node: Any) -> bool:
    """True if `x` was computed from what a node of the graph made."""
    if node is None:
        return False
    seen, ahead = set(), [x.grad_fn]
    while ahead:
        one = ahead.pop()
        if one is node:
            return True
        if one is not None and one not in seen:
            seen.add(one)
            ahead += [before for before, _ in one.next_functions]
    return False


@dataclass(eq=False)
class LastBlock:
    """The output of the block that ran last, until the next one or the final norm has read it."""

    block: nn.Module
    run: Run
    entered: Tensor
    out: Tensor
    beside: Tensor | None  # another tensor of its shape
    is_joined: bool  # the stream was taken for the sum of both, and measured so
    others: Sequence[ref[Tensor]] = ()  # what else it returned
    version: int | None = None  # of `out`
    entered_version: int | None = None
    rows: Rows | None = None  # of `out`, which may be written to, and `beside_rows`; None without a second tensor
    beside_rows: Tensor | None = None

    def __post_init__(self) -> None:
        self.version = None if self.out.is_inference() else self.out._version
        self.entered_version = None if self.entered.is_inference() else self.entered._version
        if self.beside is not None:
            self.rows = Rows(self.out)
            self.beside_rows = self.rows.of(self.beside)

    def returned_too(self, x: Tensor) -> bool:
        """True if `x` is what the block returned beside `out`, of another shape."""
        return x.shape != self.out.shape and any(other() is x for other in self.others)

    def is_update_of(self, x: Tensor) -> bool:
        """True if `x` holds the sum of what the block read and returned; it may be the former, written to since."""
        if not x.shape == self.out.shape == self.entered.shape or self._is_written:
            return False
        if same_tensor(x, self.entered):
            return self.entered_version is not None and self.entered._version != self.entered_version
        return passes_on(self.entered, self.out, x) == "sum"

    @property
    def _is_written(self) -> bool:
        return self.version is not None and self.out._version != self.version

    def is_read_by(self, x: Tensor) -> bool:
        """True if a norm that reads `x` reads `out`, or a copy in another precision."""
        is_like = x.numel() == self.out.numel() and x.shape[-1] == self.out.shape[-1]
        return same_tensor(x, self.out) or (is_like and self.is_passed_on(x.reshape(self.out.shape)))

    def is_passed_on(self, x: Tensor) -> bool:
        """True if `x` holds the same values, or has another shape, as between stages."""
        if x.shape != self.out.shape:
            return True
        if same_tensor(x, self.out):
            return not self._is_written
        return not self._is_written and passes_on(self.entered, self.out, x) in ("same", None)


class Staged(NamedTuple):
    """A measurement that waits for its call to end: statistics per token, or an array."""

    kind: str  # of a metric; of an array its statistic
    where: Place | NormRead  # a norm's place may become known later
    values: Tensor  # (statistics, tokens); of an array (masks, ...)
    shape: tuple[int, ...] = ()  # of the activation: tokens, in one dimension or several, and features


class Call:
    """One forward call of the model, and what was measured until it is known to be whole."""

    def __init__(self, mask_names: Sequence[str], implicit: bool = False, inputs: CallInputs | None = None) -> None:
        self.inputs = CallInputs() if inputs is None else inputs
        self.absent: dict[str, str] = {}  # what could not be measured, and why
        self.tokens = CallTokens(self.inputs, mask_names, self.absent)
        self.implicit = implicit  # opened by a block that was called without its model
        self.loss_tokens: float | Tensor | None = None
        self.counts_labels = False  # `loss_tokens` are counted, and not given
        self.loss_gradient: float | None = None  # what has arrived at the returned loss, of whole passes summed
        self.loss_look: float | None = None  # what did in the latest pass that was none
        self.logits: Any = None  # what watches the logits of that loss
        self.running: Run | None = None  # of the block that is running
        self.watch: AttentionWatch | None = None
        self.layer = 0  # of the latest block that ran
        self.runs: dict[nn.Module, list[Run]] = {}  # of each block
        self.earlier: list[Call] = []  # passes of the blocks in the same call of the model, such as of another text
        self.out: ref[Tensor] | None = None  # of the latest block that ran
        self.node: Any = None  # of the graph, that made it
        self.entered: list[Entered] = []  # modules on the way to the blocks, since then
        self.looked_up: list[Tensor] = []  # tokens whose vectors were, since then
        self.last: LastBlock | None = None
        self.is_added_to = False  # the model adds what a block returns to what it read
        self.final: list[NormRead] = []  # norms that read a block's output after it; the last block's counts
        self.measured: tuple[Tensor, int, Tensor] | None = None  # the latest activation, its version, its statistics
        # Where gradient hooks are, of the block that runs, by nodes of the graph; and where the tensors are read.
        self.hooked: dict[tuple[Any, int], list[Place | NormRead]] = {}
        self.watched: set[Any] = set()  # where gradient hooks were set
        self.views: list[tuple[Tensor, int, list[Any]]] = []  # views with a gradient hook, their versions, their places
        self.is_awaited = self.is_reached = False  # a gradient may still come to it; one came
        self.waits = False  # a checkpoint will hand over tensors whose gradients are wanted
        self.lost: set[Place] = set()  # where a gradient is left out
        self.staged: list[Staged] = []
        self.passes: dict[int, Any] = {}  # of several backward passes autograd's number, and what each is
        self._differentiated: set[Place] = set()

    def stage(self, kind: str, where: Place | NormRead, values: Tensor, shape: Sequence[int] = ()) -> None:
        """Keep a measurement until the call has ended; the arguments are those of `Staged`."""
        self.staged.append(Staged(kind, where, values, tuple(shape)))

    def begin_layer(self, block: nn.Module, layer: int, x: Tensor, has_second_sequence: bool) -> Run:
        """The run of a block that begins on `x`.

        Its layer is the block's. From the first block on that runs again in one call it is one more than the layer
        before.
        """
        if not self.runs:
            self.tokens.crosses = has_second_sequence and self.inputs.is_handed_states is not False
        repeats = block in self.runs or any(len(runs) > 1 for runs in self.runs.values())
        run = Run(self.layer + 1 if repeats else layer, [ref(x)])
        self.runs.setdefault(block, []).append(run)
        return run

    def is_another_pass(self, block: nn.Module, x: Tensor) -> bool:
        """True if a block that begins on `x` begins the stack anew, from tokens, and is no further layer."""
        out = None if self.out is None else self.out()
        if block is not next(iter(self.runs), None) or same_tensor(out, x) or _descends(x, self.node):
            return False
        tokens = x.numel() // x.shape[-1]
        if any(ids.numel() == tokens and ids.ndim >= min(2, x.ndim - 1) for ids in self.looked_up):
            return True
        if any(self.inputs.is_other_text(*one) for one in self.entered):
            return True
        self.absent[f"layers from {self.layer + 1} on"] = (
            "their blocks run again, on a tensor that is not known to come from the last output: if it is of another "
            "text, call the model once for each"
        )
        return False

    def go_on(self) -> None:
        """A block begins."""
        self.entered, self.looked_up = [], []

    def forget(self, layer: int) -> None:
        """Drop what was staged of a block's output and of its change of the stream."""
        places = (("block_out", layer), ("block", layer))
        self.staged = [staged for staged in self.staged if staged.where not in places]

    def lose_gradient(self, place: Place, why: str) -> None:
        """Note that the gradient at a place is left out."""
        self.lost.add(place)
        self.absent["{} {}".format(*place)] = why

    def first_gradients(self, gradients: Sequence[Staged]) -> tuple[list[Staged], set[Place]]:
        """The gradients at places that have one; and the places that had one before, and now again.

        Whole passes are summed before. Norms of two parts of a gradient do not tell the norm of their sum.
        """
        times: Counter[Any] = Counter(staged.where for staged in gradients)
        again = {place for place in times if times[place] > 1 or place in self._differentiated}
        if again:
            self.absent[GRADIENTS] = (
                "two backward passes went through a forward pass, and norms of parts do not add up: sum the losses "
                "and differentiate once"
            )
        spoiled = again & self._differentiated
        self._differentiated |= times.keys()
        return [staged for staged in gradients if staged.where not in again], spoiled

    def resolve_loss(self, loss_tokens: LossTokens) -> None:
        """Fix the factor from the gradient of the returned loss to the summed loss's.

        Raises `NormlabError` when it is not given, and the returned loss and logits do not tell it.
        """
        factor = loss_tokens(self.inputs) if callable(loss_tokens) else loss_tokens
        self.counts_labels = factor is None
        self.loss_tokens = self.inputs.labels_averaged if factor is None else factor
        if self.loss_tokens is None:
            raise Refusal(
                f"gradient metrics are of the summed token loss and {self.inputs.unknown}: "
                "pass loss_tokens=<number of labels the loss is averaged over, 1 if it is summed>"
            )

    def stop_watching(self) -> AttentionWatch | None:
        """Stop and return the watch on the block's attention; None if there was none."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
        return watch

    def close(self) -> None:
        """Let go of every activation."""
        self.running = self.last = self.measured = self.out = self.node = None
        self.final, self.views, self.hooked = [], [], {}
        self.tokens.close()
        self.go_on()
