"""CRMSNorm: LayerNorm of a zero-mean vector, from all its numbers but the last."""

from __future__ import annotations

import normlab_kernels as nk
import torch
from torch import Tensor, nn

from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width


class CRMSNorm(Norm):
    """y = gamma x / sqrt((sum x^2 + (sum x)^2) / (d + 1) + eps), statistics in float32.

    A vector of d + 1 numbers with mean zero is known from its first d: the last is -sum x, and the mean square of all
    is what stands under the root. So this is the first d numbers of LayerNorm (or RMSNorm) of the whole vector.

    Shapes: x and y (..., d); gamma = ``weight`` (d,).

    Raises:
        NormlabError: hidden_size below 1.

    Source: Pre-RMSNorm and Pre-CRMSNorm Transformers (2305.14858); the formula derived as above and tested so.
    """

    operations = 5.0

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        check_width(hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.centre)

    def starting_map(self) -> StartingMap:
        """Of independent features: (sum x)^2 is then chi-squared about sum x^2, and E[1/(1 + chi^2_1)] = 0.6557 (to
        four digits, from the normal integral) the mean square that leaves, d large."""
        return StartingMap(gain=0.6557**0.5, eps=self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return nk.crms_norm(x, self.gamma(), self.eps, kernels=self.kernels)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """s = residual + x and y = norm(s), shapes of x: (s, y), by the kernels in one pass."""
        return nk.add_crms_norm(x, residual, self.gamma(), self.eps, kernels=self.kernels)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
