"""Find the activation in a module's call, its features, its rows and its tokens."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from normlab.errors import NormlabError

COMPARED = 16  # rows and tokens on which it is found which is which
_CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d}


class Refusal(NormlabError):
    """A request that nothing can meet, so that it is refused at once."""


# -- the activation in a call ----------------------------------------------------------------------------------------


def is_activation(value: Any) -> bool:
    """True for a float tensor of at least two dimensions."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2


def find_input(args: tuple, kwargs: dict[str, Any], block: nn.Module | None = None) -> Tensor | None:
    """The first activation among a module's arguments; None without one.

    Of several that a block is given, it is the one named `hidden_states`, or the first whose features the block has
    weights for: an additive mask is none.
    """
    values = (*args, *kwargs.values())
    found = [value for value in values if is_activation(value)]
    if not found:  # as in a block that is given (x, mask)
        found = [x for value in values for x in outputs_of(value) if is_activation(x)]
    if block is None or len(found) < 2:
        return next(iter(found), None)
    named = kwargs.get("hidden_states")
    return named if is_activation(named) else next((x for x in found if _has_weights_for(block, x)), found[0])


def _has_weights_for(block: nn.Module, x: Tensor) -> bool:
    """True if a weight is as long as `x` has features, in its last dimension or its second."""
    widths = {x.shape[-1], x.shape[1] if x.ndim > 2 else 1} - {1}
    return any(not widths.isdisjoint(weight.shape) for weight in block.parameters())


def others(x: Tensor, values: Iterable[Any]) -> list[Tensor]:
    """The activations among `values` that are not `x`."""
    return [value for value in values if is_activation(value) and value is not x]


def like(x: Tensor, values: Iterable[Any]) -> list[Tensor]:
    """The activations among `values` that are not `x`, and have its shape."""
    return [value for value in others(x, values) if value.shape == x.shape]


def hidden_state(args: tuple, kwargs: dict[str, Any], block: nn.Module | None = None) -> Tensor:
    """`find_input`.

    Raises `NormlabError` without one, on the meta device, for a DTensor, and for rows that are packed into a nested
    tensor.
    """
    result = find_input(args, kwargs, block)
    if result is None:
        raise NormlabError("a measured module was called without a float tensor: name its blocks with `blocks=`")
    if result.is_meta:
        raise Refusal("the model is on the meta device, where tensors have no values: load its weights first")
    if isinstance(result, DTensor):
        raise Refusal(
            "the blocks pass DTensors on, of which a rank holds a part: have the modules that make them return local "
            "tensors (use_local_output=True)"
        )
    if result.is_nested:
        raise NormlabError(
            "PyTorch packs the padded rows into a nested tensor, which has no place for tokens: call "
            "torch.backends.mha.set_fastpath_enabled(False) before, or train()"
        )
    return result


def outputs_of(output: Any) -> tuple:
    """The values that a module returns: of a tuple, list, ModelOutput or dataclass, or the one."""
    if isinstance(output, Mapping):
        return tuple(output.values())
    if is_dataclass(output) and not isinstance(output, type):
        return tuple(getattr(output, field.name, None) for field in fields(output))
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def find_output(output: Any, shape: torch.Size | None = None) -> Tensor | None:
    """The activation that a module returns: the tensor itself, or the first one in a tuple, list or other container.

    Of a block `shape` is that of the stream it reads: router scores or attention weights that come first are none.
    """
    if isinstance(output, Tensor):
        return output
    found = [value for value in outputs_of(output) if is_activation(value)]
    first = next(iter(found), None)
    if first is None or shape is None or (first.ndim == len(shape) and first.shape != (*shape[:-1], shape[-2])):
        return first  # a stage may change the stream's shape
    return next((value for value in found if value.shape == shape), first)


def with_output(output: Any, x: Tensor) -> Any:
    """A module's output with `x` in place of the activation that `find_output` finds, in the same container."""
    old = find_output(output)
    return x if old is None else replaced(output, [(old, x)])


