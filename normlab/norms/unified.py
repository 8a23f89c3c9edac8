"""Unified Normalization: statistics of the last few batches, smoothed by their geometric mean."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normlab.norms.running import RunningNorm


class UnifiedNorm(RunningNorm):
    """y = gamma z + beta, z = x / sqrt(s + eps), s the geometric mean of mean(x^2) over the last M batches, this one
    too; out of training its running mean, alpha = 0.9.

    Gradient: (g - psi z) / sqrt(s + eps), g = gamma dL/dy, with psi_t = alpha psi_{t-1} + (1 - alpha) times the mean of
    mean(g z) over the last M batches, this one too. In the warm-up s and that mean are the batch's own.

    The paper also centres x in its general form, filters batches whose statistics stand out, and its code rescales the
    gradient by the ratio of s to its running mean: the code for language does without the first two, and the third, of
    which the paper's text does not speak, is left out here.

    Buffers beside those of `RunningNorm`: ``squares`` and ``gradients`` (M, d), a row a batch, the newest last.

    Args:
        window: M.

    Other arguments, shapes, errors: `RunningNorm`.

    Source: Unified Normalization for Accelerating Transformers (2208.01313), and its code.
    """

    squares: Tensor
    gradients: Tensor

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, window: int = 4, **shared: float) -> None:
        super().__init__(hidden_size, eps, **shared)
        self.register_buffer("squares", torch.empty(window, hidden_size))
        self.register_buffer("gradients", torch.empty(window, hidden_size))
        self.shortest_warmup = window  # until then the window holds what no batch had
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "squares" in self._buffers:  # not yet when the base resets itself
            nn.init.ones_(self.squares)
            nn.init.zeros_(self.gradients)

    def _used(self, own: Tensor) -> Tensor:
        return own if self.warming else self._geometric(torch.cat([self.squares[1:], own[None]]))

    def _geometric(self, squares: Tensor) -> Tensor:
        return squares.float().clamp_min(1e-30).log().mean(0).exp()

    def _psi(self, gradient: Tensor) -> Tensor:
        latest = gradient if self.warming else torch.cat([self.gradients[1:], gradient[None]]).mean(0)
        return self.gradient.float().lerp(latest.float(), 1 - self.momentum)

    def _update(self, step: int, mean_square: Tensor, gradient: Tensor, square: Tensor) -> None:
        used, psi = self._used(mean_square), self._psi(gradient)
        self.mean_square.lerp_(used.to(self.mean_square.dtype), self._rate(step))
        self.gradient.copy_(psi)
        for rows, new in ((self.squares, mean_square), (self.gradients, gradient)):
            rows.copy_(torch.cat([rows[1:], new[None].to(rows.dtype)]))
