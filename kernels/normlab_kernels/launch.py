"""Launch a kernel on the device its tensors are on."""

from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](...)` on `device` (Triton launches on the current one, whichever the tensors are on), with fused
    multiply-adds, whatever a version's default or the environment says."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        kernel[grid](*arguments, enable_fp_fusion=True, **constants)
        return
    with torch.cuda.device(device):
        kernel[grid](*arguments, enable_fp_fusion=True, **constants)
