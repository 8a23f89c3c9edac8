"""Bounded Hyperbolic Tangent, and the same map without its tanh."""

from __future__ import annotations

import normlab_kernels as nk
import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.norms.rms import check_width
from normlab.norms.rms import mean_square as exact_mean_square


class BHyT(nn.Module):
    """y = gamma * tanh(z), z = (lambda/kappa) * x / sqrt(ms + eps), where ms is mean(x^2) or a statistic carried over.

    By Chebyshev, at most a share 1/kappa^2 of a token's z lies outside [-lambda, lambda] when ms is exact, and
    (ms_exact/ms)/kappa^2 when it is carried; |z| <= lambda*sqrt(d)/kappa always. Gradients flow through ms.

    Shapes: x and y (..., d); ms (..., 1) in float32; gamma = ``weight`` (d,); ``lam`` (1,).

    Args:
        d: width.
        lam: lambda's starting value.
        kappa: constant divisor. Only lambda/kappa enters the map; kappa rescales lambda's learning rate.
        learnable_lam: a parameter if true, else a buffer that is saved but never trained.
        eps: added to the mean square.
        bounded: false drops the tanh, y = gamma * z: the control that keeps everything else.

    Raises:
        NormlabError: d below 1, lam or kappa not positive.

    Source: Bounded Hyperbolic Tangent (2601.09719).
    """

    def __init__(
        self,
        d: int,
        lam: float = 2.0,
        kappa: float = 10.0,
        *,
        learnable_lam: bool = True,
        eps: float = 1e-6,
        bounded: bool = True,
    ) -> None:
        super().__init__()
        check_width(d)
        if not (lam > 0 and kappa > 0):  # so put, NaN is refused too
            raise NormlabError(f"lam is {lam} and kappa is {kappa}: both must be positive")
        self.weight = nn.Parameter(torch.empty(d))
        if learnable_lam:
            self.lam = nn.Parameter(torch.empty(1))
        else:
            self.register_buffer("lam", torch.empty(1))
        self.initial_lam = lam
        self.kappa = kappa
        self.eps = eps
        self.bounded = bounded
        self.kernels = "auto"
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.lam, self.initial_lam)
        nn.init.ones_(self.weight)

    def tanh_input(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        """z = (lambda/kappa) * x / sqrt(ms + eps), the argument of tanh, in float32; shape of x."""
        ms = exact_mean_square(x) if mean_square is None else mean_square
        return (self.lam.float() / self.kappa) * (x.float() * torch.rsqrt(ms + self.eps))

    def forward(self, x: Tensor, mean_square: Tensor | None = None, return_mean_square: bool = False):
        if not self.bounded:
            ms = exact_mean_square(x) if mean_square is None else mean_square
            y = self.weight * self.tanh_input(x, ms).to(x.dtype)
        elif mean_square is None:
            y, ms = nk.bhyt(x, self.weight, self.lam, self.kappa, self.eps, kernels=self.kernels)
        else:
            ms = mean_square
            y = nk.bhyt_carried(x, self.weight, self.lam, ms, self.kappa, self.eps, kernels=self.kernels)
        return (y, ms) if return_mean_square else y

    def extra_repr(self) -> str:
        bounded = "" if self.bounded else ", bounded=False"
        return f"{self.weight.numel()}, lam={self.initial_lam:g}, kappa={self.kappa:g}, eps={self.eps}{bounded}"
