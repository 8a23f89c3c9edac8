"""Time that `normlab.observe` adds to training: 50 steps, one of them measured or all, over 50 bare ones.

    python -m benchmarks.observer --out data/bench/observer_cpu.csv

A ratio is a case over the bare steps of the same round; the columns give its median and middle half. CPU seconds are
the ones to read on a machine that does other work. The case "the same again" is the noise floor. It is larger than what
one measured step in 50 adds. That is better read as a fiftieth of what measuring every step adds. The smaller a model,
the larger the observer's share.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

import normlab
from benchmarks.probes import llama
from benchmarks.timing import arguments, clocks, interleaved, machine, ratio, report, run

if TYPE_CHECKING:
    import pandas


def cases(options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Training of a Llama by AdamW with clipping, bare and observed."""
    model, ids = llama(options)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def steps(every: int | None) -> None:
        observer = None if every is None else normlab.observe(model, every=every)
        for step in range(options.steps):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if observer is not None:
                observer.step(loss.item(), step)
        if observer is not None:
            observer.close()

    names = {"bare": None, "the same again": None, "observed once": options.steps, "observed every step": 1}
    return {name: partial(steps, every) for name, every in names.items()}


def bench(options: argparse.Namespace) -> pandas.DataFrame:
    """Time all cases."""
    import pandas

    times = interleaved({name: partial(clocks, case) for name, case in cases(options).items()}, options.rounds)
    rows = []
    for name, rounds in times.items():
        row: dict[str, object] = {"case": name}
        for index, clock in enumerate(("cpu", "wall")):
            mine, bare = ([each[index] for each in side] for side in (rounds, times["bare"]))
            row[f"{clock}_s_per_step"] = statistics.median(mine) / options.steps
            row[f"{clock}_ratio"], row[f"{clock}_low"], row[f"{clock}_high"] = ratio(mine, bare)
        rows.append(row)
    shape = {
        name: getattr(options, name) for name in ("width", "depth", "rows", "length", "steps", "threads", "rounds")
    }
    return pandas.DataFrame(rows).assign(**shape, **machine())


def main() -> None:
    """Measure, print the table, and write it to --out."""
    numbers = {"width": 128, "depth": 4, "rows": 8, "length": 128, "vocabulary": 512, "steps": 50}
    options = arguments(__doc__, numbers | {"threads": 1, "rounds": 5}).parse_args()
    torch.set_num_threads(options.threads)
    report(bench(options), options.out, columns=9)


if __name__ == "__main__":
    run(main)
