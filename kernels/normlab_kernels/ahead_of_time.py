"""Compile every kernel for a GPU that is not here, and read what the compiler made of it.

    python -m normlab_kernels.ahead_of_time --targets sm_80 sm_90 gfx942 --out data/bench/aot.csv

A row of the table is one kernel as the ladder would launch it, or with the fields changed that `launch` names:
registers a thread, bytes spilled to local memory, shared memory, machine instructions, how many of them are
special-function ones, how many loads are 16 bytes wide, and how many groups of asynchronous copies may be on their way
while a loop works (-1: it has none). `code` tells the sources: rows of other sources stay, as what was before; those of
these sources are not made twice. It needs Triton but neither a GPU nor a driver, and a process without its interpreter.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import re
import subprocess
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from normlab_kernels import ladder
from normlab_kernels.device_math import APPROX, LIBRARY, PORTABLE
from normlab_kernels.linear_kernel import linear_add_norm_kernel
from normlab_kernels.moments_kernel import row_moments_kernel
from normlab_kernels.row_kernels import norm_backward_kernel, norm_forward_kernel, parameter_gradients_kernel
from normlab_kernels.spec import FUNCTIONS, Act, Stat
from normlab_kernels.split_kernels import row_pull_kernel, row_statistics_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FLOAT32_POINTERS = {"p_out", "p_mean", "p_ms", "p_correction", "p_grad_ms", "p_along", "p_mean_q", "p_dms", "p_parts"}


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
    launch: str = ""


# What the compiler made of a build: a row of the table. Counts are of the whole kernel's code; -1 where the target's
# tools do not say.
Report = namedtuple(
    "Report",
    "target function direction width dtype block rows warps registers spilled_bytes shared_bytes instructions "
    "special_function loads_16_bytes async_depth launch code",
)


# What a pointer is for, that not every function has.
OPTIONAL = ("residual", "bias", "scale", "shift", "correction", "grad_sum", "grad_ms", "dms", "ms", "mean", "along",
            "mean_q", "sum", "dbias", "dscale", "dshift")  # fmt: skip


def _absent(kernel: Any, name: str, whole: bool) -> dict[str, Any]:
    """The pointers that are None, and the gradients wanted, when nothing is frozen; a correction is for decoding
    only."""
    inputs, outputs, stat = FUNCTIONS[name].inputs, FUNCTIONS[name].outputs, FUNCTIONS[name].spec.stat
    present = {"weight", *inputs, *(f"d{name}" for name in inputs)}
    present |= {"sum", "grad_sum"} if "residual" in inputs else set()
    present |= {"dms"} if "given" in inputs else {"grad_ms"} if "ms" in outputs else set()
    present |= {"ms"} if stat != Stat.NONE else set()
    present |= {"mean"} if stat == Stat.LAYER else set()
    present |= {"along", "mean_q"} if not whole and stat != Stat.NONE else set()
    wanted = {argument: argument[5:].lower() in present for argument in kernel.arg_names if argument[:5] == "WANT_"}
    absent = {f"p_{name}" for name in OPTIONAL if name not in present}
    return {argument: None for argument in kernel.arg_names if argument in absent} | wanted


def row_builds(
    name: str, width: int, dtype: str = "bf16", changed: dict[str, dict[str, Any]] | None = None
) -> Iterator[Build]:
    """The builds that a call of the function at a width launches, forward and backward; `changed` are fields of the
    launch of a direction that are not the ladder's."""
    spec = FUNCTIONS[name].spec
    stat, reduces = spec.stat, spec.reduces
    for direction, kernel, launch in (
        ("forward", norm_forward_kernel, ladder.forward(width, reduces)),
        ("backward", norm_backward_kernel, ladder.backward(width, stat != Stat.NONE)),
    ):
        forward = direction == "forward"
        launch = replace(launch, **(changed or {}).get(direction, {}))
        whole = launch.whole and (reduces or not forward)
        form = LIBRARY if dtype == "fp32" or (dtype == "fp16" and not forward) else APPROX
        constants = {"STAT": stat, "ACT": spec.act, "FORM": form, "BLOCK": launch.block}
        extra = {"ROWS": launch.rows, "WHOLE": whole, "EVEN": width % launch.block == 0, "STAGES": launch.stages}
        extra |= _absent(kernel, name, whole)
        own = {key: value for key, value in (constants | extra).items() if key in kernel.arg_names}
        yield Build(name, direction, width, dtype, kernel, own, launch.warps)
        if stat != Stat.NONE and not whole and (reduces or not forward):
            first = row_statistics_kernel if forward else row_pull_kernel
            reduction = ladder.reduction(width)
            own = {k: v for k, v in constants.items() if k in first.arg_names}
            own |= _absent(first, name, False) | {"BLOCK": reduction.block}
            yield Build(name, f"{direction} reduction", width, dtype, first, own, reduction.warps)
    finish = ladder.finish(width)
    kernel, tile = parameter_gradients_kernel, {"BLOCK": finish.block, "ROWS": finish.rows}
    yield Build(name, "finish", width, dtype, kernel, tile | _absent(kernel, name, True), finish.warps)


