"""What a sweep will do and how long that takes, before it starts.

`plan(preset, out)`   a `Plan`: one row a run in order, with hours of one core

Hours of a depth are those of its finished runs below `out`, where there are any; otherwise a few steps are timed at two
depths (time grows linearly with depth), and what is measured counts in steps (`progress.steps_in_all`).
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab import runs, store
from normlab.training.clusters import Cluster
from normlab.training.config import TrainConfig
from normlab.training.distributed import device_of, settled
from normlab.training.grids import Preset, planned
from normlab.training.progress import steps_in_all
from normlab.training.run import train
from normlab.training.sweep import share_cores

if TYPE_CHECKING:
    import pandas

TIMED_STEPS = 12


@dataclass(frozen=True)
class Plan:
    """table: a row a run in order: `what` ("search" or "runs"), `run scheme depth seed lr steps tokens hours done`."""

    table: pandas.DataFrame
    workers: int | Cluster

    def in_words(self) -> str:
        """Runs, tokens and hours in the order in which they come, and the sum."""
        table, lines = self.table, []
        number = (table[["what", "depth"]] != table[["what", "depth"]].shift()).any(axis=1).cumsum()
        for _, group in table.groupby(number):
            first = group.iloc[0]
            lines.append(
                f"{len(group):4d} {first['what']:6s} depth {first['depth']:<3d} "
                f"{first['tokens'] / 1e6:5.2f}M tokens each {group['hours'].max():6.2f} h at most "
                f"{group['hours'].sum():7.2f} h in all, {int(group['done'].sum())} done   "
                + ", ".join(dict.fromkeys(group["scheme"]))
            )
        left = table[~table["done"]]
        total, ahead = table["hours"].sum(), left["hours"].sum()
        lines.append(f"{len(table)} runs, {total:.1f} core-hours; left: {len(left)} runs, {ahead:.1f} core-hours")
        if isinstance(self.workers, int):
            lines.append(f"about {ahead / self.workers:.1f} hours with {self.workers} workers")
        return "\n".join(lines)


def plan(
    preset: Preset,
    out: str | Path,
    *,
    workers: int | str | Cluster | None = None,
    threads: int | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> Plan:
    """The sweep `normlab.sweep(preset, out)` would do. Arguments as there; nothing is written below `out`."""
    import pandas

    workers, threads = share_cores(workers, threads)
    done: dict[str, runs.Run] = {}
    order: list[tuple[str, TrainConfig]] = []
    for what, asked in planned(preset, threads=threads, keep_weights=False):
        config = settled(asked, device_of(asked))
        if (path := asked.finished_in(store.child(out, store.SEARCH) if what == "search" else out)) is not None:
            run = runs.read_run(path)
            config = dataclasses.replace(config, dtype=run.manifest["config"]["dtype"])
            done[config.run_id] = run
        order.append((what, config))
    seconds = _Seconds([config for _, config in order], list(done.values()), cache_dir, progress)
    rows = [
        {
            "what": what,
            "run": config.run_id,
            **{name: getattr(config, name) for name in ("scheme", "depth", "seed", "lr", "steps")},
            "tokens": config.last_step * config.tokens_per_step,
            "hours": seconds.of(config) * threads / 3600,
            "done": config.run_id in done,
        }
        for what, config in order
    ]
    return Plan(pandas.DataFrame(rows), workers)


class _Seconds:
    """Seconds of a run: from finished ones of its shape, or from the time of a step."""

    def __init__(
        self, configs: Sequence[TrainConfig], done: Sequence[runs.Run], cache_dir: Any, progress: bool
    ) -> None:
        found: dict[tuple, list[float]] = {}
        for run in done:
            if run.manifest["measured"].get("resumed_from_step") == 0:
                config = TrainConfig.from_dict(run.manifest["config"])
                found.setdefault(_shape(config), []).append(run.manifest["measured"]["wall_s"])
        self.known = {shape: statistics.median(times) for shape, times in found.items()}
        missing = [config for config in configs if _shape(config) not in self.known]
        self.steps: dict[int, float] = {}
        depths = sorted({config.depth for config in missing})
        for depth in depths[:2]:
            config = next(config for config in missing if config.depth == depth)
            self.steps[depth] = _step_seconds(config, cache_dir, progress)

    def of(self, config: TrainConfig) -> float:
        if (known := self.known.get(_shape(config))) is not None:
            return known
        (shallow, first), *rest = self.steps.items()
        slope = (rest[0][1] - first) / (rest[0][0] - shallow) if rest else first / (shallow + 2)
        slope = min(max(slope, 0.0), first / shallow)  # on a noisy machine the deeper may have been the faster
        step = first + slope * (config.depth - shallow)
        return step * steps_in_all(config)


def _shape(config: TrainConfig) -> tuple:
    return config.depth, config.width, config.last_step, config.tokens_per_step, config.dtype, config.compile


def _step_seconds(config: TrainConfig, cache_dir: Any, progress: bool) -> float:
    """Median over a few steps of a run of that shape, which is thrown away."""
    never: dict[str, Any] = dict.fromkeys(("probe_every", "eval_every", "checkpoint_every", "experiment_blocks"), 0)
    never |= {"stop_at": None, "keep_weights": False, "store_all": False}
    config = dataclasses.replace(config, steps=TIMED_STEPS, log_every=1, **never)
    with tempfile.TemporaryDirectory() as out:
        run = train(config, out, cache_dir=cache_dir, progress=progress)
    return config.tokens_per_step / run.manifest["measured"]["tokens_per_s"]
