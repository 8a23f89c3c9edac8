"""What trains on a GPU that is there for minutes: which run begins, and what a death costs."""

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu_runs
from normlab.training.config import TrainConfig


def test_no_run_begins_that_would_not_end_in_time_and_a_death_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds a block: after a run that dies and one of 24 blocks there is time for 6 blocks only."""
    now, trained = [0.0], []

    def train_one(config: TrainConfig, out: str, cache_dir: str | None) -> str:
        assert cache_dir is None
        trained.append((config.depth, config.seed))
        if config.seed == 1:
            raise BrokenProcessPool
        now[0] += 10.0 * config.depth
        return out

    monkeypatch.setattr(gpu_runs, "ProcessPoolExecutor", lambda workers, *_: ThreadPoolExecutor(workers))
    monkeypatch.setattr(gpu_runs, "train_one", train_one)
    monkeypatch.setattr(gpu_runs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gpu_runs, "read_run", lambda path: None)
    monkeypatch.setattr(gpu_runs, "told", lambda run: "")
    configs = [TrainConfig(depth=depth, seed=seed) for depth, seed in ((24, 1), (24, 0), (24, 2), (6, 0), (6, 2))]
    assert gpu_runs.train_all(configs, Path("w"), None, 1, 310.0) == 2
    assert trained == [(24, 1), (24, 0), (6, 0)]
