"""A norm or residual rule in its place of a model: its random draws, and whether its gains are zero-centred."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.norms import Norm
from normlab.norms.base import ConstantStart
from normlab.norms.gain import ignores_centre


@contextmanager
def own_draws(place: str) -> Iterator[None]:
    """Draw from a stream of the place's own, on the CPU. It follows from the RNG's state, which stays as it is.

    So places draw independently of each other and of all other weights, and no other weight depends on them.
    """
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state().numpy().tobytes()
        digest = blake2b(state + place.encode(), digest_size=4).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
        yield


def centred(module: Any, config: Any) -> Any:
    """The norm or residual rule, with zero-centred gains if the configuration says so.

    NormlabError: gains that cannot be zero-centred. The norm is not one of normlab's, or does not use ``gamma()``.
    """
    if not config.zero_centred:
        return module
    if not isinstance(module, ConstantStart):
        if any(True for _ in module.parameters()):
            raise NormlabError(
                f"{type(module).__name__} has no zero-centred gain: zero_centred needs a subclass of normlab.norms.Norm"
            )
    elif module.gains:
        if isinstance(module, Norm) and ignores_centre(module):
            raise NormlabError(
                f"{type(module).__name__} leaves out the centre of a zero-centred gain: multiply by self.gamma(), "
                f"not by self.{module.gain_name}"
            )
        module.centre = 1.0
        module.reset_parameters()
    return module


def placed(build: Callable[[], Any], place: str, config: Any) -> Any:
    """Build a norm or residual rule for a place of a model, such as "3.attn_in".

    What it draws is from the place's own stream. Modules inside it keep the start that its class gives them.
    """
    with own_draws(place):
        module = centred(build(), config)
    module.start_place = place
    for part in module.modules():
        part.is_inside_placed = part is not module
    if torch.empty(0).is_meta and _of_its_class(module):  # transformers builds so, and keeps no values of buffers
        module.build_again = build
    return module


def _of_its_class(module: nn.Module) -> dict[str, Tensor]:
    """Tensors whose start only the module's class knows: all but those of ``add_parameter`` and ``add_buffer``."""
    known = getattr(module, "starts", {})
    tensors = chain(module.named_parameters(), module.named_buffers())
    return {name: tensor for name, tensor in tensors if name not in known}


def start_again(module: Any) -> None:
    """Give a placed module its start. A module that was built without values is built again for what it lacks."""
    with own_draws(module.start_place):
        lacking = _of_its_class(module) if hasattr(module, "build_again") else {}
        if lacking and not any(tensor.is_meta for tensor in lacking.values()):
            made = _of_its_class(module.build_again())
            for name, tensor in lacking.items():
                if not getattr(tensor, "_is_hf_initialized", False):  # a checkpoint had none
                    tensor.copy_(made[name])
            del module.build_again
        if isinstance(module, ConstantStart):
            module.reset_parameters()
