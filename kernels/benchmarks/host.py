"""The host's cost of a call, measured without a GPU: a stand-in for Triton's driver drops every launch.

The stand-in says that it is an H200. What Python, PyTorch and Triton do before the launch remains, on CPU tensors. It
needs Triton's compiler, not its interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from measure import Missing
from normlab_kernels import dispatch

PROPERTIES = {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65_536}


def no_device(launcher: Callable[[Any, Any], Any]) -> SimpleNamespace:
    """Triton's driver without a device; `launcher` makes a launch from a kernel's source and metadata."""
    from triton.backends.compiler import GPUTarget

    return SimpleNamespace(
        utils=SimpleNamespace(
            get_device_properties=lambda device: PROPERTIES,
            load_binary=lambda name, kernel, shared, device: (0, 0, 32, 0, 1024),
            unload_module=lambda module: None,
        ),
        get_benchmarker=lambda: lambda call, quantiles: [0.0] * len(quantiles),  # a peer that tunes
        get_current_device=lambda: -1,  # Triton keeps what it compiled by device: none that a real driver has
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=launcher,
    )


@contextlib.contextmanager
def no_launches(launcher: Callable[[Any, Any], Any] = lambda source, made: lambda *arguments: None) -> Iterator[None]:
    """CPU tensors reach the kernels, and the kernels' launches do nothing.

    Raises:
        Missing: Triton is not there, or interprets.
    """
    if not dispatch.TRITON or dispatch.INTERPRETING:
        raise Missing("it needs Triton's compiler")
    from normlab_kernels.launch import COMPILED
    from triton.runtime import driver

    with (
        patch.object(driver, "_active", no_device(launcher)),
        patch.object(dispatch, "takes_kernels", lambda *tensors: True),
        patch.dict(COMPILED, clear=True),
    ):
        yield
