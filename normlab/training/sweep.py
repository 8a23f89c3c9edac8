"""Many runs: a preset or a list, several at once, resumable.

`sweep(what, out)` trains what is not finished yet and returns a `SweepResult`. It may be killed at any moment and
started again: finished runs are skipped, the others continue from their last checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab import runs, store
from normlab.errors import NormlabError, in_one_line
from normlab.training.config import AUTO, CorpusSpec, TrainConfig
from normlab.training.distributed import device_of, why_dtype
from normlab.training.grids import Preset, loss_of, planned, walk
from normlab.training.manifest import require_same
from normlab.training.progress import SweepBars
from normlab.training.rates import Choice, Pair
from normlab.training.text.corpus import corpus_of
from normlab.training.workers import Pool, Workers, finish_in_any_order, share_cores


@dataclass(frozen=True)
class SweepResult:
    """The results of a sweep.

    runs: all finished ones in the sweep's order.
    failures: run id -> one line with the reason.
    choices: the best learning rate by scheme and depth, if the preset tries several. Where one of these runs failed
        there is none, and no further seeds are trained.
    """

    out: str | Path
    runs: list[runs.Run]
    failures: dict[str, str]
    choices: dict[Pair, Choice]


def sweep(
    what: Preset | Sequence[TrainConfig],
    out: str | Path,
    *,
    workers: int | str | Workers | None = None,
    threads: int | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> SweepResult:
    """Train a preset or a list of configurations under directory `out`, or at an address.

    A run that fails is in the result's `failures`; the others are trained. Runs of a preset keep no weights but those
    that it names. A script calls this under `if __name__ == "__main__":`, because every worker imports the script.

    Args:
        workers: processes at once, by default 2, or as many as `threads` each allow. Or "ray", "slurm", or one of
            `normlab.training.workers` with its options; all machines then have to see `out`.
        threads: CPU threads per run, by default cores/workers, and 1 on a cluster.

    Raises:
        NormlabError: bad input, before any run starts.
    """
    if not isinstance(what, Preset):
        if not what:
            raise NormlabError("there is nothing to train: give a Preset or TrainConfigs")
        what = list(what)
        if wrong := [item for item in what if not isinstance(item, TrainConfig)]:
            raise NormlabError(f"{wrong[0]!r:.80} cannot be trained: give a Preset or TrainConfigs")
    store.check_root(out)
    workers, threads = share_cores(workers, threads)
    root = out if store.is_address(out) else Path(out)
    pool = Pool(workers) if isinstance(workers, int) else workers
    with SweepBars(progress, pool.steps) as bar:
        job = _Job(root, pool, cache_dir, bar)
        if isinstance(what, list):
            configs = [dataclasses.replace(config, threads=threads) for config in what]
            job.expect(configs)
            job.train(configs)
            return job.result({})
        fields: dict[str, Any] = {"threads": threads, "keep_weights": False}
        job.expect(planned(what, **fields))
        choices = walk(what, job.train, **fields)
        for scheme, depth in dict.fromkeys(pair for part in what.parts for pair in what.tried(part)):
            choice = choices.get((scheme, depth))
            if choice is None:
                reason = f"{scheme} at depth {depth}: no rate was chosen, as one of its runs failed; start again"
                warnings.warn(reason, stacklevel=2)
            elif choice.loss == math.inf:
                reason = f"{scheme} at depth {depth}: its runs diverged at every rate; other seeds take the lowest"
                warnings.warn(reason, stacklevel=2)
        return job.result(choices)


class _Job:
    """The sweep's state: finished runs, failures, and the bar."""

    def __init__(self, root: str | Path, workers: Workers, cache_dir: Any, bar: SweepBars) -> None:
        self.root, self.workers, self.cache_dir, self.bar = root, workers, cache_dir, bar
        self.asked: dict[str, TrainConfig] = {}
        self.done: dict[str, runs.Run] = {}
        self.failures: dict[str, str] = {}
        self.said_precision = False
        self._ahead = 0  # runs that the bar was told of

    def expect(self, configs: Sequence[TrainConfig]) -> None:
        """Tell the bar of runs that are planned, be it at another rate than they will have."""
        self._ahead += len(configs)
        self.bar.expect(configs)

    def train(self, configs: Sequence[TrainConfig]) -> dict[str, float]:
        """Train the runs that are not finished yet; losses by run id, infinite for a diverged run."""
        new = {config.run_id: config for config in configs if config.run_id not in self.asked}
        self.asked |= new
        self.expect(list(new.values())[self._ahead :])
        self._ahead -= len(new)
        self._train(list(new.values()))
        return {c.run_id: loss_of(self.done[c.run_id]) for c in configs if c.run_id in self.done}

    def _train(self, configs: Sequence[TrainConfig]) -> None:
        # Built once, here: workers find the corpora in the cache instead of all building them.
        specs = {CorpusSpec.of(config) for config in configs}
        corpora = {spec: corpus_of(spec, self.cache_dir, self.bar.show) for spec in specs}
        waiting = []
        for config in configs:
            path = config.finished_in(self.root)
            if path is None:
                waiting.append(config)
                continue
            try:
                run = runs.read_run(path)
                require_same(run.manifest, config, corpora[CorpusSpec.of(config)].identity(config))
                self._finished(config, run, skipped=True)
            except NormlabError as error:
                self._failed(config, error)
        self.bar.watch(waiting)
        if not self.said_precision and isinstance(self.workers, Pool) and any(c.dtype == AUTO for c in waiting):
            self.said_precision = True
            self.bar.say(why_dtype(device_of(waiting[0])))
        for config, outcome in finish_in_any_order(waiting, self.root, self.workers, self.cache_dir):
            if isinstance(outcome, runs.Run):
                self._finished(config, outcome)
            else:
                self._failed(config, outcome)

    def result(self, choices: dict[Pair, Choice]) -> SweepResult:
        found = [self.done[name] for name in self.asked if name in self.done]
        return SweepResult(self.root, found, self.failures, choices)

    def _finished(self, config: TrainConfig, run: runs.Run, skipped: bool = False) -> None:
        self.done[config.run_id] = run
        if skipped:
            self.bar.skip(config)
        else:
            self.bar.end(config)
            seconds = run.manifest["measured"]["wall_s"]
            self.bar.say(f"{run.name}: {run.outcome}, {seconds:.0f} s")

    def _failed(self, config: TrainConfig, error: Exception) -> None:
        self.failures[config.run_id] = in_one_line(error)
        self.bar.end(config, failed=True)
        self.bar.say(f"{config.run_id}: failed, {self.failures[config.run_id]}")
