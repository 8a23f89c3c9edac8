"""Training steps of an older checkout and of this one, in turns: the ratio of their times, and how far losses part.

    git worktree add ../before e0f34e1
    python -m benchmarks.revisions ../before --out data/bench/revisions.csv

Its 24 pairs compare the losses of 100 steps: 4 per turn, and a turn that warms up. The table's float32 rows are of
another call, with --dtype float32 --pairs 12 on a processor (or as one) with AVX2 alone.
Each side is a process of its own, with the code of its checkout. A third trains the older code uncompiled: its distance
from the compiled one is what rounding alone does to a loss. `ratio` is the older step's time on the processor over the
newer one's, with its middle half; `parted` the largest difference of the losses of one of `steps`. `before` and
`commit` are the older code and the newer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
SCHEMES = ("pre_rmsnorm", "bhyt", "lns", "dyt")
STEPS = 4  # between two changes of turn
COLUMNS = (
    "scheme",
    "dtype",
    "capability",
    "before",
    "ratio",
    "low",
    "high",
    "new_ms",
    "old_ms",
    "pairs",
    "steps",
    "parted",
    "parted_eager",
)


class Side:
    """A run in the code of a checkout, a few steps at a time."""

    def __init__(self, checkout: Path, **fields: Any) -> None:
        paths = os.pathsep.join(map(str, (checkout, checkout / "kernels")))
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(fields)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.losses: list[float] = []

    def __call__(self) -> float:
        """Seconds of the processor per step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(STEPS, file=self.process.stdin, flush=True)
        seconds, losses = json.loads(self.process.stdout.readline())
        self.losses += losses
        return seconds / STEPS

    def end(self) -> None:
        self.process.communicate()

    def parted(self, other: Side) -> float:
        """The largest difference of the losses of one step."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


def serve(fields: dict[str, Any]) -> None:
    """Train as many steps as each line of standard input says; print their seconds and losses."""
    from normlab.training.config import TrainConfig
    from normlab.training.distributed import accelerator_for, device_of, process_settings
    from normlab.training.loop import Training
    from normlab.training.text.corpus import corpus_of

    config = TrainConfig(probe_every=0, eval_every=0, checkpoint_every=0, keep_weights=False, **fields)
    with process_settings(config, device_of(config)):
        training = Training(config, corpus_of(config, None, False), accelerator_for(config))
        steps = training.steps()
        for line in sys.stdin:
            started, losses = time.process_time(), []
            for _ in range(int(line)):
                next(steps)
                losses.append(training.mean_loss())
            print(json.dumps([time.process_time() - started, losses]), flush=True)


def rows(before: Path, dtype: str, pairs: int, depth: int, width: int) -> Iterator[dict[str, Any]]:
    """A row per scheme."""
    import torch

    from benchmarks.timing import interleaved, machine, ratio

    named = ["git", "-C", str(before), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(named, check=True, capture_output=True, text=True).stdout.strip()
    for scheme in SCHEMES:
        fields = {"scheme": scheme, "depth": depth, "width": width, "dtype": dtype}
        new, old = Side(HERE, **fields, compile=True), Side(before, **fields, compile=True)
        eager = Side(before, **fields, compile=False)
        times = interleaved({"new": new, "old": old}, pairs)
        for _ in range(pairs + 1):
            eager()
        middle, low, high = ratio(times["old"], times["new"])
        for side in (new, old, eager):
            side.end()
        yield {
            "scheme": scheme,
            "dtype": dtype,
            "before": commit,
            "capability": torch.backends.cpu.get_cpu_capability(),
            "ratio": middle,
            "low": low,
            "high": high,
            "new_ms": 1e3 * statistics.median(times["new"]),
            "old_ms": 1e3 * statistics.median(times["old"]),
            "pairs": pairs,
            "steps": len(new.losses),
            "parted": new.parted(old),
            "parted_eager": eager.parted(old),
            **machine(),
        }


def main() -> None:
    import pandas as pd

    from benchmarks.timing import arguments, machine, report, written

    parser = arguments(__doc__, {"pairs": 24, "depth": 8, "width": 128})
    parser.add_argument("before", type=Path, help="the older checkout")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    columns = (*COLUMNS, *machine())
    measured = rows(given.before.resolve(), given.dtype, given.pairs, given.depth, given.width)
    table = written(measured, given.out, columns) if given.out else list(measured)
    report(pd.DataFrame(table), None)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        serve(json.loads(sys.argv[1]))
    else:
        main()
