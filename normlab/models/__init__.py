"""Models: configuration, modeling, conversion of existing models, TransformerLens bridge.

Importing this package registers ``model_type="normlab"`` with transformers, so that ``AutoModelForCausalLM`` loads our
models.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from normlab.models.configuration import NormlabConfig
from normlab.models.conversion import swap_norms
from normlab.models.modeling import NormlabDecoderLayer, NormlabForCausalLM, NormlabModel, refresh_carried

AutoConfig.register(NormlabConfig.model_type, NormlabConfig, exist_ok=True)
AutoModel.register(NormlabConfig, NormlabModel, exist_ok=True)
AutoModelForCausalLM.register(NormlabConfig, NormlabForCausalLM, exist_ok=True)

__all__ = [
    "NormlabConfig",
    "NormlabDecoderLayer",
    "NormlabForCausalLM",
    "NormlabModel",
    "refresh_carried",
    "swap_norms",
]
