"""Measure the kernels against every installed peer, on a GPU or a CPU: one call, under 8 minutes.

    python kernels/benchmarks/run.py --out data/bench             # the GPU if there is one
    python kernels/benchmarks/run.py --device cpu --out data/bench

Sections: rows (each norm, forward, backward and both), linear (projection + add + norm, fused or not), decode (each
norm for 1 to 64 rows), step (a whole training step by scheme) and generate (a token of generation by scheme); the last
two need normlab. Each writes <section>_<device>.csv; a section that is out of time says which rows it left out. plot.py
draws them.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import normlab_kernels as nk
import peers
import torch
from measure import Clock, OutOfTime, Row, copy_bandwidth, first_line, graph_of, settle
from models import generate_section, step_section
from normlab_kernels import linear

MINUTES = {"rows": 3.2, "linear": 0.8, "decode": 0.6, "step": 1.5, "generate": 0.8}


def backward_call(call: peers.Call, arguments: dict[str, torch.Tensor]) -> Callable[[], object]:
    """The backward pass alone: the graph is kept, the upstream gradients are random."""
    out = call(arguments)
    outs = list(out) if isinstance(out, tuple) else [out]
    upstream = [torch.randn_like(tensor) for tensor in outs]
    leaves = list(arguments.values())
    return lambda: torch.autograd.grad(outs, leaves, upstream, retain_graph=True, allow_unused=True)


def both_call(call: peers.Call, arguments: dict[str, torch.Tensor]) -> Callable[[], object]:
    """Forward and backward."""
    out = call(arguments)
    upstream = [torch.randn_like(t) for t in (out if isinstance(out, tuple) else (out,))]
    leaves = list(arguments.values())

    def step() -> object:
        again = call(arguments)
        outs = list(again) if isinstance(again, tuple) else [again]
        return torch.autograd.grad(outs, leaves, upstream, allow_unused=True)

    return step


def rows_shapes(device: torch.device) -> Iterator[tuple[int, int]]:
    """(rows, width); the shapes of the claim first."""
    if device.type == "cpu":
        yield from ((1024, 128), (1024, 512), (4096, 2048))
        return
    widths = (2048, 4096, 8192, 1024, 16_384, 32_768)
    for rows in (16_384, 4096, 32_768, 8192):
        for width in widths:
            if rows * width <= 1 << 29:
                yield rows, width


def worth_compiling(device: torch.device, name: str, rows: int, width: int) -> bool:
    """torch.compile takes seconds a shape on a GPU, half a minute on a CPU: where the comparison is made."""
    if device.type == "cpu":
        return rows == 1024 and name in ("rms_norm", "bhyt")
    wanted = ("rms_norm", "bhyt", "bhyt_carried", "layer_norm", "dyt", "add_rms_norm")
    return rows == 16_384 and width in (2048, 4096) and name in wanted


def rows_section(clock: Clock, dtype: torch.dtype, copy: float, deadline: float) -> Iterator[Row]:
    """Every function, peer and pass at every shape."""
    device = clock.device
    for rows, width in rows_shapes(device):
        for name, function in peers.FUNCTIONS.items():
            compiled = worth_compiling(device, name, rows, width)
            arguments = peers.arguments(name, rows, width, dtype, device)
            unit = rows * width * dtype.itemsize
            for peer, build in peers.peers(name, compiled):
                if time.monotonic() > deadline:
                    raise OutOfTime(f"rows: stopped before {name} {rows} x {width}")
                row = {"section": "rows", "function": name, "peer": peer, "rows": rows, "width": width}
                try:
                    call = build()
                    passes = {
                        "forward": (lambda call=call, a=arguments: _no_grad(call, a), function.forward_rows),
                        "backward": (backward_call(call, arguments), function.backward_rows),
                        "both": (both_call(call, arguments), function.forward_rows + function.backward_rows),
                    }
                    for direction, (timed, units) in passes.items():
                        microseconds = clock.microseconds(timed)
                        rate = units * unit / microseconds / 1e3
                        yield row | {
                            "pass": direction,
                            "microseconds": round(microseconds, 2),
                            "floor_bytes": units * unit,
                            "gigabytes_per_second": round(rate, 1),
                            "share_of_copy": round(rate / copy, 3),
                            "peak_megabytes": round(clock.peak_megabytes(timed), 2),
                        }
                except (ImportError, peers.Absent):
                    continue  # not installed, or no such function
                except Exception as error:  # noqa: BLE001 - a peer's failure is a result, not the end of the benchmark
                    if peer == "normlab":
                        raise
                    yield row | {"note": first_line(error)}


def _no_grad(call: peers.Call, arguments: dict[str, torch.Tensor]) -> object:
    with torch.no_grad():
        return call(arguments)


def linear_shapes(device: torch.device) -> Iterator[tuple[int, int]]:
    """(rows, width) of a square projection."""
    if device.type == "cpu":
        yield 256, 256
        return
    yield from ((rows, width) for rows in (16_384, 8192) for width in (2048, 4096, 1024, 8192))


FUSED, UNFUSED = "linear_add_bhyt fused", "addmm + bhyt_carried"


def linear_calls(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    """h = residual + a W^T and a norm of h, in every way that can run here."""
    a = torch.randn(rows, width, device=device, dtype=dtype)
    proj = torch.randn(width, width, device=device, dtype=dtype) / width**0.5
    residual = torch.randn(rows, width, device=device, dtype=dtype)
    weight = torch.ones(width, device=device, dtype=dtype)
    lam = torch.ones(1, device=device, dtype=dtype)
    ms = torch.ones(rows, 1, device=device)

    def product() -> torch.Tensor:
        return torch.addmm(residual, a, proj.t())

    calls: dict[str, Callable[[], object]] = {
        UNFUSED: lambda: nk.linear_add_bhyt(a, proj, residual, weight, lam, ms, fused=False),
        "addmm + rms_norm": lambda: nk.rms_norm(product(), weight),
        "addmm + F.rms_norm": lambda: torch.nn.functional.rms_norm(product(), weight.shape, weight, 1e-6),
        "addmm alone": product,
    }
    if not linear.cannot_fuse(a, proj, residual, weight):
        calls[FUSED] = lambda: nk.linear_add_bhyt(a, proj, residual, weight, lam, ms, fused=True)
        calls["linear_add_dyt fused"] = lambda: nk.linear_add_dyt(a, proj, residual, weight, None, lam, fused=True)
    return calls


def linear_section(clock: Clock, dtype: torch.dtype, copy: float, deadline: float) -> Iterator[Row]:
    """The fused kernel against addmm + each norm; prints the line for the table of `ladder.py`."""
    del copy
    gains: dict[int, list[float]] = {}
    for rows, width in linear_shapes(clock.device):
        times: dict[str, float] = {}
        for name, call in linear_calls(rows, width, dtype, clock.device).items():
            if time.monotonic() > deadline:
                raise OutOfTime(f"linear: stopped before {name} {rows} x {width}")
            with torch.no_grad():
                times[name] = clock.microseconds(call)
            yield {
                "section": "linear",
                "function": name,
                "rows": rows,
                "width": width,
                "microseconds": round(times[name], 2),
                "teraflops": round(2 * rows * width * width / times[name] / 1e6, 1),
            }
        if FUSED in times:
            gains.setdefault(width, []).append(times[UNFUSED] / times[FUSED])
    wins = tuple(sorted(width for width, gain in gains.items() if min(gain) > 1.0))
    print(f"for ladder.FUSION_WINS: {device_name(clock.device)!r}: {wins}")


def decode_section(clock: Clock, dtype: torch.dtype, copy: float, deadline: float) -> Iterator[Row]:
    """One token for each of 1 to 64 sequences: launches, not bytes. On CUDA also replayed from a graph of 32 calls."""
    del copy
    device = clock.device
    width = 128 if device.type == "cpu" else 4096
    for batch in (1, 4, 16, 64):
        for name in ("rms_norm", "bhyt", "bhyt_carried", "add_rms_norm", "add_bhyt", "add_bhyt_carried"):
            arguments = {k: v.detach() for k, v in peers.arguments(name, batch, width, dtype, device).items()}
            for peer, build in peers.peers(name, compiled=False):
                if time.monotonic() > deadline:
                    raise OutOfTime(f"decode: stopped before {name}, batch {batch}")
                row = {"section": "decode", "function": name, "peer": peer, "rows": batch, "width": width}
                try:
                    call = build()
                    timed = lambda call=call, a=arguments: _no_grad(call, a)  # noqa: E731
                    yield row | {"pass": "forward", "microseconds": round(clock.microseconds(timed), 2)}
                    if device.type == "cuda":
                        replay = graph_of(timed, 32)
                        yield row | {"pass": "graph", "microseconds": round(clock.microseconds(replay) / 32, 3)}
                except (ImportError, peers.Absent):
                    continue
                except Exception as error:  # noqa: BLE001 - as above
                    if peer == "normlab":
                        raise
                    yield row | {"note": first_line(error)}


SECTIONS = {
    "rows": rows_section,
    "linear": linear_section,
    "decode": decode_section,
    "step": step_section,
    "generate": generate_section,
}
COLUMNS = (
    "device section function peer pass rows width dtype microseconds floor_bytes gigabytes_per_second share_of_copy "
    "teraflops peak_megabytes copy_gigabytes_per_second note"
).split()


def device_name(device: torch.device) -> str:
    """As `ladder.FUSION_WINS` calls it."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else device.type


