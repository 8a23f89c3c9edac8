"""Runs on many machines: Ray's tasks, or one array of Slurm jobs through submitit.

`cluster(kind, ...)`   where the runs go: `Ray` or `Slurm`; their `finish` yields (config, Run or exception) as runs end

The output directory is one that all machines see. A run whose worker is lost (killed, a node gone, its time over) is
started again, up to `RETRIES` times, and goes on from its last checkpoint, on whichever machine.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normlab.errors import ANSWER_SECONDS, NormlabError, first_line, in_one_line
from normlab.runs import Run, read_run
from normlab.store import PARTIAL, is_address
from normlab.training.config import TrainConfig

Outcome = tuple[TrainConfig, "Run | Exception"]
RETRIES = 3
LOCAL = "local"
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Cluster(ABC):
    """address: of the cluster. gpus: of a run, a share of one where the cluster deals them out so."""

    address: str | None = None
    gpus: float = 0.0

    @abstractmethod
    def check(self) -> None:
        """NormlabError for what is missing, or cannot be asked for."""
        if not (math.isfinite(self.gpus) and self.gpus >= 0):
            raise NormlabError(f"gpus is {self.gpus}; give a finite number, at least 0")

    @abstractmethod
    def finish(self, train_one: Callable, configs: Sequence[TrainConfig], arguments: tuple) -> Iterator[Outcome]:
        """`train_one(config, *arguments)` of every configuration, which returns a run's directory."""


class Ray(Cluster):
    """address: a running cluster's ("auto", "HOST:PORT"); without one, Ray on this machine alone."""

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
            waiting = {
                task.options(num_cpus=config.threads, num_gpus=self.gpus, max_retries=RETRIES).remote(
                    config, *arguments
                ): config
                for config in configs
            }
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
    """One array of jobs. address: "local" runs the jobs as processes of this machine, to try a sweep out. options: of
    `submitit.AutoExecutor.update_parameters`, such as timeout_min, slurm_partition, slurm_array_parallelism."""

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
                    # One that ended without an answer was killed; what a job raises comes as a kind of this error.
                    lost = type(error) is submitit.core.utils.UncompletedJobError
                    if lost and tries[task.config.run_id] < RETRIES:
                        tries[task.config.run_id] += 1
                        running[executor.submit(task)] = task
                    else:
                        outcome = error if error is not None else _outcome(job.result())
                        failed |= isinstance(outcome, Exception)
                        yield task.config, outcome
                time.sleep(_POLL_SECONDS)
            if not failed:
                shutil.rmtree(folder, ignore_errors=True)  # the jobs' files and logs, which say why one failed
                with contextlib.suppress(OSError):  # runs of other sweeps are in progress
                    folder.parent.rmdir()
        finally:
            for job in running:
                job.cancel()


@dataclass
class _Task:
    """What a job does. `checkpoint` is submitit's: called when Slurm takes the machine away or the time is over; the
    job is queued again, and training goes on from its last checkpoint."""

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


def _outcome(result: str | Exception) -> Run | Exception:
    return result if isinstance(result, Exception) else read_run(result)


CLUSTERS: dict[str, type[Cluster]] = {"ray": Ray, "slurm": Slurm}
_EXTRAS = {"ray": ("ray", "Ray"), "submitit": ("slurm", "submitit")}


def cluster(kind: str, **given: Any) -> Cluster:
    """The cluster of a name ("ray", "slurm"), with what is needed for it at hand. NormlabError otherwise."""
    if kind not in CLUSTERS:
        raise NormlabError(f"workers is {kind!r}; give a number of processes, at least 1, or {' or '.join(CLUSTERS)}")
    found = CLUSTERS[kind](**given)
    found.check()
    return found


def _import(name: str) -> Any:
    import importlib

    extra, title = _EXTRAS[name]
    try:
        return importlib.import_module(name)
    except ImportError:
        raise NormlabError(f"--workers {extra} needs {title}: pip install 'normlab[{extra}]'") from None
