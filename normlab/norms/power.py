"""PowerNorm: a batch norm without a mean, whose two batch statistics are running ones."""

from __future__ import annotations

from torch import Tensor

from normlab.norms.running import RunningNorm


class PowerNorm(RunningNorm):
    """y = gamma z + beta, z = x / sqrt(s + eps), s_t = alpha s_{t-1} + (1 - alpha) mean(x^2) over a batch's tokens.

    After the warm-up a step divides by s_{t-1}, with the gradient (g - nu_{t-1} z) / sqrt(s_{t-1} + eps), g = gamma
    dL/dy; then nu_t = nu_{t-1} (1 - (1 - alpha) mean(z^2)) + (1 - alpha) mean(g z). In the warm-up it divides by the
    batch's own mean square.

    As in the paper; the released code also scales every token's groups of features by their own rms first, and divides
    the gradient by the batch's own statistic.

    Arguments, shapes, errors: `RunningNorm`.

    Source: PowerNorm (2003.07845), algorithm 2; the warm-up from its code.
    """

    def _used(self, own: Tensor) -> Tensor:
        return own if self.warming else self.mean_square.float()

    def _psi(self, gradient: Tensor) -> Tensor:
        return self.gradient.float()

    def _update(self, step: int, mean_square: Tensor, gradient: Tensor, square: Tensor) -> None:
        fresh = 1 - self.momentum
        self.mean_square.lerp_(mean_square.to(self.mean_square.dtype), self._rate(step))
        self.gradient.mul_(1 - fresh * square).add_(fresh * gradient)
