"""A run in a separate process, which this one starts, watches and stops.

`BackgroundRun(config, out)`   the run of `normlab.train(config, out)`, as the command `normlab train`

The command appends what it measures to a file in the run's working directory (`normlab.training.run`). A signal stops
it, and it writes a checkpoint first. Ctrl-C and a notebook's stop button do not reach it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import IO, Any

from normlab import runs, store
from normlab.training.config import TrainConfig, argument

READY, STARTING, TRAINING, STOPPED, FAILED = "ready", "starting", "training", "stopped", "failed"
LIVE = (STARTING, TRAINING)
Series = tuple[str, str, str, str]  # split, site, metric, mask
Point = tuple[int, "int | None", float]  # step, layer, value
_LEVELS = ("unigram_entropy", *runs.COUNT_LOSSES)
_PATIENCE = 10.0  # seconds that a process gets to end by itself
_LOOK = 0.1  # seconds between two looks while waiting


class BackgroundRun:
    """One training run in a separate process. It is used from one thread at a time.

    Args:
        config, out, cache_dir: as for `normlab.train`. The run is found there afterwards like any other, and one that
            is there already is resumed.

    Attributes, as of the last `look`:
        state: "ready", "starting", "training", "stopped", "failed", or the status of the ended run.
        step: optimizer steps done.
        reason: one line that says why it failed.
        run: the ended `normlab.runs.Run`.
        levels: n-gram baselines by the names of their metrics, once they are known.
    """

    def __init__(self, config: TrainConfig, out: str | Path, *, cache_dir: str | Path | None = None) -> None:
        self.config, self.out, self.cache_dir = config, Path(out), cache_dir
        self.state, self.step, self.reason = READY, 0, ""
        self.run: runs.Run | None = None
        self.levels: dict[str, float] = {}
        self._points: dict[Series, list[Point]] = defaultdict(list)
        self._read = 0  # bytes of the file of rows
        self._process: Any = None
        self._errors: IO[bytes] | None = None
        self._stopping = False

    def start(self) -> None:
        """Begin, or resume from the last checkpoint. NormlabError: the directory holds something other than runs."""
        store.check_root(self.out)
        if self._stopping:
            self.close()
        if self.run is not None or self.live:
            return
        for path in self._files():
            path.unlink(missing_ok=True)  # of the process before
        self._points.clear()
        self.step, self._read, self._stopping, self.reason, self.state = 0, 0, False, "", STARTING
        command = [sys.executable, "-m", "normlab", "train", *self.config.to_arguments(), "--quiet"]
        command += argument("--out", str(self.out))
        command += [] if self.cache_dir is None else argument("--cache-dir", str(self.cache_dir))
        # Modules that can be imported here can be imported there.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the process has ended)
        self._process = Popen(
            command, stdin=DEVNULL, stdout=DEVNULL, stderr=self._errors, env=environment, start_new_session=True
        )
        atexit.register(self.close)

    def stop(self) -> None:
        """Let the process write a checkpoint after the step in progress and end; `start` resumes from there."""
        if self.live and not self._stopping:
            self._stopping = True
            self._process.terminate()

    def close(self) -> None:
        """Stop the process, and wait until it has ended."""
        atexit.unregister(self.close)
        self.stop()
        if self._process is not None:
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.look()

    @property
    def live(self) -> bool:
        """True while a process trains."""
        return self.state in LIVE

    @property
    def pid(self) -> int | None:
        """The process's id; None if there is none."""
        return None if self._process is None else self._process.pid

    def points(self, split: str, site: str, metric: str, mask: str = "all") -> list[Point]:
        """(step, layer, value) of everything measured so far, in order."""
        return list(self._points.get((split, site, metric, mask), ()))

    def wait(self, timeout: float | None = None, *, step: int | None = None) -> bool:
        """Block until the process ended, or `step` steps are done. False if `timeout` seconds passed first."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.look() and not (step is not None and self.step >= step):
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(_LOOK)
        return True

    def look(self) -> bool:
        """Read what the process has measured since the last look; True while it trains."""
        if self._process is None:
            return False
        code = self._process.poll()  # first, so that a process that has ended is read to its end
        self._read_rows()
        if code is not None:
            self._process = None
            self._end(code)
        return self.live

    def _files(self) -> list[Path]:
        """Where the run may write its rows, by the precision that it takes."""
        return [self.out / store.PARTIAL / each.run_id / store.ROWS for each in self.config.candidates()]

    def _read_rows(self) -> None:
        for path in self._files():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
                self._read += len(whole + newline)
                self._show(runs.Row._make(json.loads(line)) for line in whole.splitlines())

    def _end(self, code: int) -> None:
        """Say how the process ended, and show a finished run as it is on disk."""
        assert self._errors is not None
        with self._errors as errors:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
        if code == 0 and (path := self.config.finished_in(self.out)) is not None:
            self.run = runs.read_run(path)
            self._points.clear()
            self._show(runs.rows_of(self.run.table()))
            self.state = self.run.status
        elif self._stopping:
            self.state = STOPPED
        else:
            self.state = FAILED
            killed = f"its process was killed (exit code {code}), perhaps for lack of memory"
            ended = lines[-1].removeprefix("normlab: error: ") if lines else f"its process ended with exit code {code}"
            self.reason = killed if code < 0 else ended
        self._stopping = False

    def _show(self, rows: Iterable[runs.Row]) -> None:
        for row in rows:
            self._points[row.split, row.site, row.metric, row.mask].append((row.step, row.layer, row.value))
            self.step = max(self.step, row.step)
            if row.metric in _LEVELS:
                self.levels[row.metric] = row.value
            elif self.live:
                self.state = TRAINING
