"""The tokens of one forward call: how the blocks hold them, which are padding, which come first, at which positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normlab.errors import NormlabError
from normlab.probes.call_inputs import (
    CACHE_PLACES,
    CACHES,
    DECODER_MASKS,
    DECODER_TOKENS,
    NO_MASKS,
    NO_TEXT,
    PADDING_MASKS,
    POSITIONS,
    TOKENS,
    CallInputs,
    TokenMask,
    given_mask,
    mask_by_row,
)
from normlab.probes.layout import (
    Layout,
    is_activation,
    is_read_turned,
    is_turned,
    letting_through,
    own_layout,
    row_layout,
    token_masks,
)

UNTOLD = (
    "PyTorch's attention takes (length, batch), and what it reads does not tell whether the tokens are that or (batch, "
    "length): give it batch_first=True and (batch, length)"
)
# Keys of `absent`, or how they begin.
PADDING_BY = "padding by "  # an argument that looks like a mask
TOKENS_OF = "tokens "  # the shape of an activation of which it is not told which tokens count
PART_OF_ROW = "part of each row"  # the blocks hold fewer tokens than the caller gives
NO_FIRST = "mask no_first"  # it is not told which tokens are the first of their row
OFFSETS = (1, 2)  # where positions begin that count from the padding's, as RoBERTa's; a later part begins further on


def _start_of(places: Any, length: int) -> int | None:
    """Where a call of `length` tokens goes on, by the place of the first in a cache, or of all; None if unclear."""
    if isinstance(places, Tensor) and not (places.is_floating_point() or places.dtype == torch.bool):
        if places.numel() == 1:
            return int(places)
        at = places[0] if places.ndim == 2 and len(places) == 1 else places
        return int(at[0]) if at.shape == (length,) and bool((at.diff() == 1).all()) else None
    return places if isinstance(places, int) and not isinstance(places, bool) else None


def _ranks() -> int:
    """How many processes train together."""
    is_one = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    return 1 if is_one else torch.distributed.get_world_size()


class CallTokens:
    """The tokens of one call that a stack of blocks runs on.

    Attributes:
        inputs: the call's arguments.
        mask_names: the token masks that are asked for.
        absent: what of them is not known, and why.
        crosses: the blocks are handed a second sequence, as a decoder is its encoder's.
        length_first: the blocks hold (length, batch), as PyTorch's attention has shown; None: it has not.
        is_given_turned: the caller's tokens are (length, batch); None: they do not tell.
        is_untold: attention takes (length, batch), and whether the blocks and the caller do is not known.
        unknown_masks: arguments that look like a mask and are not known for one, and what to do.
    """

    def __init__(self, inputs: CallInputs, mask_names: Sequence[str] = (), absent: dict[str, str] | None = None):
        self.inputs, self.mask_names = inputs, mask_names
        self.absent = {} if absent is None else absent
        self.crosses = False
        self.length_first: bool | None = None
        self.is_given_turned: bool | None = False
        self.is_untold = False
        self.unknown_masks: dict[str, str] = {}
        self._masks: dict[tuple[torch.device, tuple[int, ...]], Tensor | None] = {}
        # The caller's positions, and the same without padding, by (rows, tokens per row) and whether these are turned.
        self._counted: dict[tuple[tuple[int, int], bool | None], tuple[Tensor, Tensor]] = {}
        self._held: tuple[int, ...] = ()  # the dimensions before the features of what the first block reads
        self._turned: bool | None = None  # the blocks hold (length, batch); None: they do not tell
        self._awaited: Tensor | None = None  # what the first block reads, until its attention shows how it holds it
        self._later: list[Callable[[], None]] = []  # what waits for that

    # -- what the caller gives -------------------------------------------------------------------------------------

    @property
    def _is_decoder(self) -> bool:
        return self.inputs.has_decoder and self.crosses

    @property
    def _is_encoder(self) -> bool:
        return self.inputs.has_decoder and not self.crosses

    @property
    def mask_name(self) -> str | None:
        """The argument that masks the tokens of this stack: a decoder has its own; what is no text has none."""
        if not self.inputs.is_text:
            return None
        if isinstance(self.inputs.mask, str):
            return self.inputs.mask
        names = DECODER_MASKS if self._is_decoder else PADDING_MASKS[: 2 if self.inputs.has_decoder else 3]
        return next((name for name in names if name in self.inputs.arguments), names[0])

    @property
    def attention_mask(self) -> Any:
        """The caller's mask over the tokens of this stack, non-zero = a token."""
        mask = self.inputs.mask if callable(self.inputs.mask) else self.mask_name
        return given_mask(mask, self.inputs.arguments) if self.inputs.is_text else None

    def look_for_mask(self, given: Mapping[str, Any], mask: TokenMask) -> None:
        """Look for the mask in all that the caller gave, of which the model may have taken a part."""
        self.inputs.arguments = {n: x for n, x in given.items() if x is not None} | self.inputs.arguments
        self.inputs.mask = mask
        self._masks, self._counted = {}, {}

    def _tokens(self) -> Tensor | None:
        """The caller's tensor of this stack's tokens; a mask has their shape."""
        names = DECODER_TOKENS if self._is_decoder else TOKENS
        values = [self.inputs.arguments.get(name) for name in names if self.inputs.is_text]
        mask = self.attention_mask
        values += [mask] if isinstance(mask, Tensor) and mask.ndim == 2 else []
        return next((x for x in values if isinstance(x, Tensor) and x.ndim >= 2), None)

    def _likely_tokens(self) -> list[Tensor]:
        """The caller's whole numbers under other names, which may be tokens."""
        values = self.inputs.arguments.values() if self.inputs.is_text else ()
        return [x for x in values if isinstance(x, Tensor) and x.ndim == 2 and x.dtype in (torch.int32, torch.int64)]

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

    def _likely_rows(self) -> list[tuple[int, int]]:
        """Shapes of the caller's whole numbers under other names."""
        return self._as_rows((x.shape[0], x.shape[1]) for x in self._likely_tokens())

    def _as_rows(self, shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Shapes of the caller's tokens as (batch, length)."""
        return [shape[::-1] if self.is_given_turned else shape for shape in shapes]

    # -- how the blocks hold them ----------------------------------------------------------------------------------

    def find_rows(
        self, x: Tensor, takes_length_first: bool | None, length_first: bool | None, rearranges: bool
    ) -> None:
        """Find out whether the first block, which reads `x`, holds (length, batch), and whether the caller does.

        Attention tells the block's, where it reads the stream as the block does, or turned. The tokens tell whether the
        caller's is the same: by their shape, or by their values where there are as many rows as tokens in a row.

        Args:
            x: what the block reads.
            takes_length_first: PyTorch's attention in the block takes (length, batch); None without one.
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
        self._turned = takes_length_first if length_first is None else length_first
        if length_first is not None:
            is_unknown = tokens is not None and is_same is None and length_first
            self.is_given_turned = None if is_unknown else is_same is length_first
        elif takes_length_first and tokens is not None and not (is_same is False or rearranges or max(self._held) < 2):
            self._turned, self.is_untold = False if is_same else None, True
        elif known is not None and tokens is known and is_same is not None and known.shape[:2] == x.shape[:2]:
            self._turned = not is_same
        self._note_parts_of_rows()
        if takes_length_first is not None and length_first is None and not rearranges:
            self._awaited = x

    def _note_parts_of_rows(self) -> None:
        """Note that the blocks may hold a part of each row, as ranks of sequence parallelism do."""
        rows = set(self.possible_rows())
        if len(rows) != 1 or self._is_cached or self._has_others or self.attention_mask is not None:
            return  # a mask of the whole row is refused
        (batch, length), held = rows.pop(), self._held[::-1] if self._turned else self._held
        if held[0] != batch or not 0 < held[1] < length or self._past(length):
            return
        if length % held[1] or _ranks() % (length // held[1]):
            return  # what the model itself has left out or pooled
        self.absent[PART_OF_ROW] = (
            f"the blocks hold {held[1]} positions for a row's {length} tokens, and 'all' is of these: where sequence "
            "parallelism splits rows, merge over the ranks that hold the parts, as without group="
        )

    @property
    def _has_others(self) -> bool:
        """True if the caller gives an image, sound or features, whose positions the model may add."""
        others = ((n, v) for n, v in self.inputs.arguments.items() if not n.endswith("inputs_embeds"))
        return any(name in NO_TEXT or (is_activation(value) and value.ndim > 2) for name, value in others)

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

    def take_for_told(self, takes_length_first: bool | None) -> None:
        """Where nothing tells how the blocks hold rows, take it to be as their attention does, or (batch, length)."""
        self.close()
        if self._turned is None and not self.is_untold:
            self._turned = bool(takes_length_first)

    def close(self) -> None:
        """Let go of the activation, and of what waits."""
        self._awaited, self._later = None, []

    @property
    def is_by_row(self) -> bool:
        """True if the blocks and the caller hold (batch, length), as far as PyTorch's attention tells."""
        return not self.length_first and not self.is_untold and self.is_given_turned is False

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
        if not choices or self._has_others or len(tokens) > 2:
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

    # -- where they stand ------------------------------------------------------------------------------------------

    @property
    def _is_cached(self) -> bool:
        """True if the caller gives a cache, which may still be empty."""
        return any(name in self.inputs.arguments for name in CACHES)

    def _past(self, length: int) -> int:
        """Tokens of this stack before the call: those that the cache held, or before the place where it goes on."""
        if self._is_encoder or not self.inputs.is_text:
            return 0
        return self.inputs.past or self._start(length) or 0

    def _start(self, length: int) -> int | None:
        """Where the call's tokens go on, by their places in a cache that the model keeps itself; None if not given."""
        if self._is_encoder or not self.inputs.is_text:
            return None
        given = self.inputs.arguments
        places = [given.get(name) for name in CACHE_PLACES]
        places += [x for name in POSITIONS if getattr(x := given.get(name), "ndim", 0) == 0]  # of one number
        starts = (_start_of(one, length) for one in places)
        return next((start for start in starts if start is not None), None)

    def _positions(self, rows: tuple[int, int]) -> Tensor | None:
        """The caller's positions of (rows, tokens per row), or of one row for all; three axes may be before it."""
        names = ("decoder_position_ids",) if self._is_decoder else (*POSITIONS, *CACHE_PLACES)
        for name in () if self._is_encoder else names:
            given = self.inputs.arguments.get(name)
            is_whole = isinstance(given, Tensor) and not given.is_floating_point() and given.dtype != torch.bool
            if not isinstance(given, Tensor) or not is_whole or not 1 <= given.ndim <= 3:
                continue
            if name in CACHE_PLACES and _start_of(given, rows[1]) is not None:
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

    # -- which count -----------------------------------------------------------------------------------------------

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
                self.absent[TOKENS_OF + " x ".join(map(str, tokens))] = str(error)
        return self._masks[key]

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
                self.absent[NO_FIRST] = why
        return masks

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

    def _note_unknown_masks(self, rows: tuple[int, int]) -> None:
        """Name what looks like a mask of these rows, and is not known for one."""
        if self._masks or self.attention_mask is not None or not self.inputs.is_text:
            return
        tensors = {n: x for n, x in self.inputs.arguments.items() if isinstance(x, Tensor)}
        known = [x for n, x in tensors.items() if n in NO_MASKS]
        given = {n: x for n, x in tensors.items() if not any(x is one for one in known)}
        for name, x in (given | self.inputs.made).items():
            if x.shape not in (rows, rows[::-1]) or x.is_complex():
                continue
            if bool(((x == 0) | (x == 1)).all() & (x == 0).any() & (x == 1).any()):
                self.unknown_masks[name] = (
                    f"no mask was given by a known name: give mask={name!r} if non-zero is a token, or a function of "
                    "the call"
                )
                self.absent[PADDING_BY + name] = f"all tokens count, as {self.unknown_masks[name]}"

    def counted_as_held(self) -> Tensor | None:
        """bool: which tokens count, in the two dimensions of what the first block reads. None if that is not told, or
        if these are turned and equal: what the model returns may not be, and its shape does not tell it."""
        held = self._held
        masks = self.masks(torch.device("cpu"), held) if held else None
        is_square = len(held) == 2 and held[0] == held[1]
        return None if masks is None or len(held) != 2 or (self.length_first and is_square) else masks[0].view(held)

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
