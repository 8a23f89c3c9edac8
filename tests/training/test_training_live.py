"""A run in another process: it obeys between two steps, and ends as the same run trained here.

However this process ends, it leaves no process behind.
"""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from training_helpers import ForkedCommand, tiny, until

from normlab import runs, store
from normlab.errors import NormlabError
from normlab.training import live
from normlab.training.config import TrainConfig
from normlab.training.live import FAILED, PAUSED, STOPPED, TRAINING, BackgroundRun


@pytest.fixture
def begin(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BackgroundRun]]:
    """Start a run; whatever is still at work at the end is closed."""
    monkeypatch.setattr(live, "Popen", ForkedCommand)
    started = []

    def begin(config: TrainConfig, **options: Any) -> BackgroundRun:
        run = BackgroundRun(config, tmp_path / "out", cache_dir=cache, **options)
        started.append(run)
        run.start()
        return run

    yield begin
    for run in started:
        run.close()


def test_paused_stopped_and_continued_it_is_the_run_that_nobody_disturbed(text, go, begin, tmp_path):
    config = tiny(text, steps=120, probe_every=40, eval_every=40, checkpoint_every=0)
    news: list[int] = []
    run = begin(config, changed=lambda: news.append(1))
    assert run.wait(60, step=3)
    run.pause()
    until(lambda: run.state == PAUSED)
    asleep, heard = run.step, len(news)
    assert 3 <= asleep < 110
    time.sleep(0.7)
    assert (run.step, run.state, len(news)) == (asleep, PAUSED, heard) and run.pid is not None
    run.start()
    assert run.wait(60, step=asleep + 5) and run.state != STOPPED
    run.stop()
    assert run.wait(60) and run.state == STOPPED
    stopped, shown = run.step, run.points("train", "model", "loss")
    assert asleep + 5 <= stopped < 120 and [step for step, _, _ in shown] == list(range(1, stopped + 1))
    until(lambda: run.pid is None)
    work = run.out / store.PARTIAL / config.run_id
    assert not (run.out / config.run_id).exists() and (work / f"checkpoint-{stopped}").is_dir()
    assert not list(work.glob("staging*"))
    run.start()
    assert run.wait(60, step=stopped) and run.points("train", "model", "loss")[:stopped] == shown
    assert run.wait(60)
    undisturbed = go(config, tmp_path / "undisturbed")
    assert run.state == undisturbed.status
    assert run.run.manifest["measured"]["resumed_from_step"] == stopped
    assert (run.run.path / runs.STATS).read_bytes() == (undisturbed.path / runs.STATS).read_bytes()
    losses = undisturbed.table().query("metric == 'loss' and split == 'eval'")
    assert run.points("eval", "model", "loss") == [(r.step, None, r.value) for r in losses.itertuples()]
    assert run.step == 120 and run.levels["unigram_entropy"] == undisturbed.manifest["corpus"]["unigram_entropy"]
    assert not (run.out / store.PARTIAL).exists()


def test_a_killed_process_is_said_and_gone_on_from(text, begin):
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


def test_what_cannot_be_trained_is_one_line(tmp_path, begin):
    run = begin(tiny(tmp_path / "nowhere.txt"))
    assert run.wait(60) and run.state == FAILED and "nowhere.txt" in run.reason and "\n" not in run.reason
    (tmp_path / "out" / "thesis.tex").parent.mkdir(exist_ok=True)
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(NormlabError, match="holds something else"):
        BackgroundRun(tiny(tmp_path / "nowhere.txt", seed=1), tmp_path / "out").start()


def test_a_second_object_of_the_same_run_takes_it_over_at_a_checkpoint(text, begin):
    config = tiny(text, steps=400, checkpoint_every=0)
    first = begin(config)
    assert first.wait(60, step=5)
    second = begin(config)
    assert first.state == STOPPED and first.step >= 5
    assert second.wait(60, step=first.step + 1) and second.points("train", "model", "loss")[0][0] == 1
    second.close()
    assert second.pid is None


def test_a_start_right_after_a_stop_is_not_lost(text, begin):
    run = begin(tiny(text, steps=100_000, eval_every=0, checkpoint_every=0))
    assert run.wait(60, step=5)
    first = run.pid
    run.stop()
    run.start()
    assert run.live and run.pid not in (None, first)
    at = run.step
    assert at >= 5 and run.wait(60, step=at + 5) and run.state == TRAINING


class Process:
    """A process that ends with `exitcode` on a signal, or when nobody listens any more."""

    pid = 1

    def __init__(self, exitcode: int = 0, ended: bool = True) -> None:
        self.exitcode, self.waited_for_by = exitcode, set()
        self.ended = threading.Event()
        if ended:
            self.ended.set()
        ours, theirs = os.pipe()
        self.stdout, self.messages = os.fdopen(ours), os.fdopen(theirs, "w")
        self.stdin = io.StringIO()

    def send(self, **message: Any) -> None:
        print(json.dumps(message), file=self.messages, flush=True)

    def wait(self) -> int:
        self.waited_for_by.add(threading.current_thread())
        assert self.ended.wait(10)
        return self.exitcode

    def terminate(self) -> None:
        self.ended.set()


