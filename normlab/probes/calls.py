"""What one forward call tells a probe: which tokens count, and by how much the loss divides the gradient.

`CallInputs` gathers `attention_mask`, `labels` and `num_items_in_batch` from the arguments of the model's forward,
whoever in a chain of wrappers names them; `token_masks` turns the attention mask into the counted tokens; `Call` is one
forward pass with what was measured in it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.attention import AttentionWatch
from normlab.probes.metrics import MASKS
from normlab.probes.roles import BlockFlow

IGNORED_LABEL = -100
_NAMES = ("attention_mask", "labels", "shift_labels", "num_items_in_batch", "loss_tokens")


def call_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by name. Positional ones are named by the forward's signature; those it cannot name are left
    out."""
    if not args:
        return dict(kwargs)
    try:
        return dict(inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments) | kwargs
    except TypeError:
        return dict(kwargs)


class CallInputs:
    """The arguments of one forward call that a probe needs, filled in by the outermost module that names them."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def add(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = call_arguments(module, args, kwargs)
        for name in _NAMES:
            if arguments.get(name) is not None:
                self.found.setdefault(name, arguments[name])

    def loss_tokens(self, shifted: bool | None) -> Tensor | float | None:
        """How many labels the loss averages over, or None when the call does not tell.

        `num_items_in_batch` (what transformers divides by) wins; else labels different from -100 are counted, without
        the first of each row when the model shifts them (`shifted`; None = unknown, so not counted).
        """
        if "num_items_in_batch" in self.found:
            return self.found["num_items_in_batch"]
        if "shift_labels" in self.found:
            return (self.found["shift_labels"] != IGNORED_LABEL).sum()
        labels = self.found.get("labels")
        if labels is None or (shifted is None and labels.ndim > 1):
            return None
        counted = labels[..., 1:] if shifted and labels.ndim > 1 else labels
        return (counted != IGNORED_LABEL).sum()


def token_masks(
    attention_mask: Tensor | None, tokens: Sequence[int], device: torch.device, names: Sequence[str] = tuple(MASKS)
) -> Tensor:
    """Which tokens count, as (len(names), prod(tokens)) bool.

    `all` = every token that is not padding; `no_first` = those without the first real token of each row, whose massive
    activations dominate means. `attention_mask`: (batch, length), non-zero = real; with a cache it covers the past too,
    and its last columns are meant. Left and right padding both work. `tokens`: (batch, ..., length) of the activation.

    Raises `NormlabError` for a mask that does not name the tokens.
    """
    batch, length = (1, tokens[0]) if len(tokens) == 1 else (tokens[0], math.prod(tokens[1:]))
    if attention_mask is None:
        real = torch.ones(batch, length, dtype=torch.bool, device=device)
        past = torch.zeros(batch, dtype=torch.bool, device=device)
    else:
        if attention_mask.ndim != 2:
            raise NormlabError(
                f"attention_mask has {attention_mask.ndim} dimensions, so padding cannot be told: "
                "give a (batch, length) mask"
            )
        whole = attention_mask.to(device) != 0
        if whole.shape[0] != batch or whole.shape[1] < length:
            raise NormlabError(
                f"attention_mask is {tuple(whole.shape)} but the activations hold {tuple(tokens)} tokens"
            )
        past, real = whole[:, : whole.shape[1] - length].any(dim=1), whole[:, whole.shape[1] - length :]
    first = (real.cumsum(dim=1) == 1) & real & ~past[:, None]
    choices = {"all": real, "no_first": real & ~first}
    return torch.stack([choices[name].reshape(-1) for name in names])


def labels_are_shifted(modules: Iterable[nn.Module]) -> bool | None:
    """Whether the first of these modules with a transformers loss predicts the next token; None when none has one."""
    for module in modules:
        if callable(getattr(module, "loss_function", None)):  # no type means causal language modelling there
            return "CausalLM" in (getattr(module, "loss_type", None) or "CausalLM")
    return None


Place = tuple[str, int]  # site, layer
LossTokens = float | int | Tensor | Callable[[CallInputs], "float | Tensor | None"] | None


class Call:
    """One forward pass of the model: what its arguments say, and what was measured until it is known to be whole."""

    def __init__(self, mask_names: Sequence[str]) -> None:
        self.inputs = CallInputs()
        self.mask_names = mask_names
        self.depth = 0
        self.implicit = False  # opened by a block that was called without its model
        self.tokens: tuple[int, ...] = ()
        self.loss_tokens: float | Tensor = 1.0
        self.flow: BlockFlow | None = None
        self.watch: AttentionWatch | None = None
        self.last_out: Tensor | None = None  # output of the last block, until the final norm has read it
        self.measured: tuple[Tensor, int, Tensor] | None = None  # the latest activation, its version, its statistics
        self.hooked: tuple[Tensor, list[Place]] | None = None  # the latest tensor with a gradient hook, and its sites
        self.watched: set[Place] = set()  # where a gradient hook was set
        self.values: list[tuple[str, Place, Tensor, int]] = []  # kind, place, (statistics, tokens), width
        self.arrays: list[tuple[str, Place, int, Tensor]] = []  # statistic, place, index of the mask, array
        self._masks: dict[torch.device, Tensor] = {}

    def masks(self, device: torch.device) -> Tensor:
        """(masks, tokens) bool: which tokens of this call count."""
        if device not in self._masks:
            mask = self.inputs.found.get("attention_mask")
            self._masks[device] = token_masks(mask, self.tokens, device, self.mask_names)
        return self._masks[device]

    def first_tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(batch,) positions, in the flattened tokens, of each row's first real token, and whether the row has one."""
        everything = token_masks(self.inputs.found.get("attention_mask"), self.tokens, device, ["all"])[0]
        rows = everything.view(1 if len(self.tokens) == 1 else self.tokens[0], -1)
        start = torch.arange(len(rows), device=device) * rows.shape[1]
        return start + rows.int().argmax(dim=1), rows.any(dim=1)

    def positions(self, device: torch.device) -> tuple[Tensor, int]:
        """(tokens,): each token's position among its row's real tokens, the cached past included, and their limit.

        Padding on the left is given position 0; masks leave it out.
        """
        mask, length = self.inputs.found.get("attention_mask"), self.tokens[-1]
        if mask is None:
            return torch.arange(length, device=device).expand(self.tokens).reshape(-1), length
        order = ((mask.to(device) != 0).long().cumsum(1) - 1).clamp(min=0)
        return order[:, -length:].reshape(-1), mask.shape[1]

    def close(self) -> None:
        """Let go of every activation."""
        self.flow = self.last_out = self.measured = self.hooked = None
