"""Dynamic erf: DyT with the error function, a shift and a bias."""

from __future__ import annotations

import normlab_kernels as nk
import torch
from torch import Tensor, nn

from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width


class Derf(Norm):
    """y = gamma erf(alpha x + s) + beta, scalars alpha and s, no statistics and no eps.

    Shapes: x and y (..., d); gamma = ``weight`` and beta = ``bias`` (d,); ``alpha`` and s = ``shift`` (1,).

    Args:
        hidden_size: d.
        alpha: starting value; 0.5 in vision, 1 in language models. s and beta start at 0.

    Raises:
        NormlabError: hidden_size below 1.

    Source: Stronger Normalization-Free Transformers (2512.10938).
    """

    operations = 5.0

    def __init__(self, hidden_size: int, alpha: float = 1.0) -> None:
        super().__init__()
        check_width(hidden_size)
        self.alpha = nn.Parameter(torch.empty(1))
        self.shift = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.initial_alpha = alpha
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.initial_alpha)
        nn.init.zeros_(self.shift)
        nn.init.constant_(self.weight, 1.0 - self.centre)
        nn.init.zeros_(self.bias)

    def starting_map(self) -> StartingMap:
        return StartingMap(slope=self.initial_alpha, function=torch.erf)

    def forward(self, x: Tensor) -> Tensor:
        return nk.derf(x, self.gamma(), self.bias, self.alpha, self.shift, kernels=self.kernels)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, alpha={self.initial_alpha:g}"
