"""Plain hooks that keep what the audit compares with: what blocks, norms and activations read and return."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from normlab.probes.sites import Sites


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a model's output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors(item)]
    return [t for item in value for t in tensors(item)] if isinstance(value, tuple | list) else []


class Kept:
    """Everything that passes the blocks and norms of a stack in one forward and backward pass."""

    def __init__(self, where: Sites):
        self.runs: list[dict[str, Any]] = []
        self.norms: dict[nn.Module, list[Tensor]] = {}
        self.normed: list[tuple[nn.Module, Tensor, Tensor]] = []  # norms and activations, what they read and return
        self.handles: list[Any] = []
        for block in where.blocks:
            self.handles.append(block.module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.handles.append(block.module.register_forward_hook(self._leave))
        for module in where.model.modules():
            self.handles.append(module.register_forward_pre_hook(self._norm, with_kwargs=True))
            if re.search("norm|relu|silu|gelu|swish", type(module).__name__.lower()):  # or of an activation
                self.handles.append(module.register_forward_hook(self._normed))

    def _float(self, value: Any) -> Tensor | None:
        return next((t for t in tensors(value) if t.is_floating_point() and t.ndim >= 2), None)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = self._float([*args, *kwargs.values()])
        entry: dict[str, Any] = {"module": module, "h": None if x is None else x.detach().double()}
        if x is not None and x.requires_grad:
            x.register_hook(lambda g, e=entry: e.__setitem__("grad", g.detach().double()))
        self.runs.append(entry)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        entry = next(e for e in reversed(self.runs) if e["module"] is module and "out" not in e)
        entry["out"] = self._float(output).detach().double()  # type: ignore[union-attr]

    def _normed(self, module: nn.Module, args: tuple, output: Any) -> None:
        x = self._float(args)
        if x is not None:
            self.normed += [(module, x.detach().double(), t.detach().double()) for t in tensors(output)]

    def _norm(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = self._float([*args, *kwargs.values()])
        if x is not None and not any(isinstance(m, nn.ModuleList) for m in module.modules()):
            self.norms.setdefault(module, []).append(x.detach().double())
