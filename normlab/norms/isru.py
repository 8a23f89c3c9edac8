"""Dynamic inverse square root unit: LayerNorm's own function of one channel, without the others."""

from __future__ import annotations

import normlab_kernels as nk
import torch
from torch import Tensor, nn

from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width


class DyISRU(Norm):
    """y = gamma sqrt(d) x / sqrt(|b| + x^2), elementwise; b a learned scalar for what LayerNorm has the other channels'
    sum of squares.

    Shapes: x and y (..., d); gamma = ``weight`` (d,); b = ``square`` (1,).

    Args:
        hidden_size: d.
        square: b's starting value; None: d - 1, the other channels' sum of squares where each has 1. (The paper fits
            it; the start is ours.)

    Raises:
        NormlabError: hidden_size below 1.

    Source: The mathematical relationship between layer normalization and dynamic activation functions (2503.21708).
    """

    operations = 5.0

    def __init__(self, hidden_size: int, square: float | None = None) -> None:
        super().__init__()
        check_width(hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.square = nn.Parameter(torch.empty(1))
        self.initial_square = max(hidden_size - 1.0, 1.0) if square is None else square
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.centre)
        nn.init.constant_(self.square, self.initial_square)

    def starting_map(self) -> StartingMap:
        d, b = self.weight.numel(), self.initial_square
        return StartingMap(function=lambda x: d**0.5 * x * (b + x * x).rsqrt())

    def forward(self, x: Tensor) -> Tensor:
        return nk.isru(x, self.gamma(), self.square, kernels=self.kernels)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """s = residual + x and y = norm(s), shapes of x: (s, y), by the kernels in one pass."""
        return nk.add_isru(x, residual, self.gamma(), self.square, kernels=self.kernels)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, square={self.initial_square:g}"
