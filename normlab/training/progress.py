"""Progress of runs and a forecast of their end.

`bar_of(title, total)`   one bar: drawn over in a terminal or a notebook, a line about once a minute in a log file
`SweepBars`              the runs of a sweep, and the steps of those in progress on this machine
`steps_in_all(config)`   a run's work in optimizer steps, measurements included
`can_redraw()`           True if a bar may move: stderr is a terminal or a notebook
"""

from __future__ import annotations

import builtins
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

if TYPE_CHECKING:
    from normlab.training.config import TrainConfig

DRAW_SECONDS, LINE_SECONDS = 1.0, 60.0  # between two drawings; between two lines of a log file
FORWARD = 1 / 3  # a forward pass, in optimizer steps


# --- work ---


def steps_until(config: TrainConfig, step: int) -> float:
    """Work of the first `step` steps and of the measurements between them, in steps.

    A forward pass on a CPU takes a third of a step. Layer statistics of a batch take a step.
    """

    def batches(every: int, blocks: int) -> float:
        times = 1 + math.ceil(config.last_step / every) if every else 0  # the first before training
        return times * blocks / config.batch_size

    evaluated = FORWARD * batches(config.eval_every, config.eval_blocks)
    measured = evaluated + batches(config.probe_every, config.probe_blocks)
    return step * (1 + measured / config.last_step)


def steps_in_all(config: TrainConfig) -> float:
    """Work of a whole run, in steps. `normlab.training.experiments` takes 7 depth + 20 forward passes."""
    experiments = FORWARD * (7 * config.depth + 20) * config.experiment_blocks / config.batch_size
    return steps_until(config, config.last_step) + experiments


def _work(config: TrainConfig, steps: float) -> int:
    """Work of so many steps, comparable between runs. The head counts by its weights; a block's are 12 width^2."""
    return round(steps * config.tokens_per_step * config.width * (config.depth + config.vocab_size / 12 / config.width))


def _work_in_all(config: TrainConfig) -> int:
    return _work(config, steps_in_all(config))


# --- bars ---


def can_redraw() -> bool:
    """True if what is written to stderr can be drawn over: in a terminal, or in a notebook."""
    return sys.stderr.isatty() or hasattr(builtins, "__IPYTHON__")


class _Lines:
    """A log file, in which every drawing of a bar is a line."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.encoding = file, file.encoding

    def write(self, text: str) -> None:
        if line := text.strip():
            self.file.write(f"{line}\n")

    def flush(self) -> None:
        self.file.flush()


def bar_of(title: str, total: int, show: bool, **options: Any) -> tqdm:
    """A bar whose forecast is by the mean speed so far. show: False keeps silent. options: tqdm's."""
    if can_redraw():
        options |= {"file": sys.stderr, "mininterval": DRAW_SECONDS, "dynamic_ncols": True}
    else:
        options |= {"file": _Lines(sys.stderr), "mininterval": LINE_SECONDS, "position": 0}
    # Left to itself, tqdm draws more often than that.
    return tqdm(desc=title, total=total, disable=not show, smoothing=0, miniters=0, **options)


class SweepBars:
    """A context that shows the progress of a sweep, about once per second.

    The first bar counts runs that ended. The second counts work: the steps of each run, weighted by its size. Its
    forecast divides the work left by the speed of all runs together since the first step that was seen. What an earlier
    process did and what a failed run left undone does not count as speed. A log file has lines of the second.

    Args:
        show: False keeps silent.
        steps: steps done by run id, of runs in progress on this machine.
    """

    def __init__(self, show: bool, steps: Callable[[], Mapping[str, int]] = dict) -> None:
        self.show, self._steps, self._redraws = show, steps, can_redraw()
        bar = "{l_bar}{bar}| "
        self.runs = bar_of("runs", 0, show and self._redraws, bar_format=bar + "{n_fmt} of {total_fmt}{postfix}")
        forecast = bar + "{elapsed} gone, {remaining} left{postfix}"
        self.work = bar_of("steps", 0, show, bar_format=forecast, position=1)
        self._ended = self._failed = self._planned = 0
        self._waiting: dict[str, TrainConfig] = {}
        self._seen: dict[str, int] = {}  # work done of runs in progress
        self._timed = False  # a step was seen
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> SweepBars:
        if self.show:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.work.close()
        self.runs.close()

    def expect(self, configs: Sequence[TrainConfig]) -> None:
        """More runs ahead."""
        with self._lock:
            self._planned += len(configs)
            self.work.total += sum(map(_work_in_all, configs))

    def watch(self, configs: Sequence[TrainConfig]) -> None:
        """These runs may begin at any time from now on."""
        with self._lock:
            self._waiting |= {config.run_id: config for config in configs}

    def skip(self, config: TrainConfig) -> None:
        """Take a run that was finished before out of what is ahead."""
        with self._lock:
            self._planned -= 1
            self.work.total -= _work_in_all(config)

    def end(self, config: TrainConfig, failed: bool = False) -> None:
        with self._lock:
            self._waiting.pop(config.run_id, None)
            undone = _work_in_all(config) - self._seen.pop(config.run_id, 0)
            self._ended += 1
            self._failed += failed
            if failed:
                self.work.total -= undone
            else:
                self.work.n += undone
            self._draw()

    def say(self, line: str) -> None:
        if self.show:
            tqdm.write(line)

    def _follow(self) -> None:
        while not self._stop.wait(DRAW_SECONDS):
            self.tick()

    def tick(self) -> None:
        """Look at the runs in progress, and show how far they are."""
        with self._lock:
            for name, step in self._steps().items():
                if name in self._waiting:
                    self._see(self._waiting[name], step)
            self._draw()

    def _see(self, config: TrainConfig, step: int) -> None:
        done = _work(config, steps_until(config, step))
        if config.run_id not in self._seen:
            self.work.initial += done  # by a process before
        self.work.n += done - self._seen.get(config.run_id, 0)
        self._seen[config.run_id] = done
        if not self._timed:
            self._timed = True
            self.work.unpause()  # what took time until now were imports

    def _draw(self) -> None:
        failed = f", {self._failed} failed" if self._failed else ""
        self.runs.n, self.runs.total = self._ended, self._planned
        if self._redraws:
            self.runs.set_postfix_str(failed.removeprefix(", "))
            self.work.refresh()
        else:
            self.work.set_postfix_str(f"{self._ended} of {self._planned} runs{failed}", refresh=False)
            self.work.update(0)
