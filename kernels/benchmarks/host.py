"""The host's cost of a call, measured without a GPU: a stand-in for Triton's driver drops every launch.

The stand-in says that it is an H200. What Python, PyTorch and Triton do before the launch remains, on CPU tensors. It
needs Triton's compiler, not its interpreter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from measure import Missing
from normlab_kernels import dispatch

CALLS = 400


class NoDevice:
    """Triton's driver without a device."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        properties = {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65_536}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, kernel, shared, device: (0, 0, 32, 0, 1024),
            unload_module=lambda module: None,
        )
        self.get_benchmarker = lambda: lambda call, quantiles: [0.0] * len(quantiles)  # a peer that tunes

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *arguments: None


@contextlib.contextmanager
def no_launches() -> Iterator[None]:
    """CPU tensors reach the kernels, and the kernels' launches do nothing.

    Raises:
        Missing: Triton is not there, or interprets.
    """
    if not dispatch.TRITON or dispatch.INTERPRETING:
        raise Missing("it needs Triton's compiler")
    from normlab_kernels.launch import COMPILED
    from triton.runtime import driver

    before, takes = driver._active, dispatch.takes_kernels
    driver.set_active(NoDevice())
    dispatch.takes_kernels = lambda *tensors: True
    COMPILED.clear()
    try:
        yield
    finally:
        driver._active, dispatch.takes_kernels = before, takes
        COMPILED.clear()


def microseconds(*calls: Callable[[], object]) -> list[list[float]]:
    """Microseconds of the processor's time, to which other work adds little, of calls that take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(CALLS + CALLS // 8):
        for call, mine in zip(calls, times, strict=True):
            start = time.thread_time()
            call()
            mine.append((time.thread_time() - start) * 1e6)
    return [mine[CALLS // 8 :] for mine in times]
