"""Tiny random models of every architecture that the probes are tested on, with a batch each."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers as hf

import normlab
from normlab.probes import LayerStats, record
from normlab.probes.metrics import metric_row

VOCABULARY, WIDTH, DEPTH, LENGTH = 64, 32, 3, 12
_COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=DEPTH, num_attention_heads=4,
    initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_GROUPED = dict(_COMMON, num_key_value_heads=2)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=DEPTH, n_head=4, n_positions=64, initializer_range=0.2,
            bos_token_id=1, eos_token_id=2,
        )
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_GROUPED, head_dim=8, sliding_window=8)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**_GROUPED)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_GROUPED, num_local_experts=4)),
    "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_COMMON)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, ffn_dim=48, num_hidden_layers=DEPTH, num_attention_heads=4,
            word_embed_proj_dim=WIDTH, max_position_embeddings=64, init_std=0.2,
        )
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_COMMON)),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=DEPTH, num_attention_heads=4, image_size=16,
            patch_size=4,
        )
    ),
}  # fmt: skip


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def batch_for(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}
    return token_batch(generator=generator)


def token_batch(
    rows: int = 3, length: int = LENGTH, generator: torch.Generator | None = None
) -> dict[str, torch.Tensor]:
    """Tokens with right padding in row 0, left padding in row 1, and labels that skip the padding and a few more."""
    generator = generator or torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    if rows > 1:
        mask[1, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[-1, 4:6] = -100
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def tiny_llama(**changes) -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**_GROUPED, **changes})).eval()


def values(stats: LayerStats) -> dict[tuple[str, int, str, str], float]:
    """The table as (site, layer, metric, mask) -> value."""
    return {(r.site, int(r.layer), r.metric, r.mask): r.value for r in stats.to_pandas().itertuples()}


def near(expected: Mapping[tuple, float], roundings: float = 80, dtype: torch.dtype | None = None) -> dict[tuple, Any]:
    """An object equal to these values, by (..., metric, mask), up to `roundings` roundings of `dtype` (float32).

    A size is held to roundings of itself. An amount (a cosine, an entropy, a share) may be near zero as a sum of terms
    of size one, each of which was rounded. So it is also held to roundings of one.
    """
    tolerance = roundings * torch.finfo(dtype or torch.float32).eps

    def of(metric: str, value: float) -> Any:
        least = None if metric_row(metric).is_ratio else tolerance
        return pytest.approx(value, rel=tolerance, abs=least, nan_ok=True)

    return {key: of(key[-2], value) for key, value in expected.items()}


def trained_step(model, batch, metrics, **options) -> dict[tuple[str, int, str, str], float]:
    """The metrics of one forward and backward pass."""
    with record(model, metrics, **options) as rec:
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    return values(rec.stats())


def ours(scheme: str, **options) -> normlab.NormlabForCausalLM:
    torch.manual_seed(0)
    fields = {**_GROUPED, "pad_token_id": None, "initializer_range": 0.3, "num_hidden_layers": 2, **options}
    fields = {"max_position_embeddings": 16, **fields}
    return normlab.NormlabForCausalLM(normlab.NormlabConfig(scheme=scheme, **fields)).eval()


def run(model, batch, metrics) -> dict:
    with record(model, metrics) as rec, torch.no_grad():
        model(**batch)
    return values(rec.stats())
