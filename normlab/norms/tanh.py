"""Norms that bound each feature: DyT, BHyT, Derf and DyISRU."""

from __future__ import annotations

from typing import Any

import normlab_kernels as nk
import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.norms.base import Norm, StartingMap, added
from normlab.norms.base import mean_square as exact_mean_square


class DyT(Norm):
    """``y = gamma * tanh(alpha * x)``, without statistics, eps or beta (the language-model form).

    gamma = ``weight`` has shape ``(d,)``, the scalar ``alpha`` ``(1,)``.

    Args:
        hidden_size: d.
        alpha: start. At large width the attention's is larger than the others.

    Source: Zhu et al., Transformers without Normalization (2503.10622).
    """

    operations = 3.0
    kernel, add_kernel = staticmethod(nk.dyt), staticmethod(nk.add_dyt)
    shown = ("starts",)
    alpha: nn.Parameter

    def __init__(self, hidden_size: int, alpha: float = 0.5) -> None:
        super().__init__(hidden_size)
        self.add_parameter("alpha", 1, alpha)
        self.add_parameter("weight", hidden_size, 1.0)

    def starting_map(self) -> StartingMap:
        return StartingMap(slope=self.starts["alpha"], function=torch.tanh)

    def tanh_input(self, x: Tensor) -> Tensor:
        """``z = alpha * x`` in float32, shape of x."""
        return self.alpha.float() * x.float()

    def operands(self) -> tuple[Tensor, None, Tensor]:
        return self.gamma(), None, self.alpha


class BHyT(Norm):
    """``y = gamma * tanh(z)``, ``z = (lambda/kappa) * x / sqrt(ms + eps)``; ms is mean(x^2) or a carried statistic.

    When ms is exact, at most 1/kappa^2 of a token's z lie outside [-lambda, lambda], by Chebyshev, and
    ``|z| <= lambda*sqrt(d)/kappa``. A carried ms multiplies the first by ``ms_exact/ms`` and the second by its root.
    Gradients flow through ms.

    ms has shape ``(..., 1)`` and is float32. gamma = ``weight`` has shape ``(d,)``, ``lam`` ``(1,)``.

    Args:
        d: width.
        lam: start of lambda.
        kappa: constant divisor. Only lambda/kappa enters the map. kappa rescales lambda's learning rate.
        learnable_lam: a parameter if true, else a saved buffer that is never trained.
        eps: added to the mean square.
        gain: start of gamma.
        bounded: false drops the tanh, ``y = gamma * z``. This is the control that keeps everything else.

    Raises:
        NormlabError: d below 1, lam or kappa not positive.

    Source: Bounded Hyperbolic Tangent (2601.09719).
    """

    takes_mean_square = True
    shown = ("starts", "kappa", "eps", "bounded")
    lam: nn.Parameter

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
        super().__init__(d)
        if not (lam > 0 and kappa > 0):  # written this way so that NaN is rejected
            raise NormlabError(f"lam is {lam} and kappa is {kappa}: both must be positive")
        self.kappa, self.eps, self.bounded = kappa, eps, bounded
        self.operations = 5.0 if bounded else 4.0
        self.add_parameter("weight", d, gain)
        (self.add_parameter if learnable_lam else self.add_buffer)("lam", 1, lam)

    def starting_map(self) -> StartingMap:
        function = torch.tanh if self.bounded else None
        return StartingMap(self.starts["lam"] / self.kappa, self.starts["weight"], self.eps, function, self.kappa)

    @property
    def slope(self) -> Tensor:
        """lambda/kappa in float32, ``(1,)``: the slope of tanh's argument in x/rms(x)."""
        return self.lam.float() / self.kappa

    def tanh_input(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        """``z = (lambda/kappa) * x / sqrt(ms + eps)`` in float32, shape of x."""
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
        """Return ``s = residual + x`` and norm(s), in one pass where kernels compute or there is a tanh.

        Args:
            mean_square: carried statistic. None: of s.
            correction: constant that is added to it, by the kernel where no gradient is needed.

        Raises NormlabError, or the kernels' ValueError, for a residual of another shape than x.
        """
        if not self.bounded and not nk.chooses_kernels(residual, self.kernels, x):
            if mean_square is not None and correction is not None:
                correction = correction.detach()
                mean_square = mean_square + (correction.reshape(1) if correction.numel() == 1 else correction)
            s = added(x, residual)
            return s, self(s, mean_square)
        if mean_square is None:
            return nk.add_bhyt(x, residual, self.gamma(), self.lam, **self._options())[:2]
        operands = (x, residual, self.gamma(), self.lam, mean_square)
        return nk.add_bhyt_carried(*operands, correction=correction, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"kappa": self.kappa, "eps": self.eps, "bounded": self.bounded, "kernels": self.kernels}


class Derf(Norm):
    """``y = gamma * erf(alpha * x + s) + beta``, scalars alpha and s, without statistics or eps.

    gamma = ``weight`` and beta = ``bias`` have shape ``(d,)``, ``alpha`` and s = ``shift`` ``(1,)``.

    Args:
        hidden_size: d.
        alpha: start, 0.5 in vision and 1 in language models. s and beta start at 0.

    Source: Stronger Normalization-Free Transformers (2512.10938).
    """

    operations = 5.0
    kernel = staticmethod(nk.derf)
    shown = ("starts",)
    alpha: nn.Parameter
    shift: nn.Parameter
    bias: nn.Parameter

    def __init__(self, hidden_size: int, alpha: float = 1.0) -> None:
        super().__init__(hidden_size)
        self.add_parameter("alpha", 1, alpha)
        self.add_parameter("shift", 1, 0.0)
        self.add_parameter("weight", hidden_size, 1.0)
        self.add_parameter("bias", hidden_size, 0.0)

    def starting_map(self) -> StartingMap:
        return StartingMap(slope=self.starts["alpha"], function=torch.erf)

    def erf_input(self, x: Tensor) -> Tensor:
        """``z = alpha * x + s`` in float32, shape of x."""
        return self.alpha.float() * x.float() + self.shift.float()

    def operands(self) -> tuple[Tensor, ...]:
        return self.gamma(), self.bias, self.alpha, self.shift

    def constant(self) -> Tensor:
        """``gamma * erf(s) + beta``: the output at x = 0."""
        return self.gamma() * torch.erf(self.shift) + self.bias


class DyISRU(Norm):
    """``y = gamma * sqrt(d) * x / sqrt(|b| + x^2)`` elementwise.

    The learned scalar b replaces the other channels' sum of squares in LayerNorm. gamma = ``weight`` has shape
    ``(d,)``, b = ``square`` ``(1,)``.

    Args:
        hidden_size: d.
        square: start of b. None: d - 1, the other channels' sum of squares where each has 1. The paper fits it.

    Source: The mathematical relationship between layer normalization and dynamic activation functions (2503.21708).
    """

    operations = 5.0
    kernel, add_kernel = staticmethod(nk.isru), staticmethod(nk.add_isru)
    shown = ("starts",)
    square: nn.Parameter

    def __init__(self, hidden_size: int, square: float | None = None) -> None:
        super().__init__(hidden_size)
        self.add_parameter("weight", hidden_size, 1.0)
        self.add_parameter("square", 1, max(hidden_size - 1.0, 1.0) if square is None else square)

    def starting_map(self) -> StartingMap:
        d, b = self.weight.numel(), self.starts["square"]
        return StartingMap(function=lambda x: d**0.5 * x * (b + x * x).rsqrt())

    def operands(self) -> tuple[Tensor, Tensor]:
        return self.gamma(), self.square