def replaced(values: Any, changes: Sequence[tuple[Tensor, Tensor]], depth: int = 2) -> Any:
    """A tensor, or a container of values, with the second of each pair in place of the first; of the same class.

    Containers in it are looked into, too. What holds none of them is the same object.
    """
    if isinstance(values, Tensor) or depth == 0:
        return next((after for before, after in changes if values is before), values)
    old = outputs_of(values)
    new = [value if value is values else replaced(value, changes, depth - 1) for value in old]
    if all(after is before for after, before in zip(new, old, strict=True)):
        return values
    kind: Any = type(values)
    if isinstance(values, MutableMapping):  # a copy of its own class, as a ModelOutput's is made of fields
        result: Any = copy.copy(values)
        for (name, before), after in zip(values.items(), new, strict=True):
            if after is not before:
                result[name] = after
        return result
    if isinstance(values, Mapping):
        return kind(dict(zip(values, new, strict=True)))
    if is_dataclass(values):
        result = copy.copy(values)
        for field, before, after in zip(fields(values), old, new, strict=True):
            if after is not before:
                object.__setattr__(result, field.name, after)  # it may be frozen
        return result
    return kind(*new) if hasattr(kind, "_fields") else kind(new)  # a namedtuple


def output_tensor(output: Any, shape: torch.Size | None = None) -> Tensor:
    """`find_output`; raises `NormlabError` without one."""
    x = find_output(output, shape)
    if x is None:
        raise NormlabError(
            f"a block returned {type(output).__name__} without an activation: name the blocks with `blocks=`"
        )
    return x


def require_one_stream(x: Tensor, after: Tensor) -> None:
    """Refuse a block that keeps several streams: its output `after` has other features than its input `x`, or both have
    a dimension more than rows and tokens."""
    streams = f"is given {x.shape[-1]} features and passes on {after.shape[-1]}"
    if x.shape == after.shape:
        if x.ndim <= 3:
            return
        streams = f"is given {' x '.join(map(str, x.shape[:-1]))} vectors, of more than rows and tokens"
    raise NormlabError(
        f"a block {streams}: it keeps several residual streams, and this compares one; `record` measures what blocks "
        "read of them"
    )


def same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    """True if both are the same values in memory; a view counts. Both must be alive: freed memory is reused."""
    if a is None or b is None:
        return False
    return a is b or (a.device == b.device and a.numel() == b.numel() and a.data_ptr() == b.data_ptr())


# -- features --------------------------------------------------------------------------------------------------------


def is_channels_first(block: nn.Module, x: Tensor, rows: Collection[tuple[int, int]] = ()) -> bool:
    """True if a block takes (batch, channels, positions...): its first convolution reads that many channels.

    `rows` are the possible (batch, length) of the caller's tokens. Where `x` begins so, its second dimension is none of
    channels.
    """
    convolution = _CONVOLUTIONS.get(x.ndim)
    if convolution is None or (x.ndim == 3 and x.shape[:2] in rows):
        return False
    first: Any = next((m for m in block.modules() if isinstance(m, convolution)), None)
    if first is None or first.in_channels != x.shape[1] or (x.ndim == 3 and x.shape[2] == x.shape[1]):
        return False
    if x.ndim == 4:  # an image: a norm or a projection of its last dimension would come before the convolution
        before = takewhile(lambda m: m is not first, block.modules())
        return not any(_last_width(m) == x.shape[-1] for m in before)
    # A convolution over heads may have as many channels as there are tokens: the block's norms know the width.
    vectors = (getattr(m, "weight", None) for m in block.modules())
    widths = {v.numel() for v in vectors if isinstance(v, Tensor) and v.ndim == 1}
    return x.shape[1] in widths or x.shape[-1] not in widths


