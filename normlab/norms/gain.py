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
    output = _output_of(norm, gain_name(norm))
    return not output(0.0).any() and torch.allclose(output(16.0), 16 * output(1.0), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def gain_names(norm: nn.Module) -> tuple[str, ...]:
    """The names of all gains of a norm, empty where none is found.

    Of another library's norm: its `weight`, or the one vector that its output is proportional to but for a constant.
    """
    if isinstance(norm, Norm):
        return tuple(name for name in norm.gains if getattr(norm, name, None) is not None)
    if getattr(norm, "weight", None) is not None:
        return ("weight",)
    vectors = [name for name, parameter in norm.named_parameters() if parameter.ndim == 1 and parameter.numel() > 1]
    found = tuple(name for name in vectors if _multiplies(norm, name))
    return found if len(found) == 1 else ()


def _multiplies(norm: nn.Module, name: str) -> bool:
    """True if equal steps of a parameter move the output by equal amounts, other ones for each vector.

    A bias moves all vectors alike. A slope inside a tanh does not move them by equal amounts.
    """
    first, second, third = map(_output_of(norm, name), (0.0, 1.0, 2.0))
    return torch.allclose(third - second, second - first, rtol=1e-4, atol=1e-5) and _differs(second - first)


def _differs(vectors: Tensor) -> bool:
    return not torch.allclose(vectors, vectors[:, :1].expand_as(vectors), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def gain_centre(norm: nn.Module, name: str = "") -> float:
    """1 for a zero-centred gain, which is 1 + weight: there a weight of -1 leaves only a constant. Else 0.

    Args:
        name: the gain's. Default: `gain_name`.
    """
    if isinstance(norm, Norm):
        return norm.centre
    return 0.0 if _differs(_output_of(norm, name or gain_name(norm))(-1.0)) else 1.0


@torch.no_grad()
def ignores_centre(norm: Norm) -> bool:
    """True if a norm gives another output for its gains - 1 around a centre of 1 than for the gains themselves.

    False where it cannot be tried: without a gain or its values, or on vectors of a width that the norm does not tell.
    """
    names = gain_names(norm)
    if not names or any(getattr(norm, name).is_meta for name in names):
        return False
    plain, around_one = copy.deepcopy(norm).eval(), copy.deepcopy(norm).eval()
    plain.centre, around_one.centre = 0.0, 1.0
    try:
        outputs = _output_of(plain, *names)(1.0), _output_of(around_one, *names)(0.0)
        return not torch.allclose(*outputs, rtol=1e-5, atol=1e-6)
    except Exception:  # whatever another's code raises
        return False


def _output_of(norm: nn.Module, *names: str) -> Callable[[float], Tensor]:
    """The output for random vectors, without the bias, by the number that stands everywhere in the gains `names`."""
    hooks: dict[int, Any] = {id(getattr(module, kind)): OrderedDict() for module in norm.modules() for kind in HOOKS}
    norm = copy.deepcopy(norm, hooks).float()  # nobody's hooks see this copy
    tensors = dict(chain(norm.named_parameters(), norm.named_buffers()))
    gains = [tensors[name] for name in names]
    zeros = {"bias": torch.zeros_like(tensors["bias"])} if "bias" in tensors else {}
    width = getattr(norm, "hidden_size", None) or gains[0].numel()  # ScaleNorm has one gain for all
    x = torch.randn(1, 4, width, generator=torch.Generator().manual_seed(0)).to(gains[0])

    def output(value: float) -> Tensor:
        full = {name: torch.full_like(gain, value) for name, gain in zip(names, gains, strict=True)}
        return functional_call(norm, zeros | full, (x,))

    return output
