"""A run in a process of its own: it obeys between two steps, ends as the same run trained here, and leaves no process
behind, however this process ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from training_helpers import tiny

from normlab import runs
from normlab.errors import NormlabError
from normlab.training.background import FAILED, PAUSED, STOPPED, BackgroundRun
from normlab.training.config import TrainConfig

pytest_plugins = ["training_fixtures"]

# Children of a server that has imported everything start to train at once.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["normlab.training.trainer", "normlab.probes", "datasets", "pandas", "pyarrow.parquet"])


@pytest.fixture
def begin(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BackgroundRun]]:
    """Start a run; whatever is still at work at the end is closed."""
    monkeypatch.setattr(BackgroundRun, "_context", FORKS)
    started = []

    def begin(config: TrainConfig, **options: Any) -> BackgroundRun:
        run = BackgroundRun(config, tmp_path / "out", cache_dir=cache, **options)
        started.append(run)
        run.start()
        return run

    yield begin
    for run in started:
        run.close()


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_paused_stopped_and_continued_it_is_the_run_that_nobody_disturbed(
    text: Path, go: Callable, begin: Callable, tmp_path: Path
) -> None:
    config = tiny(text, steps=200, probe_every=50, eval_every=50, checkpoint_every=0)
    news: list[int] = []
    run = begin(config, changed=lambda: news.append(1))
    assert run.wait(60, step=3)
    run.pause()
    until(lambda: run.state == PAUSED)
    asleep, heard = run.step, len(news)
    assert 3 <= asleep < 190
    time.sleep(0.7)
    assert (run.step, run.state, len(news)) == (asleep, PAUSED, heard) and run.pid is not None
    run.start()
    assert run.wait(60, step=asleep + 5) and run.state != STOPPED
    run.stop()
    assert run.wait(60) and run.state == STOPPED
    stopped, shown = run.step, run.points("train", "model", "loss")
    assert asleep + 5 <= stopped < 200 and [step for step, _, _ in shown] == list(range(1, stopped + 1))
    until(lambda: run.pid is None)
    work = run.out / runs.PARTIAL / config.run_id
    assert not (run.out / config.run_id).exists() and (work / f"checkpoint-{stopped}").is_dir()
    assert not list(work.glob("staging*"))
    run.start()
    assert run.wait(60, step=stopped) and run.points("train", "model", "loss")[:stopped] == shown
    assert run.wait(60) and run.state == "not_learned" or run.state == "finished"
    undisturbed = go(config, tmp_path / "undisturbed")
    assert run.run is not None and run.run.manifest["measured"]["resumed_from_step"] == stopped
    assert (run.run.path / runs.STATS).read_bytes() == (undisturbed.path / runs.STATS).read_bytes()
    losses = undisturbed.table().query("metric == 'loss' and split == 'eval'")
    assert run.points("eval", "model", "loss") == [(r.step, None, r.value) for r in losses.itertuples()]
    assert run.step == 200 and run.unigram_entropy == undisturbed.manifest["corpus"]["unigram_entropy"]
    assert not (run.out / runs.PARTIAL).exists()


def test_a_killed_process_is_said_and_gone_on_from(text: Path, begin: Callable) -> None:
    run = begin(tiny(text, steps=300, checkpoint_every=5))
    assert run.wait(60, step=12)
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait(60) and run.state == FAILED
    assert "killed (exit code -9)" in run.reason and "\n" not in run.reason
    run.start()
    assert run.wait(60, step=10) and run.points("train", "model", "loss")[9][0] == 10 and run.reason == ""
    run.close()
    until(lambda: run.pid is None)
    assert run.state == STOPPED and not (run.out / run.config.run_id).exists()


def test_what_cannot_be_trained_is_one_line(tmp_path: Path, begin: Callable) -> None:
    run = begin(tiny(tmp_path / "nowhere.txt"))
    assert run.wait(60) and run.state == FAILED and "nowhere.txt" in run.reason and "\n" not in run.reason
    (tmp_path / "out" / "thesis.tex").parent.mkdir(exist_ok=True)
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(NormlabError, match="holds something else"):
        BackgroundRun(tiny(tmp_path / "nowhere.txt", seed=1), tmp_path / "out").start()


def test_a_second_object_of_the_same_run_takes_it_over_at_a_checkpoint(text: Path, begin: Callable) -> None:
    config = tiny(text, steps=400, checkpoint_every=0)
    first = begin(config)
    assert first.wait(60, step=5)
    second = begin(config)
    assert first.state == STOPPED and first.step >= 5
    assert second.wait(60, step=first.step + 1) and second.points("train", "model", "loss")[0][0] == 1
    second.close()
    assert second.pid is None


def test_a_finished_run_is_shown_as_it_is_on_disk(done: runs.Run, text: Path, begin: Callable, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(done.path.parent)
    run = begin(tiny(text))
    assert run.wait(60) and run.state == done.status and run.step == 8
    assert len(run.points("probe", "block_out", "rms")) == 3 * 3  # steps 0, 4, 8; layers 0, 1, 2
    run.start()
    assert run.state == done.status


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from training_helpers import tiny
from normlab.training.background import BackgroundRun

if __name__ == "__main__":
    root = Path({root!r})
    config = tiny(root / "text.txt", steps=100_000, eval_every=0, checkpoint_every=0)
    run = BackgroundRun(config, root / "out", cache_dir=root)
    run.start()
    print(run.pid, flush=True)
    try:
        run.wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    run.wait(60, step=2)
    print(run.state, flush=True)
    run.wait()
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of process groups")
def test_an_interrupt_does_not_reach_it_and_it_dies_with_its_parent(text: Path, tmp_path: Path) -> None:
    """Jupyter interrupts a cell by a signal to the kernel's whole group, and restarts a busy kernel by killing it."""
    (tmp_path / "text.txt").write_bytes(text.read_bytes())
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(Path(__file__).parent), root=str(tmp_path)))
    command = [sys.executable, str(script)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.3)  # it is importing still
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline() == "interrupted\n"
        assert parent.stdout.readline() == "training\n"
        os.killpg(parent.pid, signal.SIGINT)
        time.sleep(0.3)
        assert worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 20)
