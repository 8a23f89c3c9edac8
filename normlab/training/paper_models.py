"""SIZES: the papers' models with their recipes, as configurations.

Curse of Depth: shapes, steps, rates and warm-up are those of its released configurations and run scripts
(github.com/lmsdss/LayerNorm-Scaling). There, weights are bfloat16 throughout, and each document is cut or padded to one
block. Here weights are float32 under autocast, and documents are packed.

BHyT: the shapes are those of Llama 3.2 (1B, 3B), the rest is that of the scripts' sweep (github.com/MLAI-Yonsei/BHyT).
Which of its values won is not printed, so each configuration here is one of the sweep. Blocks per step: the paper's 20B
tokens over the scripts' steps, down to a multiple of 64. The scripts take 16 per device; the number of devices is not
known.

No source gives the steps of BHyT's 374M, or the recipes of Curse of Depth's 3B and 7B: these are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normlab.errors import NormlabError
from normlab.schemes import tagged
from normlab.training.config import TrainConfig

_CURSES, _BOUNDED = tagged("paper_sizes")


@dataclass(frozen=True)
class Size:
    """A model with its recipe. swept: fields that the paper's scripts try several values of."""

    config: TrainConfig
    source: str
    swept: Mapping[str, tuple] = field(default_factory=dict)


# Measured on the way; the same for all.
_MEASURED: dict[str, Any] = dict(
    corpus="allenai/c4:en", stream=True, dtype="bfloat16", log_every=10, checkpoint_every=1000,
    probe_every=1000, probe_blocks=2, eval_every=1000, eval_blocks=512,
)  # fmt: skip
_CURSE: dict[str, Any] = dict(
    scheme=_CURSES, batch_size=512, block_length=256, weight_decay=0.0, beta2=0.999, tokenizer="t5-base",
    clip=1e9,  # none
    model={"vocab_size": 32100, "tie_word_embeddings": False},  # theirs leaves out the tokenizer's 100 sentinels
)  # fmt: skip
# Llama 3.2's configuration, besides its shape.
_LLAMA: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
_BHYT: dict[str, Any] = dict(
    scheme=_BOUNDED, kv_heads=8, intermediate=8192, lr=3e-4, block_length=1024, tokenizer="meta-llama/Llama-3.2-1B",
    model=_LLAMA,
)  # fmt: skip
_SWEPT = {
    "lr": (5e-4, 3e-4, 1e-4),
    "weight_decay": (0.0, 0.1),
    "min_lr_ratio": (0.1, 0.01),
    "warmup": (0.05, 0.1),
    "lam_input, lam_post": ((2.0, 1.0), (3.0, 3.0)),
}
# name: depth, width, heads, MLP width, learning rate, steps, warm-up steps
_CURSE_MODELS = {
    "130m": (12, 768, 12, 2048, 1e-3, 20_000, 2_000),
    "250m": (24, 768, 16, 2560, 1e-3, 40_000, 4_000),
    "350m": (24, 1024, 16, 2736, 5e-4, 60_000, 6_000),
    "1b": (24, 2048, 32, 5461, 5e-4, 100_000, 1_000),
}
# name: depth, width, heads, steps, blocks per step
_BHYT_MODELS = {"1b": (16, 2048, 32, 20_000, 960), "3b": (28, 3072, 24, 100_000, 192)}


def _sizes() -> dict[str, Size]:
    sizes = {}
    for name, (depth, width, heads, intermediate, lr, steps, warm_up) in _CURSE_MODELS.items():
        shape: dict[str, Any] = dict(depth=depth, width=width, heads=heads, kv_heads=heads, intermediate=intermediate)
        config = TrainConfig(**shape, lr=lr, steps=steps, warmup=warm_up / steps, **_CURSE, **_MEASURED)
        sizes[f"curse-{name}"] = Size(config, f"2502.05795: configs/llama_{name}.json, run_{name}.sh")
    source = f"2601.09719: scripts/{_BOUNDED}/pt_{_BOUNDED}_sweep.sh, examples/train_pt/llama_pt.yaml"
    for name, (depth, width, heads, steps, batch_size) in _BHYT_MODELS.items():
        shape = dict(depth=depth, width=width, heads=heads)
        config = TrainConfig(**shape, steps=steps, batch_size=batch_size, **_BHYT, **_MEASURED)
        sizes[f"{_BOUNDED}-{name}"] = Size(config, source, _SWEPT)
    return sizes


SIZES = _sizes()


def get_size(name: str) -> Size:
    if name not in SIZES:
        raise NormlabError(f"unknown size {name!r}; known are {', '.join(SIZES)}")
    return SIZES[name]
