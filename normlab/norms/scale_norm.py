"""ScaleNorm: RMSNorm with one gain for all channels."""

from __future__ import annotations

import normlab_kernels as nk
import torch
from torch import Tensor, nn

from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width


class ScaleNorm(Norm):
    """y = g x / ||x||, one scalar g that starts at sqrt(d); or, with ``rms``, y = g x / rms(x), g from 1.

    The same function in two parametrisations: under Adam the second g moves by sqrt(d) times as much a step. eps is
    added to the mean square, so that both agree to the bit's rounding; statistics in float32.

    Shapes: x and y (..., d); g = ``weight`` (1,).

    Args:
        hidden_size: d.
        eps: added to the mean square.
        rms: divide by rms(x) instead of ||x||: the single-scale RMSNorm of Outlier-Safe Pre-Training.

    Raises:
        NormlabError: hidden_size below 1.

    Source: Nguyen & Salazar, Transformers without Tears (1910.05895); with ``rms``, Outlier-Safe Pre-Training
    (2506.19697).
    """

    takes_mean_square = True

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, rms: bool = False) -> None:
        super().__init__()
        check_width(hidden_size)
        self.weight = nn.Parameter(torch.empty(1))
        self.hidden_size, self.eps, self.rms = hidden_size, eps, rms
        self.start = 1.0 if rms else hidden_size**0.5
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start - self.centre)

    def starting_map(self) -> StartingMap:
        return StartingMap(eps=self.eps)

    def forward(self, x: Tensor, mean_square: Tensor | None = None, return_mean_square: bool = False):
        if mean_square is None and not return_mean_square and nk.chooses_kernels(x, self.kernels):
            return nk.rms_norm(x, self._gains(), self.eps, kernels=self.kernels)
        x32 = x.float()
        ms = x32.square().mean(-1, keepdim=True) if mean_square is None else mean_square
        unit = x32 * torch.rsqrt(ms + self.eps)
        y = self._gain() * unit.to(x.dtype)
        return (y, ms) if return_mean_square else y

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """s = residual + x and y = norm(s), shapes of x: (s, y), by the kernels in one pass."""
        return nk.add_rms_norm(x, residual, self._gains(), self.eps, kernels=self.kernels)

    def _gain(self) -> Tensor:
        return self.gamma() if self.rms else self.gamma() * self.hidden_size**-0.5

    def _gains(self) -> Tensor:
        """The gain once a channel, as RMSNorm's kernel reads it."""
        return self._gain().expand(self.hidden_size).contiguous()

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, rms={self.rms}"
