"""Attention and MLP of the schemes that change them from within; all others have transformers' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from normlab.norms import RMSNorm
from normlab.residuals.base import unit_length
from normlab.schemes import centred, get_scheme


def _rms_norm(config: Any, width: int) -> RMSNorm:
    return centred(RMSNorm(width, config.rms_norm_eps), config)


class NormedAttention(LlamaAttention):
    """Llama's attention with norms on queries, keys, values or the heads' output, nGPT's scales, and affine weights.

    - qk_norm "rms_width": RMSNorm over all heads of q and k; "rms_head": of each head; both before the rotary
      embedding, under the names of OLMo 2 and Qwen 3. "l2" (2010.04245): q.k of unit vectors times a learned g of each
      head, from log2(T^2 - T) for T = ``train_seq_len``, in place of 1/sqrt(d_head).
    - value_norm, output_norm: RMSNorm of each head's values (``v_norm``), of all heads before o_proj (``o_norm``).
    - affine_attention (2602.23057): weights a P + (m - a)/n in place of P, for a query that sees n keys. a = clip(0.1 W
      x + 0.5, 0, 1) of each head, W = ``affine_gate``; m = ``affine_mean`` is the running mean of a over the steps,
      from 0, momentum 0.9 (``at_step``; of this rank). n is read as the keys that the mask leaves: the second term is
      then a mean of the values seen, which attention with zero queries gives under any mask.
    - shifted (1901.09321): scalars, ``shift`` (2,) from 0, are added to what q, k and v and to what o_proj read.
    - spherical (2410.01131): unit q and k, each times s = ``qk_scale`` a channel, and the scores times sqrt(d_head).
      Only s^2 enters, so q takes it and keys that heads share stay what they are.
    """

    affine_mean: Tensor
    affine_seen: Tensor

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config=config, layer_idx=layer_idx)
        own = get_scheme(config.scheme).branches
        heads, kv_heads, norm = config.num_attention_heads, config.num_key_value_heads, partial(_rms_norm, config)
        self.kind = config.qk_norm
        self.unit = self.kind == "l2" or own.spherical
        if self.kind.startswith("rms"):
            whole = self.kind == "rms_width"
            self.q_norm = norm(self.head_dim * (heads if whole else 1))
            self.k_norm = norm(self.head_dim * (kv_heads if whole else 1))
        self.v_norm = norm(self.head_dim) if own.value_norm else None
        self.o_norm = norm(heads * self.head_dim) if own.output_norm else None
        self.spherical = own.spherical
        self.shift = nn.Parameter(torch.empty(2)) if own.shifted else None
        if self.unit:
            self.qk_scale = nn.Parameter(torch.empty(heads, self.head_dim if own.spherical else 1).flatten())
            self.scaling = math.sqrt(self.head_dim) if own.spherical else 1.0
        if config.affine_attention:
            self.affine_gate = nn.Linear(config.hidden_size, heads, bias=False)
            self.register_buffer("affine_mean", torch.empty(heads))
            self.register_buffer("affine_seen", torch.empty(heads + 1), persistent=False)  # sums, and how many
        length = max(config.train_seq_len, 2)
        self.initial_scale = config.hidden_size**-0.5 if own.spherical else math.log2(length**2 - length)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starting values of what the norms do not hold."""
        if self.shift is not None:
            nn.init.zeros_(self.shift)
        if self.unit:
            nn.init.constant_(self.qk_scale, self.initial_scale)
        if self.config.affine_attention:
            nn.init.zeros_(self.affine_mean)
            nn.init.zeros_(self.affine_seen)

    def at_step(self, step: int, total: int) -> None:
        """As of a norm: takes in what the training passes since the last step saw."""
        if self.config.affine_attention and self.affine_seen[-1] > 0:
            self.affine_mean.lerp_(self.affine_seen[:-1] / self.affine_seen[-1], 0.1)
            self.affine_seen.zero_()

    def _affine(self, x: Tensor, mixed: Tensor, uniform: Tensor) -> Tensor:
        """a P V + (m - a) mean(V) from P V and mean(V), each (batch, tokens, heads, d_head)."""
        a = (0.1 * self.affine_gate(x) + 0.5).clamp(0, 1)
        if self.training:
            with torch.no_grad():
                mean = a.flatten(0, -2).float().mean(0)
                self.affine_seen.add_(torch.cat([mean, mean.new_ones(1)]).to(self.affine_seen.dtype))
        m = self.affine_mean.to(a.dtype)
        return a[..., None] * mixed + (m - a)[..., None] * uniform

    def _unit_scaled(self, query: Tensor) -> Tensor:
        scale = self.qk_scale.view(self.config.num_attention_heads, 1, -1)
        if self.spherical:
            scale = (scale / self.initial_scale).square()
        return unit_length(query) * scale

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shape = hidden_states.shape[:-1]
        if self.shift is not None:
            hidden_states = hidden_states + self.shift[0]
        query, key, value = (projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.kind == "rms_width":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.view(*shape, -1, self.head_dim) for part in (query, key, value))
        if self.kind == "rms_head":
            query, key = self.q_norm(query), self.k_norm(key)
        if self.v_norm is not None:
            value = self.v_norm(value)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        assert position_embeddings is not None
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if self.unit:
            query, key = self._unit_scaled(query), unit_length(key)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        mixed, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        if self.config.affine_attention:
            nothing = torch.zeros_like(query)
            uniform, _ = attend(self, nothing, key, value, attention_mask, dropout=0.0, scaling=1.0, **kwargs)
            mixed = self._affine(hidden_states, mixed, uniform)
        mixed = mixed.reshape(*shape, -1).contiguous()
        if self.shift is not None:
            mixed = mixed + self.shift[1]
        return self.o_proj(mixed if self.o_norm is None else self.o_norm(mixed)), weights


class NormedMLP(LlamaMLP):
    """Llama's MLP with an RMSNorm before down_proj (``norm``); or with nGPT's scales: gate and up times s sqrt(d),
    s = ``scale`` a channel of each, from 1; or with Fixup's ``shift`` (3,), from 0: scalars added to what
    gate_proj and up_proj, the activation and down_proj read."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own = get_scheme(config.scheme).branches
        self.norm = _rms_norm(config, config.intermediate_size) if own.output_norm else None
        self.scale = nn.Parameter(torch.empty(2 * config.intermediate_size)) if own.spherical else None
        self.shift = nn.Parameter(torch.empty(3)) if own.shifted else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starting values of what the norm does not hold."""
        if self.scale is not None:
            nn.init.ones_(self.scale)
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        if self.shift is not None:
            x = x + self.shift[0]
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.scale is not None:
            gate_scale, up_scale = (self.scale * self.hidden_size**0.5).chunk(2)
            gate, up = gate_scale * gate, up_scale * up
        if self.shift is not None:
            gate = gate + self.shift[1]
        inner = self.act_fn(gate) * up
        if self.shift is not None:
            inner = inner + self.shift[2]
        return self.down_proj(inner if self.norm is None else self.norm(inner))


def changes_attention(config: Any) -> bool:
    """Whether attention is more than Llama's."""
    own = get_scheme(config.scheme).branches
    inside = own.value_norm or own.output_norm or own.spherical or own.shifted
    return config.qk_norm != "none" or config.affine_attention or inside


def changes_mlp(config: Any) -> bool:
    """Whether the MLP is more than Llama's."""
    own = get_scheme(config.scheme).branches
    return own.output_norm or own.spherical or own.shifted
