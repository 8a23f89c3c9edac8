"""Progress of runs and a forecast of their end: one bar for a sweep, and for a single run.

`Reporter`               writes a run's progress to a small file in its working directory
`steps_in_all(config)`   a run's work in optimizer steps, measurements included
`Progress`               reads the reports and forecasts the end: a bar in a terminal, a line per minute in a log file
`one_run(config, ...)`   the same for one run
`can_redraw()`           True if a bar may move: stderr is a terminal or a notebook

Reports are files, so runs of this process, of its workers and of a cluster are all followed in this way.
"""

from __future__ import annotations

import builtins
import contextlib
import heapq
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from normlab import store

if TYPE_CHECKING:
    from normlab.training.config import TrainConfig

REPORT = "progress"  # not *.json, which is published with every checkpoint
EVERY_SECONDS = 1.0  # between two reports of a run, and between two looks at them
FIRST_LINE, LINES = 10.0, 60.0  # seconds: until a log file's first line, and between its lines
HALF_LIFE = 300.0  # seconds: measured speed this old weighs half
NAMED = 2  # runs in progress that are named; of more, the number
FORWARD = 1 / 3  # a forward pass, in optimizer steps


# --- what a run reports ---


class Report(NamedTuple):
    """One report. began: steps done when this process began. step: steps done. loss: the last training loss logged."""

    began: int
    step: int
    loss: float | None = None
    tokens_per_s: float | None = None


def write_report(work: Path, report: Report) -> None:
    """Replace the run's report in its working directory. A failure is ignored, as training does not depend on it."""
    temporary = work / f".{REPORT}.writing"
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(report._asdict()))
        os.replace(temporary, work / REPORT)


def read_report(work: Path) -> Report | None:
    """The run's report; None if it has not begun."""
    try:
        return Report(**json.loads((work / REPORT).read_text()))
    except (OSError, ValueError, TypeError):  # TypeError: written by another version
        return None


class Reporter:
    """Reports one run about once per second. work: its working directory; None reports nothing.

    loss: the last training loss logged. A report at a step comes before that step's loss.
    """

    def __init__(self, work: Path | None, began: int) -> None:
        self.work, self.began = work, began
        self.loss: float | None = None
        self.write(began)

    def step(self, number: int, tokens_per_s: float | None) -> None:
        if number == self.began + 1 or time.perf_counter() - self.reported >= EVERY_SECONDS:
            self.write(number, tokens_per_s)

    def write(self, number: int, tokens_per_s: float | None = None) -> None:
        self.reported = time.perf_counter()
        if self.work is not None:
            write_report(self.work, Report(self.began, number, self.loss, tokens_per_s))


# --- work ---


