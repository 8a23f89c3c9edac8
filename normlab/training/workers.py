"""Several runs at once: processes of this machine, or those of a cluster (clusters.py).

`finish_in_any_order(configs, ...)` yields (config, Run or exception) as runs end; one that fails does not stop the
others.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from normlab.errors import NormlabError, show_warning
from normlab.runs import read_run
from normlab.store import child
from normlab.training.clusters import Cluster, Outcome
from normlab.training.config import TrainConfig

_UNGUARDED = 78  # exit code of a worker that would have started the sweep again


def exit_if_worker_imports_main() -> None:
    """A worker imports the script that started it. Where the script starts a sweep on import, it ends there, and the
    sweep says so in one line; multiprocessing would end it with a traceback a worker."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself finds out
        raise SystemExit(_UNGUARDED)


def train_one(config: TrainConfig, out: str, cache_dir: str | None) -> str:
    """What a worker does; returns where the run is. The transformers stack is imported here, in the worker."""
    from normlab.training.run import train

    return str(child(out, train(config, out, cache_dir=cache_dir, progress=False).name))


def finish_in_any_order(
    configs: Sequence[TrainConfig], out: str | Path, workers: int | Cluster, cache_dir: str | Path | None
) -> Iterator[Outcome]:
    """Run `configs` in about their order, `workers` at a time, or as many as a cluster has room for."""
    arguments = (str(out), str(cache_dir) if cache_dir is not None else None)
    if isinstance(workers, Cluster):
        yield from workers.finish(train_one, configs, arguments)
    else:
        yield from _with_processes(configs, workers, arguments)


def _with_processes(
    configs: Sequence[TrainConfig], workers: int, arguments: tuple, again: bool = True
) -> Iterator[Outcome]:
    """A pool dies with any of its processes (out of memory, kill -9). Each run that was in progress then gets one more
    try, alone, so that one that always dies takes no other with it; the rest go on in a new pool."""
    left = deque(configs)
    while left:
        lost = yield from _one_pool(left, workers, arguments)
        for config in lost:
            if again:
                yield from _with_processes([config], 1, arguments, again=False)
            else:
                yield config, NormlabError("its process was killed, perhaps for lack of memory")


def _one_pool(left: deque[TrainConfig], workers: int, arguments: tuple) -> Generator[Outcome, None, list[TrainConfig]]:
    """Take runs from `left`, as many at a time as there are workers, until none is left or the pool dies; return the
    runs that were in progress then."""
    others = set(multiprocessing.active_children())
    children: set[Any] = set()
    pool = ProcessPoolExecutor(
        min(workers, len(left)), mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
    )
    running: dict[Future, TrainConfig] = {}
    try:
        while left or running:
            while left and len(running) < workers:
                running[pool.submit(train_one, left[0], *arguments)] = left[0]
                left.popleft()
                children |= set(multiprocessing.active_children()) - others
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise error
                yield running.pop(future), error if isinstance(error, Exception) else read_run(future.result())
        pool.shutdown()
    except BrokenProcessPool:  # also raised by `submit`, when it died between two runs
        pool.shutdown()
        if any(child.exitcode == _UNGUARDED for child in children):
            raise NormlabError(
                "every worker of a sweep imports the script that starts it, which would start another sweep: "
                'call normlab.sweep under `if __name__ == "__main__":`'
            ) from None
    finally:  # reached early on Ctrl-C: runs in progress stop now and go on from their checkpoints next time
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
    return list(running.values())


def _start_worker() -> None:
    """Ctrl-C ends a worker without a traceback, and a worker whose parent was killed ends too rather than wait for work
    for ever. Warnings take one line."""
    warnings.showwarning = show_warning  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent: Any = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
