"""Tiny random models of every class that transformers maps for five tasks, built from their configurations alone.

`tiny_config` shrinks a configuration by the names of its fields (sizes, heads, layers, experts ...), nested ones too.
`tiny_batch` gives a batch that the model accepts. `class_names` lists the classes of a task.
"""

# ruff: noqa: E501
from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TASKS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image": "IMAGE_CLASSIFICATION",
    "image-text": "IMAGE_TEXT_TO_TEXT",
}
VOCABULARY, WIDTH, DEPTH, LENGTH, IMAGE = 128, 32, 4, 16, 64
LARGEST = 60_000_000  # parameters; a configuration that is not shrunk below is listed, not built

# The first rule whose pattern is the whole name wins; None leaves the field as it is.
RULES: tuple[tuple[str, int | None], ...] = (
    (r".*(initializer|dropout|eps|theta|scal|_index|_id|_seed|pattern|capacity).*", None),
    (r".*(vocab_size|n_vocab|vocab_size_per_layer_input|ngram_vocab_size_base|hash_byte_group_vocab|vocab_offset)", VOCABULARY),
    (r".*(num_key_value_heads|num_kv_heads|n_head_kv|n_kv_heads|multi_query_group_num)", 2),
    (r".*(experts_per_tok|experts_per_token|experts_per_tok|moe_topk|top_k_experts|moe_k|num_experts_per_token)", 2),
    (r".*(n_group|topk_group|num_expert_group|o_groups|n_groups)", 1),
    (r".*(num_local_experts|num_experts|n_routed_experts|zero_expert_num)", 4),
    (r".*(n_shared_experts|num_shared_experts)", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r".*(index_topk|sliding_window|window|chunk_size|attention_window|local_attention)", 8),
    (r".*(mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_value_heads|linear_num_key_heads)", 4),
    (r"num_key_value_groups", None),
    (r".*(_heads|n_head|num_heads|n_heads|attention_heads|num_query_groups)", 4),
    (r".*(lora_rank|_rank|lowrank)", 16),
    (r".*(mamba_d_head|mamba_head_dim|mamba_headdim)", 16),
    (r".*(head_dim|d_kv|kv_channels|attention_head_size|d_head|dim_head|head_size)", 8),
    (r".*(intermediate_size|ffn_dim|d_ff|mlp_dim|ffn_hidden_size|n_inner|d_inner|dff|feed_forward_size|dim_ff|intermediate_size_mlp|shared_expert_dim|share_expert_dim)", 48),
    (r".*(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|_layers|layers|num_blocks|num_hidden_blocks)", DEPTH),
    (r".*(d_state|state_size|rotary_dim|d_rel)", 8),
    (r"hidden_dim", 48),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|emb_dim|emb_size|word_embed_proj_dim|dim|dims|width|embedding_dim|projection_dim|output_dim|projection_size|hidden_size_per_layer_input|d_embed|hidden_size_global|d_latents|channels)", WIDTH),
    (r".*(image_size|img_size)", IMAGE),
    (r".*(patch_size)", 16),
    (r".*(max_position_embeddings|n_positions|max_seq_len|n_ctx|max_sequence_length|model_max_length|max_source_positions|max_target_positions|context_length)", VOCABULARY),
    (r".*(num_latents|num_query_tokens|n_latents|latent_query_num|mm_tokens_per_image)", 4),
    (r".*(hidden_layers_stack|num_layers_per_stack)", 2),
)  # fmt: skip
KEPT_SHALLOW = re.compile(
    r".*(vocab_size|layers|layer|depth|image_size|num_blocks|num_latents)|.*(experts|n_embd_proj).*"
)
NESTED_KEPT = re.compile(r"rope.*|.*parameters|quantization.*|id2label|label2id|task_specific_params|.*scaling")


def class_names(task: str) -> dict[str, str]:
    """Class names of a task, with a model type of each."""
    names = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES")
    found: dict[str, str] = {}
    for model_type, mapped in names.items():
        for name in [mapped] if isinstance(mapped, str) else mapped:
            found.setdefault(name, model_type)
    return found


def config_class_of(task: str, name: str) -> type:
    """The configuration class of a class of a task."""
    found: type = CONFIG_MAPPING[class_names(task)[name]]
    return found


