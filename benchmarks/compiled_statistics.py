"""What statistics in a compiled training step cost: the step with them over the same step without.

    python -m benchmarks.compiled_statistics --out data/bench/compiled_statistics.csv

CPU seconds are the ones to read on a machine that does other work. A step is a forward and a backward pass of a stock
Llama, without optimizer. The case "the same again" is a second compiled model without statistics: the noise floor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from benchmarks.probes import llama
from benchmarks.timing import arguments, clocks, interleaved, machine, ratio, report, run
from normlab.experimental.compiled_statistics import IN_GRAPH, CompiledRecorder
from normlab.probes.callback import DEFAULT
from normlab.probes.metrics import resolve_metrics
from normlab.probes.sites import sites

if TYPE_CHECKING:
    import pandas

CASES: dict[str, Sequence[str]] = {
    "the same again": (),
    "callback's default": DEFAULT,
    "all": IN_GRAPH,
}


def step_of(
    options: argparse.Namespace, metrics: Sequence[str]
) -> tuple[Callable[[], None], float, CompiledRecorder | None]:
    """A compiled step with these statistics, run once; the seconds that took, mostly compiling; the recorder."""
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


def bench(options: argparse.Namespace, cases: Sequence[str] = tuple(CASES)) -> pandas.DataFrame:
    """Time each case against a step without statistics.

    Returns:
        Columns `case metrics`, for both clocks `ratio low high` (median and middle half of the pairs) and the base's
        median seconds, `compile_s base_compile_s` (the first step), the shape and the machine.
    """
    import pandas

    rows: list[dict[str, Any]] = []
    for case in tqdm(cases, desc="compiled statistics"):
        base, base_compile, _ = step_of(options, ())
        step, compiling, recorder = step_of(options, CASES[case])
        times = interleaved({"base": partial(clocks, base), "step": partial(clocks, step)}, options.pairs)
        row: dict[str, Any] = {"case": case, "metrics": " ".join(CASES[case])}
        for index, clock in enumerate(("cpu", "wall")):
            mine, others = ([each[index] for each in times[side]] for side in ("step", "base"))
            names = (f"{clock}_ratio", f"{clock}_low", f"{clock}_high")
            row |= dict(zip(names, ratio(mine, others), strict=True))
            row[f"base_{clock}_s"] = statistics.median(others)
        if recorder is not None:
            counted = recorder.stats().manifest["forward_passes"]
            assert counted == options.pairs + 2, f"statistics of {counted} steps, not of all"
            recorder.stop()
        rows.append(row | {"compile_s": compiling, "base_compile_s": base_compile})
    shape = {name: getattr(options, name) for name in ("width", "depth", "threads", "pairs", "backend")}
    shape["tokens"] = options.rows * options.length
    return pandas.DataFrame(rows).assign(**shape, **machine())


def main() -> None:
    """Measure, print the table, and write it to --out."""
    numbers = {"width": 512, "depth": 4, "rows": 4, "length": 256, "vocabulary": 4096, "threads": 1, "pairs": 100}
    parser = arguments(__doc__, numbers)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which of them")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report(bench(options, options.cases), options.out)


if __name__ == "__main__":
    run(main)
