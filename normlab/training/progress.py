"""Progress of runs and a forecast of their end: one bar for a sweep, and for a single run.

`Reporter`               writes a run's progress to a small file in its working directory
`steps_in_all(config)`   a run's work in optimizer steps, measurements included
`Progress`               reads the reports and forecasts the end: a bar in a terminal, a line per minute in a log file
`can_redraw()`           True if a bar may move: stderr is a terminal or a notebook

Reports are files, so runs of this process, of its workers and of a cluster are all followed in this way.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from normlab import store

if TYPE_CHECKING:
    from normlab.training.config import TrainConfig

REPORT = "progress"  # not *.json, which is published with every checkpoint
EVERY_SECONDS = 1.0  # between two reports of a run, and between two looks at them
FIRST_LINE, LINES = 10.0, 60.0  # seconds: until a log file's first line, and between its lines
NAMED = 2  # runs in progress that are named; of more, the number
FORWARD = 1 / 3  # a forward pass, in optimizer steps


# --- what a run reports ---


class Report(NamedTuple):
    """One report. began: steps done when this process began. step: steps done. loss: the last training loss logged."""

    began: int
    step: int
    loss: float | None = None
    tokens_per_s: float | None = None


class Reporter:
    """Reports one run about once per second, in its working directory; with None nowhere.

    A failure is ignored, as training does not depend on it.
    """

    def __init__(self, work: Path | None, began: int) -> None:
        self.work, self.began = work, began
        self.write(Report(began, began))

    def step(self, number: int, loss: float | None, tokens_per_s: float | None, now: bool = False) -> None:
        """loss: the last one logged. now: report even if the last report was a moment ago."""
        if now or number == self.began + 1 or time.perf_counter() - self.reported >= EVERY_SECONDS:
            self.write(Report(self.began, number, loss, tokens_per_s))

    def write(self, report: Report) -> None:
        self.reported = time.perf_counter()
        if self.work is not None:
            temporary = self.work / f".{REPORT}.writing"
            with contextlib.suppress(OSError):
                temporary.write_text(json.dumps(report._asdict()))
                os.replace(temporary, self.work / REPORT)


def read_report(work: Path) -> Report | None:
    """The run's report; None if it has not begun."""
    try:
        return Report(**json.loads((work / REPORT).read_text()))
    except (OSError, ValueError, TypeError):  # TypeError: written by another version
        return None


# --- work ---


def steps_until(config: TrainConfig, step: int) -> float:
    """Work of the first `step` steps and of the measurements until then, in steps.

    A forward pass on a CPU takes a third of a step. Layer statistics of a batch take a step.
    """

    def batches(every: int, blocks: int) -> float:
        times = math.ceil(step / every) if step == config.last_step else step // every
        return (1 + times) * blocks / config.batch_size  # the first before training

    done = float(step)
    if config.eval_every:
        done += FORWARD * batches(config.eval_every, config.eval_blocks)
    if config.probe_every:
        done += batches(config.probe_every, config.probe_blocks)
    return done


def steps_in_all(config: TrainConfig) -> float:
    """Work of a whole run, in steps. `normlab.training.experiments` takes 7 depth + 20 forward passes."""
    experiments = FORWARD * (7 * config.depth + 20) * config.experiment_blocks / config.batch_size
    return steps_until(config, config.last_step) + experiments


def _step_work(config: TrainConfig) -> float:
    """Work of a step, comparable between runs: blocks, and the head by its weights (a block's are 12 width^2)."""
    return config.tokens_per_step * config.width * (config.depth + config.vocab_size / (12 * config.width))


def _work(config: TrainConfig) -> float:
    return _step_work(config) * steps_in_all(config)


# --- the forecast and the bar ---


class _Running(NamedTuple):
    """A run in progress and its last report."""

    name: str
    config: TrainConfig
    report: Report

    @property
    def done(self) -> float:
        return _step_work(self.config) * steps_until(self.config, self.report.step)

    def in_words(self) -> str:
        said = f"{self.name} step {self.report.step}/{self.config.last_step}"
        if self.report.loss is not None:
            said += f" loss {self.report.loss:.3f}"
        if self.report.tokens_per_s is not None:
            said += f" {self.report.tokens_per_s:,.0f} tokens/s"
        return said


