"""Compile every kernel for a GPU that is not here, and read what the compiler made of it.

    python -m normlab_kernels.ahead_of_time --targets sm_80 sm_90 gfx942 --out data/bench/aot.csv

A row of the table is one kernel as the ladder would launch it: registers a thread, bytes spilled to local memory,
shared memory, machine instructions, how many of them are special-function ones, and whether the loads are 16 bytes
wide. It needs Triton but neither a GPU nor a driver, and a process without Triton's interpreter.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from normlab_kernels import ladder
from normlab_kernels.device_math import APPROX, LIBRARY, PORTABLE
from normlab_kernels.linear_kernel import linear_add_norm_kernel
from normlab_kernels.moments_kernel import row_moments_kernel
from normlab_kernels.row_kernels import norm_backward_kernel, norm_forward_kernel
from normlab_kernels.spec import Act, Stat
from normlab_kernels.split_kernels import row_pull_kernel, row_statistics_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WIDTHS = (128, 512, 1024, 2048, 4096, 8192, 16_384)
FLOAT32_POINTERS = {"p_out", "p_mean", "p_ms", "p_grad_ms", "p_along", "p_mean_q"} | {
    f"p_d{name}" for name in ("ms", "weight", "bias", "scale", "shift")
}
# statistic, activation, and the flags of each function
FUNCTIONS: dict[str, tuple[Stat, Act, set[str]]] = {
    "bhyt": (Stat.RMS, Act.TANH, {"SCALE", "GRAD_MS"}),
    "bhyt_carried": (Stat.GIVEN, Act.TANH, {"SCALE"}),
    "add_bhyt": (Stat.RMS, Act.TANH, {"SCALE", "RESIDUAL", "GRAD_SUM", "GRAD_MS"}),
    "rms_norm": (Stat.RMS, Act.IDENTITY, set()),
    "add_rms_norm": (Stat.RMS, Act.IDENTITY, {"RESIDUAL", "GRAD_SUM"}),
    "layer_norm": (Stat.LAYER, Act.IDENTITY, {"BIAS"}),
    "dyt": (Stat.NONE, Act.TANH, {"SCALE", "BIAS"}),
    "derf": (Stat.NONE, Act.ERF, {"SCALE", "SHIFT", "BIAS"}),
    "add_bhyt_carried": (Stat.GIVEN, Act.TANH, {"SCALE", "RESIDUAL", "GRAD_SUM"}),
    "add_layer_norm": (Stat.LAYER, Act.IDENTITY, {"BIAS", "RESIDUAL", "GRAD_SUM"}),
    "add_dyt": (Stat.NONE, Act.TANH, {"SCALE", "RESIDUAL", "GRAD_SUM"}),
    "bhyt unbounded": (Stat.RMS, Act.IDENTITY, {"SCALE", "GRAD_MS"}),
    "bhyt_carried unbounded": (Stat.GIVEN, Act.IDENTITY, {"SCALE"}),
    "add_bhyt_carried unbounded": (Stat.GIVEN, Act.IDENTITY, {"SCALE", "RESIDUAL", "GRAD_SUM"}),
}


@dataclass(frozen=True)
class Build:
    """A kernel with the constants it is compiled for."""

    function: str
    direction: str
    width: int
    dtype: str
    kernel: Any
    constants: dict[str, Any] = field(hash=False)
    warps: int
    stages: int = 3


@dataclass(frozen=True)
class Report:
    """What the compiler made of a build. Counts are of the whole kernel's code; -1 where the target's tools do not
    say."""

    target: str
    function: str
    direction: str
    width: int
    dtype: str
    block: int
    rows: int
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: int
    special_function: int
    loads_16_bytes: int


def _flags(kernel: Any, flags: set[str]) -> dict[str, bool]:
    return {name: name[4:] in flags for name in kernel.arg_names if name.startswith("HAS_")}


def row_builds(function: str, width: int, dtype: str = "bf16") -> Iterator[Build]:
    """The builds a call of `function` at `width` launches, forward and backward."""
    stat, act, flags = FUNCTIONS[function]
    reduces = stat in (Stat.RMS, Stat.LAYER)
    for direction, kernel, launch in (
        ("forward", norm_forward_kernel, ladder.forward(width, reduces)),
        ("backward", norm_backward_kernel, ladder.backward(width, stat != Stat.NONE)),
    ):
        forward, whole = direction == "forward", launch.whole
        form = LIBRARY if dtype == "fp32" or (dtype == "fp16" and not forward) else APPROX
        constants = {"STAT": int(stat), "ACT": int(act), "FORM": form, "BLOCK": launch.block}
        extra = {"ROWS": launch.rows, "WHOLE": whole, "EVEN": width % launch.block == 0}
        if not forward:
            extra["STAGES"] = launch.stages
        yield Build(function, direction, width, dtype, kernel, constants | extra | _flags(kernel, flags), launch.warps)
        split = stat != Stat.NONE and not whole and (reduces or not forward)
        if split:
            first = row_statistics_kernel if forward else row_pull_kernel
            reduction = ladder.reduction(width)
            own = {k: v for k, v in constants.items() if k in first.arg_names}
            constants = own | _flags(first, flags) | {"BLOCK": reduction.block}
            yield Build(function, f"{direction} reduction", width, dtype, first, constants, reduction.warps)


def linear_builds(width: int, dtype: str = "bf16", launch: ladder.LinearLaunch | None = None) -> Iterator[Build]:
    """The fused projection with BHyT's epilogue, bounded or not, and with DyT's, on 132 multiprocessors; launched as
    the ladder does if not said otherwise."""
    launch = launch or ladder.linear(width)
    for function, stat, act in (
        ("linear_add_bhyt", Stat.GIVEN, Act.TANH),
        ("linear_add_bhyt unbounded", Stat.GIVEN, Act.IDENTITY),
        ("linear_add_dyt", Stat.NONE, Act.TANH),
    ):
        constants = {
            "HAS_MS": stat == Stat.GIVEN,
            "HAS_BIAS": stat == Stat.NONE,
            "ACT": int(act),
            "FORM": APPROX,
            "UPCAST": False,
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "BLOCK_K": launch.block_k,
            "SLICES": launch.slices,
            "GROUP": launch.group,
            "PROGRAMS": 132 * launch.programs,
            "FLATTEN": launch.flatten,
            "FROM_RESIDUAL": launch.from_residual,
        }
        kernel = linear_add_norm_kernel
        yield Build(function, "forward", width, dtype, kernel, constants, launch.warps, launch.stages)


def moments_build(width: int, dtype: str = "bf16") -> Build:
    """row_moments at a width."""
    launch = ladder.moments(width)
    constants = {"BLOCK": launch.block, "ROWS": launch.rows}
    return Build("row_moments", "forward", width, dtype, row_moments_kernel, constants, launch.warps)


def _descriptor(name: str, build: Build) -> str:
    """The type of a tensor descriptor: the block it moves."""
    block = build.constants
    shape = {
        "d_a": (block["BLOCK_M"], block["BLOCK_K"]),
        "d_proj": (block["BLOCK_N"], block["BLOCK_K"]),
    }.get(name, (block["BLOCK_M"], block["BLOCK_N"] // block["SLICES"]))
    if name == "d_residual" and block["FROM_RESIDUAL"]:
        shape = (block["BLOCK_M"], block["BLOCK_N"])
    return f"tensordesc<{build.dtype}[{shape[0]},{shape[1]}]>"


def _signature(build: Build) -> tuple[dict[str, str], dict[tuple[int, ...], list[list[Any]]]]:
    """Argument types, and the divisibility by 16 without which loads are not vectorised."""
    types: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(build.kernel.arg_names):
        if name in build.constants:
            types[name] = "constexpr"
            continue
        if name.startswith("d_"):
            types[name] = _descriptor(name, build)
        elif name.startswith("p_"):
            types[name] = "*fp32" if name in FLOAT32_POINTERS else f"*{build.dtype}"
        else:
            types[name] = "fp32" if name in ("eps", "inv_kappa") else "i32"
        a_width = name.startswith(("stride", "width", "n_columns", "n_inner"))
        if name.startswith("p_") or (a_width and build.width % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return types, attributes


def compile_build(build: Build, target: str) -> Any:
    """The compiled kernel; `.asm` holds its code."""
    constants = dict(build.constants)
    if target.startswith("gfx") and "FORM" in constants:
        constants["FORM"] = PORTABLE
    types, attributes = _signature(build)
    source = ASTSource(build.kernel, types, constants, attributes)
    options = {"num_warps": build.warps, "num_stages": build.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=TARGETS[target], options=options)


def _tool(name: str, *arguments: str) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _nvidia_counts(compiled: Any) -> tuple[int, int, int, int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert used is not None, usage
    lines = [line for line in code.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/\s", line)]
    special = sum("MUFU" in line for line in lines)
    wide = sum(bool(re.search(r"\bLDG(STS)?\.E\S*\.128", line)) for line in lines)
    return int(used[1]), int(used[2]) + int(used[3]), len(lines), special, wide


def _amd_counts(compiled: Any) -> tuple[int, int, int, int, int]:
    code = compiled.asm["amdgcn"]

    def metadata(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        return int(found[1]) if found else -1

    lines = [line for line in code.splitlines() if re.match(r"\s+[a-z]+_\w+", line)]
    special = sum(bool(re.match(r"\s+v_(exp|rsq|rcp|sqrt|log)_", line)) for line in lines)
    wide = sum("_load_dwordx4" in line for line in lines)
    return metadata("vgpr_count"), metadata("private_segment_fixed_size"), len(lines), special, wide


def report(build: Build, target: str) -> Report:
    """Compile and count."""
    compiled = compile_build(build, target)
    count = _amd_counts if target.startswith("gfx") else _nvidia_counts
    registers, spilled, instructions, special, wide = count(compiled)
    block = build.constants.get("BLOCK") or build.constants["BLOCK_N"]
    shape = (block, build.constants.get("ROWS") or build.constants.get("BLOCK_M", 1), build.warps)
    where = (target, build.function, build.direction, build.width, build.dtype)
    return Report(*where, *shape, registers, spilled, compiled.metadata.shared, instructions, special, wide)


def all_builds(target: str) -> Iterator[Build]:
    """Every function at every width of the ladder in bf16, the split widths once, and 2,048 in fp32 and fp16."""
    if TARGETS[target].backend == "cuda" and int(TARGETS[target].arch) >= 90:
        for width in (512, 2048):
            yield from linear_builds(width)
    for width in WIDTHS:
        yield moments_build(width)
    for function in FUNCTIONS:
        for width in (*WIDTHS, 65_536):
            yield from row_builds(function, width)
        for dtype in ("fp32", "fp16"):
            yield from row_builds(function, 2048, dtype)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m normlab_kernels.ahead_of_time", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS), default=["sm_80", "sm_90", "gfx942"])
    parser.add_argument("--out", type=Path, required=True, help="the CSV to write")
    chosen = parser.parse_args(arguments)
    seen, reports = set(), []
    for target in chosen.targets:
        for build in all_builds(target):
            key = (target, build.kernel.fn.__name__, build.dtype, build.warps, tuple(build.constants.items()))
            if key not in seen:  # tiles are the same at every width: one row, at the least width
                seen.add(key)
                reports.append(report(build, target))
                print(*asdict(reports[-1]).values(), flush=True)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    with chosen.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(reports[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in reports)


if __name__ == "__main__":
    main()
