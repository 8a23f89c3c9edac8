"""Row norms as data: every function of the package is one `RowSpec`.

All of them are, for one row x of width d,

    y = weight * act(z) + bias * h,   z = gain * (x - mean) * rstd + shift,

with `gain = scale / kappa` and `rstd = rsqrt(ms + eps)`. The scale is BHyT's lambda, or DyT's and Derf's alpha with
kappa 1, or absent. The statistic ms is reduced from the row, given by the caller, each number's own, or absent. h is 1.
For a function with a direction it is tanh(x . direction) act(z) (SeeDNorm, whose alpha is the bias).
"""

from __future__ import annotations

from typing import NamedTuple


class Stat:
    """The source of rstd."""

    NONE = 0  # no statistic: rstd = 1
    RMS = 1  # ms = mean(x^2)
    LAYER = 2  # mean(x) and the biased variance
    GIVEN = 3  # ms is an input
    COMPRESSED = 4  # ms = (sum(x^2) + sum(x)^2) / (d + 1): of x and the one number more that makes its mean 0
    OWN = 5  # ms = (x^2 + |scale|) / d, of each number by itself: the scale is the others' sum of squares, the gain 1


class Act:
    """The function applied to z."""

    IDENTITY = 0
    TANH = 1
    ERF = 2


class RowSpec(NamedTuple):
    """One function: its statistic, its activation and its two constants."""

    stat: int
    act: int
    eps: float = 0.0
    kappa: float = 1.0

    @property
    def reduces(self) -> bool:
        """True if the statistic is reduced from the row."""
        return self.stat in (Stat.RMS, Stat.LAYER, Stat.COMPRESSED)


class Function(NamedTuple):
    """A public function as data: its formula at the default constants, and the tensors it takes and returns.

    Tests, the ahead-of-time table and the benchmark read it: a further row function is one entry.
    """

    spec: RowSpec
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("y",)

    @property
    def residual(self) -> bool:
        return "residual" in self.inputs

    def shapes(self, rows: int, width: int) -> dict[str, tuple[int, ...]]:
        """The shape of each input, for that many rows."""
        known = {"x": (rows, width), "residual": (rows, width), "given": (rows, 1), "scale": (1,), "shift": (1,)}
        return {name: known.get(name, (width,)) for name in self.inputs}


_BHYT = {"eps": 1e-6, "kappa": 10.0}
_PLAIN = {
    "bhyt": Function(RowSpec(Stat.RMS, Act.TANH, **_BHYT), ("x", "weight", "scale"), ("y", "ms")),
    "bhyt_carried": Function(RowSpec(Stat.GIVEN, Act.TANH, **_BHYT), ("x", "weight", "scale", "given")),
    "rms_norm": Function(RowSpec(Stat.RMS, Act.IDENTITY, 1e-6), ("x", "weight")),
    "layer_norm": Function(RowSpec(Stat.LAYER, Act.IDENTITY, 1e-5), ("x", "weight", "bias")),
    "crms_norm": Function(RowSpec(Stat.COMPRESSED, Act.IDENTITY, 1e-6), ("x", "weight")),
    "seed_norm": Function(RowSpec(Stat.RMS, Act.IDENTITY, 1e-6), ("x", "weight", "bias", "direction")),
    "isru": Function(RowSpec(Stat.OWN, Act.IDENTITY), ("x", "weight", "scale")),
    "dyt": Function(RowSpec(Stat.NONE, Act.TANH), ("x", "weight", "bias", "scale")),
    "derf": Function(RowSpec(Stat.NONE, Act.ERF), ("x", "weight", "bias", "scale", "shift")),
    "bhyt unbounded": Function(RowSpec(Stat.RMS, Act.IDENTITY, **_BHYT), ("x", "weight", "scale"), ("y", "ms")),
    "bhyt_carried unbounded": Function(RowSpec(Stat.GIVEN, Act.IDENTITY, **_BHYT), ("x", "weight", "scale", "given")),
}
FUNCTIONS = (
    _PLAIN
    | {  # with the addition, whose sum comes first
        f"add_{name}": Function(spec, ("x", "residual", *inputs[1:]), ("s", *outputs))
        for name, (spec, inputs, outputs) in _PLAIN.items()
        if name not in ("derf", "bhyt unbounded")
    }
)
