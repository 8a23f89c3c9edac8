"""A run killed at any moment and started again ends as one that was never killed, bit for bit, and leaves nothing
half-written."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from training_helpers import FORKS, tiny

from normlab import runs, store
from normlab.training.config import TrainConfig


def _train(config: TrainConfig, out: Path, cache: Path, pause_in: str | None, marker: Path) -> None:
    import torch

    torch.set_num_threads(1)
    if pause_in is not None:
        _pause(pause_in, marker)
    from normlab.training.run import train

    train(config, out, cache_dir=cache, progress=False)


def _pause(where: str, marker: Path) -> None:
    """Stop for ever at a place inside a checkpoint's writing, once the marker says that it was reached the second
    time."""
    import torch

    import normlab.runs

    calls = []

    def reached() -> None:
        calls.append(where)
        if len(calls) == 2:
            marker.touch()
            time.sleep(600)

    def stop_before(original: Callable) -> Callable:
        return lambda *args: (reached(), original(*args))[1]

    if where == "state not written":
        torch.save = stop_before(torch.save)
    elif where == "log half-written":
        original = normlab.store.write_stats

        def half(path: Path, frame: pd.DataFrame) -> None:
            original(path, frame)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            reached()
            original(path, frame)

        normlab.store.write_stats = half
    elif where == "written, not renamed":
        os.rename = stop_before(os.rename)
    elif where == "renamed, older one not deleted":
        rename = os.rename
        os.rename = lambda *args: (rename(*args), reached())[0]
    else:
        raise AssertionError(where)


@pytest.fixture(scope="module")
def config(text: Path) -> TrainConfig:
    return tiny(text, steps=24, checkpoint_every=3, probe_every=6, eval_every=6)


@pytest.fixture(scope="module")
def undisturbed(config: TrainConfig, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[runs.Run, float]:
    """The run that nobody kills, and how long its process took."""
    out = tmp_path_factory.mktemp("undisturbed")
    _finish(config, out, cache)  # builds the corpus and starts the fork server
    shutil.rmtree(out)
    started = time.perf_counter()
    _finish(config, out, cache)
    return runs.read_run(out / config.run_id), time.perf_counter() - started


def _start(config: TrainConfig, out: Path, cache: Path, pause_in: str | None = None) -> Any:
    process = FORKS.Process(target=_train, args=(config, out, cache, pause_in, out.with_suffix(".reached")))
    process.start()
    return process


def _finish(config: TrainConfig, out: Path, cache: Path) -> None:
    process = _start(config, out, cache)
    process.join()
    assert process.exitcode == 0


def _kill(process: Any) -> bool:
    """True if it was still running."""
    process.join(0)
    running = process.exitcode is None
    if running:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert running or process.exitcode == 0
    return running


def _assert_whole(out: Path, config: TrainConfig) -> None:
    """Under the run's name there is a whole run; or there is nothing, and the newest checkpoint is whole."""
    final = out / config.run_id
    if final.exists():  # what is left of the checkpoints is being deleted
        assert len(runs.read_run(final).table()) > 0
        assert (final / runs.WEIGHTS).is_file()
        return
    checkpoints = sorted(
        (out / store.PARTIAL / config.run_id).glob("checkpoint-*"), key=lambda path: int(path.name[11:])
    )
    for checkpoint in checkpoints[-1:]:
        assert len(pd.read_parquet(checkpoint / runs.STATS)) > 0
        names = {path.name for path in checkpoint.iterdir()}
        assert names == {"state.pt", "stats.parquet", "begun.json", "files.json"}


def _assert_equal(run: runs.Run, reference: runs.Run) -> None:
    assert (run.path / runs.STATS).read_bytes() == (reference.path / runs.STATS).read_bytes()
    assert (run.path / runs.WEIGHTS).read_bytes() == (reference.path / runs.WEIGHTS).read_bytes()
    left_out = {"measured"}
    assert {k: v for k, v in run.manifest.items() if k not in left_out} == {
        k: v for k, v in reference.manifest.items() if k not in left_out
    }


def _kill_at_random(
    config: TrainConfig, out: Path, cache: Path, kills: int, seconds: float, seed: int
) -> tuple[int, float]:
    """Start and kill until `kills` processes died or the run is finished; then finish it.

    Returns how many died, and how long a whole run takes. That is `seconds` unless one ended sooner: a machine may be
    busy while the first is timed.
    """
    choose = random.Random(seed)
    killed = 0
    while killed < kills and not (out / config.run_id).exists():
        is_whole, started = not (out / store.PARTIAL / config.run_id).exists(), time.perf_counter()
        process = _start(config, out, cache)
        process.join(choose.uniform(0.2, 1.0) * seconds)
        if is_whole and process.exitcode is not None:
            seconds = time.perf_counter() - started
        killed += _kill(process)
        _assert_whole(out, config)
    _finish(config, out, cache)
    assert not (out / store.PARTIAL / config.run_id).exists()
    return killed, seconds


def test_killed_at_random_moments_a_run_ends_as_if_never_killed(config, cache, undisturbed, tmp_path):
    """Twice; forty times in tests/test_kills.py."""
    reference, seconds = undisturbed
    kills, attempt = 0, 0
    while kills < 2:
        out = tmp_path / str(attempt)
        killed, seconds = _kill_at_random(config, out, cache, 2 - kills, seconds, attempt)
        kills += killed
        _assert_equal(runs.read_run(out / config.run_id), reference)
        shutil.rmtree(out)
        attempt += 1


@pytest.mark.parametrize(
    "where",
    ["state not written", "log half-written", "written, not renamed", "renamed, older one not deleted"],
)
def test_killed_inside_a_checkpoint_write_a_run_ends_as_if_never_killed(where, config, cache, undisturbed, tmp_path):
    out = tmp_path / "runs"
    process = _start(config, out, cache, pause_in=where)
    marker = out.with_suffix(".reached")
    while not marker.exists():
        assert process.exitcode is None, "the process ended before it reached the place"
        time.sleep(0.01)
    assert _kill(process)
    _assert_whole(out, config)
    assert not (out / config.run_id).exists()
    _finish(config, out, cache)
    _assert_equal(runs.read_run(out / config.run_id), undisturbed[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"scheme": "tapernorm"},
        {"scheme": "complete_p", "dtype": "bfloat16"},
        {"scheme": "dyt", "dtype": "bfloat16", "accumulate": 2},
        {"scheme": "lns", "log_every": 4, "checkpoint_every": 3},  # stopped between two steps that are logged
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_a_run_that_is_stopped_and_resumed_has_the_bits_of_one_that_was_not(fields, text, go, stop, tmp_path):
    config = tiny(text, **fields)
    stop(config, tmp_path / "stopped", 5)
    resumed = go(config, tmp_path / "stopped")
    assert resumed.manifest["measured"]["resumed_from_step"] == 5
    _assert_equal(resumed, go(config, tmp_path / "whole"))
