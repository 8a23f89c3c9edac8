"""Time and memory of one call, on a GPU or a CPU, from one set-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Row = dict[str, Any]
FLUSH_BYTES = 512 << 20  # more than any cache; its write also gives the CPU time to queue the call


class OutOfTime(Exception):
    """A section's share of the time is used up."""


class Clock:
    """Times calls on one device. On CUDA: events around each call, caches overwritten before it, the median taken.
    On a CPU: the least; with one thread, of the processor time it used, which other work on the machine adds little to.
    """

    def __init__(self, device: torch.device, seconds: float = 0.08) -> None:
        self.device = device
        self.seconds = seconds
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    def microseconds(self, call: Callable[[], object]) -> float:
        """Of one call, after warming up."""
        for _ in range(3):
            call()
        return self._cuda(call) if self.device.type == "cuda" else self._cpu(call)

    def _cuda(self, call: Callable[[], object]) -> float:
        assert self.flush is not None
        torch.cuda.synchronize()
        begin = time.perf_counter()
        pairs = []
        while len(pairs) < 10 or (time.perf_counter() - begin < self.seconds and len(pairs) < 60):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.flush.zero_()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3

    def _cpu(self, call: Callable[[], object]) -> float:
        now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = time.perf_counter()
        times = []
        while len(times) < 5 or (time.perf_counter() - begin < 4 * self.seconds and len(times) < 200):
            start = now()
            call()
            times.append(now() - start)
        return min(times) * 1e6

    def peak_megabytes(self, call: Callable[[], object]) -> float:
        """Device memory that one call adds at its highest; NaN on a CPU."""
        if self.device.type != "cuda":
            return float("nan")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del kept
        return peak / 1e6


def graph_of(call: Callable[[], object], times: int) -> Callable[[], object]:
    """The replay of a CUDA graph of some calls: launches cost next to nothing in it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph.replay


def first_line(error: Exception) -> str:
    """An error as a note in a table."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def settle() -> None:
    """Let the C library keep freed blocks up to 31 MiB, as it does in a process that has run for a while: otherwise a
    fresh process pays page faults for every temporary and times those."""
    torch.empty(31 << 18).fill_(0)


def copy_bandwidth(clock: Clock) -> float:
    """GB/s of a plain copy of a large tensor, bytes read and written: what every share is a share of."""
    elements = (1 << 29) if clock.device.type == "cuda" else (1 << 22)
    source = torch.zeros(elements, dtype=torch.bfloat16, device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 2 / clock.microseconds(lambda: target.copy_(source)) / 1e3
