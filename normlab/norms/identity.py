"""The place of a norm where a scheme has none."""

from __future__ import annotations

from torch import Tensor

from normlab.norms.base import Norm, StartingMap


class NoNorm(Norm):
    """y = x; no parameters."""

    numbers = 0.0
    operations = 0.0

    def reset_parameters(self) -> None:
        pass

    def starting_map(self) -> StartingMap:
        return StartingMap()

    def forward(self, x: Tensor) -> Tensor:
        return x

    def shares(self, x: Tensor, parts: Tensor) -> Tensor:
        return parts
