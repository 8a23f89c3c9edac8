"""Progress of runs: what they report, the bar, the lines of a log file, and the forecast of the end."""

import bisect
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sweep_helpers import InProcess
from training_helpers import tiny, write_text

from normlab import cli, runs, store
from normlab.training import sweep as sweep_module
from normlab.training.config import CorpusSpec, TrainConfig
from normlab.training.progress import Progress, Report, Reporter, read_report, steps_in_all, steps_until
from normlab.training.run import train
from normlab.training.sweep import sweep
from normlab.training.text.corpus import corpus_of


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def configs() -> list[TrainConfig]:
    """Four runs of 300 steps, half of them twice as deep, with evaluations, statistics and experiments."""
    fields: dict[str, Any] = dict(steps=300, dtype="float32", eval_every=100, probe_every=50, experiment_blocks=8)
    return [TrainConfig(depth=depth, seed=seed, **fields) for depth in (4, 2) for seed in range(2)]


def report(root: Path, config: TrainConfig, step: int, began: int = 0, loss: float | None = None) -> None:
    work = root / store.PARTIAL / config.run_id
    work.mkdir(parents=True, exist_ok=True)
    Reporter(work, began).write(Report(began, step, loss))


def followed(configs: Sequence[TrainConfig], root: Path, clock: Clock, show: bool = False) -> Progress:
    progress = Progress("sweep", show, clock)
    progress.expect(configs)
    progress.watch(configs, root)
    return progress


