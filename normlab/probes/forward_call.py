"""One forward call of a model: which tokens count, by how much its loss divides the gradient, what was measured in it.

`CallInputs`       the arguments as the caller gave them, never as an inner module was handed them
`labels_averaged`  the number of labels that a returned loss averages over, told from the logits returned with it
`Call`             one forward call, with the measurements that wait for its end
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.layout import Layout, is_activation, own_layout, row_layout, token_masks
from normlab.probes.statistics import AttentionWatch

if TYPE_CHECKING:
    from normlab.probes.block_trace import BlockTrace
    from normlab.probes.decomposition import NormRead

IGNORED_LABEL = -100
CHUNK = 1 << 22  # 16 MiB of float32 logits at a time
CLOSE = 1e-3  # largest relative distance of a loss from its reading
APART = 4.0  # how much nearer it must be than readings of another divisor
_TEXT = ("input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids", "input")
_OTHER = ("pixel_values", "input_features", "input_values", "flattened_patches", "images", "pixel_values_videos")
_TOKENS = ("input_ids", "inputs_embeds", "attention_mask")
_DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
_CACHES = ("cache", "past_key_values", "cache_params", "past_kv_cache", "mems", "state", "past_buckets_states")


# -- the loss --------------------------------------------------------------------------------------------------------


def loss_and_logits(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """The scalar loss and the logits of what a model returned: a ModelOutput, a dict or a tuple."""
    if isinstance(output, Mapping):
        loss, logits = output.get("loss"), output.get("logits")
    elif isinstance(output, tuple | list) and len(output) > 1:
        loss, logits = output[0], output[1]
    else:
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    scalar = isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
    scores = isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim >= 2
    return loss if scalar else None, logits if scores else None


def _normalizers(logits: Tensor) -> Tensor:
    """log sum exp of each position's logits, in float32, flat."""
    rows = logits.reshape(-1, logits.shape[-1])
    return torch.cat([part.float().logsumexp(-1) for part in rows.split(max(1, CHUNK // rows.shape[-1]))])


def _summed(logits: Tensor, normalizers: Tensor, labels: Tensor) -> tuple[float, int] | None:
    """Summed cross-entropy and the number of labels; None without labels, or with one out of range."""
    kept = labels != IGNORED_LABEL
    wanted = labels[kept]
    if wanted.numel() == 0 or int(wanted.max()) >= logits.shape[-1] or int(wanted.min()) < 0:
        return None
    chosen = logits[(*kept.nonzero(as_tuple=True), wanted)]
    return float((normalizers[kept] - chosen.float()).double().sum()), wanted.numel()


def _readings(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
    """(logits, their normalizers, labels, shifted) of every way to compare labels with logits."""
    if labels.ndim == 1 and logits.ndim == 2:
        yield logits, _normalizers(logits), labels, False
    if labels.ndim != 2 or logits.ndim != 3 or logits.shape[0] != labels.shape[0]:
        return
    length = labels.shape[1]
    if logits.shape[1] < length:
        return
    logits = logits[:, logits.shape[1] - length :]  # positions before the text have no labels
    normalizers = _normalizers(logits).view(labels.shape)
    choices = [labels]
    if isinstance(mask, Tensor) and mask.shape == labels.shape and bool((mask == 0).any()):
        choices.append(labels.masked_fill(mask == 0, IGNORED_LABEL))
    for chosen in choices:
        if length > 1:
            yield logits[:, :-1], normalizers[:, :-1], chosen[:, 1:], True
        yield logits, normalizers, chosen, False


@torch.no_grad()
def labels_averaged(
    loss: Tensor, logits: Tensor, labels: Tensor, mask: Tensor | None = None, items: Tensor | float | None = None
) -> tuple[float, bool] | None:
    """Find N such that `loss` = summed token loss / N, and whether labels are shifted.

    Every reading of the labels (next or same token; with or without those at padding) has a sum S and a count n. The
    loss is compared with S / N for N in {n, `items`, 1}. No model's name is involved.

    Args:
        loss: the loss that the model returned.
        logits: (batch, length, vocabulary), or (batch, classes).
        labels: (batch, length) or (batch,), -100 = none.
        mask: the attention mask, for losses that leave out padding.
        items: `num_items_in_batch`, when the caller gave it.

    Returns:
        (N, shifted). None when no reading fits, or two of different N fit alike. N is NaN if the loss is not finite.
        Without a label and with a loss of 0, N is `items` or 1: the gradients are 0.
    """
    value = float(loss)
    if not math.isfinite(value):
        return math.nan, False  # nothing fits, and the gradients are no numbers either
    if value == 0 and not bool((labels != IGNORED_LABEL).any()):
        return (1.0 if items is None else float(items)), True
    fits: list[tuple[float, float, bool]] = []
    for scores, normalizers, wanted, shifted in _readings(logits, labels.to(logits.device), mask):
        result = _summed(scores, normalizers, wanted)
        if result is None:
            continue
        total, count = result
        for divisor in dict.fromkeys([float(count), *([float(items)] if items is not None else []), 1.0]):
            distance = abs(value * divisor - total) / max(abs(total), 1e-30)
            if distance <= CLOSE:
                fits.append((distance, divisor, shifted))
    if not fits:
        return None
    best = min(fits)
    others = [distance for distance, divisor, _ in fits if abs(divisor / best[1] - 1) > 1e-9]
    if others and min(others) <= APART * max(best[0], 1e-7):
        return None
    return best[1], best[2]


# -- the arguments ---------------------------------------------------------------------------------------------------


def call_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A call's arguments by name, and whether all of them have one.

    Positional ones are named by the forward's signature. Those that it cannot name are left out.
    """
    if not args:
        return dict(kwargs), True
    try:
        signature = inspect.signature(module.forward)
        bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return dict(kwargs), False
    swallowed = [n for n, p in signature.parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL]
    return bound | kwargs, not any(bound.get(name) for name in swallowed)


def _cached_tokens(cache: Any) -> int:
    """Tokens that a cache holds; 1 if it holds some and does not say how many."""
    if not hasattr(cache, "get_seq_length"):  # tensors of earlier tokens
        return 1 if isinstance(cache, Tensor) or len(cache) else 0
    try:
        return int(cache.get_seq_length())
    except ValueError:  # no attention, so no length
        return int(cache.has_previous_state())


class CallInputs:
    """The arguments of one forward call, from the outermost module that is handed tensors by name.

    What an inner module is handed may be made over: a mask of four dimensions, padding to a window.

    Attributes:
        arguments: by name.
        labels_averaged: how many labels the returned loss averages over, once it has been compared with its logits;
            None before, or when they do not tell.
        unknown: why `labels_averaged` is None.
    """

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.has_arguments = False
        self.has_decoder = False  # the call names a decoder's inputs next to an encoder's
        self.is_text = True  # the stack is fed from tokens, not from an image or a sound
        self.past = 0  # tokens in the cache before the call, which may fill it
        # Whether the model hands the stack vectors that the caller did not give; None where no module holds it alone.
        self.is_handed_states: bool | None = None
        self.labels_averaged: float | Tensor | None = None
        self.unknown = "this call has no countable labels"

    def add(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the call of a module on the way from the root to the blocks, from the outside in."""
        arguments, are_named = call_arguments(module, args, kwargs)
        present = {name for name, value in arguments.items() if value is not None}
        pixels = [self.arguments[name] for name in _OTHER if name in self.arguments]
        sees = present & set(_OTHER) or any(value is other for value in arguments.values() for other in pixels)
        if sees and not present & set(_TEXT):
            self.is_text = False
        names = inspect.signature(module.forward).parameters
        holds_decoder = "decoder_input_ids" in names or "decoder_attention_mask" in names
        if self.has_arguments:
            if self.has_decoder and not holds_decoder:
                states = [v for v in arguments.values() if is_activation(v) and v.ndim == 3]
                made = any(not any(v is x for x in self.arguments.values()) for v in states)
                self.is_handed_states = made or bool(self.is_handed_states)
            return
        self.arguments = {name: arguments[name] for name in arguments if name in present} | self.arguments
        self.past = max((_cached_tokens(self.arguments[name]) for name in _CACHES if name in self.arguments), default=0)
        if are_named and any(isinstance(value, Tensor) for value in arguments.values()):
            self.has_arguments = True
            self.has_decoder = holds_decoder

    def compare(self, output: Any) -> None:
        """Compare the loss that a module returned with the cross-entropy of the logits returned with it."""
        loss, logits = loss_and_logits(output)
        labels: Any = self.arguments.get("shift_labels", self.arguments.get("labels"))
        has_labels = isinstance(labels, Tensor) and not labels.is_floating_point()
        if self.labels_averaged is not None or loss is None or not has_labels:
            return
        if logits is None:
            self.unknown = "the model returns no logits with its loss"
            return
        mask, items = self.arguments.get("attention_mask"), self.arguments.get("num_items_in_batch")
        result = labels_averaged(loss, logits, labels, mask, items)
        if result is None:
            self.unknown = "the returned loss and logits do not tell over how many labels it is a mean"
        else:
            self.labels_averaged = result[0]


# -- the call --------------------------------------------------------------------------------------------------------

Place = tuple[str, int]  # site, layer
LossTokens = float | int | Tensor | Callable[[CallInputs], "float | Tensor | None"] | None


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
        self.depth = 0  # modules above the blocks that are running
        self.implicit = implicit  # opened by a block that was called without its model
        self.crosses = False  # the blocks are handed a second sequence, as a decoder is its encoder's
        self.loss_tokens: float | Tensor | None = None
        self.trace: BlockTrace | None = None  # of the block that is running
        self.watch: AttentionWatch | None = None
        self.layer = 0  # of the latest block that ran
        self.runs: dict[nn.Module, list[tuple[int, int]]] = {}  # block -> (address of its input, layer)
        self.last_out: Tensor | None = None  # output of the last block, until the final norm has read it
        self.final: list[NormRead] = []  # norms that read a block's output after it; the last block's counts
        self.measured: tuple[Tensor, int, Tensor] | None = None  # the latest activation, its version, its statistics
        # The latest tensor with a gradient hook, its version, and where it is read.
        self.hooked: tuple[Tensor, int, list[Place | NormRead]] | None = None
        self.watched: set[Any] = set()  # where gradient hooks were set
        self.staged: list[Staged] = []
        self.absent: dict[str, str] = {}  # what could not be measured, and why
        self._masks: dict[tuple[torch.device, tuple[int, ...]], Tensor | None] = {}

    def stage(self, kind: str, where: Place | NormRead, values: Tensor, shape: Sequence[int] = ()) -> None:
        """Keep a measurement until the call has ended; the arguments are those of `Staged`."""
        self.staged.append(Staged(kind, where, values, tuple(shape)))

    def begin_layer(self, block: nn.Module, index: int, x: Tensor, has_second_sequence: bool) -> int:
        """The layer of a block that begins to run on `x`.

        That is its index. From the first block on that runs again in one call it is one more than the layer before.
        """
        if not self.runs:
            self.crosses = has_second_sequence and self.inputs.is_handed_states is not False
        repeats = block in self.runs or any(len(runs) > 1 for runs in self.runs.values())
        layer = self.layer + 1 if repeats else index
        self.runs.setdefault(block, []).append((x.data_ptr(), layer))
        return layer

    def recomputed_layer(self, block: nn.Module, x: Tensor) -> int | None:
        """The layer that a checkpoint recomputes; None if the block ran more than once and its input does not tell."""
        runs = self.runs.get(block, [])
        matching = [layer for address, layer in runs if len(runs) == 1 or address == x.data_ptr()]
        return matching[0] if len(matching) == 1 else None

    # -- tokens ------------------------------------------------------------------------------------------------------

    @property
    def _is_decoder(self) -> bool:
        return self.inputs.has_decoder and self.crosses

    @property
    def mask_name(self) -> str | None:
        """The argument that masks the tokens of this stack: a decoder has its own; what is no text has none."""
        if not self.inputs.is_text:
            return None
        return "decoder_attention_mask" if self._is_decoder else "attention_mask"

    @property
    def attention_mask(self) -> Any:
        """The caller's mask over the tokens of this stack."""
        return None if self.mask_name is None else self.inputs.arguments.get(self.mask_name)

    @property
    def past(self) -> int:
        """Tokens of this stack that the cache held before the call."""
        is_encoder = self.inputs.has_decoder and not self.crosses
        return 0 if is_encoder or not self.inputs.is_text else self.inputs.past

    def _caller_rows(self) -> list[tuple[int, int]]:
        """The possible (batch, length) of this stack's tokens, from the caller's arguments."""
        names = _DECODER_TOKENS if self._is_decoder else _TOKENS
        values = (self.inputs.arguments.get(name) for name in names if self.inputs.is_text)
        like = next((x for x in values if isinstance(x, Tensor) and x.ndim >= 2), None)
        if like is None:
            return []
        several = like.ndim > 2 and not like.is_floating_point()  # choices per row, or codes per token
        rows = (like.shape[0], like.shape[1])
        return [rows, (math.prod(like.shape[:-1]), like.shape[-1])] if several else [rows]

    def has_rows(self, tokens: tuple[int, int]) -> bool:
        """True if attention's (batch, queries) are the rows of the call: no windows, chunks or latents."""
        rows = self._caller_rows()
        return not rows or tokens in rows

    def layout(self, tokens: Sequence[int]) -> Layout:
        """Find the layout of an activation's tokens. Raises `NormlabError` if the model adds positions to them."""
        choices = self._caller_rows()
        for rows in choices:
            if (layout := row_layout(tokens, rows)) is not None:
                return layout
        by_shape = own_layout(tokens)
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
        return by_shape

    def _row_masks(self, device: torch.device, layout: Layout, names: Sequence[str]) -> Tensor:
        """(names, rows, tokens per row): `token_masks` of a layout."""
        cached = any(name in self.inputs.arguments for name in _CACHES)  # it may still be empty
        return token_masks(self.attention_mask, layout.rows, device, names, cached, self.past).view(-1, *layout.rows)

    def masks(self, device: torch.device, tokens: tuple[int, ...]) -> Tensor | None:
        """(masks, tokens) bool: which tokens of an activation of this shape count; None with the reason in `absent`."""
        key = (device, tokens)
        if key not in self._masks:
            try:
                layout = self.layout(tokens)
                self._masks[key] = layout.by_tokens(self._row_masks(device, layout, self.mask_names))
            except NormlabError as error:
                self._masks[key] = None
                self.absent["tokens " + " x ".join(map(str, tokens))] = str(error)
        return self._masks[key]

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

        Padding on the left has position 0; masks leave it out.
        """
        layout = self.layout(tokens)
        mask, (batch, length) = self.attention_mask, layout.rows
        if isinstance(mask, Tensor):
            order, limit = ((mask.to(device) != 0).long().cumsum(1) - 1).clamp(min=0)[:, -length:], mask.shape[1]
        else:
            order = (self.past + torch.arange(length, device=device)).expand(batch, length)
            limit = self.past + length
        return layout.by_tokens(order[None])[0], limit

    # -- the end of the call -----------------------------------------------------------------------------------------

    def resolve_loss(self, loss_tokens: LossTokens) -> None:
        """Fix the factor from the gradient that will arrive to the summed loss's gradient.

        Raises `NormlabError` when it is not given, and the returned loss and logits do not tell it.
        """
        factor = loss_tokens(self.inputs) if callable(loss_tokens) else loss_tokens
        self.loss_tokens = self.inputs.labels_averaged if factor is None else factor
        if self.loss_tokens is None:
            raise NormlabError(
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
        self.trace = self.last_out = self.measured = self.hooked = None
        self.final = []
