"""Who is measured: this package, the plain formula, the compiler's version of it, PyTorch's fused norms, Liger, QuACK.

A peer that is not installed, or does not take a shape, leaves a note instead of a number. Nothing here is installed by
the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import normlab_kernels as nk
import torch
from normlab_kernels.reference import row_norm_reference
from normlab_kernels.spec import Act, RowSpec, Stat

Tensor = torch.Tensor
Call = Callable[[dict[str, Tensor]], Tensor | tuple[Tensor, ...]]


class Absent(Exception):
    """A peer has no such function."""


@dataclass(frozen=True)
class Function:
    """A benchmarked function: its arguments, and the rows of 16-bit numbers it must read and write (see the README)."""

    inputs: tuple[str, ...]
    forward_rows: int
    backward_rows: int
    spec: RowSpec


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
}


def formula(name: str) -> Call:
    """The plain formula of a function, as eager PyTorch runs it and as the compiler is given it."""
    function = FUNCTIONS[name]

    def call(a: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        x = a["residual"] + a["x"] if "residual" in a else a["x"]
        y = row_norm_reference(x, a["weight"], a.get("bias"), a.get("scale"), None, a.get("given"), function.spec)[0]
        return (x, y) if "residual" in a else y

    return call


def compiled_formula(name: str, backend: str = "inductor") -> Call:
    """The formula under torch.compile. What was compiled before is forgotten: all formulas share one piece of code, of
    which PyTorch keeps eight versions and then refuses."""
    torch.compiler.reset()
    return torch.compile(formula(name), fullgraph=True, dynamic=False, backend=backend)


def _torch(name: str) -> Call:
    functional = torch.nn.functional
    if name == "rms_norm":
        return lambda a: functional.rms_norm(a["x"], a["weight"].shape, a["weight"], 1e-6)
    if name == "layer_norm":
        return lambda a: functional.layer_norm(a["x"], a["weight"].shape, a["weight"], a["bias"], 1e-5)
    raise Absent("PyTorch has no such fused function")


def _liger(name: str) -> Call:
    from liger_kernel.transformers import functional

    if name == "rms_norm":
        return lambda a: functional.liger_rms_norm(a["x"], a["weight"], 1e-6, 0.0, "llama", False)
    if name == "layer_norm":
        return lambda a: functional.liger_layer_norm(a["x"], a["weight"], a["bias"], 1e-5)
    if name == "dyt":
        return lambda a: functional.liger_dyt(a["x"], a["scale"], a["weight"], a["bias"])
    if name == "add_rms_norm":
        return lambda a: functional.liger_fused_add_rms_norm(a["x"], a["residual"], a["weight"], 1e-6)
    raise Absent("Liger has no such function")


def _quack(name: str) -> Call:
    import quack

    if name == "rms_norm":
        return lambda a: quack.rmsnorm(a["x"], a["weight"], eps=1e-6)
    if name == "add_rms_norm":
        return lambda a: quack.rmsnorm(a["x"], a["weight"], residual=a["residual"], eps=1e-6, prenorm=True)
    raise Absent("QuACK has no such function in its public interface")


def peers(name: str, compiled: bool) -> Iterator[tuple[str, Callable[[], Call]]]:
    """(peer, a function that builds its call or raises), this package first."""
    yield "normlab", lambda: OURS[name]
    yield "eager", lambda: formula(name)
    if compiled:
        yield "compile", lambda: compiled_formula(name)
    yield "torch", lambda: _torch(name)
    yield "liger", lambda: _liger(name)
    yield "quack", lambda: _quack(name)


def arguments(name: str, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Random arguments that require gradients."""
    everything = {
        "x": lambda: torch.randn(rows, width, device=device, dtype=dtype),
        "residual": lambda: torch.randn(rows, width, device=device, dtype=dtype),
        "weight": lambda: torch.ones(width, device=device, dtype=dtype),
        "bias": lambda: torch.zeros(width, device=device, dtype=dtype),
        "scale": lambda: torch.ones(1, device=device, dtype=dtype),
        "given": lambda: torch.ones(rows, 1, device=device),
    }
    return {key: everything[key]().requires_grad_() for key in FUNCTIONS[name].inputs}
