"""The arguments of one forward call: the names under which tokens, masks, labels and caches are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.layout import is_activation, letting_through
from normlab.probes.returned_loss import (
    IGNORED_LABEL,
    is_half,
    is_same_loss,
    labels_averaged,
    loss_and_logits,
    unsettled,
)

TOKENS = ("input_ids", "inputs_embeds", "attention_mask")
DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
NO_TEXT = ("pixel_values", "input_features", "input_values", "flattened_patches", "images", "pixel_values_videos")
# Masks of padding by the names of transformers (non-zero = a token) and of PyTorch (True or -inf = padding).
PADDING_MASKS = ("attention_mask", "src_key_padding_mask", "tgt_key_padding_mask")
DECODER_MASKS = ("decoder_attention_mask", "tgt_key_padding_mask")
POSITIONS = ("position_ids", "positions")  # in a text, padding left out
CACHE_PLACES = ("input_pos", "start_pos", "cache_position")  # in a cache, which the model may keep itself
CACHES = ("cache", "past_key_values", "cache_params", "past_kv_cache", "mems", "state", "past_buckets_states")
NO_MASKS = {
    *TOKENS, *DECODER_TOKENS, "input", "position_ids", "token_type_ids", "mm_token_type_ids", "labels",
    "shift_labels", "langs", "head_mask", "global_attention_mask", "special_tokens_mask", "src_mask", "tgt_mask",
    "memory_mask", "memory_key_padding_mask", "decoder_attention_mask", *PADDING_MASKS,
}  # fmt: skip
_TEXT = ("input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids", "input")
# What an inner module may be handed under a known name, if the caller gave it under another one.
_KNOWN = (*_TEXT, *PADDING_MASKS, "decoder_attention_mask", "position_ids", "labels", "shift_labels")
_MASKS_PADDING = ("src_key_padding_mask", "tgt_key_padding_mask")
_LABELS = ("labels", "shift_labels", "num_items_in_batch")
_OF_FIRST = (
    "the model runs its blocks on several texts in one call, and the mask may be of the first: call it once for each"
)


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
        arguments, names = call_arguments(module, args, kwargs)[0], TOKENS if module is self._source else TOKENS[:1]
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
            if any(ids is self.arguments.get(name) for ids in tokens for name in TOKENS):
                same = copy(self)
                same.labels_averaged, same.loss, same.logits, same._losses = None, None, None, []
                return same
            masks = [given_mask(name, self.arguments) for name in PADDING_MASKS if name in self.arguments]
            if self.mask is not None or any(not isinstance(x, Tensor) or bool((x == 0).any()) for x in masks):
                new.why = _OF_FIRST
        new.mask, new.settled = self.mask, self.settled
        new.arguments |= {name: self.arguments[name] for name in _LABELS if name in self.arguments}
        return new

    def add(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the call of a module on the way from the root to the blocks, from the outside in."""
        arguments, are_named = call_arguments(module, args, kwargs)
        present = {name for name, value in arguments.items() if value is not None}
        pixels = [self.arguments[name] for name in NO_TEXT if name in self.arguments]
        sees = present & set(NO_TEXT) or any(value is other for value in arguments.values() for other in pixels)
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
        counts = [_cached_tokens(self.arguments[name]) for name in CACHES if name in self.arguments]
        self.past = max((count for count in counts if count is not None), default=0)
        self.knows_past = self.past > 0 or None not in counts

    def _take_known(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        """Take what the caller gave under unknown names, and an inner module is handed under a known one.

        Of a batch that is handed on in parts, take the part.
        """
        for name in (*_TEXT, *PADDING_MASKS, "position_ids"):
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
            elif name in PADDING_MASKS and value.ndim == 2:
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
        is_same = bool(self._losses) and is_same_loss(loss, self._losses[-1])
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
        known = {*NO_MASKS, *POSITIONS, *CACHE_PLACES}
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


LossTokens = float | int | Tensor | Callable[[CallInputs], "float | Tensor | None"] | None
TokenMask = str | Callable[[CallInputs], "Tensor | None"] | None
