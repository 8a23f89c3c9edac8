"""Give an existing Hugging Face model another normalization scheme."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from normlab.errors import NormlabError
from normlab.models.attention_mlp import changes_attention
from normlab.models.block import NormlabDecoderLayer, decoder_layer
from normlab.models.config import NormlabConfig
from normlab.models.fold import is_plain_gain
from normlab.residuals import Residual
from normlab.schemes import NormSite, get_scheme


def swap_norms(model: PreTrainedModel, scheme: str, **fields: Any) -> PreTrainedModel:
    """Replace the blocks' norms and the final norm of a Llama-shaped model, in place, for continued training.

    Attention (with its biases, QK-norms, sliding windows) and MLP are kept. Each block becomes a
    ``NormlabDecoderLayer`` around them. A new norm takes the gain of the old norm of its name. So the outputs change as
    the scheme says: BHyT's are about lambda/kappa times smaller at the start.

    Args:
        model: a causal LM whose blocks hold ``self_attn`` (with v_proj, o_proj), ``mlp``, ``input_layernorm`` and
            ``post_attention_layernorm``: Llama, Mistral, Qwen2, Qwen3 and relatives.
        scheme: a key of ``normlab.SCHEMES`` that changes only norms and sums of the blocks.
        fields: fields of NormlabConfig, e.g. ``lam_input=3.0, train_seq_len=2048``.

    Returns:
        The same model. In training, call ``normlab.models.refresh_carried(model)`` every max_steps/50 steps. Call
        ``normlab.models.set_schedules(model, step, total)`` before the first step and after each. Without it the
        branches of ProRes stay off, and norms with a schedule or running statistics keep their start.
        ``save_pretrained`` writes its weights under their names. To load them, build the original architecture, call
        ``swap_norms`` with the same arguments, then ``load_state_dict``.

    Raises:
        NormlabError: a model, norm or gain of another kind. A scheme that changes more than the blocks' norms and sums.
            A field that would change the attention.
    """
    row = get_scheme(scheme)
    if row.ends.embedding_scale is not None:
        raise NormlabError(
            f"scheme {scheme} also scales the embeddings: train it from scratch, or swap to another scheme"
        )
    if unused := sorted(fields.keys() - NormlabConfig.__annotations__.keys() - {"rms_norm_eps"}):
        raise NormlabError(f"{unused[0]} changes nothing here: fields are {', '.join(NormlabConfig.__annotations__)}")
    if not row.changes_blocks_only:
        raise NormlabError(f"scheme {scheme} changes more than norms and sums of the blocks: train it from scratch")
    base: Any = getattr(model, "base_model", None)
    blocks = getattr(base, "layers", None)
    needed = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if (
        not blocks
        or not isinstance(getattr(base, "norm", None), nn.Module)
        or any({name for name, _ in block.named_children()} != needed for block in blocks)
    ):
        raise NormlabError(
            f"{type(model).__name__} has no Llama-shaped blocks ({', '.join(sorted(needed))}, final norm): "
            "swap_norms supports Llama, Mistral, Qwen2, Qwen3 and relatives"
        )
    for norm in (
        base.norm,
        *(block.get_submodule(name) for block in blocks for name in sorted(needed) if "norm" in name),
    ):
        bias = getattr(norm, "bias", None)
        if not is_plain_gain(norm) or (bias is not None and bool(bias.any())):
            raise NormlabError(f"{type(norm).__name__} is not a norm and a gain: swap_norms would lose what it is")
    if getattr(model.config, "residual_multiplier", 1.0) != 1.0:
        raise NormlabError(f"{type(model).__name__} multiplies its branches, which swap_norms would leave out")
    if row.carries_statistic and not all(hasattr(block.self_attn, "v_proj") for block in blocks):
        raise NormlabError(
            f"scheme {scheme} needs v_proj and o_proj of the attention: {type(model).__name__} has others"
        )
    config = _llama_fields(model.config, scheme, fields)
    if changes_attention(config):
        raise NormlabError(
            "swap_norms keeps the model's attention: qk_norm and affine_attention are options of a NormlabConfig"
        )
    for index, block in enumerate(blocks):
        blocks[index] = _rebuild(block, config, index)
    base.norm = _take_gain(base.norm, row.norm_at(NormSite("final", len(blocks) + 1, config)))
    if config.carried == "causal" and row.carries_statistic:
        base.register_forward_pre_hook(_count_positions, with_kwargs=True)
    return model


def _count_positions(base: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Put a padded row's first token at position 0, as NormlabModel does: the statistic depends on it."""
    mask, tokens = kwargs.get("attention_mask"), kwargs.get("input_ids", kwargs.get("inputs_embeds"))
    if kwargs.get("position_ids") is None and mask is not None and mask.dim() == 2 and tokens is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        kwargs = kwargs | {"position_ids": positions}
    return args, kwargs


def _llama_fields(source: Any, scheme: str, fields: dict[str, Any]) -> NormlabConfig:
    names = set(LlamaConfig().to_dict()) - {"model_type", "architectures", "transformers_version"}
    known = {name: getattr(source, name) for name in names if hasattr(source, name)}
    return NormlabConfig(**{**known, "scheme": scheme, **fields})


def _take_gain(old: Any, new: Any) -> nn.Module:
    """Return the new norm with the old one's gain."""
    weight = old.weight.data
    new.to(weight.device, weight.dtype)
    gain = getattr(new, "weight", None)
    if gain is not None:
        if gain.shape != weight.shape:
            raise NormlabError(
                f"{type(new).__name__} has {gain.numel()} numbers as gain, not {weight.numel()}: train it from scratch"
            )
        gain.data.copy_(weight - new.centre)
    return new


@torch.no_grad()
def _rebuild(block: Any, config: NormlabConfig, index: int) -> NormlabDecoderLayer:
    rebuilt = decoder_layer(config, index, attention=block.self_attn, mlp=block.mlp)
    template = next(block.mlp.parameters())
    for _, name in rebuilt.layout.places():
        norm = getattr(rebuilt, name)
        _take_gain(getattr(block, name), norm) if hasattr(block, name) else norm.to(template.device, template.dtype)
    for child in rebuilt.children():
        if isinstance(child, Residual):
            child.to(template.device, template.dtype)
    for parameter in rebuilt.parameters(recurse=False):
        parameter.data = parameter.data.to(template.device, template.dtype)
    rebuilt.gradient_checkpointing = getattr(block, "gradient_checkpointing", False)
    if hasattr(block, "_gradient_checkpointing_func"):
        rebuilt._gradient_checkpointing_func = block._gradient_checkpointing_func
    if rebuilt.carried:
        rebuilt.c_attn = rebuilt.attention_variance_constant()
    return rebuilt.train(block.training)
