"""Several runs at once: processes of this machine, or a cluster's, through Ray or Slurm.

`finish_in_any_order(configs, ...)`   yields (config, Run or exception) as runs end; a failing one stops no other
`share_cores(workers, threads)`       how many processes, with how many threads each
`Pool(count)`                         processes of this machine
`cluster(kind, ...)`                  `Ray` or `Slurm`, ready to take runs

A cluster's machines all have to see the output directory. A run whose worker is lost (killed, a node gone, its time
over) is started again, up to `RETRIES` times. It resumes from its last checkpoint where the machine computes alike
(`normlab.training.manifest.environment`); elsewhere it starts again.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

from normlab.errors import ANSWER_SECONDS, NormlabError, first_line, in_one_line, show_warning
from normlab.runs import Run, read_run
from normlab.store import PARTIAL, child, is_address
from normlab.training.config import TrainConfig

Outcome = tuple[TrainConfig, "Run | Exception"]
RETRIES = 3
LOCAL = "local"
POLL_SECONDS = 0.5
LOST = (
    "its process was killed, perhaps for lack of memory, or the script that starts the sweep does so outside "
    '`if __name__ == "__main__":`'
)


_counted: dict[str, Any] = {}  # in a process of a pool: where a run's steps are written, by run id


def train_one(config: TrainConfig, out: str, cache_dir: str | None) -> str:
    """Train a run in a worker and return where it is. The transformers stack is imported here, in the worker."""
    from normlab.training.run import train

    def count(step: int, _: list) -> bool:
        if config.run_id in _counted:
            _counted[config.run_id].value = step
        return True

    return str(child(out, train(config, out, cache_dir=cache_dir, progress=False, watch=count).name))


class Workers(ABC):
    """What trains several runs at once."""

    @abstractmethod
    def finish(self, train_one: Callable, configs: Sequence[TrainConfig], arguments: tuple) -> Iterator[Outcome]:
        """Call `train_one(config, *arguments)` for every configuration. It returns a run's directory."""

    def steps(self) -> dict[str, int]:
        """Steps done by run id, of runs that began and whose steps can be seen from here."""
        return {}


def finish_in_any_order(
    configs: Sequence[TrainConfig], out: str | Path, workers: Workers, cache_dir: str | Path | None
) -> Iterator[Outcome]:
    """Train `configs` roughly in order, as many at a time as there are workers."""
    yield from workers.finish(train_one, configs, (str(out), str(cache_dir) if cache_dir is not None else None))


