"""Which of a configuration's options a model is made of.

`unread(config, names)`   the options that its scheme does not read
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch

from normlab.models.block import decoder_layer
from normlab.models.config import NormlabConfig
from normlab.models.embeddings_head import EmbeddingEnd, Head
from normlab.schemes import NormSite, get_scheme


class _Noting:
    """A configuration that notes which options were read, also by methods of its own."""

    def __init__(self, config: NormlabConfig, names: Iterable[str]) -> None:
        self._config, self.left = config, set(names)

    def __getattr__(self, name: str) -> Any:
        self.left.discard(name)
        value = getattr(self._config, name)
        return MethodType(value.__func__, self) if isinstance(value, MethodType) else value


def unread(config: NormlabConfig, names: Iterable[str]) -> set[str]:
    """Those of `names`, options that are not Llama's, which nothing reads that makes the model or its rates.

    Any value of theirs gives the same model. Parts are built without values, until each name was read.
    """
    noting: Any = _Noting(config, names)
    scheme = get_scheme(config.scheme)
    with torch.device("meta"):
        for end in (EmbeddingEnd, Head):
            end(noting)
        scheme.norm_at(NormSite("final", config.num_hidden_layers + 1, noting))
        scheme.leave_at(noting)
        for dimensions in (1, 2):
            if scheme.rates is not None:
                scheme.rates("model.layers.0.self_attn.q_proj.weight", dimensions, noting)
        for layer in range(config.num_hidden_layers):
            if not noting.left:
                break
            decoder_layer(noting, layer)
    return noting.left
