"""SeeDNorm: an RMSNorm whose gain depends on its input."""

from __future__ import annotations

import normlab_kernels as nk
import torch
from torch import Tensor, nn

from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width


class SeeDNorm(Norm):
    """y = (tanh(x . b) a + gamma) x / sqrt(mean(x^2) + eps), a dot product a token, statistics in float32.

    gamma and a start at 1, b at 0, where it is RMSNorm. a and b are weight-decayed.

    Shapes: x and y (..., d); gamma = ``weight``, a = ``alpha``, b = ``beta`` (d,).

    Raises:
        NormlabError: hidden_size below 1.

    Source: Self-Rescaled Dynamic Normalization (2510.22777).
    """

    operations = 8.0

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        check_width(hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.alpha = nn.Parameter(torch.empty(hidden_size))
        self.beta = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.centre)
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.beta)

    def starting_map(self) -> StartingMap:
        return StartingMap(eps=self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return nk.seed_norm(x, self.gamma(), self.alpha, self.beta, self.eps, kernels=self.kernels)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """s = residual + x and y = norm(s), shapes of x: (s, y), by the kernels in one pass."""
        return nk.add_seed_norm(x, residual, self.gamma(), self.alpha, self.beta, self.eps, kernels=self.kernels)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