def steps_until(config: TrainConfig, step: int) -> float:
    """Work of the first `step` steps and of the measurements until then, in steps.

    On a CPU a forward pass takes a third of a step, and layer statistics of a batch take a step.
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


@dataclass
class _Running:
    """A run in progress. done: its work up to the last report. begun, at: when the first and the last report came."""

    name: str
    config: TrainConfig
    report: Report
    done: float
    begun: float
    at: float
    stepped: bool

    @property
    def left(self) -> float:
        return _work(self.config) - self.done

    def in_words(self) -> str:
        said = f"{self.name} step {self.report.step}/{self.config.last_step}"
        if self.report.loss is not None:
            said += f" loss {self.report.loss:.3f}"
        if self.report.tokens_per_s is not None:
            said += f" {self.report.tokens_per_s:,.0f} tokens/s"
        return said


class Progress:
    """A context that shows the progress of runs, about once per second.

    The forecast divides the work left by the speed of the recent past. A run before its first step also takes the time
    that others needed for it: compilation, and measurements before training.

    title: of the bar. show: False keeps silent. slots: runs at once; None: as many as are seen in progress.
    """

    def __init__(self, title: str, show: bool, slots: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.show = title, show
        self._slots, self._clock = slots, clock
        self._bar: Any = None
        self._began = self._measured_at = clock()
        self._next_line = FIRST_LINE
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._ahead: list[float] = []  # work of each run that has not begun
        self._watched: dict[str, tuple[TrainConfig, list[Path]]] = {}
        self._running: dict[str, _Running] = {}
        self._ended = self._failed = 0
        self._done = 0.0  # work of runs that have ended
        self._work = self._seconds = 0.0  # measured in the recent past: work, and the seconds of runs that it took
        self._starts: list[float] = []

    def __enter__(self) -> Progress:
        from tqdm import tqdm

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
            self._ahead += map(_work, configs)

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
            self._take(config)

    def end(self, config: TrainConfig, failed: bool = False) -> None:
        with self._lock:
            self._watched.pop(config.run_id, None)
            run = self._running.pop(config.run_id, None)
            if run is None:
                self._take(config)
            elif run.report.step == config.last_step:
                self._measure(run.left, run.at)
            self._ended += 1
            self._failed += failed
            self._done += _work(config)

    def say(self, line: str) -> None:
        from tqdm import tqdm

        if self.show:
            tqdm.write(line)

    def _take(self, config: TrainConfig) -> None:
        """Take a run of that work out of what is ahead. Planned runs may differ from it in learning rate."""
        if self._ahead:
            work = _work(config)
            self._ahead.remove(min(self._ahead, key=lambda one: abs(one - work)))

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
                        self._see(config, work.name, report)
            self._draw()

    def _see(self, config: TrainConfig, name: str, report: Report) -> None:
        now, done = self._clock(), _step_work(config) * steps_until(config, report.step)
        run = self._running.get(config.run_id)
        if run is None:
            self._take(config)
            stepped = report.step > report.began
            self._running[config.run_id] = _Running(name, config, report, done, now, now, stepped)
        elif report.step != run.report.step:
            if run.stepped:
                self._measure(done - run.done, run.at)
            else:
                self._starts.append(now - run.begun)
            run.report, run.done, run.at, run.stepped = report, done, now, True

    def _measure(self, work: float, since: float) -> None:
        """Note a run's work since a time. Work is negative if its process died and it resumed: not measured."""
        now = self._clock()
        if work > 0:
            kept = 0.5 ** ((now - self._measured_at) / HALF_LIFE)
            self._work = self._work * kept + work
            self._seconds = self._seconds * kept + now - since
            self._measured_at = now

    def share(self) -> float:
        """The share of all work that is done. A resumed run's includes what was done before."""
        done = self._done + sum(run.done for run in self._running.values())
        work = done + sum(run.left for run in self._running.values()) + sum(self._ahead)
        return done / work if work else 0.0

    def seconds_left(self) -> float | None:
        """Seconds until the last run ends; None before any speed is known. Free slots take the next run."""
        now = self._clock()
        slots = self._slots or len(self._running) or 1
        if self._seconds > 0:
            speed = self._work / self._seconds
        elif self._done and now > self._began:  # reports are out of sight
            speed = self._done / (now - self._began) / slots
        else:
            return None
        start = statistics.mean(self._starts) if self._starts else 0.0
        ends = [
            max(0.0, run.left / speed + (0.0 if run.stepped else start) - (now - run.at))
            for run in self._running.values()
        ]
        ends += [0.0] * (slots - len(ends))
        heapq.heapify(ends)
        for work in self._ahead:
            heapq.heapreplace(ends, ends[0] + work / speed + start)
        return max(ends)

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
        from tqdm import tqdm

        left = self.seconds_left()
        said = f"{tqdm.format_interval(gone)} gone, {'?' if left is None else tqdm.format_interval(left)} left"
        count = self._ended + len(self._running) + len(self._ahead)
        if count > 1:
            said += f" | {self._ended} of {count} runs" + (f", {self._failed} failed" if self._failed else "")
        if self._running:
            words = [run.in_words() for run in self._running.values()]
            said += f" | now {', '.join(words[:NAMED])}" + (f" and {len(words) - NAMED} more" if words[NAMED:] else "")
        return said


@contextlib.contextmanager
def one_run(config: TrainConfig, root: str | Path, show: bool) -> Iterator[None]:
    """A context around one run's training: `Progress` of it alone."""
    with Progress("train", show, slots=1) as progress:
        progress.expect([config])
        progress.watch([config], root)
        yield
        progress.tick()  # the last report, which goes with the working directory


def can_redraw() -> bool:
    """True if what is written to stderr can be drawn over: in a terminal, or in a notebook."""
    return sys.stderr.isatty() or hasattr(builtins, "__IPYTHON__")
