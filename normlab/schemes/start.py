"""A norm or residual rule in its place of a model: its random draws, and whether its gains are zero-centred."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.norms import Norm
from normlab.norms.base import ConstantStart
from normlab.norms.gain import ignores_centre

# Of modules that were built without values. No attribute of theirs, since a lambda in it could not be pickled.
_MAKERS: WeakKeyDictionary[nn.Module, Callable[[], nn.Module]] = WeakKeyDictionary()


@contextmanager
def own_draws(place: str) -> Iterator[None]:
    """Draw from a stream of the place's own, on the CPU. It follows from the RNG's state, which stays as it is.

    So places draw independently of each other and of all other weights, and no other weight depends on them.
    """
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        numbers = ctypes.string_at(state.data_ptr(), state.numel())  # not by NumPy, which no FakeTensorMode allows
        digest = blake2b(numbers + place.encode(), digest_size=4).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
        yield


def centred(module: Any, config: Any) -> Any:
    """The norm or residual rule, with zero-centred gains if the configuration says so.

    NormlabError: gains that cannot be zero-centred. The norm is not one of normlab's, does not use ``gamma()``, or does
    not start each gain by ``add_parameter``.
    """
    if not config.zero_centred:
        return module
    if not isinstance(module, ConstantStart):
        if any(True for _ in module.parameters()):
            raise NormlabError(
                f"{type(module).__name__} has no zero-centred gain: zero_centred needs a subclass of normlab.norms.Norm"
            )
    elif module.gains:
        for name in module.gains:
            if getattr(module, name, None) is not None and name not in module.starts:
                raise NormlabError(
                    f"{type(module).__name__} starts its gain {name} itself: register it by add_parameter for "
                    "zero_centred, which starts it elsewhere"
                )
        if isinstance(module, Norm) and ignores_centre(module):
            raise NormlabError(
                f"{type(module).__name__} leaves out the centre of a zero-centred gain: multiply by self.gamma(), "
                f"not by self.{module.gain_name}, and add self.centre to any other gain"
            )
        module.centre = 1.0
        module.reset_parameters()
    return module


def placed(build: Callable[[], Any], place: str, config: Any) -> Any:
    """Build a norm or residual rule for a place of a model, such as "3.attn_in".

    What it draws is from the place's own stream. Modules inside it keep the start that its class gives them.
    """

    def make() -> Any:
        return centred(build(), config)

    with own_draws(place):
        module = make()
    module.start_place = place
    for part in module.modules():
        part.is_inside_placed = part is not module
    only_its_class_knows = [name for name, _ in _tensors(module) if name not in getattr(module, "starts", {})]
    if only_its_class_knows and torch.empty(0).is_meta:  # transformers builds so, and keeps no values of buffers
        _MAKERS[module] = make
    return module


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def is_made_anew(module: nn.Module) -> bool:
    """True for a placed module that was built without values, where `start_again` calls its class for what it lacks."""
    return module in _MAKERS


@torch.no_grad()
def start_again(module: Any) -> None:
    """Give a placed module its start, but for what is loaded, or offloaded to the meta device."""
    with own_draws(module.start_place):
        if is_made_anew(module):
            lacking = {name: tensor for name, tensor in _tensors(module) if not (tensor.is_meta or _is_loaded(tensor))}
            for name, start in _tensors(_MAKERS[module]()) if lacking else ():
                if name in lacking:
                    lacking[name].copy_(start)
        elif isinstance(module, ConstantStart):
            module.reset_parameters()


def _is_loaded(tensor: Tensor) -> bool:
    return bool(getattr(tensor, "_is_hf_initialized", False))  # transformers marks what a checkpoint has
