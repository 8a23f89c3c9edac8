"""The base of every residual rule, and functions that rules share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from normlab.norms.base import ConstantStart

Map = Callable[[Tensor], Tensor]


def split(state: Tensor, width: int) -> Tensor:
    """The streams of a state: ``(..., n d)`` to ``(..., n, d)``."""
    return state.unflatten(-1, (-1, width))


def rms_normalized(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, computed in float32. Keeps shape and type."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def unit_length(x: Tensor) -> Tensor:
    """``x / ||x||`` over the last axis, computed in float32. Keeps shape and type."""
    return F.normalize(x.float(), dim=-1, eps=1e-12).to(x.dtype)


def without_autocast(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute a rule in the state's own precision: autocast would round its products, and so the stream, at every
    sublayer."""

    @wraps(rule)
    def computed(self: Any, state: Tensor, *rest: Any) -> Tensor:
        with torch.autocast(state.device.type, enabled=False):
            return rule(self, state, *rest)

    return computed


class Residual(ConstantStart):
    """Base of every residual rule, and plain addition.

    ``enter`` maps the state to what the branch reads. ``join`` maps state and branch output to the next state. A plain
    addition reads two numbers and writes one.

    Attributes:
        probe_role: tells probes that the module is neither a norm nor a branch.
        keeps_read: whether ``join`` uses what the branch read.
        takes_direction: whether ``join`` takes only the direction of the branch's output, not its size.
    """

    probe_role = "residual"
    keeps_read = False
    takes_direction = False
    numbers = 3.0
    operations = 1.0

    def open(self, x: Tensor) -> Tensor:
        """Make a state of the embeddings. Any other state is returned as it is."""
        return x

    def enter(self, state: Tensor) -> Tensor:
        """Return what the branch, or the norm before it, reads: ``(..., d)``."""
        return state

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        """Return the state after the branch.

        Args:
            state: the state before it.
            branch: its output.
            norm: the layout's norm of the sum, or the identity.
            read: what it read.
        """
        return norm(state + branch)
