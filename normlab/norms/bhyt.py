"""Bounded Hyperbolic Tangent, and the same map without its tanh."""

from __future__ import annotations

from typing import Any

import normlab_kernels as nk
import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width
from normlab.norms.rms import mean_square as exact_mean_square


class BHyT(Norm):
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
        gain: what every element of gamma starts at.
        bounded: false drops the tanh, y = gamma * z: the control that keeps everything else.

    Raises:
        NormlabError: d below 1, lam or kappa not positive.

    Source: Bounded Hyperbolic Tangent (2601.09719).
    """

    takes_mean_square = True

    def __init__(
        self,
        d: int,
        lam: float = 2.0,
        kappa: float = 10.0,
        *,
        learnable_lam: bool = True,
        eps: float = 1e-6,
        gain: float = 1.0,
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
        self.gain = gain
        self.bounded = bounded
        self.operations = 5.0 if bounded else 4.0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.lam, self.initial_lam)
        nn.init.constant_(self.weight, self.gain - self.centre)

    def starting_map(self) -> StartingMap:
        function = torch.tanh if self.bounded else None
        return StartingMap(self.initial_lam / self.kappa, self.gain, self.eps, function, reach=self.kappa)

    @property
    def slope(self) -> Tensor:
        """lambda/kappa, the slope of tanh's argument in x / sqrt(ms + eps); (1,), float32."""
        return self.lam.float() / self.kappa

    def tanh_input(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        """z = (lambda/kappa) * x / sqrt(ms + eps), the argument of tanh, in float32; shape of x."""
        ms = exact_mean_square(x) if mean_square is None else mean_square
        return self.slope * (x.float() * torch.rsqrt(ms + self.eps))

    def forward(self, x: Tensor, mean_square: Tensor | None = None, return_mean_square: bool = False):
        ms = mean_square
        if not self.bounded and not nk.chooses_kernels(x, self.kernels):
            ms = exact_mean_square(x) if ms is None else ms
            y = self.gamma() * self.tanh_input(x, ms).to(x.dtype)
        elif ms is None:
            y, ms = nk.bhyt(x, self.gamma(), self.lam, **self._options())
        else:
            y = nk.bhyt_carried(x, self.gamma(), self.lam, ms, **self._options())
        return (y, ms) if return_mean_square else y

    def add(
        self, x: Tensor, residual: Tensor, mean_square: Tensor | None = None, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """s = residual + x and y = norm(s), shapes of x: (s, y), by the kernels in one pass; `correction`, a constant,
        is added to the mean square that is given, by the kernel where no gradient is wanted."""
        if mean_square is None:
            return nk.add_bhyt(x, residual, self.gamma(), self.lam, **self._options())[:2]
        operands = (x, residual, self.gamma(), self.lam, mean_square)
        return nk.add_bhyt_carried(*operands, correction=correction, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"kappa": self.kappa, "eps": self.eps, "bounded": self.bounded, "kernels": self.kernels}

    def extra_repr(self) -> str:
        bounded = "" if self.bounded else ", bounded=False"
        start = f"lam={self.initial_lam:g}, kappa={self.kappa:g}, gain={self.gain:g}"
        return f"{self.weight.numel()}, {start}, eps={self.eps}{bounded}"
