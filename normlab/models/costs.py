"""The cost of each scheme's norms and residual rules, counted, and the speed of generation, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from normlab.models.config import NormlabConfig
from normlab.residuals import Residual
from normlab.schemes import PARTS, SCHEMES, NormSite, Scheme, Sublayer

if TYPE_CHECKING:
    import pandas

GENERATION_ROUNDS = 6
BYTES = 2  # of a number in bfloat16
REDUCTION = 2.0  # squares and their sum, which a carried statistic saves


def table(width: int = 1024, depth: int = 16) -> pandas.DataFrame:
    """Return every scheme with its cost at a width and depth, counted from the formulas.

    Returns:
        One row per scheme: `name family formula paper parameters bytes operations`. `parameters` counts the trained
        numbers of norms and residual rules; attention, MLP, embeddings and head are left out. `bytes` and `operations`
        are per token and forward pass. They count what these norms and sums read and write in bfloat16, and compute,
        each run by itself.
    """
    import pandas

    rows = [
        {"name": scheme.name, "family": scheme.family, "formula": scheme.formula, "paper": scheme.paper}
        | _costs(scheme, width, depth)
        for scheme in SCHEMES.values()
    ]
    return pandas.DataFrame(rows)


def _costs(scheme: Scheme, width: int, depth: int) -> dict[str, int]:
    config = NormlabConfig(
        scheme=scheme.name, hidden_size=width, num_hidden_layers=depth, num_attention_heads=1, head_dim=2
    )
    layers = range(1, depth + 1)
    with torch.device("meta"):
        norms = [
            scheme.norm_at(NormSite(place, layer, config))
            for layer in layers
            for place, _ in scheme.layout_at(layer, config).places()
        ]
        norms.append(scheme.norm_at(NormSite("final", depth + 1, config)))
        rule = scheme.residual or (lambda sublayer: Residual())
        rules = [[rule(Sublayer(part, layer, config)) for layer in layers] for part in PARTS]
        if scheme.shares_residual:
            rules[1] = rules[0]
        leave = [] if scheme.leave is None else [scheme.leave(config)]
    modules: list[Any] = [*norms, *rules[0], *rules[1], *leave]
    saved = REDUCTION * depth if scheme.carries_statistic else 0.0
    return {
        "parameters": sum(p.numel() for module in set(modules) for p in module.parameters()),
        "bytes": round(sum(module.numbers for module in modules) * width * BYTES),
        "operations": round((sum(module.operations for module in modules) - saved) * width),
    }


def generation_speed(models: Mapping[str, Any], prompt: torch.Tensor, new_tokens: int = 24) -> pandas.DataFrame:
    """Tokens per second in greedy decoding with a KV cache, and the speed over the first model's.

    The models take turns, so that a machine that slows down slows all. A first round warms up and does not count.

    Args:
        models: by name, in evaluation mode; the first is the base.
        prompt: (rows, tokens) ids.

    Returns:
        One row per model: `model tokens_per_second speedup slowest fastest`. speedup is the median over rounds of the
        base's time over the model's; slowest and fastest are the extreme rounds.
    """
    import pandas

    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(1 + GENERATION_ROUNDS):
        for name, model in models.items():
            started = time.perf_counter()
            with torch.no_grad():
                model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
            seconds[name].append(time.perf_counter() - started)
    base = next(iter(seconds.values()))[1:]
    rows = []
    for name, (_, *times) in seconds.items():
        ratios = [first / mine for first, mine in zip(base, times, strict=True)]
        speed = len(prompt) * new_tokens / statistics.median(times)
        rows.append((name, speed, statistics.median(ratios), min(ratios), max(ratios)))
    return pandas.DataFrame(rows, columns=["model", "tokens_per_second", "speedup", "slowest", "fastest"])