def _shrunk(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, small in RULES:
        if re.fullmatch(pattern, name):
            return value if small is None or value <= 0 else min(value, small)
    return value


def _overrides(fields: dict[str, Any], ids: list[int], variant: int) -> dict[str, Any]:
    """The fields that change, nested configurations included; token ids beyond the vocabulary get ids at its end.

    `variant` 1 also fills what is None by default, and leaves lists of layer types to the class. 2 leaves them only. 3
    keeps widths and heads, and makes the model shallow only.
    """
    found: dict[str, Any] = {}
    depth = next(
        (fields[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(fields.get(n), int)), 0
    )
    for name, value in fields.items():
        name = str(name)
        if isinstance(value, dict):
            if name == "per_layer_config":
                found[name] = {k: v for k, v in value.items() if int(k) < DEPTH}
            elif name.startswith("rope") and value:
                changed = _rope(value, fields)
                if changed != value:
                    found[name] = changed
            elif not NESTED_KEPT.fullmatch(name) and value:
                inner = _overrides(value, ids, variant)
                found[name] = ({"model_type": value["model_type"]} if value.get("model_type") else {}) | inner
        elif re.fullmatch(r".*(token_id|token_index|_id|token_ids)", name) and not isinstance(value, bool):
            if isinstance(value, int) and value >= VOCABULARY // 2:
                ids.append(VOCABULARY - 1 - len(ids) % 40)
                found[name] = ids[-1]
        elif (
            re.fullmatch(r".*(depths|layer_counts|num_block_repeats|block_sizes|stage_numb_of_layers)", name) and value
        ):
            found[name] = [min(v, 2) for v in value] if isinstance(value, list | tuple) else value
        elif isinstance(value, list) and value and isinstance(value[0], str) and len(value) == depth and variant == 0:
            kinds = list(dict.fromkeys(value))
            found[name] = [kinds[i % len(kinds)] for i in range(DEPTH)]
        elif value is None and variant == 1 and name in NONE_FILLED:
            found[name] = NONE_FILLED[name]
        elif (small := _shrunk(name, value)) != value and (variant < 3 or KEPT_SHALLOW.fullmatch(name)):
            found[name] = small
    if variant == 3:
        return found
    heads, groups = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if isinstance(groups, int) and ("kv_lora_rank" in fields or groups == heads):
        found["num_key_value_heads"] = found.get("num_attention_heads", heads)
    return found


NONE_FILLED = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}


# Configurations whose own fields do not fit together once they are small, or are None by default.
_SWIN = {"num_heads": [2, 4], "depths": [2, 2], "image_size": 32, "patch_size": 4, "window_size": 4}
_CODEBOOK = {"codebook_size": 32}
_WAVES = {"hidden_size": 32, "codebook_dim": 32, "decoder_hidden_size": 32, "decoder_num_layers": 4}
EXACTLY: dict[str, dict[str, Any]] = {
    "Apertus1p5Config": {
        "vision_config": {"embed_dim": 32, "latent_channels": 32, "base_channels": 32} | _CODEBOOK,
        "audio_config": {"model_type": "wavtokenizer_encoder", "decoder_intermediate_size": 48} | _WAVES | _CODEBOOK,
        "image_token_offset": 32,
        "audio_token_offset": 64,
    },
    "SwinConfig": _SWIN,
    "DonutSwinConfig": _SWIN,
    "Mamba2Config": {"head_dim": 16},
    "PegasusXConfig": {"block_size": 8},  # else the model pads 16 tokens to 512
    "LongcatFlashConfig": {"num_key_value_heads": 4, "qk_head_dim": 16, "zero_expert_num": 2, "num_layers": 2},
    "Gemma3nTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "intermediate_size": 48,
        "activation_sparsity_pattern": None,
    },
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "EfficientNetConfig": {"initializer_range": 0.6, "depth_coefficient": 1.0},  # else its stream vanishes
    "TextNetConfig": {"image_size": [64, 64]},
    "DoryConfig": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
}
# Rotary sections that the model has as a default of its own, for heads of another size.
SECTIONED = re.compile(r"(qwen2_vl|qwen2_5_vl|glm4v|glm4v_moe|glm46v|glm_ocr|paddleocr_vl)(_text)?")


