"""A trained model for the page: what `static/model.js` needs to know of it.

model_spec   sizes, names of tensors, and each norm as data
weights_of   the weights as a safetensors file: as shipped, or of a model in memory
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from normlab.errors import NormlabError
from normlab.models.block import FinalNorm, NormlabDecoderLayer
from normlab.norms import BHyT, Derf, DyT, LayerNorm, RMSNorm

STATIC = Path(__file__).parent / "static"

# y = scale gamma f(slope (x - mean) / sqrt(ms + eps) + shift) + bias: what each norm has of it.
NORMS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    RMSNorm: lambda norm: {"divide": "rms", "eps": norm.eps, "scale": norm.scale},
    LayerNorm: lambda norm: {"divide": "std", "eps": norm.eps, "bias": "bias"},
    BHyT: lambda norm: {
        "divide": "rms",
        "eps": norm.eps,
        "slope": "lam",
        "kappa": norm.kappa,
        "f": "tanh" if norm.bounded else "none",
    },
    DyT: lambda norm: {"slope": "alpha", "f": "tanh"},
    Derf: lambda norm: {"slope": "alpha", "shift": "shift", "bias": "bias", "f": "erf"},
}
_TENSORS = ("slope", "shift", "bias")  # fields that name a tensor of the norm
MULTIPLE = 8  # of the kernel's columns


def model_spec(model: Any) -> dict[str, Any]:
    """The model as data for `static/model.js`.

    Raises:
        NormlabError: a part that the page does not compute.
    """
    config: Any = model.config
    names = {module: name for name, module in model.named_modules()}
    base: Any = getattr(model, "model", None)
    blocks: Any = getattr(base, "layers", ())
    plain = all(
        type(block) is NormlabDecoderLayer and type(block.self_attn) is LlamaAttention and type(block.mlp) is LlamaMLP
        for block in blocks
    )
    if not blocks or not plain or base.embedding_end is not None or isinstance(base.norm, FinalNorm):
        _refuse(model, "a block, an embedding or an attention of another kind")
    if any(block.carried and (block.correction != "none" or block.calibration != 1.0) for block in blocks):
        _refuse(model, "a learned correction of its carried statistic")
    if type(model.lm_head) is not nn.Linear or any(layer.bias is not None for layer in _linears(model)):
        _refuse(model, "biases, or a head that is no matrix")
    if getattr(config, "norms_folded", False) or config.rope_parameters["rope_type"] != "default":
        _refuse(model, "folded norms or scaled rotary positions")
    attention = blocks[0].self_attn
    sizes = {"width": config.hidden_size, "head_dim": attention.head_dim, "inner": config.intermediate_size}
    if odd := [f"{name} {size}" for name, size in sizes.items() if size % MULTIPLE]:
        _refuse(model, f"{odd[0]}, no multiple of {MULTIPLE}")
    tied = config.tie_word_embeddings
    embed = f"{names[base.embed_tokens]}.weight"
    return {
        **sizes,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "vocab": config.vocab_size,
        "length": config.max_position_embeddings,
        "theta": config.rope_parameters["rope_theta"],
        "scaling": attention.scaling,
        "embed": embed,
        "head": embed if tied else f"{names[model.lm_head]}.weight",
        "embedding_scale": None if base.shared_scale is None else f"{names[base]}.shared_scale",
        "blocks": [_block_spec(block, names, model) for block in blocks],
        "final": _norm_spec(base.norm, names, model),
    }


def _block_spec(block: NormlabDecoderLayer, names: Mapping[nn.Module, str], model: nn.Module) -> dict[str, Any]:
    norms = {place: _norm_spec(getattr(block, name), names, model) for place, name in block.layout.places()}
    return {
        "prefix": f"{names[block]}.",
        "norms": norms,
        "carried": block.carried,
        "c": f"{names[block]}.c_attn",
        "length": block.train_seq_len,
    }


def _norm_spec(norm: Any, names: Mapping[nn.Module, str], model: nn.Module) -> dict[str, Any]:
    if type(norm) not in NORMS:
        _refuse(model, f"the norm {type(norm).__name__}")
    spec = {"scale": 1.0, "f": "none", **NORMS[type(norm)](norm), "centre": norm.centre, "weight": "weight"}
    tensors = {field: f"{names[norm]}.{spec[field]}" for field in (*_TENSORS, "weight") if field in spec}
    return spec | tensors


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _refuse(model: Any, part: str) -> None:
    name = getattr(model.config, "scheme", None) or type(model).__name__
    raise NormlabError(f"the page does not compute {name}: it has {part}")


def weights_of(model: Any) -> bytes:
    """A safetensors file: a folder's as it is, or a model's present weights (bfloat16 and float32 are kept)."""
    from safetensors.torch import save

    if not isinstance(model, nn.Module):
        return (Path(model) / "model.safetensors").read_bytes()
    kept = (torch.bfloat16, torch.float32)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    config: Any = model.config
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return save({name: tensor if tensor.dtype in kept else tensor.float() for name, tensor in state.items()})
