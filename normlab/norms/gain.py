"""What a norm's gain does to its output, tried on a few vectors: norms of any library."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normlab.norms.base import Norm

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def gain_name(norm: nn.Module) -> str:
    """The name of the parameter that multiplies the norm's output."""
    return str(getattr(norm, "gain_name", "weight"))


@torch.no_grad()
def is_plain_gain(norm: nn.Module) -> bool:
    """True if the norm's output without its bias is proportional to the gain.

    A gain of 0 must give 0 (Gemma's gain is 1 + w). 16 times the gain must give 16 times the output (GatedNorm's gate
    reads the gain's product).
    """
    if getattr(norm, gain_name(norm), None) is None:
        return False
    output = _output_of(norm)
    return not output(0.0).any() and torch.allclose(output(16.0), 16 * output(1.0), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def gain_centre(norm: nn.Module) -> float:
    """1 for a zero-centred gain, which is 1 + weight: there a weight of -1 gives 0. Else 0."""
    if isinstance(norm, Norm):
        return norm.centre
    return 0.0 if _output_of(norm)(-1.0).any() else 1.0


def _output_of(norm: nn.Module) -> Callable[[float], Tensor]:
    """The output for random vectors, without the bias, by the number that stands everywhere in the gain."""
    hooks: dict[int, Any] = {id(getattr(module, kind)): OrderedDict() for module in norm.modules() for kind in HOOKS}
    name, norm = gain_name(norm), copy.deepcopy(norm, hooks).float()  # nobody's hooks see this copy
    tensors = dict(chain(norm.named_parameters(), norm.named_buffers()))
    gain = tensors[name]
    zeros = {"bias": torch.zeros_like(tensors["bias"])} if "bias" in tensors else {}
    width = getattr(norm, "hidden_size", None) or gain.numel()  # ScaleNorm has one gain for all
    x = torch.randn(1, 4, width, generator=torch.Generator().manual_seed(0)).to(gain)
    return lambda value: functional_call(norm, zeros | {name: torch.full_like(gain, value)}, (x,))
