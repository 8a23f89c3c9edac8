"""What a sweep will train, and how long that takes.

`plan(preset, out)`   a `Plan`: one row per run in order, with hours of one core

Hours are those of finished runs of the same shape below `out`; a diverged run, which ended early, tells none. Asked to,
it times a few steps where there are none, at two depths of each width, batch, precision, ...: time grows linearly with
depth, and measurements count in steps (`progress.steps_in_all`).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab import runs
from normlab.training.config import TrainConfig
from normlab.training.distributed import device_of, settled
from normlab.training.grids import Preset, planned
from normlab.training.progress import steps_in_all
from normlab.training.run import train
from normlab.training.workers import Workers, share_cores

if TYPE_CHECKING:
    import pandas

TIMED_STEPS = 12


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep.

    table: one row per run in order: `run scheme depth seed lr steps tokens hours done`. hours: of one core; NaN where
        they are not known.
    threads: of each run.
    """

    table: pandas.DataFrame
    workers: int | Workers
    threads: int

    @property
    def hours_left(self) -> float:
        """How long the runs that are not done take. In order, the first worker that is free takes the next.

        NaN where the hours of one are not known, or how many runs a cluster trains at once.
        """
        left = self.table.loc[~self.table["done"], "hours"]
        if not isinstance(self.workers, int) or left.isna().any():
            return math.nan
        busy = [0.0] * min(self.workers, len(left))
        for hours in left:
            heapq.heapreplace(busy, busy[0] + hours)
        return max(busy, default=0.0) / self.threads

    def in_words(self) -> str:
        """Runs, tokens and hours in order, and their sums."""
        table, lines = self.table, []
        number = (table["depth"] != table["depth"].shift()).cumsum()
        for _, group in table.groupby(number):
            first, hours = group.iloc[0], group["hours"]
            known = f"{hours.max():6.2f} h at most {hours.sum():7.2f} h in all, " if hours.notna().all() else ""
            lines.append(
                f"{len(group):4d} runs depth {first['depth']:<3d} "
                f"{_tokens(group['tokens'])} tokens each {known}{int(group['done'].sum())} done   "
                + ", ".join(dict.fromkeys(group["scheme"]))
            )
        left = table[~table["done"]]
        lines.append(f"{len(table)} runs, {len(left)} left")
        if left["hours"].isna().any():
            lines.append("how long they take is not known: --time times a few steps first")
        else:
            total, ahead = table["hours"].sum(), left["hours"].sum()
            lines[-1] += f"; {total:.1f} core-hours, {ahead:.1f} left"
            if isinstance(self.workers, int):
                lines.append(f"about {self.hours_left:.1f} hours with {self.workers} workers")
        return "\n".join(lines)


def plan(
    preset: Preset,
    out: str | Path,
    *,
    time: bool = False,
    workers: int | str | Workers | None = None,
    threads: int | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> Plan:
    """The sweep that `normlab.sweep(preset, out)` would train. Nothing is written below `out`.

    Args:
        time: train a few steps for the hours that no finished run tells.
        workers, threads, cache_dir, progress: as for `sweep`.
    """
    import pandas

    workers, threads = share_cores(workers, threads)
    done: dict[str, runs.Run] = {}

    def finished(asked: TrainConfig) -> runs.Run | None:
        if (path := asked.finished_in(out)) is None:
            return None
        run = done[asked.run_id] = runs.read_run(path)
        return run

    order: list[TrainConfig] = []
    for asked in planned(preset, finished, threads=threads, keep_weights=False):
        config = settled(asked, device_of(asked))
        if (found := done.pop(asked.run_id, None)) is not None:
            config = dataclasses.replace(config, dtype=found.config["dtype"])
            done[config.run_id] = found
        order.append(config)
    seconds = _Seconds(list(done.values()))
    if time:
        seconds.measure(order, cache_dir, progress)
    rows = [
        {
            "run": config.run_id,
            **{name: getattr(config, name) for name in ("scheme", "depth", "seed", "lr", "steps")},
            "tokens": config.last_step * config.tokens_per_step,
            "hours": seconds.of(config) / 3600,
            "done": config.run_id in done,
        }
        for config in order
    ]
    return Plan(pandas.DataFrame(rows), workers, threads)


def _tokens(counts: pandas.Series) -> str:
    """How many, in millions; from the fewest to the most where they differ."""
    least, most = f"{counts.min() / 1e6:5.2f}M", f"{counts.max() / 1e6:.2f}M"
    return least if counts.min() == counts.max() else f"{least} to {most}"


class _Seconds:
    """Seconds of a run on one core: from finished ones of its shape, or from the time of a step; NaN without either."""

    def __init__(self, done: Sequence[runs.Run]) -> None:
        times: dict[tuple, list[float]] = {}
        for run in done:
            if run.manifest["measured"].get("resumed_from_step") == 0 and run.status != runs.DIVERGED:
                config = TrainConfig.from_dict(run.config)
                seconds = run.manifest["measured"]["wall_s"] * config.threads
                times.setdefault(_shape(config), []).append(seconds)
        self.known = {shape: statistics.median(seconds) for shape, seconds in times.items()}
        self.steps: dict[tuple, dict[int, float]] = {}  # by depth, of each kind of block

    def measure(self, configs: Sequence[TrainConfig], cache_dir: Any, progress: bool) -> None:
        """Time steps at the two smallest depths that are not known, of each kind of block."""
        missing: dict[tuple, dict[int, TrainConfig]] = {}
        for config in configs:
            if _shape(config) not in self.known:
                missing.setdefault(_block(config), {}).setdefault(config.depth, config)
        for block, by_depth in missing.items():
            shallow = sorted(by_depth)[:2]
            self.steps[block] = {depth: _step_seconds(by_depth[depth], cache_dir, progress) for depth in shallow}

    def of(self, config: TrainConfig) -> float:
        if (known := self.known.get(_shape(config))) is not None:
            return known
        if (steps := self.steps.get(_block(config))) is None:
            return math.nan
        (shallow, first), *rest = steps.items()
        slope = (rest[0][1] - first) / (rest[0][0] - shallow) if rest else first / (shallow + 2)
        slope = min(max(slope, 0.0), first / shallow)  # on a noisy machine the deeper may have been the faster
        return (first + slope * (config.depth - shallow)) * steps_in_all(config)


def _shape(config: TrainConfig) -> tuple:
    return config.depth, config.last_step, *_block(config)


def _block(config: TrainConfig) -> tuple:
    """What the time of a step depends on beside the depth and the scheme."""
    size = config.width, config.intermediate, config.vocab_size
    return *size, config.batch_size, config.block_length, config.dtype, config.compile


def _step_seconds(config: TrainConfig, cache_dir: Any, progress: bool) -> float:
    """Median over a few steps of a run of that shape, which is thrown away, on one core."""
    never: dict[str, Any] = dict.fromkeys(("probe_every", "eval_every", "checkpoint_every", "experiment_blocks"), 0)
    never |= {"stop_at": None, "keep_weights": False, "store_all": False}
    config = dataclasses.replace(config, steps=TIMED_STEPS, log_every=1, **never)
    with tempfile.TemporaryDirectory() as out:
        run = train(config, out, cache_dir=cache_dir, progress=progress)
    return config.tokens_per_step / run.manifest["measured"]["tokens_per_s"] * config.threads