def _last_width(module: nn.Module) -> int | None:
    """The features that a module reads in the last dimension; None if it reads another one."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return module.normalized_shape[-1]
    return module.in_features if isinstance(module, nn.Linear) else None


def features_last(x: Tensor, channels_first: bool, norm: nn.Module | None = None, width: int | None = None) -> Tensor:
    """A view of `x` with the features as its last dimension.

    Args:
        x: an activation of a block.
        channels_first: whether the block takes channels first.
        norm: the norm that reads `x`; the lengths of its vectors tell the features.
        width: the features of the stream, for parts of a block that may be turned or not.
    """
    if not channels_first or x.ndim < 3 or (width is not None and x.shape[1] != width):
        return x
    if norm is not None:
        lengths = {p.numel() for p in norm.parameters() if p.numel() > 1}
        if isinstance(norm, nn.LayerNorm | nn.RMSNorm) or (x.shape[1] not in lengths and x.shape[-1] in lengths):
            return x
    return x.movedim(1, -1)


# -- rows and tokens -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The tokens of an activation viewed as `shape`.

    Dimension `row` counts the rows, `column` the tokens of a row. The others are the streams that a token has.
    """

    shape: tuple[int, ...]
    row: int = 0
    column: int = 1
    is_told: bool = True  # that this is the row, and not the other dimension
    has_first: bool = True  # the tokens begin with the row's first

    @property
    def rows(self) -> tuple[int, int]:
        """Rows, and tokens per row."""
        return self.shape[self.row], self.shape[self.column]

    def by_tokens(self, masks: Tensor) -> Tensor:
        """(masks, rows, tokens per row) as (masks, tokens of the activation): all streams of a token are alike."""
        streams = [n for i, n in enumerate(self.shape) if i not in (self.row, self.column)]
        alike = masks.view(*masks.shape, *(1 for _ in streams)).expand(*masks.shape, *streams)
        return alike.movedim((1, 2), (1 + self.row, 1 + self.column)).reshape(len(masks), -1)


def takes_length_first(block: nn.Module) -> bool | None:
    """True if PyTorch's attention in a block takes (length, batch, width); None without one."""
    attention = next((m for m in block.modules() if isinstance(m, nn.MultiheadAttention)), None)
    return None if attention is None else not attention.batch_first


@torch.no_grad()
def is_turned(tokens: Tensor, x: Tensor) -> bool | None:
    """True if x[j, i] is of tokens[i, j], and not x[i, j], where there are as many rows as tokens; None if unknown.

    Equal tokens have like vectors, if only one of the two readings makes them so. A few are compared.
    """
    few = min(len(tokens), COMPARED)
    tokens, x = tokens[:few, :few].to(x.device), x.detach()[:few, :few].float()
    if tokens.is_floating_point():
        if tokens.shape != x.shape:
            return None
        straight, turned = (float((x - y).norm()) for y in (tokens, tokens.transpose(0, 1)))
    else:
        flat = tokens.flatten()
        place = torch.arange(few, device=x.device).repeat(few)
        equal = (flat[:, None] == flat).fill_diagonal_(False)
        at_one_place = equal & (place[:, None] == place)
        pairs = at_one_place if bool(at_one_place.any()) else equal
        rows = (y.reshape(few * few, -1) for y in (x, x.transpose(0, 1)))
        straight, turned = (float(torch.cdist(y, y)[pairs].mean()) for y in rows)
    if straight <= turned / 2 and turned > 0:
        return False
    return True if turned <= straight / 2 and straight > 0 else None


@torch.no_grad()
def is_read_turned(x: Tensor, read: Tensor) -> bool | None:
    """True if `read`, made of the stream `x`, holds its rows and tokens turned, False if as they are; None if unknown.

    Where there are as many rows as tokens, their vectors tell it. A norm between changes their length only.
    """
    if x.shape[0] != x.shape[1]:
        return read.shape[:2] != x.shape[:2]
    few = min(len(x), COMPARED)
    a, b = (y.detach()[:few, :few].float() for y in (x, read.to(x.device)))
    return is_turned(*(functional.normalize(y - y.mean(-1, keepdim=True), dim=-1) for y in (a, b)))


def own_layout(tokens: Sequence[int], turned: bool | None) -> Layout:
    """The layout of an activation by its shape alone: its first dimension counts rows, unless its block tells."""
    if len(tokens) == 1:
        return Layout((1, tokens[0]))
    if len(tokens) == 2:
        is_told = turned is not None or 1 in tokens
        return Layout(tuple(tokens), 1, 0) if turned else Layout(tuple(tokens), is_told=is_told)
    return Layout((tokens[0], math.prod(tokens[1:])))