def _sections(partial_rotary_factor: float | None) -> list[int]:
    """Rotary sections that add up to half of a head's 8 features."""
    half = int(8 * (partial_rotary_factor or 1)) // 2
    return [half - 2 * (half // 4), half // 4, half // 4]


def _rope(value: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters with sections that fit."""
    changed = {k: _rope(v, fields) if isinstance(v, dict) else v for k, v in value.items()}
    if isinstance(value.get("mrope_section"), list):
        factor = value.get("partial_rotary_factor") or fields.get("partial_rotary_factor")
        changed["mrope_section"] = _sections(factor)
    return changed


def tiny_config(config_class: type, variant: int = 0) -> Any:
    """A small configuration of this class; raises what its own constructor raises."""
    try:
        fields = config_class().to_dict()
    except Exception:
        fields = {name: p.default for name, p in inspect.signature(config_class).parameters.items()}
        fields = {name: value for name, value in fields.items() if value is not inspect.Parameter.empty}
    exactly = EXACTLY.get(config_class.__name__, {}) if variant in (0, 3) else {}
    config = config_class(**_overrides(fields, [], variant) | exactly)
    for part in _parts_of(config):
        if SECTIONED.fullmatch(part.model_type) and getattr(part, "rope_parameters", None):
            rope = part.rope_parameters
            rope["mrope_section"] = _sections(rope.get("partial_rotary_factor"))
        part._attn_implementation = "eager"
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        for name, value in tokens.items():
            given = getattr(part, name, None)
            if given is None or isinstance(given, int) and given >= VOCABULARY:
                setattr(part, name, value)
    return config


def _parts_of(config: Any) -> list[Any]:
    found = [config]
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            found += _parts_of(value)
    return found


def prepare(name: str, config_class: type, task: str) -> tuple[nn.Module, dict[str, Any]]:
    """The class with random weights (seed 0), in evaluation mode, and a batch on which it returns a finite loss, if it
    returns one. Raises what the first attempt raised when none works."""
    first: Exception | None = None
    for variant in range(4):
        try:
            model = build(name, config_class, variant)
        except ImportError:
            raise
        except Exception as error:
            first = first or error
            continue
        for batch in batches(model, task):
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    model(**batch)
            except Exception as error:
                first = first or error
            else:
                return model, batch
    raise first or AssertionError("no variant was tried")


def build(name: str, config_class: type, variant: int = 0) -> nn.Module:
    """The class with random weights. Raises ValueError when it cannot be made small."""
    model_class = getattr(transformers, name)
    own = getattr(model_class, "config_class", None)
    config = tiny_config(own if own is not None and own is not config_class else config_class, variant)
    config.return_dict = True
    if name.startswith("Reformer"):
        config.is_decoder = "LM" in name and "Masked" not in name
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"stays at {size / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    model = model_class(config).eval()
    if hasattr(model, "set_default_language"):
        model.set_default_language(next(iter(config.languages)))
    return model


def batches(model: nn.Module, task: str) -> list[dict[str, Any]]:
    """Batches to try, the plainest first: two rows, the first padded on the right by three tokens."""
    generator = torch.Generator().manual_seed(1)
    takes = inspect.signature(model.forward).parameters
    extra = {"use_cache": False} if "use_cache" in takes else {}
    pixels = _pixels(model, generator)
    if task == "image":
        labels = {"labels": torch.tensor([0, 1])} if "labels" in takes else {}
        return [{"pixel_values": pixels} | labels, {"input_ids": torch.arange(16)[None].repeat(2, 1)} | labels]
    ids = torch.randint(5, 60, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 4:6] = -100
    batch = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels} | extra
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.randint(5, 60, (2, LENGTH - 6), generator=generator)
        batch["labels"] = torch.randint(5, 60, (2, LENGTH - 6), generator=generator)
        batch["labels"][1, -2:] = -100
    batch = {name: value for name, value in batch.items() if name in takes or name in ("input_ids", "labels")}
    found = [batch]
    if "pixel_values" in takes:
        found.append(batch | {"pixel_values": pixels})
        found.append(
            {k: v for k, v in batch.items() if k != "input_ids" and k != "attention_mask"} | {"pixel_values": pixels}
        )
    if "bbox" in takes:
        found.append(batch | {"bbox": torch.zeros(2, LENGTH, 4, dtype=torch.long)})
    if "qformer_input_ids" in takes:
        found.append(batch | {"pixel_values": pixels, "qformer_input_ids": ids})
    if "flattened_patches" in takes:
        patches = torch.randn(2, 10, 2 + model.config.vision_config.patch_embed_hidden_size, generator=generator)
        found.append({k: v for k, v in batch.items() if k != "input_ids"} | {"flattened_patches": patches})
    return found + [{k: v for k, v in one.items() if k != "attention_mask"} for one in found]


def _pixels(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    config = next((c for c in _parts_of(model.config) if getattr(c, "image_size", None)), model.config)
    size = getattr(config, "image_size", None) or IMAGE
    height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
    return torch.randn(2, getattr(config, "num_channels", 3) or 3, height, width, generator=generator)
