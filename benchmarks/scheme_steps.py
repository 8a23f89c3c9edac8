"""A training step of every scheme over Pre-LN's, in models of the league's size, on this machine's CPU.

    python -m benchmarks.scheme_steps --out data/bench/scheme_steps.csv

Each scheme takes turns with Pre-LN, 6 steps each, in float32 on one thread. A ratio is the median over rounds, with
their middle half. A step holds all that a scheme does after it, such as nGPT's normalized matrices and BHyT's refresh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.timing import arguments, interleaved, machine, ratio, report, run, written
from benchmarks.training import STEPS, BareLoop, threads_of
from normlab.schemes import BASELINE, SCHEMES
from normlab.training.config import TrainConfig
from normlab.training.text.corpus import corpus_of

DEPTH, WIDTH = 8, 128  # of the league
COLUMNS = ("scheme", "step", "step_low", "step_high", "rounds", "depth", "width", *machine())


def measure(rounds: int, schemes: Sequence[str], cache_dir: Path | None = None) -> Iterator[dict]:
    """One row per scheme but Pre-LN."""
    config = TrainConfig(scheme=BASELINE, depth=DEPTH, width=WIDTH, dtype="float32", threads=1, keep_weights=False)
    corpus = corpus_of(config, cache_dir, progress=False)
    with threads_of(1):
        for scheme in schemes:
            if scheme == BASELINE:
                continue
            loops = [BareLoop(replace(config, scheme=name), corpus) for name in (scheme, BASELINE)]
            sides: dict[str, Any] = {loop.config.scheme: partial(loop.run, STEPS) for loop in loops}
            times = interleaved(sides, rounds)
            middle, low, high = ratio(*times.values())
            row = {"scheme": scheme, "step": middle, "step_low": low, "step_high": high, "rounds": rounds}
            yield row | {"depth": DEPTH, "width": WIDTH} | machine()


def main() -> None:
    """Measure, print, and write each row to the CSV file as it comes."""
    import pandas as pd

    parser = arguments(__doc__, {"rounds": 7})
    parser.add_argument("schemes", nargs="*", default=tuple(SCHEMES), help="default: all but Pre-LN")
    parser.set_defaults(out=Path("scheme_steps.csv"))
    options = parser.parse_args()
    rows = tqdm(measure(options.rounds, options.schemes), total=len(options.schemes), desc="steps")
    report(pd.DataFrame(written(rows, options.out, COLUMNS)), None)


if __name__ == "__main__":
    run(main)
