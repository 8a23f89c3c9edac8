"""Rules with two streams: one normalised after each branch, one that is only added to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normlab.residuals.base import Map, Residual, rms_normalized


class _Two(Residual):
    """State (x, y), both started at the embeddings."""

    numbers = 6.0
    operations = 2.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def open(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1) if x.shape[-1] == self.width else x


class Dual(_Two):
    """x <- norm(x + f(x)), s <- s + f(x): Post-LN, and the plain sum of its branches beside it.

    Source: ResiDual (2304.14802).
    """

    def enter(self, state: Tensor) -> Tensor:
        return state[..., : self.width]

    def join(self, state: Tensor, branch: Tensor, norm: Map) -> Tensor:
        x, total = state.split(self.width, -1)
        return torch.cat([norm(x + branch), total + branch], -1)


class _RMSEnd(Residual):
    """Its gains are its own, so that probes do not take them for norms of the stream."""

    gain: nn.Parameter
    gain_x: nn.Parameter
    gain_y: nn.Parameter

    def __init__(self, width: int, eps: float, *gains: str) -> None:
        super().__init__()
        self.width, self.eps, self.gains = width, eps, gains
        for name in gains:
            self.register_parameter(name, nn.Parameter(torch.empty(width)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for gain in self.parameters(recurse=False):
            nn.init.constant_(gain, 1.0 - self.centre)

    def normalized(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMSNorm of one stream."""
        return (gain if self.centre == 0.0 else gain + self.centre) * rms_normalized(x, self.eps)


class DualEnd(_RMSEnd):
    """x + RMSNorm(s): what leaves ResiDual's two streams (2304.14802). The scheme has no further norm."""

    operations = 5.0

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps, "gain")

    def forward(self, state: Tensor) -> Tensor:
        x, total = state.split(self.width, -1) if state.shape[-1] > self.width else (state, state)
        return x + self.normalized(total, self.gain)


class Siamese(_RMSEnd):
    """x <- N1(x); z = f(norm(x + N3(y))); x <- x + z; y <- y + z, N1 and N3 RMSNorms with gains ``gain_x`` and
    ``gain_y``.

    Of the two public variants this is the language model's; the vision model's divides the z that joins x by
    sqrt(2 l). N1 acts once a sublayer, on what both the branch and the sum read. With gain_x = 0 the branch and all
    that is kept of it is y: Pre-LN on N3(y).

    Source: SiameseNorm (2602.08064), the formula at second hand.
    """

    numbers = 8.0
    operations = 11.0

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps, "gain_x", "gain_y")

    def open(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1) if x.shape[-1] == self.width else x

    def enter(self, state: Tensor) -> Tensor:
        x, y = state.split(self.width, -1)
        return self.normalized(x, self.gain_x) + self.normalized(y, self.gain_y)

    def join(self, state: Tensor, branch: Tensor, norm: Map) -> Tensor:
        x, y = state.split(self.width, -1)
        return torch.cat([self.normalized(x, self.gain_x) + branch, y + branch], -1)


class SiameseEnd(_RMSEnd):
    """N(x) + N'(y), RMSNorms: what the final norm reads of SiameseNorm's two streams (2602.08064)."""

    operations = 9.0

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps, "gain_x", "gain_y")

    def forward(self, state: Tensor) -> Tensor:
        x, y = state.split(self.width, -1) if state.shape[-1] > self.width else (state, state)
        return self.normalized(x, self.gain_x) + self.normalized(y, self.gain_y)
