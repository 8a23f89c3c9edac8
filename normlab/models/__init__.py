"""Models under a scheme.

config           NormlabConfig
block            one block
attention_mlp    attention and MLP that schemes change; embeddings_head: embeddings and head
model            NormlabForCausalLM
swap             give an existing model another scheme
fold             multiply gains into matrices
pruning          delete blocks
pretrained       trained models: load, find, export
costs            parameters and operations of each scheme
lens             TransformerLens bridge

Importing this package registers ``model_type="normlab"`` with transformers, so that ``AutoModelForCausalLM`` loads our
models. It raises NormlabError if transformers is older than `normlab.models.config.TRANSFORMERS`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from normlab.models.config import NormlabConfig
from normlab.models.fold import FoldedNorms, fold_norms
from normlab.models.model import (
    NormlabDecoderLayer,
    NormlabForCausalLM,
    NormlabModel,
    refresh_carried,
    set_schedules,
)
from normlab.models.pruning import moves_blocks, without_blocks
from normlab.models.swap import swap_norms

AutoConfig.register(NormlabConfig.model_type, NormlabConfig, exist_ok=True)
AutoModel.register(NormlabConfig, NormlabModel, exist_ok=True)
AutoModelForCausalLM.register(NormlabConfig, NormlabForCausalLM, exist_ok=True)

__all__ = [
    "FoldedNorms",
    "NormlabConfig",
    "NormlabDecoderLayer",
    "NormlabForCausalLM",
    "NormlabModel",
    "fold_norms",
    "moves_blocks",
    "refresh_carried",
    "set_schedules",
    "swap_norms",
    "without_blocks",
]
