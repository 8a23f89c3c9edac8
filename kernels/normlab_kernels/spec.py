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


@dataclass(frozen=True)
class Function:
    """A public function as data: its formula at the default constants, the tensors it takes, in the order of its
    arguments, and those it returns. Tests, the ahead-of-time table and
    the benchmark read it: a further row function is one entry."""

    spec: RowSpec
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("y",)

    @property
    def residual(self) -> bool:
        return "residual" in self.inputs


def _with_addition(functions: dict[str, Function]) -> dict[str, Function]:
    """Each function, and where there is one its `add_` form."""
    found = {}
    for name, function in functions.items():
        found[name] = function
        if name != "derf" and name != "bhyt unbounded":
            x, *others = function.inputs
            found[f"add_{name}"] = Function(function.spec, (x, "residual", *others), ("s", *function.outputs))
    return found


_BHYT = {"eps": 1e-6, "kappa": 10.0}
FUNCTIONS = _with_addition(
    {
        "bhyt": Function(RowSpec(Stat.RMS, Act.TANH, **_BHYT), ("x", "weight", "scale"), ("y", "ms")),
        "bhyt_carried": Function(RowSpec(Stat.GIVEN, Act.TANH, **_BHYT), ("x", "weight", "scale", "given")),
        "rms_norm": Function(RowSpec(Stat.RMS, Act.IDENTITY, 1e-6), ("x", "weight")),
        "layer_norm": Function(RowSpec(Stat.LAYER, Act.IDENTITY, 1e-5), ("x", "weight", "bias")),
        "dyt": Function(RowSpec(Stat.NONE, Act.TANH), ("x", "weight", "bias", "scale")),
        "derf": Function(RowSpec(Stat.NONE, Act.ERF), ("x", "weight", "bias", "scale", "shift")),
        "bhyt unbounded": Function(RowSpec(Stat.RMS, Act.IDENTITY, **_BHYT), ("x", "weight", "scale"), ("y", "ms")),
        "bhyt_carried unbounded": Function(
            RowSpec(Stat.GIVEN, Act.IDENTITY, **_BHYT), ("x", "weight", "scale", "given")
        ),
    }
)
