"""Launch a kernel on the device its tensors are on, at little cost to the host."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETING = bool(triton.knobs.runtime.interpret)  # fixed when the kernels are decorated, at import
COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}  # a kernel and its constants, by what chooses it


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](...)` on `device` (Triton launches on the current one, whichever the tensors are on), with fused
    multiply-adds, whatever a version's default or the environment says.

    Triton takes 15 us to find what it compiled; here it is found by the kinds of the arguments. What it made for AMD
    depends on a tensor's size too, and the interpreter makes nothing: there it is asked each time.
    """
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):
            return launch(kernel, grid, device, *arguments, **constants)
    key = kernel.fn, device, *map(kind, arguments), *constants.values()
    if (found := COMPILED.get(key)) is not None:
        return found[0][*grid, 1, 1](*arguments, *found[1])
    compiled = kernel[grid](*arguments, enable_fp_fusion=True, **constants)
    if compiled is not None and torch.version.hip is None:
        COMPILED[key] = compiled, tuple(value for name, value in constants.items() if name in kernel.arg_names)


def kind(argument: Any) -> Any:
    """The kind of an argument. Triton compiles a variant for each type, alignment and divisibility."""
    type_ = type(argument)
    if argument is None or type_ is float:
        return type_
    if type_ is int:
        return argument == 1, argument & 15 == 0, argument >> 31
    if type_ is TensorDescriptor:
        return argument.base.dtype, *argument.block_shape
    return argument.dtype, argument.data_ptr() & 15 == 0
