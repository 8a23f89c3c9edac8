"""A run that trains in a process of its own while this process goes on: watched, paused, continued, stopped.

`BackgroundRun(config, out)`   the run of `normlab.train(config, out)`, as a process that tells what it measures

The process sends every step's measurements and takes commands between two steps, so it is never interrupted inside one.
Pausing keeps it, asleep; stopping writes a checkpoint and ends it; ended in any other way, it leaves its last whole
checkpoint. It ends when this process ends, and what interrupts this process (Ctrl-C, a notebook's stop button) does not
reach it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from normlab import runs
from normlab.errors import NormlabError
from normlab.training.config import TrainConfig
from normlab.training.workers import end_with_parent

READY, STARTING, TRAINING, PAUSED, STOPPED, FAILED = "ready", "starting", "training", "paused", "stopped", "failed"
LIVE = (STARTING, TRAINING, PAUSED)
# Where a value belongs in the long table: split, site, metric, mask.
Place = tuple[str, str, str, str]
Point = tuple[int, "int | None", float]  # step, layer, value
_PATIENCE = 10.0  # seconds that a process gets to end by itself


class BackgroundRun:
    """One training run in a process of its own.

    Args:
        config, out, cache_dir: as for `normlab.train`; the run is found there afterwards like any other, and one that
            is there already is taken up where it ended.
        changed: called, from another thread, when there is something new to see. It must not call `start` or `close`,
            which wait for that thread; what it raises fails the run.

    Attributes:
        state: "ready", "starting", "training", "paused", "stopped", "failed", or the status of the ended run.
        step: optimizer steps done.
        reason: one line that says why it failed.
        run: the ended `normlab.runs.Run`.
        levels: losses of models that only count, by their metrics' names, once they are known.
    """

    _context: ClassVar[Any] = multiprocessing.get_context("spawn")  # a fork would copy locks that threads hold
    # Weak: a live one is held by its listener's thread, an ended one is its owner's.
    _running: ClassVar[weakref.WeakValueDictionary[Path, BackgroundRun]] = weakref.WeakValueDictionary()

    def __init__(
        self,
        config: TrainConfig,
        out: str | Path,
        *,
        cache_dir: str | Path | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.out, self.cache_dir = config, Path(out), cache_dir
        self.state, self.step, self.reason = READY, 0, ""
        self.run: runs.Run | None = None
        self.levels: dict[str, float] = {}
        self._changed = changed
        self._condition = threading.Condition(threading.RLock())
        self._points: dict[Place, list[Point]] = defaultdict(list)
        self._process: Any = None  # until the listener has seen it end
        self._stopping = False  # it was told to stop and obeys nothing else any more
        self._pipe: Any = None
        self._listener: threading.Thread | None = None

    # --- commands ---

    def start(self) -> None:
        """Begin, or go on: after a pause, after a stop (a stop under way is waited for), or from the last checkpoint
        after a failure.

        A second `BackgroundRun` of the same run in this process stops the first. NormlabError for a directory that
        holds something other than runs.
        """
        runs.check_root(self.out)
        if self.run is None:
            self._replace_other()  # takes a while: not under the lock, which `points` needs
        with self._condition:
            if self.live and not self._stopping:
                self._send("train")
                return
            self._condition.wait_for(lambda: self._process is None)
            if self.run is not None:
                return
            self._spawn()
            self.state, self.reason, self._stopping = STARTING, "", False
        self._changed()

    def pause(self) -> None:
        """Sleep after the step in progress; `start` wakes it."""
        self._send("pause")

    def stop(self) -> None:
        """Write a checkpoint after the step in progress and end the process; `start` goes on from there."""
        with self._condition:
            self._stopping = True
            self._send("stop")

    def close(self, patience: float = _PATIENCE) -> None:
        """End the process now. What it did since its last checkpoint is lost, nothing is half-written."""
        with self._condition:
            process, listener = self._process, self._listener
            if process is None or listener is None:
                return
            if self.live:
                self.state = STOPPED
        process.terminate()
        listener.join(patience)  # which waits for the process: of two threads that do, one misses how it ended
        if listener.is_alive():
            process.kill()
            listener.join(patience)

    # --- what it shows ---

    @property
    def live(self) -> bool:
        """Whether there is a process at work or asleep."""
        return self.state in LIVE

    @property
    def pid(self) -> int | None:
        """The process's id while there is one."""
        process = self._process
        return process.pid if process is not None else None

    @property
    def unigram_entropy(self) -> float | None:
        """That of the corpus, once it is known."""
        return self.levels.get("unigram_entropy")

    def points(self, split: str, site: str, metric: str, mask: str = "all") -> list[Point]:
        """(step, layer, value) of everything measured there so far, in order."""
        with self._condition:
            return list(self._points.get((split, site, metric, mask), ()))

    def wait(self, timeout: float | None = None, *, step: int | None = None) -> bool:
        """Block until the process ended, or until `step` steps are done; False when `timeout` seconds went by first."""
        with self._condition:
            return self._condition.wait_for(
                lambda: self.state not in (READY, *LIVE) or (step is not None and self.step >= step), timeout
            )

    # --- the process ---

    def _send(self, command: str) -> None:
        with self._condition:
            if self.live:
                with contextlib.suppress(OSError):  # it ended just now; the listener says how
                    self._pipe.send(command)

    def _replace_other(self) -> None:
        """A cell that is run again makes a second object for the same run: the first gives way, at a checkpoint."""
        key = (self.out / self.config.run_id).resolve()
        other = self._running.get(key)
        if other is not None and other is not self:
            if other.state in (TRAINING, PAUSED):
                other.stop()
                other.wait(_PATIENCE)
            other.close()
        self._running[key] = self

    def _spawn(self) -> None:
        pipe, theirs = self._context.Pipe()
        arguments = (self.config, str(self.out), str(self.cache_dir) if self.cache_dir is not None else None, theirs)
        process = self._context.Process(target=_work, args=arguments, name=self.config.run_id, daemon=True)
        with _interrupts_kept():
            process.start()
        theirs.close()  # so that reading from ours ends when the process does
        self._process, self._pipe = process, pipe
        self._listener = threading.Thread(target=self._listen, args=(process, pipe), daemon=True)
        self._listener.start()

    def _listen(self, process: Any, pipe: Any) -> None:
        try:
            while (message := _received(pipe)) is not None:
                self._heard(*message)
                self._changed()
        except Exception as error:
            self._heard("failed", _in_one_line(error))
            process.terminate()
        finally:
            with self._condition:
                pipe.close()  # a process that still wants to tell something ends, rather than wait for a reader
            process.join()
            with self._condition:
                self._process = None
                self._heard("failed", _how_it_ended(process.exitcode))
        self._changed()

    def _heard(self, what: str, *rest: Any) -> None:
        """Take in a message, unless the end is known already."""
        with self._condition:
            if self.live:
                getattr(self, f"_heard_{what}")(*rest)
            self._condition.notify_all()

    def _heard_corpus(self, levels: dict[str, float]) -> None:
        self.levels = levels

    def _heard_began(self, step: int, rows: list[tuple]) -> None:
        self._points.clear()  # a run that goes on sends what it had measured at its checkpoint
        self._heard_step(step, rows)

    def _heard_step(self, step: int, rows: list[tuple]) -> None:
        self.state, self.step = TRAINING, step
        for at, _, split, site, layer, metric, mask, value in rows:
            self._points[split, site, metric, mask].append((at, layer, value))

    def _heard_paused(self) -> None:
        self.state = PAUSED

    def _heard_training(self) -> None:
        self.state = TRAINING

    def _heard_stopped(self) -> None:
        self.state = STOPPED

    def _heard_failed(self, reason: str) -> None:
        self.state, self.reason = FAILED, reason

    def _heard_ended(self, path: str) -> None:
        """What is shown of an ended run is what is on disk."""
        import pandas as pd

        self.run = runs.read_run(path)
        frame = self.run.table()
        self._points.clear()
        columns = ["split", "site", "metric", "mask", "step", "layer", "value"]
        for split, site, metric, mask, step, layer, value in frame[columns].itertuples(index=False, name=None):
            at = int(layer) if pd.notna(layer) else None
            self._points[split, site, metric, mask].append((int(step), at, float(value)))
        ends = frame[frame["metric"].isin(["unigram_entropy", *runs.COUNT_LOSSES])]
        self.levels = dict(zip(ends["metric"], ends["value"].astype(float), strict=True))
        self.state, self.step = self.run.status, int(frame["step"].max())


