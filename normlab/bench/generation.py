"""How fast models write, side by side: greedy decoding with a KV cache, in turns, on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor


def generation(models: Mapping[str, Any], prompt: Tensor, new_tokens: int = 24, rounds: int = 6) -> pd.DataFrame:
    """Tokens a second, and the speed over the first model's, round by round: all in turns, so that a machine that
    slows down slows all.

    Args:
        models: by name, in evaluation mode; the first is the base.
        prompt: (rows, tokens) ids.
        rounds: timed ones; one more goes before them to warm up.

    Returns:
        A row a model: `model tokens_per_second speedup slowest fastest`. speedup is the median of the base's time over
        the model's; slowest and fastest round beside it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, model in models.items():
            started = time.perf_counter()
            with torch.no_grad():
                model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
            seconds[name].append(time.perf_counter() - started)
    base = next(iter(seconds.values()))[1:]
    rows = []
    for name, (_, *times) in seconds.items():
        ratios = [first / own for first, own in zip(base, times, strict=True)]
        speed = len(prompt) * new_tokens / statistics.median(times)
        rows.append((name, speed, statistics.median(ratios), min(ratios), max(ratios)))
    return pd.DataFrame(rows, columns=["model", "tokens_per_second", "speedup", "slowest", "fastest"])
