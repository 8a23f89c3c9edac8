"""Progress of runs: the bars, the lines of a log file, and the forecast of the end."""

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import tqdm.std
from sweep_helpers import InProcess
from training_helpers import tiny, write_text

from normlab import cli
from normlab.training import sweep as sweep_module
from normlab.training.config import CorpusSpec, TrainConfig
from normlab.training.progress import SweepBars, bar_of, steps_in_all, steps_until
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
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tqdm.std, "time", clock)
    return clock


@pytest.fixture
def configs() -> list[TrainConfig]:
    """Four runs of 300 steps, half of them twice as deep, with evaluations, statistics and experiments."""
    fields: dict[str, Any] = dict(steps=300, dtype="float32", eval_every=100, probe_every=50, experiment_blocks=8)
    fields |= {"vocab_size": 320}
    return [TrainConfig(depth=depth, seed=seed, **fields) for depth in (4, 2) for seed in range(2)]


def lines_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The text on stderr, which is no terminal."""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    return lambda: log.getvalue().splitlines()


@pytest.fixture
def bars_of() -> Iterator[Callable[..., SweepBars]]:
    """Make bars that look at their runs only when told to."""
    made = []

    def make(steps: dict[str, int]) -> SweepBars:
        made.append(SweepBars(True, lambda: steps))
        return made[-1]

    yield make
    for bars in made:
        bars.__exit__()


def seconds_left(bars: SweepBars) -> float:
    found = bars.work.format_dict
    return (found["total"] - found["n"]) * found["elapsed"] / (found["n"] - found["initial"])


def share(bars: SweepBars) -> float:
    return bars.work.n / bars.work.total


# --- the bars of a sweep ---


def test_what_is_measured_on_the_way_and_in_the_end_is_work():
    config = TrainConfig(steps=100, batch_size=8, eval_every=40, eval_blocks=24, probe_every=0)
    assert steps_in_all(config) == pytest.approx(100 + 4), "three forward passes before training, and three times more"
    measured = replace(config, depth=4, probe_every=50, probe_blocks=16, experiment_blocks=8)
    assert steps_in_all(measured) == pytest.approx(104 + 3 * 2 + 48 / 3)


def test_a_resumed_run_starts_where_it_was(configs, clock, bars_of):
    steps: dict[str, int] = {}
    bars, name = bars_of(steps), configs[0].run_id
    bars.expect(configs[:1])
    bars.watch(configs[:1])
    for clock.now, steps[name] in ((5.0, 200), (6.0, 201), (15.0, 210)):
        bars.tick()
    assert share(bars) == pytest.approx(210 / 300, abs=0.05)
    assert seconds_left(bars) == pytest.approx(90, rel=0.2), "ten steps in ten seconds, and experiments at the end"


def test_skipped_failed_and_never_seen_runs_leave_nothing_to_wait_for(configs, bars_of):
    bars = bars_of({configs[1].run_id: 17, "of another stage": 3})
    bars.expect(configs)
    bars.skip(configs[0])
    bars.watch(configs[1:])
    bars.tick()
    bars.end(configs[1], failed=True)
    bars.end(configs[2])
    assert 0.4 < share(bars) < 0.6, "a failed run is not ahead, and no work that was done"
    bars.end(configs[3], failed=True)
    assert share(bars) == pytest.approx(1)
    bars.expect(configs[2:3])
    assert share(bars) == pytest.approx(0.5, abs=0.05), "a search may grow"


def machine(configs: list[TrainConfig], start: float, steps: dict[str, int]) -> Iterator[list[TrainConfig]]:
    """Two runs at once, by the second: those that end then. Each takes `start` seconds before its first step."""
    waiting, running, now = list(configs), [], 0
    while waiting or running:
        while waiting and len(running) < 2:
            running.append((waiting.pop(0), now))
        now += 1
        ended = []
        for config, begun in list(running):
            done = (now - begun - start) / (0.1 * config.depth)
            if done > 0:
                steps[config.run_id] = int(min(done / steps_until(config, 1), config.steps))
            if done >= steps_in_all(config):
                running.remove((config, begun))
                ended.append(config)
        yield ended


@pytest.mark.parametrize("start", [0.0, 25.0])
def test_the_end_is_right_within_30_percent_after_a_minute(start, configs, clock, bars_of):
    steps: dict[str, int] = {}
    bars, said = bars_of(steps), {}
    bars.expect(configs)
    bars.watch(configs)
    for clock.now, ended in enumerate(machine(configs, start, steps), 1):  # noqa: B007
        bars.tick()
        for config in ended:
            bars.end(config)
        if clock.now > start + 2:
            said[clock.now] = seconds_left(bars)
    assert clock.now > 150 and share(bars) == pytest.approx(1)
    for seconds, left in said.items():
        if 60 <= seconds < clock.now - 10:
            assert left == pytest.approx(clock.now - seconds, rel=0.3), seconds


def test_of_a_cluster_the_runs_that_ended_give_the_end(configs, clock, bars_of):
    bars = bars_of({})
    bars.expect(configs[:2])
    bars.watch(configs[:2])
    clock.now = 50.0
    bars.tick()
    bars.end(configs[0])
    assert seconds_left(bars) == pytest.approx(50)


# --- what is written ---


def test_a_log_file_gets_a_line_a_minute_and_no_carriage_return(configs, clock, monkeypatch, bars_of):
    lines = lines_of(monkeypatch)
    steps: dict[str, int] = {}
    bars = bars_of(steps)
    bars.expect(configs)
    bars.watch(configs)
    for second in range(5, 301, 5):
        clock.now, steps[configs[0].run_id] = float(second), second
        bars.tick()
    assert 5 <= len(lines()) <= 6, "at the start, then each minute"
    assert lines()[1].startswith("steps:   7%|") and lines()[1].endswith(" left, 0 of 4 runs")
    assert not any("\r" in line or "?" in line for line in lines()[1:])


def test_a_terminal_gets_two_bars_that_move(configs, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with SweepBars(True, lambda: {configs[0].run_id: 150}) as bars:
        bars.expect(configs[:2])
        bars.watch(configs[:2])
        bars.tick()
        bars.end(configs[1], failed=True)
    assert " 50%|" in terminal.getvalue() and "1 of 2, 1 failed" in terminal.getvalue()


def test_a_training_run_has_a_line_in_a_log_file_at_its_start_and_its_end(tmp_path, monkeypatch):
    lines = lines_of(monkeypatch)
    config = tiny(write_text(tmp_path / "text.txt"))
    run = train(config, tmp_path / "out", cache_dir=tmp_path / "cache")
    assert [line[:12] for line in lines()] == ["train:   0%|", "train: 100%|"]
    loss = run.table().query("split == 'train' and metric == 'loss'")["value"].iloc[-1]
    assert "| 8/8 [" in lines()[1] and f"loss {loss:.3f}, " in lines()[1] and lines()[1].endswith(" tokens/s]")
    train(replace(config, seed=1), tmp_path / "out", cache_dir=tmp_path / "cache", progress=False)
    assert len(lines()) == 2, "silent"


def test_a_bar_that_is_not_shown_writes_nothing(monkeypatch):
    lines = lines_of(monkeypatch)
    with bar_of("train", 3, False) as bar:
        bar.update()
    assert lines() == []


# --- sweeps ---


def test_a_sweep_with_a_failing_run_ends_at_all_of_its_work(tmp_path, monkeypatch):
    lines = lines_of(monkeypatch)
    text = write_text(tmp_path / "text.txt")
    monkeypatch.setattr(sweep_module, "finish_in_any_order", InProcess(failing=lambda config: config.seed == 1))
    some = [tiny(text, seed=seed) for seed in range(3)]
    result = sweep(some, tmp_path / "out", cache_dir=tmp_path / "cache")
    assert len(result.failures) == 1
    assert lines()[-1].startswith("steps: 100%|") and lines()[-1].endswith(" left, 3 of 3 runs, 1 failed")


def test_a_stopped_sweep_leaves_the_last_word_to_the_command(tmp_path, monkeypatch):
    lines = lines_of(monkeypatch)
    text = write_text(tmp_path / "text.txt")

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_module, "finish_in_any_order", stopped)
    arguments = ["sweep", "--preset", "tiny", "--out", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache")]
    monkeypatch.setattr(sweep_module, "corpus_of", lambda *_: corpus_of(CorpusSpec(str(text), vocab_size=300)))
    assert cli.main(arguments) == 130
    assert "stopped; the same command" in lines()[-1]
