"""Dynamic Tanh: normalization without statistics."""

from __future__ import annotations

import normlab_kernels as nk
import torch
from torch import Tensor, nn

from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width


class DyT(Norm):
    """y = gamma * tanh(alpha * x), one scalar alpha, no statistics and no eps; the language-model form without beta.

    Shapes: x and y (..., d); gamma = ``weight`` (d,); ``alpha`` (1,).

    Args:
        hidden_size: d.
        alpha: starting value of the learnable scalar; larger for attention than elsewhere at large width.

    Raises:
        NormlabError: hidden_size below 1.

    Source: Zhu et al., Transformers without Normalization (2503.10622).
    """

    operations = 3.0

    def __init__(self, hidden_size: int, alpha: float = 0.5) -> None:
        super().__init__()
        check_width(hidden_size)
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.initial_alpha = alpha
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.initial_alpha)
        nn.init.constant_(self.weight, 1.0 - self.centre)

    def starting_map(self) -> StartingMap:
        return StartingMap(slope=self.initial_alpha, function=torch.tanh)

    def tanh_input(self, x: Tensor) -> Tensor:
        """z = alpha * x, the argument of tanh, in float32; shape of x."""
        return self.alpha.float() * x.float()

    def forward(self, x: Tensor) -> Tensor:
        return nk.dyt(x, self.gamma(), None, self.alpha, kernels=self.kernels)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """s = residual + x and y = norm(s), shapes of x: (s, y), by the kernels in one pass."""
        return nk.add_dyt(x, residual, self.gamma(), None, self.alpha, kernels=self.kernels)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, alpha={self.initial_alpha:g}"
