"""LayerNorm: centred statistics, gain and bias."""

from __future__ import annotations

import normlab_kernels as nk
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width


class LayerNorm(Norm):
    """y = gamma * (x - mean(x)) / sqrt(var(x) + eps) + beta, with the biased variance, statistics in float32.

    Shapes: x and y (..., d); gamma = ``weight`` and beta = ``bias`` (d,).

    Args:
        hidden_size: d.
        eps: added to the variance.

    Raises:
        NormlabError: hidden_size below 1.

    Source: Ba, Kiros & Hinton, Layer Normalization (1607.06450).
    """

    operations = 7.0

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        check_width(hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.centre)
        nn.init.zeros_(self.bias)

    def starting_map(self) -> StartingMap:
        """Of features whose mean is 0, as a wide residual stream's is before training."""
        return StartingMap(eps=self.eps)

    def shares(self, x: Tensor, parts: Tensor) -> Tensor:
        """As for every norm, with each part centred by itself."""
        centred = x - x.mean(-1, keepdim=True)
        factor = self.gamma() / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return factor * (parts - parts.mean(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        if nk.chooses_kernels(x, self.kernels):
            return nk.layer_norm(x, self.gamma(), self.bias, self.eps, kernels=self.kernels)
        return F.layer_norm(x, self.weight.shape, self.gamma(), self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """s = residual + x and y = norm(s), shapes of x: (s, y), by the kernels in one pass."""
        return nk.add_layer_norm(x, residual, self.gamma(), self.bias, self.eps, kernels=self.kernels)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
