"""Compile every kernel for a GPU that is not here, and read what the compiler made of it.

    python -m normlab_kernels.ahead_of_time --targets sm_80 sm_90 gfx942 --out data/bench/aot.csv

One row of the table is one kernel as it would be launched, or with the fields changed that `launch` names. It has
registers per thread, bytes spilled to local memory, and shared memory. It counts machine instructions, special-function
instructions, and loads that are 16 bytes wide. The last count is of groups of asynchronous copies that may be under way
while a loop works (-1: there are none). `code` identifies the sources; rows of other sources stay, for comparison.
Triton keeps what it has compiled. Triton is needed, without its interpreter. A GPU and a driver are not.
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
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from normlab_kernels import choices, dispatch, functions, row_kernels, split_kernels
from normlab_kernels.device_math import PORTABLE
from normlab_kernels.experimental import linear_choices, linear_ops
from normlab_kernels.launch import kind
from normlab_kernels.moments import row_moments
from normlab_kernels.spec import FUNCTIONS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIRECTIONS = {
    split_kernels.row_statistics_kernel: "forward reduction",
    row_kernels.norm_backward_kernel: "backward",
    split_kernels.row_pull_kernel: "backward reduction",
    row_kernels.parameter_gradients_kernel: "finish",
}  # of all others: forward
LINEAR = {  # the fused product, with the norm that it ends in
    "linear_add_bhyt": "add_bhyt_carried",
    "linear_add_bhyt unbounded": "add_bhyt_carried unbounded",
    "linear_add_dyt": "add_dyt",
}
ROWS = 5000  # of the calls; no multiple of 16, from which a compiler could gain


@dataclass(frozen=True)
class Build:
    """A kernel with what it is launched with: tensors without memory, numbers, and the constants it is compiled for."""

    function: str
    width: int
    dtype: str
    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    launch: str = ""

    @property
    def direction(self) -> str:
        return DIRECTIONS.get(self.kernel, "forward")


# What the compiler made of a build: a row of the table. Counts are of the whole kernel's code; -1 where the target's
# tools do not say.
Report = namedtuple(
    "Report",
    "target function direction width dtype block rows warps registers spilled_bytes shared_bytes instructions "
    "special_function loads_16_bytes async_depth launch code",
)


def builds(name: str, width: int, dtype: str = "bf16", launch: str = "") -> list[Build]:
    """The launches of a function's call at a width: forward, backward and for the parameters' gradients.

    The fused product has as many columns in as out, on 132 multiprocessors.

    Args:
        launch: fields other than the choice's, of the backward kernel or of the product.
    """
    function = FUNCTIONS.get(LINEAR.get(name, name), FUNCTIONS["rms_norm"])
    a = {}
    for key, shape in function.shapes(ROWS, width).items():
        kind_ = torch.float32 if key == "given" else DTYPES[dtype]
        a[key] = torch.empty(shape, dtype=kind_, device="meta").requires_grad_()
    found: list[Build] = []
    backward = choices.backward

    def run(kernel: Any, *arguments: Any, grid: object, warmup: bool, **constants: Any) -> None:
        found.append(Build(name, width, dtype, kernel, arguments, constants, launch))

    with (
        patch.object(JITFunction, "run", run),
        patch.object(dispatch, "takes_kernels", lambda *tensors: True),
        patch.object(choices, "backward", lambda *where: choices.changed(backward(*where), launch)),
        patch.object(linear_choices, "product", lambda *where: choices.changed(linear_choices.linear(width), launch)),
        patch.object(linear_ops, "multiprocessors", lambda device: 132),
    ):
        if name in LINEAR:
            proj = torch.empty(width, width, dtype=DTYPES[dtype], device="meta")
            optional = a.get("bias"), a["scale"], a.get("given")
            linear_ops.launch_linear(a["x"], proj, a["residual"], a["weight"], *optional, function.spec)
        elif name == "row_moments":
            row_moments(a["x"])
        else:
            made = functions.by_name(name)(a)
            outputs = made if isinstance(made, tuple) else (made,)
            torch.autograd.grad(outputs, list(a.values()), [torch.empty_like(output) for output in outputs])
    return found


def compile_build(build: Build, target: str) -> Any:
    """The compiled kernel; `.asm` holds its code."""
    constants = dict(build.constants)
    if target.startswith("gfx") and "FORM" in constants:
        constants["FORM"] = PORTABLE
    device = SimpleNamespace(
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGETS[target],
    )
    with patch.object(driver, "_active", device):
        return build.kernel.warmup(*build.arguments, grid=(1,), **constants)


def _tool(name: str, *arguments: str) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


# A line that is a machine instruction, a special function, and a load of 16 bytes.
INSTRUCTIONS = {
    "cuda": (r"\s+/\*[0-9a-f]{4,}\*/\s", r".*MUFU", r".*\bLDG(STS)?\.E\S*\.128"),
    "hip": (r"\s+[a-z]+_\w+", r"\s+v_(exp|rsq|rcp|sqrt|log)_", r".*_load_dwordx4"),
}


def _counts(compiled: Any, backend: str) -> tuple[int, ...]:
    """Registers, spilled bytes, shared memory, then instructions: all, special functions, loads of 16 bytes."""
    if backend == "hip":
        code = compiled.asm["amdgcn"]
        names = (r"\.vgpr_count", r"\.private_segment_fixed_size")
        registers, spilled = (int(re.search(rf"{name}:\s+(\d+)", code)[1]) for name in names)  # type: ignore[index]
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage, code = _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "-c", file.name)
        registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
        spilled = stack + local
    every, *kinds = INSTRUCTIONS[backend]
    lines = [line for line in code.splitlines() if re.match(every, line)]
    counts = [sum(bool(re.match(kind, line)) for line in lines) for kind in kinds]
    return registers, spilled, compiled.metadata.shared, len(lines), *counts


def _async_depth(compiled: Any) -> int:
    """Number of groups of copies that the first wait in the last loop leaves in flight."""
    depth = re.search(r"async_wait[^\n]*num = (\d+)", compiled.asm["ttgir"].rpartition("scf.for")[2])
    return int(depth[1]) if depth else -1


def report(build: Build, target: str) -> Report:
    """Compile and count."""
    compiled = compile_build(build, target)
    c = build.constants
    shape = (c.get("BLOCK") or c["BLOCK_N"], c.get("ROWS") or c.get("BLOCK_M", 1), c["num_warps"])
    where = (target, build.function, build.direction, build.width, build.dtype)
    counts = _counts(compiled, TARGETS[target].backend)
    return Report._make([*where, *shape, *counts, _async_depth(compiled), build.launch, _code()])


# Launches beside those chosen: backward those of before, of the fused product those that a GPU has to time.
TRIED = {
    "stages=2": ("bhyt", "add_bhyt", "rms_norm", "layer_norm"),
    "stages=2 block=1024": ("dyt", "derf"),
    "flatten=1": ("linear_add_bhyt",),
    "from_residual=1 stages=3": ("linear_add_bhyt",),
    "flatten=1 from_residual=1 stages=3": ("linear_add_bhyt",),
    "block_m=128 block_n=128 slices=2 warps=4 stages=3 programs=2": ("linear_add_bhyt",),
}
WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)


def all_builds(target: str) -> Iterator[Build]:
    """The builds of a target's rows in the table.

    Every launch is there. Derf and DyT have those of tiles. LayerNorm with the addition, which holds most, has those of
    whole and split rows. So has SeeDNorm, whose launches differ. Every function is there at 4,096, and some at other
    widths. On sm_90 there are also the fused product and launches that are not chosen.
    """
    where = [(name, width, "bf16") for name in ("derf", "dyt") for width in WIDTHS[:5]]
    where += [(name, width, "bf16") for name in ("add_layer_norm", "add_seed_norm", "row_moments") for width in WIDTHS]
    where += [(name, 4096, "bf16") for name in FUNCTIONS]
    where += [("bhyt", 65_536, "bf16"), ("add_bhyt", 8192, "bf16"), ("add_bhyt", 2048, "fp32")]
    if target == "sm_90":
        where += [(name, width, "bf16") for name in LINEAR for width in (512, 2048)]
    for one in where:
        yield from builds(*one)
    for launch, names in TRIED.items() if target == "sm_90" else ():
        for name in names:
            found = builds(name, 2048 if name in LINEAR else 4096, launch=launch)
            yield found[0] if name in LINEAR else found[1]


def _code() -> str:
    """The sources that decide what is compiled."""
    here = Path(__file__).parent
    patterns = "*_kernel*.py", "*ops.py", "device_math.py", "*choices.py"
    sources = [path for pattern in patterns for path in sorted(here.rglob(pattern))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m normlab_kernels.ahead_of_time", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS), default=["sm_90", "sm_80", "gfx942"])
    parser.add_argument("--out", type=Path, required=True, help="the CSV to write")
    chosen = parser.parse_args(arguments)
    rows: list[Any] = []
    if chosen.out.exists():
        with chosen.out.open(newline="") as file:
            _, *rows = (row for row in csv.reader(file) if row[0] not in chosen.targets or row[-1] != _code())
    seen = set()
    for target in chosen.targets:
        for build in all_builds(target):
            key = (target, build.kernel, *map(kind, build.arguments), *build.constants.values())
            if key not in seen:  # tiles are the same at many widths: one row, at the first
                seen.add(key)
                rows.append(report(build, target))
                print(*rows[-1], flush=True)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    with chosen.out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Report._fields, *rows])


if __name__ == "__main__":
    main()
