"""Attention and MLP of the schemes that change them. All others use transformers'."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from normlab.norms import RMSNorm
from normlab.norms.base import ConstantStart
from normlab.residuals import unit_length
from normlab.schemes import centred, get_scheme
from normlab.schemes.start import own_draws


def _rms_norm(config: Any, width: int) -> RMSNorm:
    return centred(RMSNorm(width, config.rms_norm_eps), config)


class NormedAttention(ConstantStart, LlamaAttention):
    """Llama's attention with norms on queries, keys, values or the heads' output, nGPT's scales, or affine weights.

    qk_norm: RMSNorm of q and k before the rotary embedding. "rms_width" is over all heads, "rms_head" over each. The
    names are those of OLMo 2 and Qwen 3. "l2" (2010.04245) is q.k of unit vectors times a learned g per head. It
    replaces 1/sqrt(d_head) and starts at log2(T^2 - T) for T = ``train_seq_len``.

    value_norm: RMSNorm of each head's values (``v_norm``). output_norm: RMSNorm of all heads before o_proj
    (``o_norm``).

    affine_attention (2602.23057): weights ``a P + (m - a)/n`` instead of P, for a query that sees n keys. Per head
    ``a = clip(0.1 W x + 0.5, 0, 1)`` with W = ``affine_gate``. The running mean m = ``affine_mean`` is of a over this
    rank's steps, from 0 with momentum 0.9. Only keys that the mask leaves count in n. So the second term is a mean of
    the values seen, which attention with zero queries gives under any mask. Probes measure P, not the weights used.
    W is drawn from a stream of its place's own. So other weights do not change.

    shifted (1901.09321): scalars ``shift`` ``(2,)`` from 0, added to the inputs of q, k and v and of o_proj.

    spherical (2410.01131): unit q and k, each times s = ``qk_scale`` per channel. The scores are times sqrt(d_head).
    Only s^2 enters, so q takes it, and keys that heads share stay as they are.
    """

    affine_mean: Tensor
    affine_seen: Tensor
    qk_scale: nn.Parameter
    shift: nn.Parameter

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config=config, layer_idx=layer_idx)
        branches = get_scheme(config.scheme).branches
        heads, kv_heads, norm = config.num_attention_heads, config.num_key_value_heads, partial(_rms_norm, config)
        self.kind = config.qk_norm
        self.spherical, self.shifted = branches.spherical, branches.shifted
        self.unit = self.kind == "l2" or self.spherical
        if self.kind.startswith("rms"):
            whole = self.kind == "rms_width"
            self.q_norm = norm(self.head_dim * (heads if whole else 1))
            self.k_norm = norm(self.head_dim * (kv_heads if whole else 1))
        self.v_norm = norm(self.head_dim) if branches.value_norm else None
        self.o_norm = norm(heads * self.head_dim) if branches.output_norm else None
        if self.shifted:
            self.add_parameter("shift", 2, 0.0)
        if self.unit:
            length = max(config.train_seq_len, 2)
            self.initial_scale = config.hidden_size**-0.5 if self.spherical else math.log2(length**2 - length)
            self.add_parameter("qk_scale", heads * (self.head_dim if self.spherical else 1), self.initial_scale)
            self.scaling = math.sqrt(self.head_dim) if self.spherical else 1.0
        if config.affine_attention:
            place = f"{layer_idx + 1}.affine_gate"
            with own_draws(place):
                self.affine_gate = nn.Linear(config.hidden_size, heads, bias=False)
            self.affine_gate.draws_at = place  # type: ignore[assignment]
            self.add_buffer("affine_mean", heads, 0.0)
            self.add_buffer("affine_seen", heads + 1, 0.0, persistent=False)  # sums, and the number of passes

    def at_step(self, step: int, total: int) -> None:
        """Update the running mean with the training passes since the last step."""
        if self.config.affine_attention and self.affine_seen[-1] > 0:
            self.affine_mean.lerp_(self.affine_seen[:-1] / self.affine_seen[-1], 0.1)
            self.affine_seen.zero_()

    def _affine(self, x: Tensor, mixed: Tensor, uniform: Tensor) -> Tensor:
        """``a P V + (m - a) mean(V)`` from P V and mean(V), each ``(batch, tokens, heads, d_head)``."""
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

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        older = kwargs.pop("past_key_values", None)  # the name before transformers 5.24
        cache = kwargs.pop("cache", older)
        shape = hidden_states.shape[:-1]
        if self.shifted:
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
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        mixed, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        if self.config.affine_attention:
            # A compiler's function modes are its own; others, such as a probe's, would take it for attention.
            with nullcontext() if torch.compiler.is_compiling() else torch._C.DisableTorchFunction():
                zeros = torch.zeros_like(query)
                uniform, _ = attend(self, zeros, key, value, attention_mask, dropout=0.0, scaling=1.0, **kwargs)
            mixed = self._affine(hidden_states, mixed, uniform)
        mixed = mixed.reshape(*shape, -1).contiguous()
        if self.shifted:
            mixed = mixed + self.shift[1]
        return self.o_proj(mixed if self.o_norm is None else self.o_norm(mixed)), weights


class NormedMLP(ConstantStart, LlamaMLP):
    """Llama's MLP with one of three changes.

    output_norm: RMSNorm before down_proj (``norm``).

    spherical: nGPT's scales. gate and up are times s sqrt(d), with s = ``scale`` per channel, from 1.

    shifted: Fixup's scalars ``shift`` ``(3,)``, from 0. They are added to the inputs of gate_proj and up_proj, of the
    activation and of down_proj.
    """

    scale: nn.Parameter
    shift: nn.Parameter

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        branches = get_scheme(config.scheme).branches
        self.spherical, self.shifted = branches.spherical, branches.shifted
        self.norm = _rms_norm(config, config.intermediate_size) if branches.output_norm else None
        if self.spherical:
            self.add_parameter("scale", 2 * config.intermediate_size, 1.0)
        if self.shifted:
            self.add_parameter("shift", 3, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.shifted:
            x = x + self.shift[0]
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.spherical:
            gate_scale, up_scale = (self.scale * self.hidden_size**0.5).chunk(2)
            gate, up = gate_scale * gate, up_scale * up
        if self.shifted:
            gate = gate + self.shift[1]
        inner = self.act_fn(gate) * up
        if self.shifted:
            inner = inner + self.shift[2]
        return self.down_proj(inner if self.norm is None else self.norm(inner))


class RotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's. A compiled training step on a CPU computes it once, for all heads and blocks.

    The compiler would evaluate cos and sin wherever they rotate something, in each block, forward and backward.
    """

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        in_step = self.training and torch.compiler.is_compiling() and x.device.type == "cpu"
        if in_step and self.rope_type == "default":
            return rotary_table(position_ids, self.inv_freq, self.attention_scaling, x.dtype)
        return super().forward(x, position_ids)


@torch.library.custom_op("normlab::rotary_table", mutates_args=())
def rotary_table(
    position_ids: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of LlamaRotaryEmbedding, ``(batch, tokens, d_head)``, as an operation that is not taken apart."""
    angles = (position_ids[..., None].float() * inv_freq.float()).repeat(1, 1, 2)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


@rotary_table.register_fake
def _(position_ids: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos = inv_freq.new_empty((*position_ids.shape, 2 * len(inv_freq)), dtype=dtype)
    return cos, torch.empty_like(cos)


def changes_attention(config: Any) -> bool:
    """True if attention is not Llama's."""
    branches = get_scheme(config.scheme).branches
    return config.qk_norm != "none" or config.affine_attention or branches.value_norm or changes_mlp(config)


def changes_mlp(config: Any) -> bool:
    """True if the MLP is not Llama's. Attention changes too then."""
    branches = get_scheme(config.scheme).branches
    return branches.output_norm or branches.spherical or branches.shifted
