"""A norm or residual rule in its place of a model: its random draws, and whether its gains are zero-centred."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch


@contextmanager
def own_draws(place: str) -> Iterator[None]:
    """Draw from a stream of the place's own, on the CPU. It follows from the RNG's state, which stays as it is.

    So places draw independently of each other and of all other weights, and no other weight depends on them.
    """
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state().numpy().tobytes()
        torch.default_generator.manual_seed(int.from_bytes(blake2b(state + place.encode(), digest_size=4).digest(), "big"))
        yield


def centred(module: Any, config: Any) -> Any:
    """The norm or residual rule, with zero-centred gains if the configuration says so."""
    if module.gains and config.zero_centred:
        module.centre = 1.0
        module.reset_parameters()
    return module


def placed(build: Callable[[], Any], place: str, config: Any) -> Any:
    """Build a norm or residual rule for a place of a model, such as "3.attn_in".

    What it draws is from the place's own stream.
    """
    with own_draws(place):
        module = centred(build(), config)
    module.place = place
    return module


def start_again(module: Any) -> None:
    """Give a placed module its start, as a norm's or rule's ``reset_parameters`` has it."""
    with own_draws(module.place):
        module.reset_parameters()