def row_layout(tokens: Sequence[int], rows: tuple[int, int], turned: bool | None) -> Layout | None:
    """The layout under which an activation's tokens are the caller's (batch, length) `rows`, or None.

    `turned` says whether they are (length, batch), where both are alike. Raises `NormlabError` when two different
    ones fit.
    """
    tokens, count = tuple(tokens), len(tokens)
    if count > 2 and tokens[:2] == rows == tokens[-2:]:
        raise NormlabError(
            f"the activations hold {' x '.join(map(str, tokens))} tokens, so rows and streams cannot be told apart: "
            "give batches of another size"
        )
    if tokens == rows == rows[::-1]:
        return own_layout(tokens, turned)
    if tokens[:2] == rows:
        return Layout(tokens)
    if tokens[-2:] == rows:
        return Layout(tokens, count - 2, count - 1)
    if tokens == rows[::-1]:
        return Layout(tokens, 1, 0)
    in_one_row = max(tokens) == math.prod(tokens) == math.prod(rows)  # or as many rows of one token
    return Layout(rows) if in_one_row else None


def letting_through(mask: Tensor) -> Tensor:
    """A mask whose values are not 0 at tokens; an additive one (float, nothing above 0) is 0 at tokens."""
    return mask == 0 if mask.is_floating_point() and not bool((mask > 0).any()) else mask


def require_by_token(mask: Any) -> None:
    """Refuse a mask that is not (batch, length)."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = f"{mask.ndim} dimensions" if isinstance(mask, Tensor) else "no shape"
        raise NormlabError(
            f"attention_mask has {shape}, so padding cannot be told: give a (batch, length) mask, or none"
        )


def token_masks(
    attention_mask: Tensor | None,
    tokens: Sequence[int],
    device: torch.device,
    names: Sequence[str],
    cached: bool,
    past_tokens: int,
    starts: Tensor | None,
) -> Tensor:
    """The tokens that count, as (len(names), prod(tokens)) bool.

    `all` is every token that is not padding. `no_first` leaves out the first real token of each row, whose massive
    activations dominate means. Left and right padding both work.

    Args:
        attention_mask: (batch, length), non-zero = real (see `letting_through`).
        tokens: (batch, ..., length) of the activation.
        device: where the masks are made.
        names: which masks.
        cached: the mask may cover a cached past; then its last columns are the activation's.
        past_tokens: how many tokens the cache holds, for a mask that does not cover them.
        starts: (batch, length) bool: the tokens at position 0, where the caller's positions tell; they are the first.

    Raises:
        NormlabError: the mask does not fit the tokens.
    """
    batch, length = (1, tokens[0]) if len(tokens) == 1 else (tokens[0], math.prod(tokens[1:]))
    if attention_mask is None:
        real = torch.ones(batch, length, dtype=torch.bool, device=device)
        past = torch.full((batch,), past_tokens > 0, device=device)
    else:
        require_by_token(attention_mask)
        whole = attention_mask.to(device) != 0
        if whole.shape[0] != batch or whole.shape[1] < length or (whole.shape[1] > length and not cached):
            if bool(whole.all()):  # no padding, whatever the tokens are
                return token_masks(None, tokens, device, names, cached, past_tokens, starts)
            raise NormlabError(
                f"attention_mask is {tuple(whole.shape)} but the activations hold {tuple(tokens)} tokens, so padding "
                "cannot be told: leave out the mask and the padding"
            )
        before, real = whole[:, : whole.shape[1] - length], whole[:, whole.shape[1] - length :]
        past = before.any(dim=1) if before.shape[1] else torch.full((batch,), past_tokens > 0, device=device)
    first = (real.cumsum(dim=1) == 1) & ~past[:, None] if starts is None else starts
    choices = {"all": real, "no_first": real & ~first}
    return torch.stack([choices[name].reshape(-1) for name in names])


# -- several streams -------------------------------------------------------------------------------------------------


def stream_of(block: nn.Module, state: Tensor, channels_first: bool) -> Tensor:
    """The stream that a block reads of its input, features last: of several streams, what the block's ``enter`` makes.

    Weights that are split over ranks are gathered for it.
    """
    enter = getattr(block, "enter", None)
    if enter is None:
        return features_last(state, channels_first)
    from torch.distributed.fsdp import FSDPModule  # here, because it takes a second to load

    split = isinstance(block, FSDPModule) and any(isinstance(weight, DTensor) for weight in block.parameters())
    if split:
        cast(FSDPModule, block).unshard()
    with torch.no_grad():
        entered = enter(state)
    if split:
        cast(FSDPModule, block).reshard()
    return features_last(entered, channels_first)