def _received(pipe: Any) -> tuple | None:
    """The next message; None once the process is gone."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _in_one_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, NormlabError) else f"{type(error).__name__}: {line}"


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was killed (exit code {code}), perhaps for lack of memory"
    return f"its process ended with exit code {code}; its error output says why"


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """A process started here never sees SIGINT: a signal mask is inherited, from the first instant on. Jupyter sends
    the interrupt of a cell to the kernel's children too."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where Jupyter interrupts the kernel alone
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # starting it later, before the process, would let SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(config: TrainConfig, out: str, cache_dir: str | None, pipe: Any) -> None:
    """What the process does."""
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is being written is tidied up
    if hasattr(os, "nice"):
        os.nice(5)  # cells of the notebook come first
    try:
        pipe.send(_trained(config, out, cache_dir, pipe))
    except Exception as error:
        with contextlib.suppress(OSError):  # nobody watches any more
            pipe.send(("failed", _in_one_line(error)))


def _trained(config: TrainConfig, out: str, cache_dir: str | None, pipe: Any) -> tuple:
    """Train, and return the last message: how it ended."""
    from normlab.training.callbacks import RunStopped
    from normlab.training.corpus import corpus_of
    from normlab.training.trainer import train

    corpus = corpus_of(config, cache_dir)
    counted = corpus.count_losses(config.eval_blocks, config.held_out)
    pipe.send(("corpus", {"unigram_entropy": corpus.unigram_entropy, **counted}))
    try:
        run = train(config, out, cache_dir=cache_dir, progress=False, watch=_Watcher(pipe))
    except RunStopped:
        return ("stopped",)
    return ("ended", str(run.path))


class _Watcher:
    """Sends each step's rows and obeys the commands that have come in meanwhile."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.what = "began"

    def __call__(self, step: int, rows: list[tuple]) -> bool:
        self.pipe.send((self.what, step, rows))
        self.what = "step"
        paused = False
        while paused or self.pipe.poll():
            command = self.pipe.recv()
            if command == "stop":
                return False
            if paused != (command == "pause"):
                paused = not paused
                self.pipe.send(("paused" if paused else "training",))
        return True
