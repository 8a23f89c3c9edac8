"""The peers: this package, the plain formula, torch.compile's version of it, PyTorch's norms, Liger, QuACK.

PyTorch's RMSNorm is in its own kernels and, as another peer, in those that it has from QuACK. BHyT's released decode
kernel is restated from its formula.

A peer that is not installed, or does not take a shape, leaves a note instead of a number. `pip install -e
'kernels[peers]'` installs them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

import normlab_kernels as nk
import torch
from measure import Missing
from normlab_kernels import dispatch, functions
from normlab_kernels.moments import row_moments_reference
from normlab_kernels.reference import row_norm_reference
from normlab_kernels.spec import FUNCTIONS
from plan import TORCH_QUACK

Tensor = torch.Tensor
Call = Callable[[dict[str, Tensor]], Any]


def rows_moved(name: str, direction: str) -> int:
    """Rows of numbers that a pass must read and write.

    x (and the residual) in, y (and the sum) out; backward x or the sum, and each gradient.
    """
    if name == "row_moments":
        return 1
    forward, backward = (4, 4) if FUNCTIONS[name].residual else (2, 3)
    return {"forward": forward, "backward": backward}.get(direction, forward + backward)


def _ours(name: str) -> Call:
    """The package's function, without the statistic that the plain formula does not return."""
    call, function = functions.by_name(name), FUNCTIONS[name]
    kept = slice(2) if function.residual else 0
    return (lambda a: call(a)[kept]) if "ms" in function.outputs else call


OURS: dict[str, Call] = {name: _ours(name) for name in FUNCTIONS} | {"row_moments": lambda a: nk.row_moments(a["x"])}


def formula(name: str) -> Call:
    """The plain formula of a function, as eager PyTorch runs it and as the compiler is given it."""
    if name == "row_moments":
        return lambda a: tuple(row_moments_reference(a["x"].detach()))
    spec = FUNCTIONS[name].spec

    def call(a: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        x = a["residual"] + a["x"] if "residual" in a else a["x"]
        one = (a.get("scale"), a.get("shift"), a.get("given"))
        y = row_norm_reference(x, a["weight"], a.get("bias"), *one, spec, a.get("direction"))[0]
        return (x, y) if "residual" in a else y

    return call


def compiled_formula(name: str, backend: str) -> Call:
    """The formula under torch.compile. What was compiled before is forgotten: all formulas share one piece of code, of
    which PyTorch keeps eight versions and then refuses."""
    torch.compiler.reset()
    return compiled(formula(name), backend)


def compiled(call: Call, backend: str) -> Call:
    return torch.compile(call, fullgraph=True, dynamic=False, backend=backend)


def _torch(name: str) -> Call:
    functional = torch.nn.functional
    if name == "rms_norm":
        return lambda a: functional.rms_norm(a["x"], a["weight"].shape, a["weight"], 1e-6)
    return lambda a: functional.layer_norm(a["x"], a["weight"].shape, a["weight"], a["bias"], 1e-5)


def vendored_quack(on: bool) -> None:
    """Whether PyTorch may run its RMSNorm in the QuACK kernels that it has. From 2.13 on it does so by itself where it
    finds nvidia-cutlass-dsl and apache-tvm-ffi in versions that it knows.

    Raises:
        Missing: it should, and has none that run here.
    """
    operations: list[str] = []
    with contextlib.suppress(ImportError):
        from torch.backends import python_native

        (python_native.enable_operations if on else python_native.disable_operations)(*RMS_NORM)
        operations = python_native.get_dsl_operations("cutedsl")
    if on and not {*RMS_NORM}.issubset(operations):
        raise Missing(f"PyTorch {torch.__version__} has no QuACK kernels for {version(TORCH_QUACK) or 'no CuTe DSL'}")
    if on and torch.cuda.get_device_capability()[0] not in (9, 10):
        raise Missing("PyTorch has QuACK's kernels for Hopper and Blackwell")


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
    TORCH_QUACK: _torch,
    "liger": _liger,
    "quack": _quack,
    "released": _released,
}
PACKAGES = {
    "liger": ("liger-kernel",),
    "quack": ("quack-kernels", "nvidia-cutlass-dsl"),
    TORCH_QUACK: ("nvidia-cutlass-dsl", "apache-tvm-ffi"),
}
RMS_NORM = ("_fused_rms_norm", "_fused_rms_norm_backward")  # PyTorch's operations


@functools.cache
def version(peer: str) -> str:
    """The versions of a peer's packages, beside PyTorch and Triton."""
    found = []
    for package in PACKAGES.get(peer, ()):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join(found)


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
    """Random arguments that require gradients; gains, scales and given statistics are 1."""
    shapes = {"x": (rows, width)} if name == "row_moments" else FUNCTIONS[name].shapes(rows, width)
    made = {}
    for key, shape in shapes.items():
        like = {"device": device, "dtype": torch.float32 if key == "given" else dtype}
        made[key] = torch.ones(shape, **like) if key in ("weight", "scale", "given") else torch.randn(shape, **like)
        if key == "direction":
            made[key] /= width**0.5
        made[key].requires_grad_()
    return made
