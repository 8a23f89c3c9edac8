"""Attention in training steps: PyTorch's, but where another form of the same is faster.

A step's blocks are whole, without padding, so that attention is causal and needs no mask. Under torch.compile
transformers builds one all the same. In half precision on a CPU a step's attention has its scores in float32, by
PyTorch's own. A compiled step in bfloat16 has them by `CausalAttention`, if its blocks are short.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

CAUSAL = "sdpa_causal"
CAUSAL_HALF_CPU = "sdpa_float32"
# Longer blocks stay with PyTorch's, which keeps no square of weights.
LONGEST_SQUARE = 256


def use_fast_attention(model: Any, dtype: str, device: torch.device) -> None:
    """Choose the attention of a model that trains on `device` with autocast to `dtype`."""
    half_cpu = dtype != "float32" and device.type == "cpu"
    name, attend = (CAUSAL_HALF_CPU, _attend_half_cpu) if half_cpu else (CAUSAL, sdpa_attention_forward)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _mask)
    model.set_attn_implementation(name)


def _mask(q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask where attention is causal. transformers cannot tell while compiling, as positions have no values then.

    A static cache has more keys than there are queries, of which some are not written yet.
    """
    if attention_mask is None and torch.compiler.is_compiling() and q_length == kv_length:
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)


def _attend_half_cpu(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with scores in float32. Its output is rounded all the same.

    PyTorch's backward of it takes six times as long in bfloat16. For 8 x 4 heads x 128 x 32 on one core it is 14.6
    against 2.2 ms.
    """
    with torch.autocast(query.device.type, enabled=False):
        causal = attention_mask is None and query.shape[2] == key.shape[2] and scaling is not None and not dropout
        short = key.shape[2] <= LONGEST_SQUARE and value.dtype == torch.bfloat16
        if torch.compiler.is_compiling() and causal and short:
            return CausalAttention.apply(query, key, value, scaling).transpose(1, 2).contiguous(), None
        out, weights = sdpa_attention_forward(
            module,
            query.float(),
            key.float(),
            value.float(),
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
    return out.to(query.dtype), weights


class CausalAttention(torch.autograd.Function):
    """``softmax(s q k^T) v`` over keys up to the query's own.

    Scores and softmax are float32. The weights, and all products of the backward pass, are rounded to v's dtype, the
    gradient of the weights too. PyTorch's kernel for a CPU either rounds nothing or is slow.

    Shapes: q ``(batch, heads, tokens, d_head)``; k and v ``(batch, kv_heads, tokens, d_head)``; the result is q's.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        tokens, dtype = query.shape[2], value.dtype
        grouped = (query.shape[1] // key.shape[1], tokens)  # of the queries that share a key
        query = query.reshape(*key.shape[:2], -1, key.shape[3])
        scores = (query.float() @ key.float().transpose(2, 3) * scaling).unflatten(2, grouped)
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).flatten(2, 3).to(dtype)
        ctx.save_for_backward(query.to(dtype), key.to(dtype), value, weights)
        ctx.scaling, ctx.grouped, ctx.dtype = scaling, grouped, query.dtype
        return (weights @ value).unflatten(2, grouped).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, weights = ctx.saved_tensors
        out = gradients[0].reshape(query.shape)
        through_weights = (out @ value.transpose(2, 3)).float() * weights
        scores = (through_weights - weights * through_weights.sum(-1, keepdim=True)) * ctx.scaling
        scores = scores.to(value.dtype)
        of_query = (scores @ key).unflatten(2, ctx.grouped).flatten(1, 2)
        of_key = scores.transpose(2, 3) @ query
        return of_query.to(ctx.dtype), of_key.to(ctx.dtype), weights.transpose(2, 3) @ out, None
