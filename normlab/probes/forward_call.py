"""One forward call of a model: which tokens count, what its loss divides the gradient by, what was measured in it."""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.decomposition import NormRead, NormRun
from normlab.probes.layout import (
    Layout,
    Refusal,
    is_activation,
    is_read_turned,
    is_turned,
    letting_through,
    own_layout,
    row_layout,
    same_tensor,
    token_masks,
)
from normlab.probes.statistics import AttentionWatch
from normlab.probes.stream_sums import Rows

IGNORED_LABEL = -100
GRADIENTS = "gradients"  # in `absent`: why gradients of a forward pass are left out
CHUNK = 1 << 22  # 16 MiB of float32 logits at a time
HALF = (torch.float16, torch.bfloat16)
CLOSE = 1e-3  # largest relative distance of a loss from its reading, in half precision
ROUNDINGS = 32  # the largest of a loss in float32, in roundings of its terms
APART = 4.0  # how much nearer it must be than readings of another divisor
_TEXT = ("input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids", "input")
_OTHER = ("pixel_values", "input_features", "input_values", "flattened_patches", "images", "pixel_values_videos")
_TOKENS = ("input_ids", "inputs_embeds", "attention_mask")
_DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
# Masks of padding by the names of transformers (non-zero = a token) and of PyTorch (True or -inf = padding).
_MASKS = ("attention_mask", "src_key_padding_mask", "tgt_key_padding_mask")
_DECODER_MASKS = ("decoder_attention_mask", "tgt_key_padding_mask")
_MASKS_PADDING = ("src_key_padding_mask", "tgt_key_padding_mask")
# What an inner module may be handed under a known name, if the caller gave it under another one.
_KNOWN = (*_TEXT, *_MASKS, "decoder_attention_mask", "position_ids", "labels", "shift_labels")
_NO_MASKS = {
    *_TOKENS, *_DECODER_TOKENS, "input", "position_ids", "token_type_ids", "mm_token_type_ids", "labels",
    "shift_labels", "langs", "head_mask", "global_attention_mask", "special_tokens_mask", "src_mask", "tgt_mask",
    "memory_mask", "memory_key_padding_mask", "decoder_attention_mask", *_MASKS,
}  # fmt: skip
_LABELS = ("labels", "shift_labels", "num_items_in_batch")
_OF_FIRST = (
    "the model runs its blocks on several texts in one call, and the mask may be of the first: call it once for each"
)
UNTOLD = (
    "PyTorch's attention takes (length, batch), and what it reads does not tell whether the tokens are that or (batch, "
    "length): give it batch_first=True and (batch, length)"
)
_CACHES = ("cache", "past_key_values", "cache_params", "past_kv_cache", "mems", "state", "past_buckets_states")

_POSITIONS = ("position_ids", "positions")  # in a text, padding left out
_PLACES = ("input_pos", "start_pos", "cache_position")  # in a cache, which the model may keep itself
OFFSETS = (1, 2)  # where positions begin that count from the padding's, as RoBERTa's; a later part begins further on


# -- the loss --------------------------------------------------------------------------------------------------------