def device_label(device: torch.device) -> str:
    """A name fit for a file: the GPU's, or cpu and its number of threads."""
    if device.type == "cpu":
        return f"cpu_{torch.get_num_threads()}_threads" if torch.get_num_threads() > 1 else "cpu_1_thread"
    return device_name(device).lower().replace(" ", "_")


def measure_section(name: str, clock: Clock, dtype: torch.dtype, copy: float, out: Path, minutes: float) -> None:
    label = device_label(clock.device)
    path = out / f"{name}_{label}.csv"
    deadline = time.monotonic() + 60 * minutes
    common = {"device": label, "dtype": str(dtype).removeprefix("torch."), "copy_gigabytes_per_second": round(copy, 1)}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        try:
            for row in SECTIONS[name](clock, dtype, copy, deadline):
                writer.writerow(common | row)
                file.flush()
                print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        except OutOfTime as reached:
            print(f"{reached}: the section's {minutes:g} minutes are used up", flush=True)
    print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bf16 on CUDA, else fp32")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--minutes", type=float, help="for each section, instead of the defaults (6.9 in all)")
    parser.add_argument("--seconds", type=float, default=0.08, help="to spend on a number; a few calls are always made")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    settle()
    dtype = getattr(torch, chosen.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    chosen.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(device, chosen.seconds)
    copy = copy_bandwidth(clock)
    print(f"{device_label(device)}: copy {copy:.0f} GB/s, torch {torch.__version__}")
    for name in chosen.sections:
        measure_section(name, clock, dtype, copy, chosen.out, chosen.minutes or MINUTES[name])


if __name__ == "__main__":
    main()
