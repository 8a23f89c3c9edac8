"""Shared parts of the kernels' tests: the functions as a table, and the comparison of each with float64.

One suite, three implementations, chosen by the process (Triton's mode is fixed at import):

* `TRITON_INTERPRET=1 pytest kernels`: the Triton kernels in the interpreter, on a CPU;
* `pytest kernels` without a GPU: the PyTorch functions of `cpu.py`;
* `pytest -m gpu kernels` with one: the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from normlab_kernels import dispatch, functions
from normlab_kernels.reference import row_norm_reference
from normlab_kernels.spec import FUNCTIONS, RowSpec, Stat

Tensor = torch.Tensor
INTERPRETING = dispatch.INTERPRETING
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
KERNELS = INTERPRETING or DEVICE == "cuda"  # whether calls reach the Triton kernels
FULL = not INTERPRETING  # shapes and lists; the interpreter takes a second for a wide row, and has them under `-m slow`
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A public function: how it is called on the named inputs, which of them it takes, and its formula."""

    call: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    inputs: tuple[str, ...]
    spec: RowSpec
    residual: bool
    outputs: tuple[str, ...]


def full_if_slow(every: list[Any], few: tuple[Any, ...]) -> list[Any]:
    """Parameters of a test: all, but in the interpreter only a few that stand for them, outside of `-m slow`."""
    slow = pytest.mark.slow
    return [
        one if FULL or one in few else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=slow)
        for one in every
    ]


def _named(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """The function, with its outputs by their names."""
    call, outputs = functions.by_name(name), FUNCTIONS[name].outputs

    def run(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
        out = call(arguments)
        return dict(zip(outputs, out if isinstance(out, tuple) else (out,), strict=True))

    return run


CASES = {name: Case(_named(name), f.inputs, f.spec, f.residual, f.outputs) for name, f in FUNCTIONS.items()}


# In the interpreter the addition before these, whose code is that of all, is left to `-m slow`.
NAMES = sorted(CASES)
QUICK = tuple(name for name in NAMES if name not in ("add_crms_norm", "add_isru", "add_seed_norm"))
ALL = full_if_slow(NAMES, QUICK)


def make_inputs(case: Case, rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Random arguments of a case; the scale is large enough for tanh to bend."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    everything = {
        "x": normal(rows, width),
        "residual": normal(rows, width),
        "weight": 1 + 0.3 * normal(width),
        "bias": normal(width),
        "scale": torch.tensor([8.0 if case.spec.kappa > 1 else 0.7]),
        "shift": torch.tensor([0.3]),
        "given": 0.5 + torch.rand(rows, 1, generator=generator),
        "direction": normal(width) / width**0.5,
    }
    wide = ("given",)
    return {k: everything[k].to(DEVICE, torch.float32 if k in wide else dtype) for k in case.inputs}


def formula(case: Case, a: dict[str, Tensor]) -> dict[str, Tensor]:
    """The case's outputs by the plain formula, at the dtype of the arguments."""
    x = a["residual"] + a["x"] if case.residual else a["x"]
    one = (a["weight"], a.get("bias"), a.get("scale"), a.get("shift"), a.get("given"))
    y, ms = row_norm_reference(x, *one, case.spec, a.get("direction"))
    out = {"y": y}
    if "ms" in case.outputs:
        assert ms is not None
        out["ms"] = ms
    if case.residual:
        out["s"] = x
    return out


def results(
    function: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    arguments: dict[str, Tensor],
    upstream: dict[str, Tensor] | None,
    dtype: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(outputs and gradients, upstream gradients used); `dtype` converts the arguments first."""
    a = {k: (v if dtype is None else v.to(dtype)).detach().requires_grad_() for k, v in arguments.items()}
    out = function(a)
    if upstream is None:
        generator = torch.Generator().manual_seed(7)
        upstream = {k: torch.randn(v.shape, generator=generator).to(v.device, v.dtype) for k, v in out.items()}
    names = list(out)
    wanted = [upstream[k].to(out[k].dtype) for k in names]
    grads = torch.autograd.grad([out[k] for k in names], list(a.values()), wanted)
    both = {k: v.detach() for k, v in out.items()}
    return both | {f"d{k}": g for k, g in zip(a, grads, strict=True)}, upstream


def assert_close(
    ours: dict[str, Tensor], torchs: dict[str, Tensor], exact: dict[str, Tensor], what: str, least: float = 1.0
) -> None:
    """Each tensor: error <= 2x PyTorch's own + 1e-5 of its largest value, or of `least` if that is larger.

    The interpreter truncates fp32 to bf16 where hardware rounds, which costs up to one unit in the last place: of a sum
    before the norm too, so two of its mean square.
    """
    assert ours.keys() == exact.keys(), what
    for name, reference in exact.items():
        assert ours[name].dtype == torchs[name].dtype, f"{what} {name}: {ours[name].dtype}"
        assert ours[name].shape == reference.shape, f"{what} {name}"
        if reference.numel() == 0:
            continue
        size = reference.abs().max().clamp(min=least)
        ulp = 2.0**-7 if INTERPRETING and ours["y"].dtype == torch.bfloat16 else 0.0
        ulp *= 2 if name == "ms" and "s" in exact else 1
        error = (ours[name].double() - reference).abs().max()
        theirs = (torchs[name].double() - reference).abs().max()
        if reference.numel() == 1:  # PyTorch's error may be small by luck: allow what rounding each term once gives
            rounding = 0.5 * torch.finfo(ours[name].dtype).eps * len(ours["y"]) ** 0.5
            theirs = theirs.clamp(min=rounding)
        limit = 2 * theirs + (1e-5 + ulp) * size
        assert error <= limit, f"{what} {name}: error {error:.3g} > {limit:.3g}"


def check(name: str, rows: int, width: int, dtype: torch.dtype) -> None:
    """A case at a shape and dtype against float64, forward and every gradient, with random upstream gradients.

    A norm with the addition is that of the sum as it is stored, and float64 is given that sum.
    """
    case = CASES[name]
    arguments = make_inputs(case, rows, width, dtype)
    ours, upstream = results(case.call, arguments, None)
    torchs, _ = results(lambda a: formula(case, a), arguments, upstream)
    if case.residual:
        s = arguments["residual"] + arguments["x"]
        arguments = arguments | {"residual": s, "x": torch.zeros_like(s)}
    exact, _ = results(lambda a: formula(case, a), arguments, upstream, torch.float64)
    # A row of one number is constant: LayerNorm's dx is then 0, as a difference of terms of size 1/sqrt(eps).
    constant = case.spec.stat is Stat.LAYER and width == 1
    least = case.spec.eps**-0.5 if constant else 1.0
    assert_close(ours, torchs, exact, f"{name} ({rows}, {width}) {dtype}", least)
