"""Launch a kernel on the device its tensors are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def on_device(kernel: Any, grid: tuple[int, ...], device: torch.device) -> Callable[..., Any]:
    """`kernel[grid]`, run on `device`: Triton launches on the current device, whichever the tensors are on."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return kernel[grid]

    def launch(*arguments: Any, **constants: Any) -> Any:
        with torch.cuda.device(device):
            return kernel[grid](*arguments, **constants)

    return launch