def share_cores(workers: int | str | Workers | None, threads: int | None) -> tuple[int | Workers, int]:
    """Workers and threads of each, from what was asked for and the machine's cores.

    By default two workers share the cores, or as many as `threads` each allow. A cluster's runs have one thread each.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if isinstance(workers, str):
        workers = cluster(workers)
    if isinstance(workers, int) and workers < 1:
        raise NormlabError(f"workers is {workers}; give a number of processes, at least 1")
    if threads is not None:
        TrainConfig(threads=threads)  # its check
    if workers is None:
        workers = min(2, cores) if threads is None else max(1, cores // threads)
    return workers, threads or (max(1, cores // workers) if isinstance(workers, int) else 1)


# --- processes of this machine ---


@dataclass
class Pool(Workers):
    """Processes of this machine.

    count: at once. prepare: what a process calls before its first run.

    A pool dies with any of its processes (out of memory, kill -9). Each run that was in progress then gets one more
    try, alone, so that one that always dies takes no other with it. The rest continue in a new pool.
    """

    count: int
    prepare: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        self._steps: dict[str, Any] = {}

    def finish(self, train_one: Callable, configs: Sequence[TrainConfig], arguments: tuple) -> Iterator[Outcome]:
        # Without locks, which a process that is killed would hold for ever.
        self._steps = {config.run_id: RawValue(ctypes.c_int64) for config in configs}
        left = deque(configs)
        while left:
            for config in (yield from self._processes(left, self.count, train_one, arguments)):
                alone = deque([config])
                if (yield from self._processes(alone, 1, train_one, arguments)):
                    yield config, NormlabError(LOST)

    def steps(self) -> dict[str, int]:
        return {name: count.value for name, count in self._steps.items() if count.value}

    def _processes(
        self, left: deque[TrainConfig], count: int, train_one: Callable, arguments: tuple
    ) -> Generator[Outcome, None, list[TrainConfig]]:
        """Take runs from `left`, `count` at a time, until none is left or a process dies.

        Returns the runs that were in progress when it died.
        """
        others = set(multiprocessing.active_children())
        spawn = multiprocessing.get_context("spawn")
        started = (self.prepare, self._steps)
        pool = ProcessPoolExecutor(min(count, len(left)), spawn, initializer=_start_worker, initargs=started)
        running: dict[Future, TrainConfig] = {}
        try:
            while left or running:
                while left and len(running) < count:
                    running[pool.submit(train_one, left[0], *arguments)] = left[0]
                    left.popleft()
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        raise error
                    yield running.pop(future), error if isinstance(error, Exception) else read_run(future.result())
            pool.shutdown()
        except BrokenProcessPool:  # also raised by `submit`, if it died between two runs
            pool.shutdown()
        finally:  # reached early on Ctrl-C: runs in progress stop now and resume from their checkpoints next time
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
        return list(running.values())


def _start_worker(prepare: Callable[[], Any] | None, counted: dict[str, Any]) -> None:
    """Let Ctrl-C end a worker without a traceback, and end it with its parent. Warnings take one line."""
    _counted.update(counted)
    warnings.showwarning = show_warning  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    if prepare is not None:
        prepare()


def end_with_parent() -> None:
    """End this process when the one that started it ends, whatever it is doing."""
    parent: Any = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


# --- clusters ---


@dataclass(frozen=True)
class Cluster(Workers):
    """A cluster, whose machines train runs.

    address: of the cluster. gpus: per run; a share of one where the cluster can split them.
    """

    address: str | None = None
    gpus: float = 0.0

    @abstractmethod
    def check(self) -> None:
        """NormlabError for a missing package or program, or options that the cluster does not take."""
        if not (math.isfinite(self.gpus) and self.gpus >= 0):
            raise NormlabError(f"gpus is {self.gpus}; give a finite number, at least 0")


class Ray(Cluster):
    """Ray's tasks. address: a running cluster's ("auto", "HOST:PORT"); by default Ray on this machine alone."""

    def check(self) -> None:
        super().check()
        _import("ray")

    def finish(self, train_one: Callable, configs: Sequence[TrainConfig], arguments: tuple) -> Iterator[Outcome]:
        ray = _import("ray")
        started = not ray.is_initialized()
        if started:
            self._start(ray)
        try:
            task = ray.remote(train_one)
            waiting = {}
            for config in configs:
                options = {"num_cpus": config.threads, "num_gpus": self.gpus, "max_retries": RETRIES}
                waiting[task.options(**options).remote(config, *arguments)] = config
            while waiting:
                done, _ = ray.wait(list(waiting), num_returns=1)
                config = waiting.pop(done[0])
                try:
                    yield config, read_run(ray.get(done[0]))
                except Exception as error:  # Ray wraps whatever the task raised
                    cause = getattr(error, "cause", None)
                    yield config, cause if isinstance(cause, Exception) else error
        finally:
            if started:
                ray.shutdown()

    def _start(self, ray: Any) -> None:
        where = self.address or "a cluster on this machine"
        try:
            host, colon, port = (self.address or "").rpartition(":")
            if colon and port.isdigit() and "/" not in host:  # Ray itself tries for minutes
                socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
            ray.init(address=self.address, log_to_driver=False)
        except Exception as error:  # of sockets, of Ray's processes
            raise NormlabError(f"Ray does not start ({where}): {in_one_line(error)}") from error


@dataclass(frozen=True)
class Slurm(Cluster):
    """One array of Slurm jobs, through submitit.

    address: "local" runs the jobs as processes of this machine, to try a sweep out. options: of
    `submitit.AutoExecutor.update_parameters`, such as timeout_min, slurm_partition, slurm_array_parallelism.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        super().check()
        _import("submitit")
        if self.address not in (None, LOCAL):
            raise NormlabError(f"address {self.address!r}: Slurm needs none; {LOCAL!r} tries it on this machine")
        if self.address is None and shutil.which("sbatch") is None:
            raise NormlabError("--workers slurm: there is no sbatch here; start the sweep on a machine of the cluster")
        if self.gpus != int(self.gpus):
            raise NormlabError(f"gpus is {self.gpus}; Slurm gives whole ones")
        self._executor(Path(), 1)

    def _executor(self, folder: Path, threads: int) -> Any:
        executor = _import("submitit").AutoExecutor(folder=folder, cluster=self.address or "slurm")
        try:
            executor.update_parameters(cpus_per_task=threads, gpus_per_node=int(self.gpus), **self.options)
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise NormlabError(f"--slurm: {first_line(error)}") from error
        return executor

    def finish(self, train_one: Callable, configs: Sequence[TrainConfig], arguments: tuple) -> Iterator[Outcome]:
        submitit = _import("submitit")
        if is_address(arguments[0]):
            raise NormlabError("--workers slurm: jobs start from --out: name a directory that all machines see")
        folder = Path(arguments[0]).resolve() / PARTIAL / "slurm"
        executor = self._executor(folder, max((config.threads for config in configs), default=1))
        tasks = [_Task(train_one, config, arguments) for config in configs]
        jobs = executor.submit_array(tasks) if tasks else []
        running = dict(zip(jobs, tasks, strict=True))
        tries = dict.fromkeys((config.run_id for config in configs), 0)
        failed = False
        try:
            while running:
                for job in [job for job in running if job.done()]:
                    task = running.pop(job)
                    error = job.exception()
                    # A killed job ends without an answer. What a job raises comes as a subclass of this error.
                    lost = type(error) is submitit.core.utils.UncompletedJobError
                    if lost and tries[task.config.run_id] < RETRIES:
                        tries[task.config.run_id] += 1
                        running[executor.submit(task)] = task
                        continue
                    result = error if error is not None else job.result()
                    failed |= isinstance(result, Exception)
                    yield task.config, result if isinstance(result, Exception) else read_run(result)
                time.sleep(POLL_SECONDS)
            if not failed:
                shutil.rmtree(folder, ignore_errors=True)  # the jobs' files and logs, which say why one failed
                with contextlib.suppress(OSError):  # runs of other sweeps are in progress
                    folder.parent.rmdir()
        finally:
            for job in running:
                job.cancel()


