"""What statistics in a compiled training step cost: the step with them over the same step without.

    python benchmarks/compiled_statistics.py --out data/bench/compiled_statistics.csv

A ratio is the median over interleaved pairs, the side that goes first alternating, in CPU seconds of this process (all
its threads) and in wall seconds; CPU seconds are the ones to read on a machine that does other work. A step is a
forward and a backward pass of a stock Llama, without optimizer. The case "the same again" is a second compiled model
without statistics: how far two equal things are apart here.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from normlab.bench.probes import llama
from normlab.errors import NormlabError
from normlab.experimental.compiled_statistics import IN_GRAPH, CompiledRecorder
from normlab.probes.callback import DEFAULT
from normlab.probes.metrics import resolve_metrics
from normlab.probes.sites import sites

if TYPE_CHECKING:
    import pandas

Step = Callable[[], None]
CASES: dict[str, Sequence[str]] = {
    "the same again": (),
    "callback's default": DEFAULT,
    "all": IN_GRAPH,
}


def step_of(options: argparse.Namespace, metrics: Sequence[str]) -> tuple[Step, float, CompiledRecorder | None]:
    """A compiled step with these statistics, run once; the seconds that took, mostly compiling; what takes them."""
    model, ids = llama(options, queries_a_key=1)
    model.train()
    recorder = CompiledRecorder(sites(model), resolve_metrics(metrics)) if metrics else None
    if recorder is not None:
        recorder.start()
    compiled = torch.compile(model, backend=options.backend, fullgraph=True)

    def step() -> None:
        compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    started = time.perf_counter()
    step()
    return step, time.perf_counter() - started, recorder


def timed(step: Step) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of a step."""
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - cpu, time.perf_counter() - wall


def pairs_of(base: Step, step: Step, pairs: int) -> dict[str, list[tuple[float, float]]]:
    """(of `step`, of `base`) seconds by clock, pair by pair, after one of each that does not count."""
    timed(base), timed(step)
    found: dict[str, list[tuple[float, float]]] = {"cpu": [], "wall": []}
    for index in range(pairs):
        if index % 2:
            mine, others = timed(step), timed(base)
        else:
            others, mine = timed(base), timed(step)
        for clock, a, b in zip(found, mine, others, strict=True):
            found[clock].append((a, b))
    return found


def bench(options: argparse.Namespace, cases: Sequence[str] = tuple(CASES)) -> pandas.DataFrame:
    """Columns: case, metrics, cpu_ratio and wall_ratio (medians), each with low and high (the middle half of the
    pairs), the base's median seconds, compile_s and base_compile_s (the first step), and what was run on."""
    import pandas

    rows: list[dict[str, Any]] = []
    for case in tqdm(cases, desc="compiled statistics"):
        base, base_compile, _ = step_of(options, ())
        step, compiling, recorder = step_of(options, CASES[case])
        row: dict[str, Any] = {"case": case, "metrics": " ".join(CASES[case])}
        for clock, times in pairs_of(base, step, options.pairs).items():
            ratios = sorted(a / b for a, b in times)
            quarter = len(ratios) // 4
            row[f"{clock}_ratio"] = statistics.median(ratios)
            row[f"{clock}_low"], row[f"{clock}_high"] = ratios[quarter], ratios[-1 - quarter]
            row[f"base_{clock}_s"] = statistics.median(b for _, b in times)
        if recorder is not None:
            counted = recorder.stats().manifest["forward_passes"]
            assert counted == options.pairs + 2, f"statistics of {counted} steps, not of all"
            recorder.stop()
        row |= {"compile_s": compiling, "base_compile_s": base_compile}
        rows.append(row)
    about = {name: getattr(options, name) for name in ("width", "depth", "threads", "pairs", "backend")}
    about |= {"tokens": options.rows * options.length, "torch": torch.__version__, "processor": platform.machine()}
    return pandas.DataFrame(rows).assign(**about, load_1min=round(os.getloadavg()[0], 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write it to --out."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/compiled_statistics.py", description="what statistics in a compiled training step cost"
    )
    defaults = {"width": 512, "depth": 4, "rows": 4, "length": 256, "vocabulary": 4096, "threads": 1, "pairs": 100}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which of them")
    parser.add_argument("--out", type=Path, help="a CSV file")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    table = bench(options, options.cases)
    print(table.drop(columns="metrics").iloc[:, :11].round(3).to_string(index=False))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(options.out, index=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NormlabError as error:
        sys.exit(f"normlab: error: {error}")
