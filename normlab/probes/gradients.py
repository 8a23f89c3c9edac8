"""`Gradients`: tensor hooks that reduce a gradient the moment it arrives, and keep a number a token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normlab.probes.calls import Call, Place
from normlab.probes.hooks import features_last, in_backward
from normlab.probes.metrics import GRADIENT_SITES
from normlab.probes.readings import NormRead
from normlab.probes.reducers import at_least_float32


def gradient_place(where: Place | NormRead) -> Place | None:
    """The gradient's site; None of a norm that turned out to be at none."""
    place = where.place if isinstance(where, NormRead) else where
    if place is None or place[0] not in GRADIENT_SITES:
        return None
    return GRADIENT_SITES[place[0]], place[1]


class Gradients:
    """The gradients of one recording that have arrived and are not merged yet."""

    def __init__(self, wanted: bool):
        self._wanted = wanted
        self._lock = threading.Lock()
        self._arrived: list[tuple[Call, list[Any], Tensor, int, tuple[int, ...]]] = []

    def watch(
        self,
        x: Tensor,
        where: Place | NormRead,
        call: Call | None,
        channels_first: bool = False,
        norm: nn.Module | None = None,
    ) -> None:
        """Have the gradient at `x` reduced when it arrives; a norm's place may become known later."""
        if not self._wanted or call is None or not x.requires_grad:
            return
        if not isinstance(where, NormRead):
            place = gradient_place(where)
            if place is None or (in_backward() and place in map(gradient_place, call.watched)):
                return  # a checkpoint hands the recomputation a tensor that has its hook already
        call.watched.add(where)
        if call.hooked is not None and call.hooked[0] is x:
            call.hooked[1].append(where)
            return
        places: list[Any] = [where]
        call.hooked = (x, places)

        def reduce(gradient: Tensor) -> None:
            if call.loss_tokens is None:  # of a forward pass that was not whole
                return
            with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
                view = features_last(gradient, channels_first, norm)
                norms = torch.linalg.vector_norm(at_least_float32(view), dim=-1) * call.loss_tokens
            with self._lock:
                self._arrived.append((call, places, norms.reshape(1, -1), view.shape[-1], tuple(view.shape[:-1])))

        x.register_hook(reduce)

    def take(self) -> Iterator[tuple[Call, list[tuple[str, Any, Tensor, int, tuple[int, ...]]]]]:
        """What has arrived, call by call, as the accumulator takes it."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for call in dict.fromkeys(item[0] for item in arrived):
            yield (
                call,
                [
                    ("gradient", place, norms, width, tokens)
                    for c, places, norms, width, tokens in arrived
                    if c is call
                    for where in places
                    if (place := gradient_place(where)) is not None
                ],
            )
