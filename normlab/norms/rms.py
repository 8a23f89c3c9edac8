"""Norms that divide by the root mean square of the token."""

from __future__ import annotations

import normlab_kernels as nk
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.norms.base import Norm, StartingMap
from normlab.norms.base import mean_square as exact_mean_square


class RMSNorm(Norm):
    """``y = scale * gamma * x / sqrt(mean(x^2) + eps)``, statistics in float32, rounded before gamma as in Llama.

    gamma = ``weight`` has shape ``(d,)``. The mean square has shape ``(..., 1)`` and is float32.

    Args:
        hidden_size: d.
        eps: added to the mean square.
        gain: start of gamma. lambda/kappa gives the control for BHyT's small output.
        scale: constant factor after gamma. LayerNorm Scaling (2502.05795) uses 1/sqrt(layer).
        trained: if false, gamma is a buffer.

    Source: Zhang & Sennrich, Root Mean Square Layer Normalization (1910.07467).
    """

    takes_mean_square = True
    kernel, add_kernel = staticmethod(nk.rms_norm), staticmethod(nk.add_rms_norm)
    shown: tuple[str, ...] = ("eps", "gain", "scale")

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, gain: float = 1.0, scale: float = 1.0, trained: bool = True
    ) -> None:
        super().__init__(hidden_size)
        self.eps, self.gain, self.scale = eps, gain, scale
        (self.add_parameter if trained else self.add_buffer)("weight", hidden_size, gain)

    def starting_map(self) -> StartingMap:
        return StartingMap(gain=self.gain * self.scale, eps=self.eps)

    def operands(self) -> tuple[Tensor, float]:
        return (self.gamma() if self.scale == 1.0 else self.gamma() * self.scale), self.eps

    def times_gain(self, unit: Tensor) -> Tensor:
        """The output from x/rms(x). A fixed gain is a buffer in float32, which is no reason to widen the output."""
        gamma = self.gamma()
        y = (gamma.to(unit.dtype) if "weight" in self._buffers else gamma) * unit
        return y if self.scale == 1.0 else y * self.scale

    def forward(self, x: Tensor, mean_square: Tensor | None = None, return_mean_square: bool = False):
        if mean_square is None and not return_mean_square and nk.chooses_kernels(x, self.kernels):
            return super().forward(x)
        x32 = x.float()  # once, so that gradients are summed in float32
        ms = exact_mean_square(x32) if mean_square is None else mean_square
        y = self.times_gain((x32 * torch.rsqrt(ms + self.eps)).to(x.dtype))
        return (y, ms) if return_mean_square else y


class ScaleNorm(RMSNorm):
    """``y = g * x / ||x||`` with one scalar g from sqrt(d), or ``y = g * x / rms(x)`` with g from 1.

    Both are one function. Under Adam the second g moves sqrt(d) times as much per step. Both add eps to the mean
    square. The gain g = ``weight`` has shape ``(1,)``.

    Args:
        hidden_size: d.
        eps: added to the mean square.
        rms: divide by rms(x), the single-scale RMSNorm of Outlier-Safe Pre-Training.

    Source: Nguyen & Salazar, Transformers without Tears (1910.05895). With ``rms``: Outlier-Safe Pre-Training
    (2506.19697).
    """

    shown = ("eps", "rms")
    hidden_size: int

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, rms: bool = False) -> None:
        Norm.__init__(self, hidden_size)
        self.eps, self.rms = eps, rms
        self.add_parameter("weight", 1, 1.0 if rms else hidden_size**0.5)

    def starting_map(self) -> StartingMap:
        return StartingMap(eps=self.eps)

    def _gain(self) -> Tensor:
        return self.gamma() if self.rms else self.gamma() * self.hidden_size**-0.5

    def operands(self) -> tuple[Tensor, float]:
        """The gain is repeated per channel for RMSNorm's kernel."""
        return self._gain().expand(self.hidden_size).contiguous(), self.eps

    def times_gain(self, unit: Tensor) -> Tensor:
        return self._gain() * unit


class SeeDNorm(Norm):
    """``y = (tanh(dot(x, b)) * a + gamma) * x / sqrt(mean(x^2) + eps)``, one dot product per token.

    gamma and a start at 1 and b at 0, where this is RMSNorm. a and b are weight-decayed. Statistics are in float32.
    gamma = ``weight``, a = ``alpha`` and b = ``beta`` have shape ``(d,)``.

    Source: Self-Rescaled Dynamic Normalization (2510.22777).
    """

    operations = 8.0
    kernel, add_kernel = staticmethod(nk.seed_norm), staticmethod(nk.add_seed_norm)
    alpha: nn.Parameter
    beta: nn.Parameter

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size)
        self.eps = eps
        self.add_parameter("weight", hidden_size, 1.0)
        self.add_parameter("alpha", hidden_size, 1.0)
        self.add_parameter("beta", hidden_size, 0.0)

    def starting_map(self) -> StartingMap:
        return StartingMap(eps=self.eps)

    def operands(self) -> tuple[Tensor, Tensor, Tensor, float]:
        return self.gamma(), self.alpha, self.beta, self.eps


class GatedNorm(Norm):
    """``y = n * sigmoid(W_up silu(W_down n))`` with ``n = gamma * x / sqrt(mean(x^2) + eps)``.

    W_up starts at 0, so the gate starts at 1/2. W_down starts N(0, std). In a model it is drawn from a stream of its
    place's own, so other weights do not change. These starts are ours.

    gamma = ``weight`` has shape ``(d,)``, W_down = ``down`` ``(r, d)`` and W_up = ``up`` ``(d, r)``.

    Args:
        hidden_size: d.
        eps: added to the mean square.
        rank: r.
        std: standard deviation of W_down at the start.

    Source: GatedNorm (2601.22966).
    """

    shown = ("eps", "rank")
    down: nn.Parameter
    up: nn.Parameter

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, rank: int = 16, std: float = 0.02) -> None:
        super().__init__(hidden_size)
        self.eps, self.rank, self.std = eps, rank, std
        self.operations = 6.0 + 4.0 * rank
        self.add_parameter("weight", hidden_size, 1.0)
        self.add_parameter("down", (rank, hidden_size), 0.0)
        self.add_parameter("up", (hidden_size, rank), 0.0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.down, std=self.std)

    def starting_map(self) -> StartingMap:
        return StartingMap(gain=0.5, eps=self.eps)

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        n = self.gamma() * (x32 * torch.rsqrt(exact_mean_square(x32) + self.eps)).to(x.dtype)
        return n * F.linear(F.silu(F.linear(n, self.down)), self.up).sigmoid()