def linear_builds(width: int, dtype: str = "bf16", launch: ladder.LinearLaunch | None = None) -> Iterator[Build]:
    """The fused projection with BHyT's epilogue, bounded or not, and with DyT's, on 132 multiprocessors; launched as
    the ladder does if not said otherwise."""
    launch = launch or ladder.linear(width)
    for function, stat, act in (
        ("linear_add_bhyt", Stat.GIVEN, Act.TANH),
        ("linear_add_bhyt unbounded", Stat.GIVEN, Act.IDENTITY),
        ("linear_add_dyt", Stat.NONE, Act.TANH),
    ):
        constants = {name.upper(): value for name, value in asdict(launch).items() if name not in ("warps", "stages")}
        constants |= {"HAS_MS": stat == Stat.GIVEN, "HAS_BIAS": stat == Stat.NONE, "ACT": act, "FORM": APPROX}
        constants |= {"UPCAST": False, "PROGRAMS": 132 * launch.programs}
        kernel = linear_add_norm_kernel
        yield Build(function, "forward", width, dtype, kernel, constants, launch.warps, launch.stages)


def moments_build(width: int, dtype: str = "bf16") -> Build:
    """row_moments at a width."""
    launch = ladder.moments(width)
    constants = {"BLOCK": launch.block, "ROWS": launch.rows, "WHOLE": launch.block >= width}
    return Build("row_moments", "forward", width, dtype, row_moments_kernel, constants, launch.warps)


def _descriptor(name: str, build: Build) -> str:
    """The type of a tensor descriptor: the block it moves."""
    c = build.constants
    columns = c["BLOCK_N"] // (1 if name == "d_residual" and c["FROM_RESIDUAL"] else c["SLICES"])
    operands = {"d_a": (c["BLOCK_M"], c["BLOCK_K"]), "d_proj": (c["BLOCK_N"], c["BLOCK_K"])}
    rows, columns = operands.get(name, (c["BLOCK_M"], columns))
    return f"tensordesc<{build.dtype}[{rows},{columns}]>"


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


def _async_depth(compiled: Any) -> int:
    """The least number of groups that a wait in a loop leaves on their way."""
    depths = re.findall(r"async_wait[^\n]*num = (\d+)", compiled.asm["ttgir"].rpartition("scf.for")[2])
    return min((int(depth) for depth in depths[:1]), default=-1)


def report(build: Build, target: str) -> Report:
    """Compile and count."""
    compiled = compile_build(build, target)
    count = _amd_counts if target.startswith("gfx") else _nvidia_counts
    registers, spilled, instructions, special, wide = count(compiled)
    block = build.constants.get("BLOCK") or build.constants["BLOCK_N"]
    shape = (block, build.constants.get("ROWS") or build.constants.get("BLOCK_M", 1), build.warps)
    where = (target, build.function, build.direction, build.width, build.dtype)
    counts = (registers, spilled, compiled.metadata.shared, instructions, special, wide, _async_depth(compiled))
    return Report(*where, *shape, *counts, build.launch, _code())


# What the ladder chose before: backward launches at 4,096.
FORMER = {"stages=2": ("bhyt", "add_bhyt", "rms_norm", "layer_norm"), "stages=2 block=1024": ("dyt", "derf")}
# Beside every function at 4,096 in bf16: column tiles at their least, the widest whole rows, split rows, fp32.
OTHERS = (
    ("derf", 1024, "bf16"), ("dyt", 1024, "bf16"), ("bhyt", 2048, "bf16"), ("add_bhyt", 8192, "bf16"),
    ("add_layer_norm", 8192, "bf16"), ("add_layer_norm", 32_768, "bf16"), ("bhyt", 65_536, "bf16"),
    ("add_bhyt", 2048, "fp32"),
)  # fmt: skip


def all_builds(target: str) -> Iterator[Build]:
    """What a target's rows are: for AMD fewer, on sm_90 also the fused product and the ladder's former choices."""
    amd = TARGETS[target].backend == "hip"
    functions = [name for name in FUNCTIONS if not (amd and (name.endswith("unbounded") or FUNCTIONS[name].residual))]
    for where in (*OTHERS[:2], *((name, 4096, "bf16") for name in functions), *OTHERS[2 : 2 if amd else None]):
        yield from row_builds(*where)
    yield moments_build(4096)
    if target == "sm_90":
        yield from linear_builds(2048)
        for launch, names in FORMER.items():
            changed = {"backward": {name: int(value) for name, value in (part.split("=") for part in launch.split())}}
            for name in names:
                yield replace([*row_builds(name, 4096, changed=changed)][1], launch=launch)


def _code() -> str:
    """The sources that decide what is compiled."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*_kernel*.py")), here / "device_math.py", here / "ladder.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m normlab_kernels.ahead_of_time", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS), default=["sm_90", "sm_80", "gfx942"])
    parser.add_argument("--out", type=Path, required=True, help="the CSV to write")
    chosen = parser.parse_args(arguments)
    code, made, seen = _code(), set(), set()
    if chosen.out.exists():
        with chosen.out.open(newline="") as file:
            made = {(*row[:5], *row[-2:]) for row in csv.reader(file)}
    else:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(",".join(Report._fields) + "\n")
    for target in chosen.targets:
        for build in all_builds(target):
            where = (target, build.function, build.direction, str(build.width), build.dtype, build.launch, code)
            key = (target, build.kernel.fn.__name__, build.dtype, build.warps, str(sorted(build.constants.items())))
            if key not in seen and where not in made:  # tiles are the same at many widths: one row, at the first
                row = report(build, target)
                print(*row, flush=True)
                with chosen.out.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow(row)
            seen.add(key)


if __name__ == "__main__":
    main()
