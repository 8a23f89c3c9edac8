"""A run in another process: it is watched, stopped at a checkpoint, and ends as the same run trained here."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from training_helpers import ForkedCommand, tiny

from normlab import runs, store
from normlab.errors import NormlabError
from normlab.training import live
from normlab.training.config import TrainConfig
from normlab.training.live import FAILED, STOPPED, BackgroundRun


@pytest.fixture
def begin(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BackgroundRun]]:
    """Start a run; whatever is still at work at the end is closed."""
    monkeypatch.setattr(live, "Popen", ForkedCommand)
    started = []

    def begin(config: TrainConfig) -> BackgroundRun:
        run = BackgroundRun(config, tmp_path / "out", cache_dir=cache)
        started.append(run)
        run.start()
        return run

    yield begin
    for run in started:
        run.close()


def test_stopped_and_continued_it_is_the_run_that_nobody_disturbed(text, go, begin, tmp_path):
    config = tiny(text, steps=120, probe_every=40, eval_every=40, checkpoint_every=0)
    run = begin(config)
    assert run.wait(60, step=3)
    run.stop()
    assert run.wait(60) and run.state == STOPPED and run.pid is None
    stopped, shown = run.step, run.points("train", "model", "loss")
    assert 3 <= stopped < 120 and [step for step, _, _ in shown] == list(range(1, stopped + 1))
    work = run.out / store.PARTIAL / config.run_id
    assert not (run.out / config.run_id).exists() and (work / f"checkpoint-{stopped}").is_dir()
    run.start()
    assert run.wait(60, step=stopped + 1) and run.points("train", "model", "loss")[:stopped] == shown
    assert run.wait(60)
    undisturbed = go(config, tmp_path / "undisturbed")
    assert run.state == undisturbed.status
    assert run.run.manifest["measured"]["resumed_from_step"] == stopped
    assert (run.run.path / runs.STATS).read_bytes() == (undisturbed.path / runs.STATS).read_bytes()
    losses = undisturbed.table().query("metric == 'loss' and split == 'eval'")
    assert run.points("eval", "model", "loss") == [(r.step, None, r.value) for r in losses.itertuples()]
    assert run.step == 120 and run.levels["unigram_entropy"] == undisturbed.manifest["corpus"]["unigram_entropy"]
    assert not (run.out / store.PARTIAL).exists()


def test_a_run_appends_what_it_logs_to_a_file(text, go, done, tmp_path):
    config, seen = tiny(text), []

    def watch(step: int, rows: list) -> bool:
        lines = (tmp_path / store.PARTIAL / config.run_id / store.ROWS).read_text().splitlines()
        seen[:] = [runs.Row._make(json.loads(line)) for line in lines]
        return True

    run = go(config, tmp_path, watch=watch)
    levels, rows = seen[:3], seen[3:]
    assert {row.metric: row.value for row in levels} == {
        "unigram_entropy": run.manifest["corpus"]["unigram_entropy"],
        **{name: run.manifest[name] for name in runs.COUNT_LOSSES},
    }
    assert rows == [row for row in runs.rows_of(done.table()) if row.metric in {row.metric for row in rows}]


def test_a_killed_process_is_said_and_gone_on_from(text, begin):
    run = begin(tiny(text, steps=300, checkpoint_every=5))
    assert run.wait(60, step=12)
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait(60) and run.state == FAILED
    assert "killed (exit code -9)" in run.reason and "\n" not in run.reason
    run.start()
    assert run.wait(60, step=13) and run.points("train", "model", "loss")[9][0] == 10 and run.reason == ""
    run.close()
    assert run.pid is None and run.state == STOPPED and not (run.out / run.config.run_id).exists()


def test_what_cannot_be_trained_is_one_line(tmp_path, begin):
    run = begin(tiny(tmp_path / "nowhere.txt"))
    assert run.wait(60) and run.state == FAILED and "nowhere.txt" in run.reason and "\n" not in run.reason
    (tmp_path / "out" / "thesis.tex").parent.mkdir(exist_ok=True)
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(NormlabError, match="holds something else"):
        BackgroundRun(tiny(tmp_path / "nowhere.txt", seed=1), tmp_path / "out").start()


def test_a_start_right_after_a_stop_is_not_lost(text, begin):
    run = begin(tiny(text, steps=100_000, eval_every=0, checkpoint_every=0))
    assert run.wait(60, step=5)
    first, at = run.pid, run.step
    run.stop()
    run.start()
    assert run.live and run.pid not in (None, first) and run.wait(60, step=at + 5)


def test_a_run_that_logs_seldom_stops_after_the_step_in_progress(text, begin):
    run = begin(tiny(text, steps=100_000, log_every=100_000, probe_every=5, eval_every=0, checkpoint_every=0))
    assert run.wait(60, step=5)
    run.stop()
    assert run.wait(60) and run.state == STOPPED
    assert list((run.out / store.PARTIAL / run.config.run_id).glob("checkpoint-*"))


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code, self.pid = code, 1

    def poll(self) -> int:
        return self.code


@pytest.mark.parametrize(
    "code, errors, reason",
    [
        (-9, "half a wor", "its process was killed (exit code -9), perhaps for lack of memory"),
        (3, "", "its process ended with exit code 3"),
        (2, "a warning\nnormlab: error: no such corpus\n", "no such corpus"),
        (1, "Traceback:\n  a line\nKeyError: 'x'\n", "KeyError: 'x'"),
    ],
)
def test_an_end_is_told_by_its_last_line_or_its_exit_code(code, errors, reason, tmp_path, monkeypatch):
    def ended(command: list[str], *, stderr: Any, **_: Any) -> Ended:
        stderr.write(errors.encode())
        return Ended(code)

    monkeypatch.setattr(live, "Popen", ended)
    run = BackgroundRun(TrainConfig(), tmp_path / "out")
    run.start()
    assert run.wait(10) and (run.state, run.reason) == (FAILED, reason)


def test_a_finished_run_is_shown_as_it_is_on_disk(done, text, begin, tmp_path):
    (tmp_path / "out").symlink_to(done.path.parent)
    run = begin(tiny(text))
    assert run.wait(60) and run.state == done.status and run.step == 8
    assert len(run.points("probe", "block_out", "rms")) == 3 * 3  # steps 0, 4, 8; layers 0, 1, 2
    run.start()
    assert run.state == done.status and run.pid is None
