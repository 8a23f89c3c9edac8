"""Shared parts of the benchmarks: interleaved rounds, ratios, and tables as CSV files.

One machine runs all sides in turns, so that a machine that slows down slows all of them. A ratio is the median over
rounds of one side's time over another's in the same round.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from normlab.errors import NormlabError

if TYPE_CHECKING:
    import pandas

Time = TypeVar("Time")


def interleaved(
    sides: Mapping[str, Callable[[], Time]], rounds: int, tick: Callable[[], Any] = lambda: None
) -> dict[str, list[Time]]:
    """The times of all sides, round by round, every second round in the opposite order.

    A first round warms up and does not count.

    Args:
        sides: each runs once and returns its time.
        tick: called after each round.
    """
    for side in sides.values():
        side()
    times: dict[str, list[Time]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            times[name].append(sides[name]())
        tick()
    return times


def clocks(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of the processor (all threads of this process), and of the wall clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


def ratio(times: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Median ratio of the rounds, and the ends of their middle half."""
    ratios = sorted(a / b for a, b in zip(times, base, strict=True))
    quarter = len(ratios) // 4
    return statistics.median(ratios), ratios[quarter], ratios[-1 - quarter]


def machine() -> dict[str, Any]:
    """Columns that say where a table was measured, and of which commit."""
    from normlab.training.manifest import commit

    load = round(os.getloadavg()[0], 1)
    return {"torch": torch.__version__, "processor": processor(), "load_1min": load, "commit": commit()}


def processor(listed: Path = Path("/proc/cpuinfo")) -> str:
    """The name of this machine's processor, or its kind where Linux does not list a name."""
    lines = listed.read_text().splitlines() if listed.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def arguments(about: str, numbers: Mapping[str, int]) -> argparse.ArgumentParser:
    """A parser with a flag for each number and `--out FILE`."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--out", type=Path, help="a CSV file")
    return parser


def written(rows: Iterable[dict[str, Any]], out: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """All rows; the CSV file holds those that there are while the next one is measured."""
    import pandas

    out.parent.mkdir(parents=True, exist_ok=True)
    kept: list[dict[str, Any]] = []
    for row in rows:
        kept.append(row)
        pandas.DataFrame(kept, columns=list(columns)).to_csv(out, index=False)
    return kept


def report(table: pandas.DataFrame, out: Path | None, columns: int = 12) -> None:
    """Print the first columns of a table, and write all to a CSV file where one is named."""
    print(table.iloc[:, :columns].round(3).to_string(index=False))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(out, index=False)
        print(out)


def run(main: Callable[[], None]) -> None:
    """Run a benchmark's main function; an error of ours is one line."""
    try:
        main()
    except NormlabError as error:
        sys.exit(f"normlab: error: {error}")