def lines_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The text on stderr, which is no terminal."""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    return lambda: log.getvalue().splitlines()


# --- work ---


def test_what_is_measured_on_the_way_and_in_the_end_is_work():
    config = TrainConfig(steps=100, batch_size=8, eval_every=40, eval_blocks=24, probe_every=0)
    assert steps_until(config, 0) == pytest.approx(1), "three forward passes before training"
    assert steps_until(config, 79) == pytest.approx(79 + 2)
    assert steps_in_all(config) == pytest.approx(100 + 4), "after the last step once more"
    measured = replace(config, depth=4, probe_every=50, probe_blocks=16, experiment_blocks=8)
    assert steps_in_all(measured) == pytest.approx(104 + 3 * 2 + 48 / 3)


# --- the bar ---


def test_the_bar_counts_steps_of_runs_that_have_not_ended(configs, tmp_path):
    progress = followed(configs[:2], tmp_path, Clock())
    assert progress.share() == 0
    shares = []
    for steps in ((30, 0), (150, 30), (150, 150)):
        for config, step in zip(configs, steps, strict=False):
            report(tmp_path, config, step)
        progress.tick()
        shares.append(progress.share())
    assert shares == sorted(set(shares)) and shares[-1] == pytest.approx(0.5, abs=0.05)


def test_a_run_counts_by_its_work(configs, tmp_path):
    progress = followed([configs[0], configs[2]], tmp_path, Clock())
    progress.end(configs[2])
    assert 0.3 < progress.share() < 0.45, "half as deep as the other, and with as large a head"


def test_a_resumed_run_starts_where_it_was(configs, tmp_path):
    one, clock = configs[:1], Clock()
    report(tmp_path, *one, step=290)  # left by a process that was killed after its checkpoint at step 200
    progress = followed(one, tmp_path, clock)
    progress.tick()
    assert progress.share() == 0, "a report from before is none of this sweep's"
    for seconds, step in ((5, 200), (6, 201), (16, 211)):
        clock.now = seconds
        report(tmp_path, *one, step=step, began=200)
        progress.tick()
    assert progress.share() == pytest.approx(211 / 300, abs=0.05)
    assert progress.seconds_left() == pytest.approx(89, rel=0.3), "not as fast as if it had made 211 steps in 16 s"


def test_skipped_failed_and_never_seen_runs_leave_nothing_to_wait_for(configs, tmp_path):
    progress = followed(configs, tmp_path, Clock())
    progress.skip(configs[0])
    report(tmp_path, configs[1], 17)
    progress.tick()
    progress.end(configs[1], failed=True)
    progress.end(configs[2])
    assert 0.5 < progress.share() < 1
    progress.end(configs[3], failed=True)
    assert progress.share() == pytest.approx(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_is_seen_in_the_precision_that_its_worker_takes(dtype, configs, tmp_path):
    progress = followed([replace(configs[0], dtype="auto")], tmp_path, Clock())
    report(tmp_path, replace(configs[0], dtype=dtype), 150)
    progress.tick()
    assert progress.share() == pytest.approx(0.5, abs=0.05)


def test_a_growing_search_adds_work(configs, tmp_path):
    progress = followed(configs[:1], tmp_path, Clock())
    progress.end(configs[0])
    progress.expect(configs[1:2])
    assert progress.share() == pytest.approx(0.5)


# --- the forecast ---


class Machine:
    """Runs by a synthetic clock, `workers` at once. Each step takes `seconds` times its share of work. In the first
    `start` seconds a run reports only that it began."""

    def __init__(self, seconds: float, start: float, workers: int = 2) -> None:
        self.seconds, self.start, self.workers = seconds, start, workers

    def ends(self, configs: Sequence[TrainConfig], root: Path, progress: Progress, clock: Clock) -> Iterator[float]:
        """The clock after each second, until all runs have ended."""
        waiting, running = list(configs), []
        while waiting or running:
            while waiting and len(running) < self.workers:
                running.append((waiting.pop(0), clock.now))
            for config, begun in list(running):
                steps = max(0.0, clock.now - begun - self.start) / (self.seconds * config.depth)
                if steps >= steps_in_all(config):
                    running.remove((config, begun))
                    progress.end(config)
                else:
                    done = bisect.bisect(range(config.steps + 1), steps, key=partial(steps_until, config))
                    report(root, config, max(0, done - 1))
            progress.tick()
            clock.now += 1
            yield clock.now


@pytest.mark.parametrize("start", [0.0, 25.0])
def test_the_end_is_right_within_30_percent_after_a_minute(start, configs, tmp_path):
    configs = [replace(config, vocab_size=320) for config in configs]
    clock = Clock()
    progress = followed(configs, tmp_path, clock)
    said = {
        seconds: progress.seconds_left() for seconds in Machine(0.1, start).ends(configs, tmp_path, progress, clock)
    }
    end = clock.now
    assert end > 150 and progress.share() == pytest.approx(1)
    for seconds, left in said.items():
        if 60 <= seconds < end - 10:
            assert left is not None and left == pytest.approx(end - seconds, rel=0.3), seconds


def test_where_no_report_is_seen_the_runs_that_ended_give_the_end(configs, tmp_path):
    clock = Clock()
    progress = followed(configs[:2], tmp_path, clock)
    clock.now = 50.0
    assert progress.seconds_left() is None
    progress.end(configs[0])
    assert progress.seconds_left() == pytest.approx(50)


# --- what is written ---


def test_a_log_file_gets_a_line_a_minute_and_no_carriage_return(configs, tmp_path, monkeypatch):
    lines, clock = lines_of(monkeypatch), Clock()
    progress = followed(configs, tmp_path, clock, show=True)
    for second in range(5, 301, 5):
        clock.now = float(second)
        report(tmp_path, configs[0], min(300, second), loss=4.2123)
        progress.tick()
    assert len(lines()) == 6, "after ten seconds, then each minute"
    assert lines()[0].startswith("sweep:   1% | 00:10 gone, ")
    assert lines()[1].endswith(f" left | 0 of 4 runs | now {configs[0].run_id} step 60/300 loss 4.212")
    assert not any("\r" in line or "?" in line for line in lines())


def test_of_many_runs_in_progress_two_are_named(configs, tmp_path, monkeypatch):
    lines, clock = lines_of(monkeypatch), Clock()
    progress = followed(configs, tmp_path, clock, show=True)
    for config in configs:
        report(tmp_path, config, 3)
    clock.now = 10.0
    progress.tick()
    assert lines()[0].endswith(f"now {configs[0].run_id} step 3/300, {configs[1].run_id} step 3/300 and 2 more")


def test_a_terminal_gets_one_bar_that_moves(configs, tmp_path, monkeypatch):
    terminal, clock = Terminal(), Clock()
    monkeypatch.setattr(sys, "stderr", terminal)
    with followed(configs[:1], tmp_path, clock, show=True) as progress:
        report(tmp_path, configs[0], 150, loss=3.5)
        progress.tick()
    assert " 48%|" in terminal.getvalue()
    assert "step 150/300 loss 3.500" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1, "the bar's end"


def test_a_training_run_ends_with_a_line_in_a_log_file(tmp_path, monkeypatch):
    lines = lines_of(monkeypatch)
    config = tiny(write_text(tmp_path / "text.txt"))
    train(config, tmp_path / "out", cache_dir=tmp_path / "cache")
    assert [line[:13] for line in lines()] == ["train: 100% |"]
    train(replace(config, seed=1), tmp_path / "out", cache_dir=tmp_path / "cache", progress=False)
    assert len(lines()) == 1, "silent"


def test_a_run_reports_its_steps_and_its_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.training.progress.EVERY_SECONDS", 0.0)
    config = tiny(write_text(tmp_path / "text.txt"))
    seen: list[Report | None] = []

    def watch(step: int, rows: list[runs.Row]) -> bool:
        seen.append(read_report(tmp_path / "out" / store.PARTIAL / config.run_id))
        return True

    run = train(config, tmp_path / "out", cache_dir=tmp_path / "cache", progress=False, watch=watch)
    losses = run.table().query("split == 'train' and metric == 'loss'")["value"].tolist()
    assert [said and said.step for said in seen] == list(range(config.steps + 1))
    assert [said and said.loss for said in seen][2:] == pytest.approx(losses[:-1]), "as logged before the step"
    assert seen[-1] is not None and seen[-1].tokens_per_s


# --- sweeps ---


def test_a_sweep_with_a_failing_run_ends_at_all_of_its_work(tmp_path, monkeypatch):
    lines = lines_of(monkeypatch)
    text = write_text(tmp_path / "text.txt")
    monkeypatch.setattr(sweep_module, "finish_in_any_order", InProcess(failing=lambda config: config.seed == 1))
    some = [tiny(text, seed=seed) for seed in range(3)]
    result = sweep(some, tmp_path / "out", cache_dir=tmp_path / "cache")
    assert len(result.failures) == 1
    assert [line.split(" | ")[::2] for line in lines()] == [["sweep: 100%", "3 of 3 runs, 1 failed"]]


def test_a_stopped_sweep_leaves_the_last_word_to_the_command(tmp_path, monkeypatch):
    lines = lines_of(monkeypatch)
    text = write_text(tmp_path / "text.txt")

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_module, "finish_in_any_order", stopped)
    arguments = ["sweep", "--preset", "tiny", "--out", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache")]
    monkeypatch.setattr(sweep_module, "corpus_of", lambda *_: corpus_of(CorpusSpec(str(text), vocab_size=300)))
    assert cli.main(arguments) == 130
    assert len(lines()) == 1 and "stopped; the same command" in lines()[0]
