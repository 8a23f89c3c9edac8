"""Delete blocks as papers prune: the others move up and take the constants of their new layers."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

from normlab.errors import NormlabError
from normlab.models.model import NormlabForCausalLM
from normlab.norms import Norm
from normlab.schemes import NormSite, get_scheme


def moves_blocks(model: NormlabForCausalLM) -> bool:
    """True if blocks can be moved to another layer: only their norms depend on it."""
    return get_scheme(model.config.scheme).residual is None and model.config.bounded_layers is None


@contextmanager
def without_blocks(model: NormlabForCausalLM, layers: Collection[int]) -> Iterator[NormlabForCausalLM]:
    """Context manager: the model without blocks `layers`, counted from 1, and the rest renumbered 1, 2, ...

    The scheme builds every norm again for its new layer, with its present weights. So LNS's factor 1/sqrt(l)
    (2502.05795) follows the new number. A block keeps its layout: Mix-LN's Post-LN blocks stay Post-LN. Schemes whose
    norms do not depend on the layer lose exactly what `skip_sensitivity` says. For evaluation without a cache.

    Raises:
        NormlabError: a layer that the model does not have, or all of them; a scheme with residual rules.
    """
    decoder = model.model
    blocks = decoder.layers
    if wrong := [layer for layer in layers if not 1 <= layer <= len(blocks)]:
        raise NormlabError(f"there is no block {wrong[0]} to delete: the model has blocks 1 to {len(blocks)}")
    kept = [block for layer, block in enumerate(blocks, start=1) if layer not in layers]
    if not kept:
        raise NormlabError("all blocks would be deleted: keep at least one")
    scheme = get_scheme(model.config.scheme)
    if not moves_blocks(model):
        raise NormlabError(f"scheme {scheme.name} here builds each block for its place: a block cannot be moved")
    config = copy.copy(model.config)
    config.num_hidden_layers = len(kept)
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for layer, block in enumerate(kept, start=1):
            for place, name in block.layout.places():
                norm = getattr(block, name)
                moved = scheme.norm_at(NormSite(place, layer, config)).to(block.mlp.down_proj.weight)
                moved.load_state_dict(norm.state_dict())
                if isinstance(norm, Norm):
                    moved.kernels = norm.kernels
                replaced.append((block, name, norm))
                setattr(block, name, moved.train(norm.training))
        decoder.layers = nn.ModuleList(kept)
        yield model
    finally:
        decoder.layers = blocks
        for block, name, norm in replaced:
            setattr(block, name, norm)