class Progress:
    """A context that shows the progress of runs, about once per second.

    The forecast divides the work left by the speed of all runs together since the first step that was seen. What an
    earlier process did and what a failed run left undone does not count as speed.

    title: of the bar. show: False keeps silent.
    """

    def __init__(self, title: str, show: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.show, self._clock = title, show, clock
        self._bar: Any = None
        self._began, self._next_line = clock(), FIRST_LINE
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._watched: dict[str, tuple[TrainConfig, list[Path]]] = {}
        self._running: dict[str, _Running] = {}
        self._runs = self._ended = self._failed = 0
        self._work = self._ended_work = 0.0
        self._since: float | None = None  # when the first step was seen
        self._untimed = 0.0  # work that is done or given up, and that no time since then was spent on

    def __enter__(self) -> Progress:
        if self.show and can_redraw():
            self._bar = tqdm(total=1.0, desc=self.title, bar_format="{l_bar}{bar}|")
        if self.show:
            self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.show and kind is None:
            self._next_line = 0.0
            self.tick()
        if self._bar is not None:
            self._bar.close()

    # --- what happens to runs ---

    def expect(self, configs: Sequence[TrainConfig]) -> None:
        """More runs ahead."""
        with self._lock:
            self._runs += len(configs)
            self._work += sum(map(_work, configs))

    def watch(self, configs: Sequence[TrainConfig], root: str | Path) -> None:
        """These runs may begin below `root` at any time from now on."""
        folder = (store.Remote(root).copy if store.is_address(root) else Path(root)) / store.PARTIAL
        for config in configs:
            works = [folder / candidate.run_id for candidate in config.candidates()]
            for work in works:
                with contextlib.suppress(OSError):
                    (work / REPORT).unlink()  # of a process that was killed
            with self._lock:
                self._watched[config.run_id] = config, works

    def skip(self, config: TrainConfig) -> None:
        """Take a run that was finished before out of what is ahead."""
        with self._lock:
            self._runs -= 1
            self._work -= _work(config)

    def end(self, config: TrainConfig, failed: bool = False) -> None:
        with self._lock:
            self._watched.pop(config.run_id, None)
            run, work = self._running.pop(config.run_id, None), _work(config)
            self._ended += 1
            self._failed += failed
            self._ended_work += work
            if run is not None and run.report.step < config.last_step:
                self._untimed += work - run.done
            elif run is None and failed:
                self._untimed += work
            elif self._since is None:  # reports are out of sight
                self._since = self._began

    def say(self, line: str) -> None:
        if self.show:
            tqdm.write(line)

    # --- what is seen of them ---

    def _follow(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            self.tick()

    def tick(self) -> None:
        """Read the reports and show what they say."""
        with self._lock:
            for config, works in self._watched.values():
                for work in works:
                    report = read_report(work)
                    if report is not None:
                        self._see(_Running(work.name, config, report))
            self._draw()

    def _see(self, run: _Running) -> None:
        if run.config.run_id not in self._running:
            self._untimed += run._replace(report=Report(run.report.began, run.report.began)).done
        self._running[run.config.run_id] = run
        if self._since is None and run.report.step > run.report.began:
            self._since, self._untimed = self._clock(), self._done()

    def _done(self) -> float:
        return self._ended_work + sum(run.done for run in self._running.values())

    def share(self) -> float:
        """The share of all work that is done. A resumed run's includes what was done before."""
        return self._done() / self._work if self._work else 0.0

    def seconds_left(self) -> float | None:
        """Seconds until the last run ends; None before any speed is known."""
        timed = self._done() - self._untimed
        if self._since is None or timed <= 0:
            return None
        return (self._work - self._done()) * (self._clock() - self._since) / timed

    def _draw(self) -> None:
        gone = self._clock() - self._began
        if self._bar is not None:
            self._bar.n = self.share()
            self._bar.bar_format = "{l_bar}{bar}| " + self._in_words(gone)
            self._bar.refresh()
        elif self.show and gone >= self._next_line:
            self._next_line = (gone // LINES + 1) * LINES
            print(f"{self.title}: {100 * self.share():3.0f}% | {self._in_words(gone)}", file=sys.stderr, flush=True)

    def _in_words(self, gone: float) -> str:
        left = self.seconds_left()
        said = f"{tqdm.format_interval(gone)} gone, {'?' if left is None else tqdm.format_interval(left)} left"
        if self._runs > 1:
            said += f" | {self._ended} of {self._runs} runs" + (f", {self._failed} failed" if self._failed else "")
        if self._running:
            words = [run.in_words() for run in self._running.values()]
            said += f" | now {', '.join(words[:NAMED])}" + (f" and {len(words) - NAMED} more" if words[NAMED:] else "")
        return said


def can_redraw() -> bool:
    """True if what is written to stderr can be drawn over: in a terminal, or in a notebook."""
    return sys.stderr.isatty() or hasattr(builtins, "__IPYTHON__")
