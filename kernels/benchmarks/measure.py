"""The devices a benchmark runs on: a CPU, a GPU, and a stand-in for a GPU in dry runs, whose times mean nothing.

    time(make, touched)        columns of a row: the time of a call, what its launch costs the host, its memory
    interleaved(a, b, steps)   microseconds of two calls that take turns
    graphed(call)              the call without its launches, where the device can do that
    copy_microseconds(bytes)   the yardstick: a copy of random data that reads and writes as many bytes

`make()` sets up one call with its own buffers.
"""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

Row = dict[str, Any]
Call = Callable[[], object]
MOST_BUFFERS = 64
LARGEST_COPY = 1 << 29  # bytes


class Missing(Exception):
    """Something that a measurement needs is not there, which is no failure."""


def ratios(baseline: list[float], compared: list[float]) -> Row:
    """Median time, and median ratio of neighbours with its 95% interval from order statistics.

    The interval assumes no distribution: below it lie at most 2.5% of the binomial's ranks.
    """
    each = sorted(b / a for a, b in zip(baseline, compared, strict=True))
    count = len(each)
    tails = itertools.accumulate(math.comb(count, rank) / 2**count for rank in range(count // 2))
    below = max(0, sum(tail <= 0.025 for tail in tails) - 1)
    columns = {"microseconds": statistics.median(compared), "ratio": statistics.median(each), "steps": count}
    return columns | {"ratio_low": each[below], "ratio_high": each[count - 1 - below]}


def in_turns(
    a: Call,
    b: Call,
    steps: int,
    mark: Callable[[], Any] = time.perf_counter,
    between: Callable[[Any, Any], float] = lambda start, end: (end - start) * 1e6,
) -> tuple[list[float], list[float]]:
    """Microseconds of every call; which goes first changes from turn to turn. The first three turns do not count."""
    marks: tuple[list[Any], list[Any]] = ([], [])
    for step in range(3 + steps):
        for which in (0, 1) if step % 2 else (1, 0):
            start = mark()
            (a, b)[which]()
            marks[which].append((start, mark()))
    first, second = ([between(*pair) for pair in pairs[3:]] for pairs in marks)
    return first, second


class Device:
    """A CPU: the least of many calls; with one thread, of the processor time used, to which other work adds little."""

    kind = "cpu"
    dtype = torch.float32
    backend = "inductor"  # of torch.compile
    steps = 40  # of each of two calls that take turns: 1.6% shows
    seconds = 0.3
    model = {"depth": 1, "width": 64, "length": 8, "batch": 2, "prompt": 4}  # whole models, and their tokens

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        self.torch = torch.device("cpu")
        self.name, self.label = "cpu", f"cpu_{threads}_threads" if threads > 1 else "cpu_1_thread"
        self._copies: dict[int, float] = {}
        torch.empty(31 << 18).fill_(0)  # from now on the C library keeps freed blocks instead of returning their pages

    def sizes(self, *planned: int) -> tuple[int, ...]:
        """The sizes that are run for those planned."""
        return planned

    def settings(self) -> Row:
        """The state of the device, as columns."""
        return {}

    def graphed(self, call: Call) -> Call | None:
        """Replays the call; None where the device has no graphs."""
        return None

    def time(self, make: Callable[[], Call], touched: int) -> Row:
        call = make()
        for _ in range(3):
            call()
        now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        begin, times = time.perf_counter(), []
        while len(times) < 5 or (time.perf_counter() - begin < self.seconds and len(times) < 200):
            start = now()
            call()
            times.append(now() - start)
        return {"microseconds": min(times) * 1e6}

    def interleaved(self, a: Call, b: Call, steps: int) -> tuple[list[float], list[float]]:
        return in_turns(a, b, steps)

    def copy_microseconds(self, size: int) -> float:
        """Microseconds of a copy of random data that reads and writes `size` bytes together.

        From a gigabyte on an H200 copies at two thirds of its speed, which no kernel does. So at most half a gigabyte
        is copied, and the time of more is computed from that.
        """
        part = min(size, LARGEST_COPY)

        def make() -> Call:
            source = torch.empty(self.sizes(max(1, part // 2))[0], dtype=torch.uint8, device=self.torch).random_()
            target = torch.empty_like(source)
            return lambda: target.copy_(source)

        if part not in self._copies:
            self._copies[part] = self.time(make, part)["microseconds"]
        return self._copies[part] * size / part


class Fake(Device):
    """A stand-in for a GPU in dry runs: the same plan, on the CPU at tiny shapes."""

    kind = "cuda"
    backend = "eager"
    steps = 2
    seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.name = self.label = "fake"

    def sizes(self, *planned: int) -> tuple[int, ...]:
        return (min(4, planned[0]), *(min(32, size) for size in planned[1:]))

    def graphed(self, call: Call) -> Call:
        return call


class Cuda(Device):
    """Times by `triton.testing.do_bench`, which flushes the second-level cache before each call.

    `microseconds` is the device's time of a call in the replay of a CUDA graph, over buffers that take turns.
    `eager_microseconds` is that of a launched call, `host_microseconds` the host's time of a call, `peak_megabytes` the
    device memory that one call adds at its highest.
    """

    kind = "cuda"
    dtype = torch.bfloat16
    model = {"depth": 16, "width": 2048, "length": 2048, "batch": 4, "prompt": 128}

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.device("cuda", torch.cuda.current_device())
        self.properties = torch.cuda.get_device_properties(self.torch)
        self.name = self.properties.name
        self.label = self.name.lower().replace(" ", "_")
        # Everything runs on one stream that is not the default: a backward pass runs on its forward pass's stream, and
        # a graph cannot be captured on the default one.
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)

    def time(self, make: Callable[[], Call], touched: int) -> Row:
        from triton.testing import do_bench

        # A set of buffers is used again after twice the cache's bytes.
        sets = 1 + max(1, math.ceil(2 * self.properties.L2_cache_size / max(1, touched)))
        calls = [make() for _ in range(min(MOST_BUFFERS, sets))]
        for call in (*calls, *calls[:2]):
            call()
        eager = 1e3 * do_bench(calls[0], rep=30, return_mode="median")
        columns: Row = {"eager_microseconds": eager, "host_microseconds": self._host(calls[0])}
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = calls[0]()
        torch.cuda.synchronize()
        columns["peak_megabytes"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        del kept
        rounds = max(1, min(50, round(1000 / (len(calls) * eager))))
        try:
            replay = self._capture(calls, rounds)
        except RuntimeError as error:  # it may wait for the host, or not be capturable for another reason
            torch.cuda.synchronize()  # raises once more if the device is lost
            return columns | {"note": f"no CUDA graph: {first_line(error)}"}
        low, middle, high = do_bench(replay, rep=30, quantiles=[0.25, 0.5, 0.75])
        return columns | {"microseconds": 1e3 * middle / (rounds * len(calls)), "spread": (high - low) / middle}

    def _capture(self, calls: list[Call], rounds: int) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(rounds):
                kept = [call() for call in calls]  # so that every call of a round writes to its own memory
            del kept
        return graph.replay

    def graphed(self, call: Call) -> Call:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        return self._capture([call], 1)

    def _host(self, call: Call) -> float:
        times = []
        for _ in range(20):
            torch.cuda.synchronize()  # the queue is empty, so the call need not wait for room in it
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return statistics.median(times) * 1e6

    def interleaved(self, a: Call, b: Call, steps: int) -> tuple[list[float], list[float]]:
        def mark() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        def between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
            end.synchronize()
            return 1e3 * start.elapsed_time(end)

        return in_turns(a, b, steps, mark, between)

    def settings(self) -> Row:
        """Clocks, temperature and driver of this GPU by nvidia-smi; nothing where it cannot be asked."""
        names = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "driver")
        command = ["nvidia-smi", "-i", f"GPU-{getattr(self.properties, 'uuid', '')}", "--format=csv,noheader,nounits"]
        command += ["--query-gpu=clocks.sm,clocks.mem,temperature.gpu,driver_version"]
        try:
            line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return {}
        return dict(zip(names, (value.strip() for value in line.split(",")), strict=False))


def first_line(error: BaseException) -> str:
    """An error as a note in a table."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
