"""What a row norm computes, as data: every function of the package is one `RowSpec`.

All of them are, for one row x of width d,

    y = weight * act(z) + bias,   z = gain * (x - mean) * rstd + shift,

with `gain = scale / kappa` (BHyT's lambda, DyT's and Derf's alpha with kappa 1, or absent), `rstd = rsqrt(ms + eps)`
of a statistic that is reduced from the row, given by the caller, or absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Stat(IntEnum):
    """Where rstd comes from."""

    NONE = 0  # no statistic: rstd = 1
    RMS = 1  # ms = mean(x^2)
    LAYER = 2  # mean(x) and the biased variance
    GIVEN = 3  # ms is an input


class Act(IntEnum):
    """The function applied to z."""

    IDENTITY = 0
    TANH = 1
    ERF = 2


@dataclass(frozen=True)
class RowSpec:
    """One function: its statistic, its activation and its two constants."""

    stat: Stat
    act: Act
    eps: float = 0.0
    kappa: float = 1.0