def listening(tmp_path: Path, process: Process, *messages: dict, errors: str = "", **options: Any) -> BackgroundRun:
    """A run that gets `messages` from a process whose error output is `errors`."""
    run = BackgroundRun(TrainConfig(), tmp_path / "out", **options)
    for message in messages:
        process.send(**message)
    run._process, run.state = process, TRAINING
    run._listener = threading.Thread(target=run._listen, args=(process, io.BytesIO(errors.encode())), daemon=True)
    run._listener.start()
    return run


@pytest.mark.parametrize("error", [FileNotFoundError("no such page"), KeyError("no such trace")])
def test_what_goes_wrong_while_it_is_shown_is_said_and_ends_the_run(tmp_path, error):
    calls: list[int] = []

    def changed() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise error

    process = Process(ended=False)
    steps = [{"step": step, "rows": [], "state": TRAINING} for step in (1, 2)]
    run = listening(tmp_path, process, *steps, changed=changed)
    assert run.wait(10) and run.state == FAILED and run.step == 1
    assert run.reason == f"{type(error).__name__}: {error}"
    until(lambda: run.pid is None, 10)
    assert process.ended.is_set()
    with pytest.raises(OSError):  # rather than block once the pipe is full
        process.send(step=3, rows=[])


@pytest.mark.parametrize(
    "code, errors, reason",
    [
        (-9, "half a wor", "its process was killed (exit code -9), perhaps for lack of memory"),
        (3, "", "its process ended with exit code 3"),
        (2, "a warning\nnormlab: error: no such corpus\n", "no such corpus"),
        (1, "Traceback:\n  a line\nKeyError: 'x'\n", "KeyError: 'x'"),
    ],
)
def test_an_end_without_a_message_is_told_by_its_last_line_or_its_exit_code(tmp_path, code, errors, reason):
    process = Process(code)
    process.messages.close()
    run = listening(tmp_path, process, errors=errors)
    assert run.wait(10) and (run.state, run.reason) == (FAILED, reason)


def test_only_the_listener_waits_for_the_process(tmp_path):
    """One of two threads that wait for a process misses its exit code."""
    process = Process(ended=False)
    run = listening(tmp_path, process)
    assert run.pid == process.pid
    process.messages.close()
    run.close()
    assert process.waited_for_by == {run._listener} and run.pid is None and run.state == STOPPED


@pytest.mark.skipif(os.name == "nt", reason="a script in place of Python")
def test_what_cannot_be_imported_is_said(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Traceback:' >&2\necho 'ModuleNotFoundError: no torch' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    run = BackgroundRun(TrainConfig(), tmp_path / "out")
    run.start()
    assert run.wait(60) and (run.state, run.reason) == (FAILED, "ModuleNotFoundError: no torch")


def test_a_run_that_nobody_has_any_more_is_forgotten(monkeypatch, tmp_path):
    monkeypatch.setattr(BackgroundRun, "_spawn", lambda self: None)
    run = BackgroundRun(TrainConfig(), tmp_path / "out")
    run.start()
    assert run in BackgroundRun._running.values()
    seen = weakref.ref(run)
    del run
    assert seen() is None


def test_points_can_be_read_while_another_object_gives_way(monkeypatch, tmp_path):
    run, waits = BackgroundRun(TrainConfig(), tmp_path / "out"), []

    def stop_other() -> None:
        reader = threading.Thread(target=run.points, args=("train", "model", "loss"), daemon=True)
        reader.start()
        reader.join(2)
        waits.append(reader.is_alive())

    monkeypatch.setattr(run, "_stop_other", stop_other)
    monkeypatch.setattr(run, "_spawn", lambda: None)
    run.start()
    assert waits == [False]


def test_a_finished_run_is_shown_as_it_is_on_disk(done, text, begin, tmp_path):
    (tmp_path / "out").symlink_to(done.path.parent)
    run = begin(tiny(text))
    assert run.wait(60) and run.state == done.status and run.step == 8
    assert len(run.points("probe", "block_out", "rms")) == 3 * 3  # steps 0, 4, 8; layers 0, 1, 2
    run.start()
    assert run.state == done.status


PARENT = """
import signal
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from training_helpers import ForkedCommand, tiny
from normlab.training.live import BackgroundRun

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
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
@pytest.mark.slow
def test_an_interrupt_does_not_reach_it_and_it_dies_with_its_parent(text, tmp_path):
    """Jupyter interrupts a cell by a signal to the kernel's whole group, and restarts a busy kernel by killing it."""
    (tmp_path / "text.txt").write_bytes(text.read_bytes())
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(Path(__file__).parents[1] / "helpers"), root=str(tmp_path)))
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
