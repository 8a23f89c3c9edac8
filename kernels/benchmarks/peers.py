"""Who is measured: this package, the plain formula, the compiler's version of it, PyTorch's fused norms, Liger, QuACK,
and BHyT's released decode kernel restated.

A peer that is not installed, or does not take a shape, leaves a note instead of a number. Nothing here is installed by
the benchmark: `pip install -e 'kernels[peers]'` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import normlab_kernels as nk
import torch
from normlab_kernels import dispatch
from normlab_kernels.moments import row_moments_reference
from normlab_kernels.reference import row_norm_reference
from normlab_kernels.spec import Act, RowSpec, Stat

Tensor = torch.Tensor
Call = Callable[[dict[str, Tensor]], Tensor | tuple[Tensor, ...]]


class Missing(Exception):
    """What cannot be measured here for lack of something, which is no failure."""


@dataclass(frozen=True)
class Function:
    """A benchmarked function: its arguments, and the rows of 16-bit numbers it must read and write (see the README)."""

    inputs: tuple[str, ...]
    forward_rows: int
    backward_rows: int
    spec: RowSpec | None  # row_moments is no norm


BHYT = RowSpec(Stat.RMS, Act.TANH, 1e-6, 10.0)
CARRIED = RowSpec(Stat.GIVEN, Act.TANH, 1e-6, 10.0)
CARRIED_UNBOUNDED = RowSpec(Stat.GIVEN, Act.IDENTITY, 1e-6, 10.0)
FUNCTIONS = {
    "rms_norm": Function(("x", "weight"), 2, 3, RowSpec(Stat.RMS, Act.IDENTITY, 1e-6)),
    "bhyt": Function(("x", "weight", "scale"), 2, 3, BHYT),
    "bhyt_carried": Function(("x", "weight", "scale", "given"), 2, 3, CARRIED),
    "bhyt_carried unbounded": Function(("x", "weight", "scale", "given"), 2, 3, CARRIED_UNBOUNDED),
    "layer_norm": Function(("x", "weight", "bias"), 2, 3, RowSpec(Stat.LAYER, Act.IDENTITY, 1e-5)),
    "dyt": Function(("x", "weight", "bias", "scale"), 2, 3, RowSpec(Stat.NONE, Act.TANH)),
    "add_rms_norm": Function(("x", "residual", "weight"), 4, 4, RowSpec(Stat.RMS, Act.IDENTITY, 1e-6)),
    "add_bhyt": Function(("x", "residual", "weight", "scale"), 4, 4, BHYT),
    "add_bhyt_carried": Function(("x", "residual", "weight", "scale", "given"), 4, 4, CARRIED),
    "derf": Function(("x", "weight", "bias", "scale", "shift"), 2, 3, RowSpec(Stat.NONE, Act.ERF)),
    "row_moments": Function(("x",), 1, 0, None),
}

OURS: dict[str, Call] = {
    "rms_norm": lambda a: nk.rms_norm(a["x"], a["weight"]),
    "bhyt": lambda a: nk.bhyt(a["x"], a["weight"], a["scale"])[0],
    "bhyt_carried": lambda a: nk.bhyt_carried(a["x"], a["weight"], a["scale"], a["given"]),
    "bhyt_carried unbounded": lambda a: nk.bhyt_carried(a["x"], a["weight"], a["scale"], a["given"], bounded=False),
    "layer_norm": lambda a: nk.layer_norm(a["x"], a["weight"], a["bias"]),
    "dyt": lambda a: nk.dyt(a["x"], a["weight"], a["bias"], a["scale"]),
    "add_rms_norm": lambda a: nk.add_rms_norm(a["x"], a["residual"], a["weight"]),
    "add_bhyt": lambda a: nk.add_bhyt(a["x"], a["residual"], a["weight"], a["scale"])[:2],
    "add_bhyt_carried": lambda a: nk.add_bhyt_carried(a["x"], a["residual"], a["weight"], a["scale"], a["given"]),
    "derf": lambda a: nk.derf(a["x"], a["weight"], a["bias"], a["scale"], a["shift"]),
    "row_moments": lambda a: tuple(nk.row_moments(a["x"])),
}


def formula(name: str) -> Call:
    """The plain formula of a function, as eager PyTorch runs it and as the compiler is given it."""
    spec = FUNCTIONS[name].spec
    if spec is None:
        return lambda a: tuple(row_moments_reference(a["x"].detach()))

    def call(a: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        x = a["residual"] + a["x"] if "residual" in a else a["x"]
        one = (a.get("scale"), a.get("shift"), a.get("given"))
        y = row_norm_reference(x, a["weight"], a.get("bias"), *one, spec)[0]
        return (x, y) if "residual" in a else y

    return call


def compiled_formula(name: str, backend: str) -> Call:
    """The formula under torch.compile. What was compiled before is forgotten: all formulas share one piece of code, of
    which PyTorch keeps eight versions and then refuses."""
    torch.compiler.reset()
    return torch.compile(formula(name), fullgraph=True, dynamic=False, backend=backend)


def _torch(name: str) -> Call:
    functional = torch.nn.functional
    if name == "rms_norm":
        return lambda a: functional.rms_norm(a["x"], a["weight"].shape, a["weight"], 1e-6)
    return lambda a: functional.layer_norm(a["x"], a["weight"].shape, a["weight"], a["bias"], 1e-5)


def _liger(name: str) -> Call:
    from liger_kernel.transformers import functional

    calls: dict[str, Call] = {
        "rms_norm": lambda a: functional.liger_rms_norm(a["x"], a["weight"], 1e-6, 0.0, "llama", False),
        "layer_norm": lambda a: functional.liger_layer_norm(a["x"], a["weight"], a["bias"], 1e-5),
        "dyt": lambda a: functional.liger_dyt(a["x"], a["scale"], a["weight"], a["bias"]),
        "add_rms_norm": lambda a: functional.liger_fused_add_rms_norm(a["x"], a["residual"], a["weight"], 1e-6)[::-1],
    }  # the last returns (y, s), as QuACK does
    return calls[name]


def _quack(name: str) -> Call:
    import quack

    if name == "rms_norm":
        return lambda a: quack.rmsnorm(a["x"], a["weight"], eps=1e-6)
    return lambda a: quack.rmsnorm(a["x"], a["weight"], residual=a["residual"], eps=1e-6, prenorm=True)[::-1]


def _released(name: str) -> Call:
    import released

    def call(a: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        able = dispatch.takes_kernels(a["x"])
        function = released.released_bhyt if able else released.released_reference
        s, y = function(a["x"], a.get("residual"), a["weight"], a["scale"])
        return (s, y) if "residual" in a else y

    return call


BUILDERS: dict[str, Callable[[str], Call]] = {
    "normlab": lambda name: OURS[name],
    "eager": formula,
    "torch": _torch,
    "liger": _liger,
    "quack": _quack,
    "released": _released,
}


def build(peer: str, name: str, backend: str = "inductor") -> Call:
    """A peer's call of a function; `backend` is torch.compile's.

    Raises:
        Missing: the peer is not installed.
    """
    try:
        return compiled_formula(name, backend) if peer == "compile" else BUILDERS[peer](name)
    except ImportError as error:
        raise Missing(f"{peer} cannot be imported: {error}") from error


def arguments(name: str, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Random arguments that require gradients."""
    everything = {
        "x": lambda: torch.randn(rows, width, device=device, dtype=dtype),
        "residual": lambda: torch.randn(rows, width, device=device, dtype=dtype),
        "weight": lambda: torch.ones(width, device=device, dtype=dtype),
        "bias": lambda: torch.zeros(width, device=device, dtype=dtype),
        "scale": lambda: torch.ones(1, device=device, dtype=dtype),
        "shift": lambda: torch.zeros(1, device=device, dtype=dtype),
        "given": lambda: torch.ones(rows, 1, device=device),
    }
    return {key: everything[key]().requires_grad_() for key in FUNCTIONS[name].inputs}
