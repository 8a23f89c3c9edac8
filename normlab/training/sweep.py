"""Many runs: a preset or a list, several at once, resumable.

`sweep(what, out)` trains what is not finished yet and returns a `SweepResult`. Killed at any moment and started again,
it goes on
where it was: finished runs are skipped, the others continue from their last checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab import runs
from normlab.errors import NormlabError
from normlab.training.config import TrainConfig, require_same
from normlab.training.corpus import corpus_of
from normlab.training.presets import Preset, get_preset
from normlab.training.workers import finish_in_any_order, import_ray


@dataclass(frozen=True)
class SweepResult:
    """runs: all finished ones, in the sweep's order. failures: run id -> one line saying why it failed. learning_rates:
    by scheme, where the preset searched for them."""

    out: Path
    runs: list[runs.Run]
    failures: dict[str, str]
    learning_rates: dict[str, float]


def default_workers(threads: int | None = None) -> tuple[int, int]:
    """(workers, threads each): two workers share the cores, or as many as `threads` each allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(2, cores) if threads is None else max(1, cores // threads)
    return workers, threads or max(1, cores // workers)


def sweep(
    what: str | Preset | Sequence[TrainConfig],
    out: str | Path,
    *,
    workers: int | str | None = None,
    threads: int | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> SweepResult:
    """Train a preset (by name or as `Preset`) or a list of configurations under directory `out`.

    workers: processes at once, default 2; "ray": Ray's. threads: CPU threads a run, default cores/workers. Runs of a
    preset keep no weights. A run that fails is in the result's `failures`; the others go on. NormlabError for bad
    input, before any run starts.
    """
    root = Path(out)
    runs.check_root(root)
    workers, threads = _share(workers, threads)
    if workers == "ray":
        import_ray()
    job = _Job(root, workers, cache_dir, progress)
    if not isinstance(what, (str, Preset)):
        configs = [dataclasses.replace(config, threads=threads) for config in what]
        job.run(configs, cost=sum(map(_cost, configs)))
        return job.result(configs, {})
    preset = get_preset(what) if isinstance(what, str) else what
    more = {"threads": threads, "keep_weights": False}
    search = preset.search(**more)
    # Every scheme's first learning rate stands for the one to be found: costs are the same.
    planned = preset.grid(dict.fromkeys(preset.schemes, preset.learning_rates[0]), **more)
    shared = len(preset.schemes) if search and preset.search_depth in preset.depths else 0
    job.run(
        search,
        cost=sum(map(_cost, search + planned)) - sum(_cost(c) for c in search[:: len(preset.learning_rates)][:shared]),
    )
    chosen = (
        best_learning_rates(search, job.done) if search else dict.fromkeys(preset.schemes, preset.learning_rates[0])
    )
    missing = [scheme for scheme in preset.schemes if scheme not in chosen]
    grid = preset.grid(chosen | dict.fromkeys(missing, min(preset.learning_rates)), **more)
    grid = [config for config in grid if config.scheme not in missing]
    job.run(grid)
    return job.result(search + grid, chosen if search else {})


def best_learning_rates(search: Iterable[TrainConfig], done: Mapping[str, runs.Run]) -> dict[str, float]:
    """By scheme, the learning rate with the lowest final held-out loss; the lowest of all when every run diverged. A
    scheme none of whose runs ended is left out."""
    best: dict[str, tuple[float, float]] = {}
    for config in search:
        if (run := done.get(config.run_id)) is None:
            continue
        loss = run.eval_loss if math.isfinite(run.eval_loss) else math.inf
        best[config.scheme] = min(best.get(config.scheme, (math.inf, math.inf)), (loss, config.lr))
    return {scheme: lr for scheme, (_, lr) in best.items()}


class _Job:
    """The sweep's state: what is done, what failed, and the bar."""

    def __init__(self, root: Path, workers: int | str, cache_dir: Any, progress: bool) -> None:
        self.root, self.workers, self.cache_dir, self.progress = root, workers, cache_dir, progress
        self.done: dict[str, runs.Run] = {}
        self.failures: dict[str, str] = {}
        self.bar: Any = None

    def run(self, configs: Sequence[TrainConfig], cost: int | None = None) -> None:
        """Train those of `configs` that are not finished. `cost`: of the whole sweep, when it is known first."""
        from tqdm import tqdm

        if self.bar is None:
            form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} left{postfix}"
            self.bar = tqdm(desc="sweep", total=cost, disable=not self.progress, bar_format=form)
        todo = [config for config in configs if config.run_id not in self.done and config.run_id not in self.failures]
        identities = self._corpus_identities(todo)
        waiting = []
        for config in todo:
            if not (self.root / config.run_id).exists():
                waiting.append(config)
                continue
            try:
                run = runs.read_run(self.root / config.run_id)
                require_same(run.manifest, config, identities[_corpus_fields(config)])
                self._finished(config, run, skipped=True)
            except NormlabError as error:
                self._failed(config, error)
        for config, outcome in finish_in_any_order(waiting, self.root, self.workers, self.cache_dir):
            if isinstance(outcome, runs.Run):
                self._finished(config, outcome)
            else:
                self._failed(config, outcome)

    def result(self, configs: Sequence[TrainConfig], learning_rates: dict[str, float]) -> SweepResult:
        if self.bar is not None:
            self.bar.close()
        names = dict.fromkeys(config.run_id for config in configs)
        return SweepResult(self.root, [self.done[n] for n in names if n in self.done], self.failures, learning_rates)

    def _corpus_identities(self, configs: Sequence[TrainConfig]) -> dict[tuple, dict[str, Any]]:
        """Built once, here: workers find the corpora in the cache instead of all building them."""
        different = {_corpus_fields(config): config for config in configs}
        return {key: corpus_of(config, self.cache_dir, self.progress).identity() for key, config in different.items()}

    def _finished(self, config: TrainConfig, run: runs.Run, skipped: bool = False) -> None:
        self.done[config.run_id] = run
        if skipped:
            self.bar.total -= _cost(config)  # nothing to wait for
        else:
            self.bar.update(_cost(config))
            self.bar.set_postfix_str(f"{len(self.done)} runs done, {len(self.failures)} failed", refresh=False)
            self._say(
                f"{run.name}: {run.status}, eval loss {run.eval_loss:.3f}, {run.manifest['measured']['wall_s']:.0f} s"
            )

    def _failed(self, config: TrainConfig, error: Exception) -> None:
        line = (str(error).strip().splitlines() or [""])[0]
        self.failures[config.run_id] = line if isinstance(error, NormlabError) else f"{type(error).__name__}: {line}"
        self.bar.update(_cost(config))
        self._say(f"{config.run_id}: failed, {self.failures[config.run_id]}")

    def _say(self, line: str) -> None:
        if self.progress:
            self.bar.write(line)


def _share(workers: int | str | None, threads: int | None) -> tuple[int | str, int]:
    if workers is not None and workers != "ray" and (not isinstance(workers, int) or workers < 1):
        raise NormlabError(f"workers is {workers!r}; give a number of processes, at least 1, or 'ray'")
    if threads is not None and threads < 1:
        raise NormlabError(f"threads is {threads}; it must be at least 1")
    if workers is None:
        return default_workers(threads)
    return workers, threads or (1 if workers == "ray" else max(1, default_workers(1)[0] // int(workers)))


def _corpus_fields(config: TrainConfig) -> tuple:
    return (
        config.corpus,
        config.tokenizer,
        config.vocab_size,
        config.block_length,
        config.text_column,
        config.characters,
    )


def _cost(config: TrainConfig) -> int:
    """Work of a run in arbitrary units: blocks, and about two blocks' worth for embeddings and head."""
    return config.steps * config.tokens_per_step * (config.depth + 2) * config.width
