"""The cost of what each scheme adds to Llama, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.initialization import no_init_weights

from normlab.models.block import FinalNorm, JoiningDecoderLayer
from normlab.models.config import NormlabConfig
from normlab.models.model import NormlabForCausalLM
from normlab.norms import RMSNorm
from normlab.norms.base import ConstantStart
from normlab.residuals import Residual
from normlab.schemes import PARTS, SCHEMES, Scheme, get_scheme

if TYPE_CHECKING:
    import pandas

BYTES = 2  # of a number in bfloat16
HEAD = 32  # width of a head, and step of the MLP's width, as training builds models
LLAMAS = ("_proj.weight", "embed_tokens.weight", "lm_head.weight")  # names of Llama's matrices
REDUCTION = 2.0  # squares and their sum, which a carried statistic saves


def table(width: int = 1024, depth: int = 16, vocabulary: int = 4096) -> pandas.DataFrame:
    """Return every scheme with its cost at a width and depth, counted from the formulas.

    Heads are 32 wide, half as many have keys and values, and the MLP is 8/3 as wide as the model.

    Returns:
        One row per scheme: `name family formula paper parameters bytes operations`. `parameters` counts the trained
        numbers of a model beyond Llama's matrices. It is below 0 where blocks share them. `bytes` and `operations` are
        per token and forward pass, beyond Llama's matrix products, softmax and activation. They count what norms, sums
        and scales read and write in bfloat16, and compute, each run by itself. Rows of matrices that are kept at unit
        length are left out: their cost does not grow with tokens. Both are missing where a norm is not one of
        normlab's, as PyTorch's, and so does not say its own.
    """
    import pandas

    rows = [
        {"name": scheme.name, "family": scheme.family, "formula": scheme.formula, "paper": scheme.paper}
        | _costs(scheme, width, depth, vocabulary)
        for scheme in SCHEMES.values()
    ]
    return pandas.DataFrame(rows).astype({"bytes": "Int64", "operations": "Int64"})  # may be missing


def _costs(scheme: Scheme, width: int, depth: int, vocabulary: int) -> dict[str, int | None]:
    heads = width // HEAD if width % HEAD == 0 else 1
    config = NormlabConfig(
        scheme=scheme.name,
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        intermediate_size=max(HEAD, round(width * 8 / 3 / HEAD) * HEAD),
    )
    with torch.device("meta"), no_init_weights():
        model = NormlabForCausalLM(config)
    model.tie_weights()  # blocks of a looped model too
    blocks, final = model.model.layers, model.model.norm
    modules: list[Any] = [*final.children()] if isinstance(final, FinalNorm) else [final]
    for block in blocks:
        modules += [block.norm_at(place) for place, _ in block.layout.places()]
        modules += [block.rule_at(part) if isinstance(block, JoiningDecoderLayer) else Residual() for part in PARTS]
    named = model.named_parameters(remove_duplicate=False)
    llamas = sum(p.numel() for name, p in named if name.endswith(LLAMAS))  # of a Llama, whose blocks share none
    parameters = sum(p.numel() for p in model.parameters()) - llamas
    if not all(isinstance(module, ConstantStart) for module in modules):
        return {"parameters": parameters, "bytes": None, "operations": None}
    saved = REDUCTION * depth * width if scheme.carries_statistic else 0.0
    parts: list[tuple[int, Any]] = [(width, module) for module in modules]
    parts += [*_in_block(config) * depth, *_at_ends(config)]
    return {
        "parameters": parameters,
        "bytes": round(BYTES * sum(channels * part.numbers for channels, part in parts)),
        "operations": round(sum(channels * part.operations for channels, part in parts) - saved),
    }


class Cost(NamedTuple):
    """Numbers read and written, and operations, per channel."""

    numbers: float
    operations: float


NORM = Cost(RMSNorm.numbers, RMSNorm.operations)
UNIT = Cost(2.0, 3.0)  # squares, their sum, a division
SCALE = Cost(2.0, 1.0)  # or a sum with a scalar


def _in_block(config: NormlabConfig) -> list[tuple[int, Cost]]:
    """(channels, cost) of what a scheme adds inside attention and MLP."""
    branches, inner, width = get_scheme(config.scheme).branches, config.intermediate_size, config.hidden_size
    heads, groups = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    size = config.head_dim or width // heads
    queries, keys = size * heads, size * groups
    parts = (
        ((config.qk_norm or "none").startswith("rms"), queries + keys, NORM),
        (branches.value_norm, keys, NORM),
        (branches.output_norm, queries + inner, NORM),
        (branches.spherical, queries + keys, UNIT),
        (branches.spherical, queries + 2 * inner, SCALE),
        (branches.shifted, 2 * width + queries + 2 * inner, SCALE),
    )
    return [(channels, cost) for is_there, channels, cost in parts if is_there]


def _at_ends(config: NormlabConfig) -> list[tuple[int, Cost]]:
    """(channels, cost) of what a scheme adds at embeddings and logits."""
    ends, width = get_scheme(config.scheme).ends, config.hidden_size
    parts = (
        (ends.embedding_scale is not None, width, SCALE),
        (ends.unit_embeddings or ends.normalized_embeddings, width, UNIT),
        (ends.unit_embeddings, width, SCALE),
        (ends.projection, 2 * width, Cost(2.0, 2.0 * width)),
        (ends.head_shift, width, SCALE),
        (ends.logit_scale or ends.logit_factor is not None, config.vocab_size, SCALE),
    )
    return [(channels, cost) for is_there, channels, cost in parts if is_there]
