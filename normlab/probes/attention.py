"""Attention scores of any implementation: watch the calls of scaled_dot_product_attention and softmax inside a block.

Fused attention never materialises its scores, so they are recomputed from the query and key it is called with, in
chunks of queries; explicit attention is read at its softmax. The watched call itself is not altered.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

SCORE_CHUNK = 1 << 19  # 2 MiB of float32 scores at a time: they stay in cache between passes
NOTHING = -80.0  # e^-80 is nothing beside 1, and unlike e^-inf it can be multiplied by its exponent
_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)


class AttentionWatch(TorchFunctionMode):
    """While active, keeps the statistics of the first attention call: `found` is (2, batch x queries), or None."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Tensor | None = None
        self.shape: tuple[int, int] = (0, 0)  # batch, queries

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.found is None and func is functional.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            if query.ndim == 4:
                self.found = _without_autocast(_from_query_and_key, *args, **kwargs)
                self.shape = (query.shape[0], query.shape[2])
        elif self.found is None and func in _SOFTMAX:
            scores = args[0] if args else kwargs.get("input")
            over = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if isinstance(scores, Tensor) and scores.ndim == 4 and over in (-1, 3):
                self.found = _without_autocast(_from_scores, scores)
                self.shape = (scores.shape[0], scores.shape[2])
        return func(*args, **kwargs)


def _without_autocast(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    device = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)).device.type
    with torch.no_grad(), torch.autocast(device, enabled=False):
        return function(*args, **kwargs)


def _from_query_and_key(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The statistics from the arguments of `scaled_dot_product_attention`, (batch, heads, tokens, d_head) each."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    keys, transposed = key.shape[-2], key.float().transpose(-1, -2)
    step = max(1, SCORE_CHUNK // (query.shape[0] * query.shape[1] * keys))
    pieces = []
    for start in range(0, query.shape[-2], step):
        rows = query[..., start : start + step, :]
        seen = min(keys, start + rows.shape[-2]) if is_causal else keys  # later keys are hidden from these queries
        scores = (rows.float() * scale) @ transposed[..., :seen]
        if is_causal:
            positions = torch.arange(start, start + rows.shape[-2], device=query.device)
            scores.masked_fill_(positions[:, None] < torch.arange(seen, device=query.device), -torch.inf)
        if attn_mask is not None:
            mask = attn_mask[..., start : start + step, :seen] if attn_mask.shape[-2] > 1 else attn_mask[..., :seen]
            scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask.float())
        pieces.append(_row_statistics(scores))
    return torch.cat(pieces, dim=-1).flatten(1)


def _from_scores(scores: Tensor) -> Tensor:
    return _row_statistics(scores.float()).flatten(1)


def _row_statistics(scores: Tensor) -> Tensor:
    """(2, batch, queries): the largest score over heads and keys, and the entropy (nats) averaged over heads.

    With t = s - max s: entropy = log(sum e^t) - sum(t e^t) / sum(e^t), one exponential and no logarithm a score.
    """
    largest = scores.amax(dim=-1)
    shifted = (scores - largest[..., None]).clamp_(min=NOTHING)
    weight = shifted.exp()
    total = weight.sum(-1)
    entropy = total.log() - torch.linalg.vecdot(weight, shifted) / total
    return torch.stack([largest.amax(1), entropy.mean(1)])
