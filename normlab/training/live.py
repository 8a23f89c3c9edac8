"""A run in a separate process, which this one watches, pauses, continues and stops.

`BackgroundRun(config, out)`   the run of `normlab.train(config, out)`, as the command `normlab train --follow`
`train_followed(config, out)`  that command

The process writes each step's measurements to its standard output as lines of JSON. Between two steps it takes the
commands `pause`, `train` and `stop` from its standard input. A paused process sleeps. A stopped one writes a checkpoint
and ends; ended in any other way, it leaves its last whole checkpoint. It ends with its standard input, so with this
process, even while it is paused. It has its own session, so Ctrl-C and a notebook's stop button do not reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, ClassVar

from normlab import runs, store
from normlab.errors import in_one_line
from normlab.training.config import TrainConfig

READY, STARTING, TRAINING, PAUSED, STOPPED, FAILED = "ready", "starting", "training", "paused", "stopped", "failed"
LIVE = (STARTING, TRAINING, PAUSED)
Series = tuple[str, str, str, str]  # split, site, metric, mask
Point = tuple[int, "int | None", float]  # step, layer, value
_PATIENCE = 10.0  # seconds that a process gets to end by itself


class BackgroundRun:
    """One training run in a separate process.

    Args:
        config, out, cache_dir: as for `normlab.train`. The run is found there afterwards like any other, and one that
            is there already is resumed.
        changed: called from another thread when there is something new to show. It must not call `start` or `close`,
            which wait for that thread. If it raises, the run fails.

    Attributes:
        state: "ready", "starting", "training", "paused", "stopped", "failed", or the status of the ended run.
        step: optimizer steps done.
        reason: one line that says why it failed.
        run: the ended `normlab.runs.Run`.
        levels: n-gram baselines by the names of their metrics, once they are known.
    """

    # Weak: a live one is held by its listener's thread, an ended one by its owner.
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
        self._points: dict[Series, list[Point]] = defaultdict(list)
        self._process: Any = None  # until the listener has seen it end
        self._stopping = False  # stop was requested; later commands are ignored
        self._listener: threading.Thread | None = None

    # --- commands ---

    def start(self) -> None:
        """Begin, continue after a pause, or resume from the last checkpoint after a stop or a failure.

        A second `BackgroundRun` of the same run in this process stops the first. NormlabError for a directory that
        holds something other than runs.
        """
        store.check_root(self.out)
        if self.run is None:
            self._stop_other()  # takes a while: not under the lock, which `points` needs
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
        """Write a checkpoint after the step in progress and end the process; `start` resumes from there."""
        with self._condition:
            self._stopping = True
            self._send("stop")

    def close(self, patience: float = _PATIENCE) -> None:
        """End the process now. The steps since its last checkpoint are lost; nothing is half-written."""
        with self._condition:
            process, listener = self._process, self._listener
            if process is None or listener is None:
                return
            if self.live:
                self.state = STOPPED
        process.terminate()
        listener.join(patience)  # which waits for the process: of two threads that do, one misses its exit code
        if listener.is_alive():
            process.kill()
            listener.join(patience)

    # --- what it shows ---

    @property
    def live(self) -> bool:
        """True while a process trains or sleeps."""
        return self.state in LIVE

    @property
    def pid(self) -> int | None:
        """The process's id; None if there is none."""
        process = self._process
        return process.pid if process is not None else None

    def points(self, split: str, site: str, metric: str, mask: str = "all") -> list[Point]:
        """(step, layer, value) of everything measured so far, in order."""
        with self._condition:
            return list(self._points.get((split, site, metric, mask), ()))

    def wait(self, timeout: float | None = None, *, step: int | None = None) -> bool:
        """Block until the process ended, or `step` steps are done. False if `timeout` seconds passed first."""
        with self._condition:
            return self._condition.wait_for(
                lambda: self.state not in (READY, *LIVE) or (step is not None and self.step >= step), timeout
            )

    # --- the process ---

    def _send(self, command: str) -> None:
        with self._condition:
            if self.live:
                with contextlib.suppress(OSError):  # it ended just now; the listener says how
                    print(command, file=self._process.stdin, flush=True)

    def _stop_other(self) -> None:
        """Stop an earlier object of the same run at a checkpoint. A cell that is run again makes a second one."""
        key = (self.out / self.config.run_id).resolve()
        other = self._running.get(key)
        if other is not None and other is not self:
            if other.state in (TRAINING, PAUSED):
                other.stop()
                other.wait(_PATIENCE)
            other.close()
        self._running[key] = self

    def _spawn(self) -> None:
        command = [sys.executable, "-m", "normlab", "train", "--follow", *self.config.to_arguments()]
        command += ["--out", str(self.out)] + ([] if self.cache_dir is None else ["--cache-dir", str(self.cache_dir)])
        # Modules that can be imported here can be imported there.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (the listener closes it)
        self._process = Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )
        self._listener = threading.Thread(target=self._listen, args=(self._process, errors), daemon=True)
        self._listener.start()

    def _listen(self, process: Any, errors: Any) -> None:
        try:
            for line in process.stdout:
                self._receive(json.loads(line))
                self._changed()
        except Exception as error:
            self._end(FAILED, in_one_line(error))
            process.terminate()
        finally:
            process.stdout.close()  # a process that still writes then ends, rather than wait for a reader
            code = process.wait()
            with self._condition, errors:
                self._process = None
                self._end(FAILED, _how_it_ended(code, errors))
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self._changed()

    def _receive(self, message: Mapping[str, Any]) -> None:
        """Apply a message, unless the run has ended."""
        with self._condition:
            if self.live:
                self.levels = message.get("levels", self.levels)
                if message.get("first"):
                    self._points.clear()  # a resumed run sends the measurements of its checkpoint again
                if "rows" in message:
                    self.step = message["step"]
                    self._add(map(runs.Row._make, message["rows"]))
                self.state = message.get("state", self.state)
                if "ended" in message:
                    self._show_finished(runs.read_run(message["ended"]))
            self._condition.notify_all()

    def _end(self, state: str, reason: str) -> None:
        with self._condition:
            if self.live:
                self.state, self.reason = state, reason
            self._condition.notify_all()

    def _add(self, rows: Iterable[runs.Row]) -> None:
        for row in rows:
            self._points[row.split, row.site, row.metric, row.mask].append((row.step, row.layer, row.value))

    def _show_finished(self, run: runs.Run) -> None:
        """Show an ended run as it is on disk."""
        self.run, self.state = run, run.status
        rows = list(runs.rows_of(run.table()))
        self._points.clear()
        self._add(rows)
        self.step = max(row.step for row in rows)
        self.levels = {row.metric: row.value for row in rows if row.metric in ("unigram_entropy", *runs.COUNT_LOSSES)}


