"""Gain from a second Ray worker: runs per minute of two workers over one, the same short runs.

    python -m benchmarks.clusters --out data/bench/ray_workers.csv

Runs are of one thread and of the sweep's shape at depth 4, without measurements on the way. The clock runs from Ray's
start to its end. So it includes the time in which a worker does not train: Ray and the workers start, import, and wait
for the last run. Its share is in the table.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.timing import arguments, machine, report, run
from normlab.errors import NormlabError
from normlab.training.config import TrainConfig
from normlab.training.sweep import sweep
from normlab.training.text.corpus import corpus_of
from normlab.training.workers import Ray

if TYPE_CHECKING:
    import pandas

WORKERS = (1, 2)


def timed(configs: Sequence[TrainConfig], workers: int, cache_dir: str | None) -> tuple[float, list[float]]:
    """Wall seconds of all runs of `normlab sweep --workers ray` where Ray has `workers` CPUs, and of each."""
    import ray

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
        try:
            result = sweep(configs, out, workers=Ray(), cache_dir=cache_dir, progress=False)
        finally:
            ray.shutdown()
        wall = time.perf_counter() - started
    if result.failures:
        raise NormlabError(f"a run failed: {next(iter(result.failures.values()))}")
    return wall, [run.manifest["measured"]["wall_s"] for run in result.runs]


def bench(count: int, cache_dir: str | None = None, **fields: Any) -> pandas.DataFrame:
    """Time the runs on one worker and on two.

    Returns:
        One row each: `workers runs wall_s runs_a_minute ratio not_training run_s` and the machine. ratio is over one
        worker, not_training a share of the workers' time, run_s the median of a run.
    """
    import pandas

    Ray().check()
    never: dict[str, Any] = dict.fromkeys(("probe_every", "eval_every", "checkpoint_every"), 0)
    configs = [TrainConfig(seed=seed, keep_weights=False, **never, **fields) for seed in range(count)]
    corpus_of(configs[0], cache_dir)  # built here, not while the clock runs
    rows: list[dict[str, Any]] = []
    for workers in WORKERS:
        wall, seconds = timed(configs, workers, cache_dir)
        row: dict[str, Any] = {"workers": workers, "runs": len(seconds), "wall_s": wall}
        row |= {"runs_a_minute": 60 * len(seconds) / wall, "not_training": 1 - sum(seconds) / (workers * wall)}
        rows.append(row | {"run_s": statistics.median(seconds)})
    table = pandas.DataFrame(rows)
    table.insert(4, "ratio", table["runs_a_minute"] / table["runs_a_minute"][0])
    import ray

    config = configs[0]
    about = {name: getattr(config, name) for name in ("depth", "width", "steps", "threads")}
    about |= {"tokens": config.tokens_per_step, "cores": os.cpu_count(), "ray": ray.__version__}
    return table.assign(**about, **machine())


def main() -> None:
    """Measure, print the table, and write it to --out."""
    parser = arguments(__doc__, {"runs": 6, "depth": 4, "width": 128, "steps": 300})
    parser.add_argument("--cache-dir", help="directory for prepared corpora; default: the user's cache directory")
    options = parser.parse_args()
    shape = {name: getattr(options, name) for name in ("depth", "width", "steps")}
    report(bench(options.runs, options.cache_dir, **shape), options.out)


if __name__ == "__main__":
    run(main)
