"""Many runs: a preset or a list, several at once, resumable.

`sweep(what, out)` trains what is not finished yet and returns a `SweepResult`. Killed at any moment and started again,
it goes on where it was: finished runs are skipped, the others continue from their last checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normlab import runs, store
from normlab.errors import NormlabError, in_one_line
from normlab.training.clusters import Cluster, cluster
from normlab.training.config import AUTO, TrainConfig, require_same
from normlab.training.corpus import CorpusSpec, corpus_of
from normlab.training.distributed import device_of, why_dtype
from normlab.training.grids import Choice, Choices, Part, Preset, Search, Tried
from normlab.training.presets import get_preset
from normlab.training.progress import Progress
from normlab.training.workers import exit_if_worker_imports_main, finish_in_any_order


@dataclass(frozen=True)
class SweepResult:
    """runs: all finished ones, in the sweep's order, without those of the search for learning rates, which are below
    `out`/search and `out`/finals. failures: run id -> one line saying why it failed. choices: learning rate and
    settings by scheme and searched depth, where the preset searched for them."""

    out: str | Path
    runs: list[runs.Run]
    failures: dict[str, str]
    choices: dict[tuple[str, int], Choice]


def default_workers(threads: int | None = None) -> tuple[int, int]:
    """(workers, threads each): two workers share the cores, or as many as `threads` each allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(2, cores) if threads is None else max(1, cores // threads)
    return workers, threads or max(1, cores // workers)


def sweep(
    what: str | Preset | Sequence[TrainConfig],
    out: str | Path,
    *,
    workers: int | str | Cluster | None = None,
    threads: int | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> SweepResult:
    """Train a preset (by name or as `Preset`) or a list of configurations under directory `out`, or at an address.

    workers: processes at once, default 2; "ray", "slurm", or one of `normlab.training.clusters` with its options: `out`
    is then where all machines see it. threads: CPU threads a run, default cores/workers. Runs of a preset keep no
    weights but those that it names. A run that fails is in the result's `failures`; the others go on.
    NormlabError for bad input, before any run starts. A script calls this under `if __name__ == "__main__":`, because
    every worker imports the script.
    """
    exit_if_worker_imports_main()
    if not isinstance(what, str | Preset):
        what = list(what)
        if wrong := [one for one in what if not isinstance(one, TrainConfig)]:
            raise NormlabError(f"{wrong[0]!r:.80} cannot be trained: give a preset, its name, or TrainConfigs")
    store.check_root(out)
    workers, threads = share_cores(workers, threads)
    root = out if store.is_address(out) else Path(out)
    with Progress("sweep", progress, None if isinstance(workers, Cluster) else workers) as bar:
        job = _Job(root, workers, cache_dir, bar)
        if not isinstance(what, (str, Preset)):
            configs = [dataclasses.replace(config, threads=threads) for config in what]
            bar.expect(configs)
            job.run(configs)
            return job.result(configs, {})
        preset = get_preset(what) if isinstance(what, str) else what
        more: dict[str, Any] = {"threads": threads, "keep_weights": False}
        bar.expect([config for _, config in planned(preset, **more)])
        choices: dict[tuple[str, int], Choice] = {}
        configs = []
        for part in preset.parts:
            choices.update(job.search(preset, part, choices, more))
            grid = preset.grid(part, choices, **more)
            configs += grid
            if isinstance(preset.rate, Search):  # in order: a part's runs come before the next part's search
                job.run(grid)
        job.run(configs)  # where rates are known, all parts share one pool of workers
        return job.result(configs, choices)


def planned(preset: Preset, **more: Any) -> list[tuple[str, TrainConfig]]:
    """("search" or "runs", configuration) of every run of a preset, in order, before anything is known: the grid of
    rates as it stands, and its middle rate for those to be found. A search may grow its grid and hold finals."""
    plan: list[tuple[str, TrainConfig]] = []
    known: dict[tuple[str, int], Choice] = {}
    for part in preset.parts:
        for pair in preset.searched(part):
            if pair not in known:
                assert isinstance(preset.rate, Search)
                rates = sorted(preset.rate.foreseen)
                known[pair] = Choice(rates[len(rates) // 2])
                plan += [
                    ("search", preset.trial(part, *pair, Choice(rate, fields), **more))
                    for fields in preset.rate.settings(pair[0])
                    for rate in preset.rate.foreseen
                ]
        plan += [("runs", config) for config in preset.grid(part, known, **more)]
    return plan


@dataclass
class _Grid:
    """Learning rates of a scheme at a depth, under one of its settings: those tried, and the losses of runs that
    ended."""

    scheme: str
    depth: int
    fields: Mapping[str, Any]
    tried: set[float] = field(default_factory=set)
    losses: dict[float, float] = field(default_factory=dict)


class _Job:
    """The sweep's state: what is done, what failed, and the bar."""

    def __init__(self, root: str | Path, workers: int | Cluster, cache_dir: Any, bar: Progress) -> None:
        self.root, self.workers, self.cache_dir, self.bar = root, workers, cache_dir, bar
        self.done: dict[str, runs.Run] = {}
        self.failures: dict[str, str] = {}
        self.said_precision = False

    def search(self, preset: Preset, part: Part, known: Choices, more: Mapping[str, Any]) -> Choices:
        """The choices that a part needs beside those known. The grids of all of them grow together, so that the workers
        have something to do. A pair none of whose runs ended is left out."""
        search = preset.rate
        if not isinstance(search, Search):
            return {}
        grids = [
            _Grid(scheme, depth, fields)
            for scheme, depth in preset.searched(part)
            if (scheme, depth) not in known
            for fields in search.settings(scheme)
        ]
        wanted = [(grid, rate) for grid in grids for rate in search.rates]
        while wanted:
            trials = [
                preset.trial(part, grid.scheme, grid.depth, Choice(rate, grid.fields), **more) for grid, rate in wanted
            ]
            if any(grid.tried for grid, _ in wanted):  # the grids as they stood were expected with the whole sweep
                self.bar.expect(trials)
            self.run(trials, store.child(self.root, store.SEARCH))
            for (grid, rate), config in zip(wanted, trials, strict=True):
                grid.tried.add(rate)
                if config.run_id in self.done:
                    grid.losses[rate] = self._loss(config)
            grown = [(grid, search.next_rate(grid.losses)) for grid in grids]
            wanted = [(grid, rate) for grid, rate in grown if rate is not None and rate not in grid.tried]
        return self._settle(preset, part, grids, more)

    def _settle(self, preset: Preset, part: Part, grids: Sequence[_Grid], more: Mapping[str, Any]) -> Choices:
        """Of each scheme and depth the best in `grids`, or the best of the finals where the search has some."""
        assert isinstance(preset.rate, Search)
        ended: dict[tuple[str, int], dict[Tried, float]] = {}
        for place, grid in enumerate(grids):
            for rate, loss in grid.losses.items():
                ended.setdefault((grid.scheme, grid.depth), {})[place, rate] = loss
        finalists = {pair: preset.rate.finalists(losses) for pair, losses in ended.items()}
        finals = {
            (pair, one): preset.trial(part, *pair, Choice(one[1], grids[one[0]].fields), final=True, **more)
            for pair, several in finalists.items()
            if len(several) > 1
            for one in several
        }
        self.bar.expect(list(finals.values()))
        self.run(list(finals.values()), store.child(self.root, store.FINALS))
        losses = {key: self._loss(config) for key, config in finals.items()}
        best = {
            pair: min(several, key=lambda one: losses.get((pair, one), math.inf)) for pair, several in finalists.items()
        }
        return {
            pair: Choice(rate, grids[place].fields, ended[pair][place, rate]) for pair, (place, rate) in best.items()
        }

    def _loss(self, config: TrainConfig) -> float:
        """Of a run that ended; infinite where it failed or diverged."""
        run = self.done.get(config.run_id)
        return run.eval_loss if run is not None and math.isfinite(run.eval_loss) else math.inf

    def run(self, configs: Sequence[TrainConfig], root: str | Path | None = None) -> None:
        """Train those of `configs` that are not finished under `root`, by default the sweep's."""
        root = root or self.root
        todo = [config for config in configs if config.run_id not in self.done and config.run_id not in self.failures]
        identities = self._corpus_identities(todo)
        waiting = []
        for config in todo:
            path = config.finished_in(root)
            if path is None:
                waiting.append(config)
                continue
            try:
                run = runs.read_run(path)
                require_same(run.manifest, config, identities[CorpusSpec.of(config)])
                self._finished(config, run, skipped=True)
            except NormlabError as error:
                self._failed(config, error)
        self.bar.watch(waiting, root)
        if (
            any(config.dtype == AUTO for config in waiting)
            and isinstance(self.workers, int)
            and not self.said_precision
        ):
            self.said_precision = True
            self.bar.say(why_dtype(device_of(waiting[0])))
        for config, outcome in finish_in_any_order(waiting, root, self.workers, self.cache_dir):
            if isinstance(outcome, runs.Run):
                self._finished(config, outcome)
            else:
                self._failed(config, outcome)

    def result(self, configs: Sequence[TrainConfig], choices: dict[tuple[str, int], Choice]) -> SweepResult:
        names = dict.fromkeys(config.run_id for config in configs)
        return SweepResult(self.root, [self.done[n] for n in names if n in self.done], self.failures, choices)

    def _corpus_identities(self, configs: Sequence[TrainConfig]) -> dict[CorpusSpec, dict[str, Any]]:
        """Built once, here: workers find the corpora in the cache instead of all building them."""
        different = {CorpusSpec.of(config): None for config in configs}
        return {spec: corpus_of(spec, self.cache_dir, self.bar.show).identity() for spec in different}

    def _finished(self, config: TrainConfig, run: runs.Run, skipped: bool = False) -> None:
        self.done[config.run_id] = run
        if skipped:
            self.bar.skip(config)
        else:
            self.bar.end(config)
            seconds = run.manifest["measured"]["wall_s"]
            self.bar.say(f"{run.name}: {run.status}, eval loss {run.eval_loss:.3f}, {seconds:.0f} s")

    def _failed(self, config: TrainConfig, error: Exception) -> None:
        self.failures[config.run_id] = in_one_line(error)
        self.bar.end(config, failed=True)
        self.bar.say(f"{config.run_id}: failed, {self.failures[config.run_id]}")


def share_cores(workers: int | str | Cluster | None, threads: int | None) -> tuple[int | Cluster, int]:
    """(workers, threads each), of what was asked for and the machine's cores."""
    if isinstance(workers, str):
        workers = cluster(workers)
    if isinstance(workers, int) and workers < 1:
        raise NormlabError(f"workers is {workers}; give a number of processes, at least 1")
    if threads is not None:
        TrainConfig(threads=threads)  # its check
    if workers is None:
        return default_workers(threads)
    return workers, threads or (1 if isinstance(workers, Cluster) else max(1, default_workers(1)[0] // workers))
