"""What a row norm computes, as data: every function of the package is one `RowSpec`.

All of them are, for one row x of width d,

    y = weight * act(z) + bias,   z = gain * (x - mean) * rstd + shift,

with `gain = scale / kappa` (BHyT's lambda, DyT's and Derf's alpha with kappa 1, or absent), `rstd = rsqrt(ms + eps)`
of a statistic that is reduced from the row, given by the caller, or absent.
"""

from __future__ import annotations

from typing import NamedTuple


class Stat:
    """Where rstd comes from."""

    NONE = 0  # no statistic: rstd = 1
    RMS = 1  # ms = mean(x^2)
    LAYER = 2  # mean(x) and the biased variance
    GIVEN = 3  # ms is an input


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
        """Whether the statistic is the row's own."""
        return self.stat in (Stat.RMS, Stat.LAYER)


class Function(NamedTuple):
    """A public function as data: its formula at the default constants, the tensors it takes, in the order of its
    arguments, and those it returns. Tests, the ahead-of-time table and the benchmark read it: a further row function is
    one entry."""

    spec: RowSpec
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("y",)

    @property
    def residual(self) -> bool:
        return "residual" in self.inputs


_BHYT = {"eps": 1e-6, "kappa": 10.0}
_PLAIN = {
    "bhyt": Function(RowSpec(Stat.RMS, Act.TANH, **_BHYT), ("x", "weight", "scale"), ("y", "ms")),
    "bhyt_carried": Function(RowSpec(Stat.GIVEN, Act.TANH, **_BHYT), ("x", "weight", "scale", "given")),
    "rms_norm": Function(RowSpec(Stat.RMS, Act.IDENTITY, 1e-6), ("x", "weight")),
    "layer_norm": Function(RowSpec(Stat.LAYER, Act.IDENTITY, 1e-5), ("x", "weight", "bias")),
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