@dataclass
class _Task:
    """One job.

    submitit calls `checkpoint` if Slurm takes the machine away or the time is over. The job is queued again, and
    training resumes from its last checkpoint.
    """

    train_one: Callable
    config: TrainConfig
    arguments: tuple

    def __call__(self) -> str | Exception:
        try:
            return self.train_one(self.config, *self.arguments)
        except Exception as error:
            return error

    def checkpoint(self) -> Any:
        return _import("submitit").helpers.DelayedSubmission(self)


CLUSTERS: dict[str, type[Cluster]] = {"ray": Ray, "slurm": Slurm}
_EXTRAS = {"ray": ("ray", "Ray"), "submitit": ("slurm", "submitit")}


def cluster(kind: str, **options: Any) -> Cluster:
    """The cluster of a name ("ray", "slurm"). NormlabError if something that it needs is missing."""
    if kind not in CLUSTERS:
        raise NormlabError(f"workers is {kind!r}; give a number of processes, at least 1, or {' or '.join(CLUSTERS)}")
    chosen = CLUSTERS[kind](**options)
    chosen.check()
    return chosen


def _import(name: str) -> Any:
    extra, title = _EXTRAS[name]
    try:
        return importlib.import_module(name)
    except ImportError:
        raise NormlabError(f"--workers {extra} needs {title}: pip install 'normlab[{extra}]'") from None