def _how_it_ended(code: int, errors: Any) -> str:
    if code < 0:
        return f"its process was killed (exit code {code}), perhaps for lack of memory"
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("normlab: error: ") if lines else f"its process ended with exit code {code}"


# --- in the process ---


def train_followed(config: TrainConfig, out: str | Path, cache_dir: str | Path | None = None) -> None:
    """Train as `normlab.train` does, with the commands and messages that the head of this file names."""
    from normlab.training.run import RunStopped, train
    from normlab.training.text.corpus import corpus_of

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a file in progress is removed
    if hasattr(os, "nice"):
        os.nice(5)  # cells of the notebook come first
    follower = _Follower(sys.stdout)
    with contextlib.redirect_stdout(sys.stderr):  # other prints are no messages
        corpus = corpus_of(config, cache_dir)
        baselines = corpus.measured_on(config).count_losses
        follower.send(levels={"unigram_entropy": corpus.unigram_entropy, **baselines})
        try:
            run = train(config, out, cache_dir=cache_dir, progress=False, watch=follower)
            follower.send(ended=str(run.path))
        except RunStopped:
            follower.send(state=STOPPED)


class _Follower:
    """Sends each step's rows, and obeys the commands that arrived meanwhile."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.first = stream, True
        self.commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_commands, daemon=True).start()

    def _read_commands(self) -> None:
        while data := os.read(0, 4096):  # not sys.stdin, whose lock would be held while the interpreter ends
            for command in data.decode().split():
                self.commands.put(command)
        os._exit(1)  # the watching process is gone

    def send(self, **message: Any) -> None:
        print(json.dumps(message), file=self.stream, flush=True)

    def __call__(self, step: int, rows: list[runs.Row]) -> bool:
        self.send(step=step, rows=rows, state=TRAINING, first=self.first)
        self.first = paused = False
        while paused or not self.commands.empty():
            command = self.commands.get()
            if command == "stop":
                return False
            if paused != (command == "pause"):
                paused = not paused
                self.send(state=PAUSED if paused else TRAINING)
        return True