def loss_and_logits(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """The scalar loss and the logits of what a model returned: a ModelOutput, a dict, a tuple or the loss alone.

    A tuple begins with the loss and the logits, or is the logits and their loss, which may be None. Of another one it
    is not known what is what.
    """
    if isinstance(output, Tensor):
        loss, logits = output if output.ndim == 0 else None, None
    elif isinstance(output, Mapping):
        loss, logits = output.get("loss"), output.get("logits")
    elif isinstance(output, tuple | list) and not hasattr(output, "logits"):
        first, second = (*output[:2], None, None)[:2]
        is_pair = len(output) == 2 and (second is None or _is_loss(second))
        loss, logits = (second, first) if is_pair else (first, second)
        logits = logits if is_pair or _is_loss(loss) else None
    else:
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    scores = isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim >= 2
    return loss if _is_loss(loss) else None, logits if scores else None


def _is_loss(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()


def _is_same_loss(one: Tensor, other: Tensor) -> bool:
    """True if two losses have one value, in the precision of either, or none."""
    a, b = one.detach().view(()), other.view(()).to(one.device)
    return bool((a == b.to(a.dtype)) | (a.to(b.dtype) == b) | (a.isnan() & b.isnan()))


def _normalizers(logits: Tensor) -> Tensor:
    """log sum exp of each position's logits, in float32, flat."""
    rows = logits.reshape(-1, logits.shape[-1])
    return torch.cat([part.float().logsumexp(-1) for part in rows.split(max(1, CHUNK // rows.shape[-1]))])


def _summed(logits: Tensor, normalizers: Tensor, labels: Tensor) -> tuple[float, float, int] | None:
    """Summed cross-entropy, the size of its terms, and how many labels; None without one, or with one out of range."""
    kept = labels != IGNORED_LABEL
    wanted = labels[kept]
    if wanted.numel() == 0 or int(wanted.max()) >= logits.shape[-1] or int(wanted.min()) < 0:
        return None
    chosen, above = logits[(*kept.nonzero(as_tuple=True), wanted)].double(), normalizers[kept].double()
    return float((above - chosen).sum()), float((above.abs() + chosen.abs()).sum()), wanted.numel()


class Reading(NamedTuple):
    """A way in which a loss may average the cross-entropy of labels."""

    shifted: bool  # labels are of the next token
    skips_padding: bool
    divisor: str  # "labels", "items" or "nothing"


READINGS = frozenset(map(Reading._make, product((False, True), (False, True), ("labels", "items", "nothing"))))
# By the argument of labels, whether items are given, and how many other losses were returned further in.
Settled = defaultdict[tuple[str, bool, int], set[Reading]]


def unsettled() -> Settled:
    """How a loss averages, before any call."""
    return defaultdict(lambda: set(READINGS))


def _compared(
    logits: Tensor, labels: Tensor, mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, bool, tuple[bool, ...]]]:
    """(logits, their normalizers, labels, shifted, skips padding) of every way to compare labels with logits."""
    if labels.ndim == 1 and logits.ndim == 2:
        yield logits, _normalizers(logits), labels, False, (False, True)
    if labels.ndim != 2 or logits.ndim != 3 or logits.shape[0] != labels.shape[0]:
        return
    length = labels.shape[1]
    if logits.shape[1] < length:
        return
    logits = logits[:, logits.shape[1] - length :]  # positions before the text have no labels
    normalizers = _normalizers(logits).view(labels.shape)
    choices: list[tuple[Tensor, tuple[bool, ...]]] = [(labels, (False, True))]
    if isinstance(mask, Tensor) and mask.shape == labels.shape and bool((mask == 0).any()):
        choices = [(labels, (False,)), (labels.masked_fill(mask == 0, IGNORED_LABEL), (True,))]
    for chosen, skips in choices:
        if length > 1:
            yield logits[:, :-1], normalizers[:, :-1], chosen[:, 1:], True, skips
        yield logits, normalizers, chosen, False, skips


def is_half(loss: Tensor) -> bool:
    """True if a loss has half precision, whatever its type."""
    return any(bool(loss == loss.to(kind)) for kind in HALF)


@torch.no_grad()
def labels_averaged(
    loss: Tensor,
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    items: Tensor | float | None = None,
    settled: set[Reading] | None = None,
) -> tuple[float, bool] | None:
    """Find N such that `loss` = summed token loss / N, and whether labels are shifted.

    Every reading of the labels (next or same token; with or without those at padding) has a sum S and a count n. The
    loss is compared with S / N for N in {n, `items`, 1}. No model's name is involved. A loss in float32 fits within the
    roundings of its terms: that of smoothed labels, or with another term, is near a wrong reading now and then.

    Args:
        loss: the loss that the model returned.
        logits: (batch, length, vocabulary), or (batch, classes).
        labels: (batch, length) or (batch,), -100 = none.
        mask: the attention mask, for losses that leave out padding.
        items: `num_items_in_batch`, when the caller gave it.
        settled: the readings that fitted all calls before (at first `READINGS`). Others do not count, and those that
            do not fit this call are removed.

    Returns:
        (N, shifted). None when no reading fits, or two of different N fit alike. N is NaN if the loss is not finite.
        Without a label and with a loss of 0, N is `items` or 1: the gradients are 0.
    """
    value = float(loss)
    if not math.isfinite(value):
        return math.nan, False  # nothing fits, and the gradients are no numbers either
    if value == 0 and not bool((labels != IGNORED_LABEL).any()):
        return (1.0 if items is None else float(items)), True
    half = is_half(loss)
    fits: dict[Reading, tuple[float, float]] = {}
    for scores, normalizers, wanted, shifted, skips in _compared(logits, labels.to(logits.device), mask):
        result = _summed(scores, normalizers, wanted)
        if result is None:
            continue
        total, size, count = result
        close = CLOSE * max(abs(total), 1e-30)
        if not half:
            close = min(close, ROUNDINGS * torch.finfo(torch.float32).eps * size)
        divisors = {"labels": float(count), "nothing": 1.0} | ({} if items is None else {"items": float(items)})
        for name, divisor in divisors.items():
            distance = abs(value * divisor - total)
            if distance <= close:
                fit = distance / max(abs(total), 1e-30), divisor
                fits |= {Reading(shifted, skip, name): fit for skip in skips}
    if settled is not None and (fits or not half):  # half precision may miss its own reading
        settled.intersection_update(fits)
        fits = {reading: fits[reading] for reading in settled}
    if not fits:
        return None
    best, reading = min((fit, reading) for reading, fit in fits.items())
    others = [distance for distance, divisor in fits.values() if abs(divisor / best[1] - 1) > 1e-9]
    if others and min(others) <= APART * max(best[0], 1e-7):
        return None
    return best[1], reading.shifted


# -- the arguments ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _signature(forward: Callable) -> inspect.Signature:
    return inspect.signature(forward.__get__(object()))


def signature_of(module: nn.Module) -> inspect.Signature:
    """That of a module's forward, which takes long to make and is the same in each call.

    Raises TypeError or ValueError where Python cannot tell it.
    """
    function = getattr(module.forward, "__func__", None)
    return inspect.signature(module.forward) if function is None else _signature(function)


def call_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A call's arguments by name, and whether all of them have one.

    Positional ones are named by the forward's signature. Those that it cannot name are left out.
    """
    if not args:
        return dict(kwargs), True
    try:
        signature = signature_of(module)
        bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return dict(kwargs), False
    swallowed = [n for n, p in signature.parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL]
    return bound | kwargs, not any(bound.get(name) for name in swallowed)


def _cached_tokens(cache: Any) -> int | None:
    """Tokens that a cache holds; 1 if it holds some and does not say how many, None if it may hold some."""
    if isinstance(cache, bool | int | str):  # whether, or how, to make one
        return 0
    if not hasattr(cache, "get_seq_length"):  # tensors of earlier tokens
        if isinstance(cache, Tensor):
            return 1
        return min(len(cache), 1) if hasattr(cache, "__len__") else None
    try:
        return int(cache.get_seq_length())
    except ValueError:  # no attention, so no length
        return int(cache.has_previous_state())


def _start_of(places: Any, length: int) -> int | None:
    """Where a call of `length` tokens goes on, by the place of the first in a cache, or of all; None if unclear."""
    if isinstance(places, Tensor) and not (places.is_floating_point() or places.dtype == torch.bool):
        if places.numel() == 1:
            return int(places)
        at = places[0] if places.ndim == 2 and len(places) == 1 else places
        return int(at[0]) if at.shape == (length,) and bool((at.diff() == 1).all()) else None
    return places if isinstance(places, int) and not isinstance(places, bool) else None


def given_mask(mask: TokenMask, arguments: Mapping[str, Any]) -> Any:
    """The mask of a call's tokens, non-zero = a token: an argument by name, or what a function makes of them all."""
    if callable(mask):
        inputs = CallInputs()
        inputs.arguments = dict(arguments)
        return mask(inputs)
    value = None if mask is None else arguments.get(mask)
    if isinstance(value, Tensor) and mask in _MASKS_PADDING:
        value = value == 0
        return value[None] if value.ndim == 1 else value
    return letting_through(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def mask_by_row(mask: Tensor, rows: Sequence[int], name: TokenMask) -> Tensor:
    """A call's mask as (batch, length) `rows`, where the tokens are (length, batch), or may be. PyTorch's is so always.

    Raises `NormlabError` where padding cannot be told.
    """
    if callable(name) or name in _MASKS_PADDING or rows[0] != rows[1]:
        return mask.mT if mask.shape == (rows[1], rows[0]) != (rows[0], rows[1]) else mask
    if not bool((mask != 0).all()):
        raise NormlabError(
            f"there are as many rows as tokens in a row, {rows[0]}, and whether the mask is (batch, length) or "
            "(length, batch) cannot be told: give batches of another size"
        )
    return mask


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, and in their dicts, lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Mapping | list | tuple):
            found += _tensors(value.values() if isinstance(value, Mapping) else value)
    return found


def _are_rows_of(x: Any, batch: Any) -> bool:
    """True if `x` is a view of fewer rows of a batch."""
    if not isinstance(x, Tensor) or not isinstance(batch, Tensor) or x is batch or not 1 < x.ndim == batch.ndim:
        return False
    if x.shape[1:] != batch.shape[1:] or len(x) >= len(batch):
        return False
    return x.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


Entered = tuple[nn.Module, tuple, dict[str, Any]]  # a module and what it was called with


class CallInputs:
    """The arguments of one forward call, from the outermost module that is handed tensors by name.

    What an inner module is handed may be made over: a mask of four dimensions, padding to a window. What the caller
    gave under another name counts under the inner module's.

    Attributes:
        arguments: by name.
        mask: what the caller says the mask is.
        labels_averaged: how many labels the returned loss averages over, once it has been compared with its logits;
            None before, or when they do not tell.
        unknown: why `labels_averaged` is None.
        looked_up: tokens of which vectors were, before the first block.
    """

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.mask: TokenMask = None
        self.made: dict[str, Tensor] = {}  # masks that an inner module was handed and the caller did not give
        self.has_arguments = False
        self.has_decoder = False  # the call names a decoder's inputs next to an encoder's
        self.is_text = True  # the stack is fed from tokens, not from an image or a sound
        self.past = 0  # tokens in the cache before the call, which may fill it
        self.knows_past = True
        self.why = ""  # it is not known which tokens are padding
        # Whether the model hands the stack vectors that the caller did not give; None where no module holds it alone.
        self.is_handed_states: bool | None = None
        self.labels_averaged: float | Tensor | None = None
        self.loss: Tensor | None = None  # that is compared, until the call ends, and the logits that told the labels
        self.logits: Tensor | None = None
        self._losses: list[Tensor] = []  # the values of those that were, from the inside out
        self.settled = unsettled()  # by earlier calls
        self.unknown = "this call has no countable labels"
        self.looked_up: list[Tensor] = []
        self._source: nn.Module | None = None  # the inner module whose names tell what the caller's tensors are

    def is_other_text(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
        """True if a module is called with other tokens: the second text of a bi-encoder."""
        arguments, names = call_arguments(module, args, kwargs)[0], _TOKENS if module is self._source else _TOKENS[:1]
        given = {name: arguments.get(name) for name in names}
        return any(isinstance(x, Tensor) and x is not self.arguments.get(name) for name, x in given.items())

    def following(self, entered: Sequence[Entered], tokens: Sequence[Tensor]) -> CallInputs:
        """The arguments of a further pass in the same call, by the modules entered for it.

        Without them they are the same if the `tokens` of which vectors were looked up are. The labels are the call's.
        """
        new = CallInputs()
        for one in entered:
            new.add(*one)
        tensors = {name: x for name, x in new.arguments.items() if isinstance(x, Tensor)}
        if all(name not in _KNOWN and x.is_floating_point() for name, x in tensors.items()):
            if any(ids is self.arguments.get(name) for ids in tokens for name in _TOKENS):
                same = copy(self)
                same.labels_averaged, same.loss, same.logits, same._losses = None, None, None, []
                return same
            masks = [given_mask(name, self.arguments) for name in _MASKS if name in self.arguments]
            if self.mask is not None or any(not isinstance(x, Tensor) or bool((x == 0).any()) for x in masks):
                new.why = _OF_FIRST
        new.mask, new.settled = self.mask, self.settled
        new.arguments |= {name: self.arguments[name] for name in _LABELS if name in self.arguments}
        return new

    def add(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the call of a module on the way from the root to the blocks, from the outside in."""
        arguments, are_named = call_arguments(module, args, kwargs)
        present = {name for name, value in arguments.items() if value is not None}
        pixels = [self.arguments[name] for name in _OTHER if name in self.arguments]
        sees = present & set(_OTHER) or any(value is other for value in arguments.values() for other in pixels)
        if sees and not present & set(_TEXT):
            self.is_text = False
        names = signature_of(module).parameters
        holds_decoder = "decoder_input_ids" in names or "decoder_attention_mask" in names or {"src", "tgt"} <= {*names}
        if self.has_arguments:
            if self.has_decoder and not holds_decoder:
                states = [v for v in arguments.values() if is_activation(v) and v.ndim == 3]
                made = any(not any(v is x for x in self.arguments.values()) for v in states)
                self.is_handed_states = made or bool(self.is_handed_states)
            elif not self.has_decoder:
                self._take_known(module, arguments)
                self.has_decoder = holds_decoder  # of a wrapper that takes any arguments, or names of its own
            return
        self.take({name: arguments[name] for name in arguments if name in present} | self.arguments)
        if are_named and any(isinstance(value, Tensor) for value in arguments.values()):
            self.has_arguments = True
            self.has_decoder = holds_decoder

    def take(self, arguments: dict[str, Any]) -> None:
        """Take these for the call's arguments, and count the tokens in a cache among them."""
        self.arguments = arguments
        counts = [_cached_tokens(self.arguments[name]) for name in _CACHES if name in self.arguments]
        self.past = max((count for count in counts if count is not None), default=0)
        self.knows_past = self.past > 0 or None not in counts

    def _take_known(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        """Take what the caller gave under unknown names, and an inner module is handed under a known one.

        Of a batch that is handed on in parts, take the part.
        """
        for name in (*_TEXT, *_MASKS, "position_ids"):
            if _are_rows_of(arguments.get(name), self.arguments.get(name)):
                self.arguments[name] = arguments[name]
        given = _tensors(self.arguments.values())
        is_named = any(name in self.arguments for name in _TEXT)
        for name in _KNOWN:
            value = arguments.get(name)
            if name in self.arguments or not isinstance(value, Tensor):
                continue
            if any(value is other for other in given):
                self.arguments[name] = value
                if not is_named:
                    self._source = module
            elif name in _MASKS and value.ndim == 2:
                self.made[name] = value

    def compare(self, output: Any) -> None:
        """Compare the loss that a module returned with the cross-entropy of the logits returned with it.

        A loss that a module further out returns counts instead, unless it alone has no graph. Labels under an unknown
        name are those that it fits, and negative ones are none, whichever the loss leaves out. A loss in half precision
        is too coarse to tell.
        """
        loss, logits = loss_and_logits(output)
        if loss is None or (self.loss is not None and self.loss.requires_grad and not loss.requires_grad):
            return
        self.loss = loss
        is_same = bool(self._losses) and _is_same_loss(loss, self._losses[-1])
        if not is_same:
            self._losses.append(loss.detach())
        elif self.labels_averaged is not None:
            return
        self.labels_averaged = self.logits = None
        if logits is None:
            self.unknown = "the model returns no logits with its loss"
            return
        name = "shift_labels" if "shift_labels" in self.arguments else "labels"
        if name in self.arguments:
            self._compare(loss, logits, name, self.arguments[name])
        elif bool(loss.isfinite()) and not is_half(loss):
            own = self.unnamed()
            for name in sorted(own, key=lambda name: any(own[name] is ids for ids in self.looked_up)):  # tokens last
                if own[name].numel() == logits[..., 0].numel():
                    labels = own[name].long().view(logits.shape[:-1])
                    self._compare(loss, logits, name, labels.masked_fill(labels < 0, IGNORED_LABEL))
                if self.labels_averaged is not None:
                    self.arguments["labels"] = own[name]
                    return

    def unnamed(self) -> dict[str, Tensor]:
        """The caller's whole numbers under names that are not known: tokens, labels or others."""
        known = {*_NO_MASKS, *_POSITIONS, *_PLACES}
        given = {name: x for name, x in self.arguments.items() if isinstance(x, Tensor) and name not in known}
        return {name: x for name, x in given.items() if x.dtype in (torch.int32, torch.int64)}

    def _compare(self, loss: Tensor, logits: Tensor, name: str, labels: Any) -> None:
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        mask, items = given_mask("attention_mask", self.arguments), self.arguments.get("num_items_in_batch")
        key = name, items is not None, len(self._losses)
        try:
            result = labels_averaged(loss, logits, labels, mask, items, self.settled[key])
        except Exception as error:  # the model goes on
            self.unknown = f"its loss could not be compared with its logits ({type(error).__name__})"
            return
        if result is None:
            self.unknown = "the returned loss and logits do not tell over how many labels it is a mean"
        else:
            self.labels_averaged, self.logits = result[0], logits


# -- the call --------------------------------------------------------------------------------------------------------

Place = tuple[str, int]  # site, layer
LossTokens = float | int | Tensor | Callable[[CallInputs], "float | Tensor | None"] | None
TokenMask = str | Callable[[CallInputs], "Tensor | None"] | None


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
        rows = Rows(self.out)
        rows.note_rounding(x)
        entered = rows.of(self.entered.to(self.out.device))
        return entered is not None and rows.same(rows.of(x.to(self.out.device)), rows.first + entered)

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
        rows = Rows(self.out)
        rows.note_rounding(x)
        is_known = bool(rows.first.isfinite().all(1).any())
        return not self._is_written and (not is_known or rows.same(rows.first, rows.of(x.to(self.out.device))))


class Staged(NamedTuple):
    """A measurement that waits for its call to end: statistics per token, or an array."""

    kind: str  # of a metric; of an array its statistic
    where: Place | NormRead  # a norm's place may become known later
    values: Tensor  # (statistics, tokens); of an array (masks, ...)
    shape: tuple[int, ...] = ()  # of the activation: tokens, in one dimension or several, and features


class Call:
    """One forward call of the model, and what was measured until it is known to be whole."""

    def __init__(self, mask_names: Sequence[str], implicit: bool = False) -> None:
        self.inputs = CallInputs()
        self.mask_names = mask_names
        self.implicit = implicit  # opened by a block that was called without its model
        self.crosses = False  # the blocks are handed a second sequence, as a decoder is its encoder's
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
        self.staged: list[Staged] = []
        self.absent: dict[str, str] = {}  # what could not be measured, and why
        self._masks: dict[tuple[torch.device, tuple[int, ...]], Tensor | None] = {}
        # The caller's positions, and the same without padding, by (rows, tokens per row) and whether these are turned.
        self._counted: dict[tuple[tuple[int, int], bool | None], tuple[Tensor, Tensor]] = {}
        self._held: tuple[int, ...] = ()  # the dimensions before the features of what the first block reads
        self._turned: bool | None = None  # the blocks hold (length, batch); None: they do not tell
        self.length_first: bool | None = None  # so they do, as PyTorch's attention has shown; None: it has not
        self.is_given_turned: bool | None = False  # the caller's tokens are (length, batch); None: they do not tell
        self.is_untold = False  # attention takes (length, batch), and whether the blocks and the caller do is not known
        self._awaited: Tensor | None = None  # what the first block reads, until its attention shows how it holds it
        self._later: list[Callable[[], None]] = []  # what waits for that
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
            self.crosses = has_second_sequence and self.inputs.is_handed_states is not False
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

    # -- tokens ------------------------------------------------------------------------------------------------------

    @property
    def _is_decoder(self) -> bool:
        return self.inputs.has_decoder and self.crosses

    @property
    def mask_name(self) -> str | None:
        """The argument that masks the tokens of this stack: a decoder has its own; what is no text has none."""
        if not self.inputs.is_text:
            return None
        if isinstance(self.inputs.mask, str):
            return self.inputs.mask
        names = _DECODER_MASKS if self._is_decoder else _MASKS[: 2 if self.inputs.has_decoder else 3]
        return next((name for name in names if name in self.inputs.arguments), names[0])

    @property
    def attention_mask(self) -> Any:
        """The caller's mask over the tokens of this stack, non-zero = a token."""
        mask = self.inputs.mask if callable(self.inputs.mask) else self.mask_name
        return given_mask(mask, self.inputs.arguments) if self.inputs.is_text else None

    @property
    def _is_encoder(self) -> bool:
        return self.inputs.has_decoder and not self.crosses

    def _start(self, length: int) -> int | None:
        """Where the call's tokens go on, by their places in a cache that the model keeps itself; None if not given."""
        if self._is_encoder or not self.inputs.is_text:
            return None
        given = self.inputs.arguments
        places = [given.get(name) for name in _PLACES]
        places += [x for name in _POSITIONS if getattr(x := given.get(name), "ndim", 0) == 0]  # of one number
        starts = (_start_of(one, length) for one in places)
        return next((start for start in starts if start is not None), None)

    def _past(self, length: int) -> int:
        """Tokens of this stack before the call: those that the cache held, or before the place where it goes on."""
        if self._is_encoder or not self.inputs.is_text:
            return 0
        return self.inputs.past or self._start(length) or 0

    @property
    def _is_cached(self) -> bool:
        """True if the caller gives a cache, which may still be empty."""
        return any(name in self.inputs.arguments for name in _CACHES)

    def _tokens(self) -> Tensor | None:
        """The caller's tensor of this stack's tokens; a mask has their shape."""
        names = _DECODER_TOKENS if self._is_decoder else _TOKENS
        values = [self.inputs.arguments.get(name) for name in names if self.inputs.is_text]
        mask = self.attention_mask
        values += [mask] if isinstance(mask, Tensor) and mask.ndim == 2 else []
        return next((x for x in values if isinstance(x, Tensor) and x.ndim >= 2), None)

    def possible_rows(self) -> list[tuple[int, int]]:
        """`caller_rows`, and behind them those of arguments under other names."""
        return [*self.caller_rows(), *self._likely_rows()]

    def caller_rows(self) -> list[tuple[int, int]]:
        """The possible (batch, length) of this stack's tokens, from the arguments with a known name."""
        like = self._tokens()
        if like is None:
            return []
        several = like.ndim > 2 and not like.is_floating_point()  # choices per row, or codes per token
        rows = [(like.shape[0], like.shape[1])]
        return self._as_rows([*rows, (math.prod(like.shape[:-1]), like.shape[-1])] if several else rows)

    def _as_rows(self, shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Shapes of the caller's tokens as (batch, length)."""
        return [shape[::-1] if self.is_given_turned else shape for shape in shapes]

    def _likely_tokens(self) -> list[Tensor]:
        """The caller's whole numbers under other names, which may be tokens."""
        values = self.inputs.arguments.values() if self.inputs.is_text else ()
        return [x for x in values if isinstance(x, Tensor) and x.ndim == 2 and x.dtype in (torch.int32, torch.int64)]

    def _likely_rows(self) -> list[tuple[int, int]]:
        """Shapes of the caller's whole numbers under other names."""
        return self._as_rows((x.shape[0], x.shape[1]) for x in self._likely_tokens())

    def find_rows(self, x: Tensor, by_attention: bool | None, length_first: bool | None, rearranges: bool) -> None:
        """Find out whether the first block, which reads `x`, holds (length, batch), and whether the caller does.

        Attention tells the block's, where it reads the stream as the block does, or turned. The tokens tell whether the
        caller's is the same: by their shape, or by their values where there are as many rows as tokens in a row.

        Args:
            x: what the block reads.
            by_attention: PyTorch's attention in the block takes (length, batch); None without one.
            length_first: the block holds (length, batch), as its attention has shown; None: it has not yet.
            rearranges: it has read other rows, so that it does not tell.
        """
        self._held, self.length_first = tuple(x.shape[:-1]), length_first
        self._turned, self.is_given_turned, self.is_untold = None, False, False
        if x.ndim != 3:
            return
        known, likely = self._tokens(), self._likely_tokens()
        texts = likely if known is None else [known]
        tokens = next((ids for ids in texts if ids.shape[:2] in (x.shape[:2], x.shape[1::-1])), None)
        is_same: bool | None = None  # the caller's tokens are in the order of the stream
        if tokens is not None:
            told = is_turned(tokens, x) if x.shape[0] == x.shape[1] else tokens.shape[:2] != x.shape[:2]
            is_same = None if told is None else not told
        self._turned = by_attention if length_first is None else length_first
        if length_first is not None:
            is_unknown = tokens is not None and is_same is None and length_first
            self.is_given_turned = None if is_unknown else is_same is length_first
        elif tokens is not None and by_attention and is_same is not False and not rearranges and max(x.shape[:-1]) > 1:
            self._turned, self.is_untold = False if is_same else None, True
        elif known is not None and tokens is known and is_same is not None and known.shape[:2] == x.shape[:2]:
            self._turned = not is_same
        if by_attention is not None and length_first is None and not rearranges:
            self._awaited = x

    @property
    def awaits_attention(self) -> bool:
        """True while the first block runs, and its attention has yet to show how it holds its rows."""
        return self._awaited is not None

    def attention_reads(self, x: Tensor, takes_length_first: bool) -> tuple[bool | None, bool]:
        """Take what the first block's attention reads: whether the block holds (length, batch), None if that is not
        told; and whether the attention reads other rows than the block."""
        stream = self._awaited
        if stream is None:
            return None, False
        rearranges = x.ndim != 3 or x.shape[:2] not in (stream.shape[:2], stream.shape[1::-1])
        turned = None if rearranges else is_read_turned(stream, x)
        length_first = None if turned is None else takes_length_first != turned
        self.find_rows(stream, takes_length_first, length_first, rearranges)
        self.rows_are_told()
        return length_first, rearranges

    def rows_are_told(self) -> None:
        """No attention will tell more of the rows: do what waits for it."""
        self._awaited, later = None, self._later
        self._later = []
        for act in later:
            act()

    def once_rows_are_told(self, act: Callable[[], None]) -> None:
        """Do what depends on which tokens count: now, or once the first block's attention has run."""
        if self._awaited is None:
            act()
        else:
            self._later.append(act)

    def by_row_as_held(self, values: Tensor) -> Tensor:
        """(batch, length) values of tokens in the order in which the blocks hold them."""
        return values.mT if self._turned else values

    def layout(self, tokens: Sequence[int]) -> Layout:
        """Find the layout of an activation's tokens. Raises `NormlabError` if the model adds positions to them."""
        choices = self.caller_rows()
        for rows in self.possible_rows():
            if (layout := row_layout(tokens, rows, self._turned)) is not None:
                is_flat = layout.shape != tuple(tokens)
                return Layout(rows[::-1], 1, 0) if is_flat and self._turned and self._held == rows[::-1] else layout
        by_shape = own_layout(tokens, self._turned if self.inputs.is_text else False)
        # An image, sound or features would add positions of their kind.
        others = ((n, v) for n, v in self.inputs.arguments.items() if not n.endswith("inputs_embeds"))
        has_others = any(name in _OTHER or (is_activation(value) and value.ndim > 2) for name, value in others)
        if not choices or has_others or len(tokens) > 2:
            return by_shape
        batch, length = choices[0]
        count = by_shape.rows[1]
        if self._is_decoder and by_shape.rows[0] == batch and count % length == 0:  # ProphetNet's, one after another
            return Layout((batch, count // length, length), 0, 2)
        if len(tokens) == 1 and batch > 1:
            raise NormlabError(
                f"the model holds {batch} rows of {length} tokens as one of {tokens[0]}, so rows cannot be told apart: "
                "give rows without padding, or one at a time"
            )
        if by_shape.rows[0] == batch and count > length:
            raise NormlabError(
                f"the model holds {count} positions a row for {length} tokens, so what it pads or puts before "
                "them cannot be told: pad to that length with an attention_mask, or record the inner model, which is "
                "given all of them"
            )
        selects = by_shape.rows[0] == batch and count < length and not self._is_cached
        return replace(by_shape, has_first=not selects)

    def _positions(self, rows: tuple[int, int]) -> Tensor | None:
        """The caller's positions of (rows, tokens per row), or of one row for all; three axes may be before it."""
        names = ("decoder_position_ids",) if self._is_decoder else (*_POSITIONS, *_PLACES)
        for name in () if self._is_encoder else names:
            given = self.inputs.arguments.get(name)
            is_whole = isinstance(given, Tensor) and not given.is_floating_point() and given.dtype != torch.bool
            if not isinstance(given, Tensor) or not is_whole or not 1 <= given.ndim <= 3:
                continue
            if name in _PLACES and _start_of(given, rows[1]) is not None:
                continue  # then padding has places too
            positions = given[None] if given.ndim == 1 else given.mT if self.is_given_turned else given
            if positions.shape[-2:] in ((1, rows[1]), rows):
                key = rows, self.is_given_turned
                if key not in self._counted or self._counted[key][0] is not given:
                    self._counted[key] = given, self._without_padding(positions, rows)
                return self._counted[key][1]
        return None

    def _without_padding(self, positions: Tensor, rows: tuple[int, int]) -> Tensor:
        """Positions that count the padding before a row's tokens, from 0 at its first real token."""
        mask = self._mask(rows)
        if not isinstance(mask, Tensor) or mask.shape != rows or self._past(rows[1]) or not self.inputs.knows_past:
            return positions
        order = (mask != 0).to(positions.device).cumsum(1)
        padding = order == 0
        in_place = (positions == torch.arange(rows[1], device=positions.device)) & ~padding
        counts = ((positions == 0) & padding).any(-1, keepdim=True) & (in_place & (order == 1)).any(-1, keepdim=True)
        return torch.where(counts & in_place, positions - padding.sum(1, keepdim=True), positions)

    def _starts(self, rows: tuple[int, int], device: torch.device) -> Tensor | None:
        """(rows, tokens per row) bool: the tokens at position 0, by the caller's positions; None without them."""
        positions = self._positions(rows)
        if positions is None:
            return None
        starts = (positions == 0).to(device)
        return (starts.all(0) if starts.ndim == 3 else starts).expand(rows)  # time, height and width

    def _is_offset(self, rows: tuple[int, int]) -> bool:
        """True if the caller's positions of a row's tokens begin beside 0, and no cache holds what is before."""
        positions = self._positions(rows)
        if positions is None or positions.ndim > 2 or self._is_cached:
            return False
        mask = self._mask(rows)
        if isinstance(mask, Tensor) and mask.shape == rows:  # padding has a position of its own
            positions = positions.to(mask.device).expand(rows).masked_fill(mask == 0, torch.iinfo(positions.dtype).max)
        least = positions.amin(1)
        return bool(torch.stack([least == offset for offset in OFFSETS]).any())

    def _mask(self, rows: tuple[int, int]) -> Any:
        """The caller's mask; one of queries and keys as whether each token sees itself."""
        mask = self.attention_mask
        if isinstance(mask, Tensor) and mask.ndim == 2 and self.is_given_turned is not False:
            return mask_by_row(mask, rows, self.inputs.mask if callable(self.inputs.mask) else self.mask_name)
        if not isinstance(mask, Tensor) or mask.ndim not in (3, 4):
            return mask
        seen = letting_through(mask) != 0
        seen = seen.any(1) if seen.ndim == 4 else seen
        past = self._past(rows[1])
        seen = seen[:, :, past : past + rows[1]]
        fits = all(n in (1, row) for n, row in zip(seen.shape, rows, strict=False)) and seen.shape[2] == rows[1]
        return seen.expand(*rows, rows[1]).diagonal(dim1=1, dim2=2) if fits else mask

    def _row_masks(self, device: torch.device, layout: Layout, names: Sequence[str]) -> Tensor:
        """(names, rows, tokens per row): `token_masks` of a layout."""
        mask, starts = self._mask(layout.rows), self._starts(layout.rows, device)
        past = self._past(layout.rows[1])
        masks = token_masks(mask, layout.rows, device, names, self._is_cached or past > 0, past, starts)
        masks = masks.view(len(names), *layout.rows)
        if not layout.is_told and not bool(masks[0].all()):
            raise NormlabError(
                f"there are as many rows as tokens in a row, {layout.rows[0]}, so they cannot be told apart: give "
                "batches of another size"
            )
        if why := self._untold_firsts(layout, starts):
            by_row = torch.tensor([name != "all" for name in names], device=device)[:, None, None]
            masks = masks & ~by_row
            if bool(by_row.any()):
                self.absent["mask no_first"] = why
        return masks

    def _untold_firsts(self, layout: Layout, starts: Tensor | None) -> str:
        """The reason that the first token of a row is not known; "" where it is."""
        if self.is_untold:
            return UNTOLD
        if not layout.is_told or (self.is_given_turned is None and self._positions(layout.rows) is not None):
            return (
                "whether the blocks hold (batch, length) or (length, batch) cannot be told: give the tokens or a mask "
                "by name, in batches with another number of rows than of tokens"
            )
        if not layout.has_first:
            return f"blocks run on {layout.rows[1]} tokens of a longer row, and do not tell whether on its first"
        if self._is_offset(layout.rows):
            return (
                "the positions given do not begin at 0, and do not tell whether the tokens are the first of their row: "
                "call without them, or count from 0"
            )
        if starts is None and not self.inputs.knows_past and self._start(layout.rows[1]) is None:
            return "the cache does not say how many tokens it holds: give it __len__, or call with position_ids"
        return ""

    def known_firsts(self, rows: tuple[int, int], device: torch.device) -> tuple[Tensor | None, int]:
        """(rows, tokens per row) bool: the tokens at position 0, None without positions; and how many came before.

        Raises `NormlabError` where the first tokens are not known.
        """
        starts = self._starts(rows, device)
        if why := self._untold_firsts(Layout(rows), starts):
            raise NormlabError(why)
        return starts, self._past(rows[1])

    def masks(self, device: torch.device, tokens: tuple[int, ...]) -> Tensor | None:
        """(masks, tokens) bool: which tokens of an activation of this shape count; None with the reason in `absent`."""
        key = (device, tokens)
        if key not in self._masks:
            try:
                if self.inputs.why:
                    raise NormlabError(self.inputs.why)
                layout = self.layout(tokens)
                self._note_unknown_masks(layout.rows)
                self._masks[key] = layout.by_tokens(self._row_masks(device, layout, self.mask_names))
            except NormlabError as error:
                self._masks[key] = None
                self.absent["tokens " + " x ".join(map(str, tokens))] = str(error)
        return self._masks[key]

    def _note_unknown_masks(self, rows: tuple[int, int]) -> None:
        """Name what looks like a mask of these rows, and is not known for one."""
        if self._masks or self.attention_mask is not None or not self.inputs.is_text:
            return
        tensors = {n: x for n, x in self.inputs.arguments.items() if isinstance(x, Tensor)}
        known = [x for n, x in tensors.items() if n in _NO_MASKS]
        given = {n: x for n, x in tensors.items() if not any(x is one for one in known)}
        for name, x in (given | self.inputs.made).items():
            if x.shape not in (rows, rows[::-1]) or x.is_complex():
                continue
            if bool(((x == 0) | (x == 1)).all() & (x == 0).any() & (x == 1).any()):
                self.absent[f"padding by {name}"] = (
                    f"all tokens count, as no mask was given by a known name: give mask={name!r} if non-zero is a "
                    "token, or a function of the call"
                )

    def look_for_mask(self, given: Mapping[str, Any], mask: TokenMask) -> None:
        """Look for the mask in all that the caller gave, of which the model may have taken a part."""
        self.inputs.arguments = {n: x for n, x in given.items() if x is not None} | self.inputs.arguments
        self.inputs.mask = mask
        self._masks, self._counted = {}, {}

    @property
    def is_by_row(self) -> bool:
        """True if the blocks and the caller hold (batch, length), as far as PyTorch's attention tells."""
        return not self.length_first and not self.is_untold and self.is_given_turned is False

    def counted_as_held(self) -> Tensor | None:
        """bool: which tokens count, in the two dimensions of what the first block reads. None if that is not told, or
        if these are turned and equal: what the model returns may not be, and its shape does not tell it."""
        held = self._held
        masks = self.masks(torch.device("cpu"), held) if held else None
        is_square = len(held) == 2 and held[0] == held[1]
        return None if masks is None or len(held) != 2 or (self.length_first and is_square) else masks[0].view(held)

    def counts_first_tokens(self, device: torch.device, tokens: tuple[int, ...]) -> bool:
        """True if the masks differ in the first real token of each row, if at all."""
        layout = self.layout(tokens)
        starts = self._starts(layout.rows, device)
        return starts is None and not self._untold_firsts(layout, starts)

    def first_tokens(self, device: torch.device, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Flat positions of each row's first real token (of all its streams), and whether the row has one."""
        layout = self.layout(tokens)
        real = self._row_masks(device, layout, ["all"])[0]
        flat = torch.arange(math.prod(tokens), device=device).view(layout.shape)
        order = flat.movedim((layout.row, layout.column), (0, 1)).reshape(*layout.rows, -1)
        first = order[torch.arange(len(order), device=device), real.int().argmax(dim=1)]
        return first.reshape(-1), real.any(dim=1).repeat_interleave(order.shape[2])

    def positions(self, device: torch.device, tokens: tuple[int, ...]) -> tuple[Tensor, int]:
        """(tokens,): each token's position among its row's real tokens, the cached past included; and their limit.

        Padding on the left has position 0; masks leave it out. The caller's own positions come first.
        """
        layout = self.layout(tokens)
        mask, (batch, length) = self._mask(layout.rows), layout.rows
        given, past = self._positions(layout.rows), self._past(length)
        if given is not None and given.ndim == 2:
            order, limit = given.to(device).expand(batch, length), int(given.max()) + 1
        elif isinstance(mask, Tensor):
            order, limit = ((mask.to(device) != 0).long().cumsum(1) - 1).clamp(min=0)[:, -length:], mask.shape[1]
        else:
            order = (past + torch.arange(length, device=device)).expand(batch, length)
            limit = past + length
        return layout.by_tokens(order[None])[0], limit

    # -- the end of the call -----------------------------------------------------------------------------------------

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
        self.running = self.last = self.measured = self.out = self.node = self._awaited = None
        self.final, self.views, self.hooked, self._later = [], [], {}, []
        self.go_on()
