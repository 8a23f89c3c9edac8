"""SIZES: the papers' models with their recipes, as configurations.

Curse of Depth: shapes, steps, rates and warm-up of its released configurations and run scripts (github.com/lmsdss/
LayerNorm-Scaling). There, weights are bfloat16 throughout and each document is cut or padded to one block; here weights
are float32 under autocast and documents are packed. Its 3B and 7B shapes have no recipe and are left out.

BHyT: the shape of Llama 3.2 (1B, 3B), and the scripts' sweep (github.com/MLAI-Yonsei/BHyT). Which of its values won is
not printed: each configuration here is one of the sweep. Blocks a step: the paper's 20B tokens over the scripts' steps,
down to a multiple of 64 (the scripts take 16 on each device, and how many devices there were is not said). The 374M
model has a shape and 7.5B tokens, but no number of steps: left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normlab.errors import NormlabError
from normlab.schemes import tagged
from normlab.training.config import TrainConfig

_CURSES, _BOUNDED = tagged("paper_sizes")
LEFT_OUT = {
    f"{_BOUNDED}-374m": "its shape is known, the number of its steps is not",
    "curse-3b": "its shape is known, its recipe is not",
    "curse-7b": "its shape is known, its recipe is not",
}


@dataclass(frozen=True)
class Size:
    """A model with its recipe. swept: fields that the paper's scripts try several values of."""

    config: TrainConfig
    source: str
    swept: Mapping[str, tuple] = field(default_factory=dict)


# What is measured on the way; the same for all.
_MEASURED: dict[str, Any] = {
    "corpus": "allenai/c4:en",
    "stream": True,
    "dtype": "bfloat16",
    "probe_every": 1000,
    "probe_blocks": 2,
    "eval_every": 1000,
    "eval_blocks": 512,
    "checkpoint_every": 1000,
    "log_every": 10,
}


def _curse(
    depth: int, width: int, heads: int, intermediate: int, lr: float, steps: int, warm_up: int, name: str
) -> Size:
    config = TrainConfig(
        scheme=_CURSES,
        depth=depth,
        width=width,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        lr=lr,
        steps=steps,
        warmup=warm_up / steps,
        batch_size=512,
        block_length=256,
        weight_decay=0.0,
        clip=1e9,  # none
        beta2=0.999,
        tokenizer="t5-base",
        model={"vocab_size": 32000, "tie_word_embeddings": False},
        **_MEASURED,
    )
    return Size(config, f"2502.05795: configs/llama_{name}.json, run_{name}.sh")


# Llama 3.2's configuration, beside its shape.
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
_SWEPT = {
    "lr": (5e-4, 3e-4, 1e-4),
    "weight_decay": (0.0, 0.1),
    "min_lr_ratio": (0.1, 0.01),
    "warmup": (0.05, 0.1),
    "lam_input, lam_post": ((2.0, 1.0), (3.0, 3.0)),
}


def _bhyt(depth: int, width: int, heads: int, steps: int, batch_size: int) -> Size:
    config = TrainConfig(
        scheme=_BOUNDED,
        depth=depth,
        width=width,
        heads=heads,
        kv_heads=8,
        intermediate=8192,
        lr=3e-4,
        steps=steps,
        batch_size=batch_size,
        block_length=1024,
        tokenizer="meta-llama/Llama-3.2-1B",
        model=_LLAMA,
        **_MEASURED,
    )
    return Size(
        config, f"2601.09719: scripts/{_BOUNDED}/pt_{_BOUNDED}_sweep.sh, examples/train_pt/llama_pt.yaml", _SWEPT
    )


SIZES = {
    "curse-130m": _curse(12, 768, 12, 2048, 1e-3, 20_000, 2_000, "130m"),
    "curse-250m": _curse(24, 768, 16, 2560, 1e-3, 40_000, 4_000, "250m"),
    "curse-350m": _curse(24, 1024, 16, 2736, 5e-4, 60_000, 6_000, "350m"),
    "curse-1b": _curse(24, 2048, 32, 5461, 5e-4, 100_000, 1_000, "1b"),
    f"{_BOUNDED}-1b": _bhyt(16, 2048, 32, 20_000, 960),
    f"{_BOUNDED}-3b": _bhyt(28, 3072, 24, 100_000, 192),
}


def get_size(name: str) -> Size:
    if name in LEFT_OUT:
        raise NormlabError(f"{name} is left out: {LEFT_OUT[name]}; known are {', '.join(SIZES)}")
    if name not in SIZES:
        raise NormlabError(f"unknown size {name!r}; known are {', '.join(SIZES)}")
    return SIZES[name]
