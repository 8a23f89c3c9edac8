"""Norms with a centred statistic: LayerNorm and its compressed form."""

from __future__ import annotations

import normlab_kernels as nk
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.norms.base import Norm, StartingMap


class LayerNorm(Norm):
    """``y = gamma * (x - mean(x)) / sqrt(var(x) + eps) + beta``, biased variance, statistics in float32.

    gamma = ``weight`` and beta = ``bias`` have shape ``(d,)``. beta may be None.

    y has the wider dtype of x and gamma, as RMSNorm's has, but on a CPU x's, as PyTorch's LayerNorm gives it. So norms
    in float32 leave a stream in half precision as it is there.

    Args:
        hidden_size: d.
        eps: added to the variance.

    Source: Ba, Kiros & Hinton, Layer Normalization (1607.06450).
    """

    operations = 7.0
    kernel, add_kernel = staticmethod(nk.layer_norm), staticmethod(nk.add_layer_norm)
    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size)
        self.eps = eps
        self.add_parameter("weight", hidden_size, 1.0)
        self.add_parameter("bias", hidden_size, 0.0)

    def starting_map(self) -> StartingMap:
        """Features have mean 0, as in a wide residual stream before training."""
        return StartingMap(eps=self.eps)

    def operands(self) -> tuple[Tensor, Tensor | None, float]:
        return self.gamma(), self.bias, self.eps

    def forward(self, x: Tensor) -> Tensor:
        if nk.chooses_kernels(x, self.kernels):
            return super().forward(x)
        gamma, bias, eps = self.operands()
        wide = torch.promote_types(x.dtype, torch.float32)  # PyTorch sums gradients of 16 bits in 16 bits
        y = F.layer_norm(x.to(wide), gamma.shape, gamma.to(wide), None if bias is None else bias.to(wide), eps)
        return y.to(x.dtype if x.device.type == "cpu" else torch.promote_types(x.dtype, gamma.dtype))

    def shares(self, x: Tensor, parts: Tensor) -> Tensor:
        """As in every norm, but each part is centred first."""
        centred = x - x.mean(-1, keepdim=True)
        factor = self.gamma() / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return factor * (parts - parts.mean(-1, keepdim=True))


class CRMSNorm(Norm):
    """``y = gamma * x / sqrt((sum x^2 + (sum x)^2) / (d + 1) + eps)``, statistics in float32.

    The last of d + 1 numbers with mean zero is ``-sum x`` of the first d. The root is the rms of all d + 1 numbers. So
    this is LayerNorm of the whole vector, computed from its first d numbers.

    gamma = ``weight`` has shape ``(d,)``.

    Source: Pre-RMSNorm and Pre-CRMSNorm Transformers (2305.14858). The formula is derived as above and tested.
    """

    operations = 5.0
    kernel, add_kernel = staticmethod(nk.crms_norm), staticmethod(nk.add_crms_norm)

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size)
        self.eps = eps
        self.add_parameter("weight", hidden_size, 1.0)

    def starting_map(self) -> StartingMap:
        """For independent features ``(sum x)^2 / sum x^2`` is chi-squared.

        The mean square of the output is then ``E[1/(1 + chi^2_1)] = 0.6557`` at large d, from the normal integral.
        """
        return StartingMap(gain=0.6557**0.5, eps=self.eps)

    def operands(self) -> tuple[Tensor, float]:
        return self.gamma(), self.eps
