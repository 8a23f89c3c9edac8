"""What a call costs the host: kernels are compiled for a GPU and looked up as ever, and the launch itself is nothing.

A stand-in for Triton's driver says that it is an H200 and drops what it is given, so that Python, PyTorch and Triton's
own work remain, on CPU tensors, on a machine without a GPU. It needs Triton's compiler: no interpreter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from normlab_kernels import dispatch
from peers import Missing

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
    """Of the processor's time, to which other work on the machine adds little, for each of the calls, which take
    turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(CALLS + CALLS // 8):
        for call, own in zip(calls, times, strict=True):
            start = time.thread_time()
            call()
            own.append((time.thread_time() - start) * 1e6)
    return [own[CALLS // 8 :] for own in times]
