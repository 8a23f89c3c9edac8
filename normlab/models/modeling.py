"""NormlabForCausalLM: Hugging Face Llama whose blocks take their norms from a scheme.

Attention, rotary embedding, MLP, KV cache, masks, loss and generation are transformers' own. Ours is the block: where
the norms sit, and the mean square that BHyT carries from the attention site to the MLP site.
"""

from __future__ import annotations

from typing import Any

import normlab_kernels as nk
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

from normlab.errors import NormlabError
from normlab.models.configuration import NormlabConfig
from normlab.norms import Norm
from normlab.schemes import NormSite, get_scheme

KERNELS = ("auto", "triton", "torch")


def _watched(module: nn.Module) -> bool:
    """Whether a hook would miss what a fused kernel does inside this module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _adds(norm: Any, x: Tensor) -> bool:
    """Whether the norm's kernel takes the addition before it along: kernels compute the norm, and nobody watches it."""
    return isinstance(norm, Norm) and nk.chooses_kernels(x, norm.kernels) and not _watched(norm)


def _note_state_prefix(block: NormlabDecoderLayer, state_dict: dict[str, Tensor], prefix: str, *unused) -> None:
    block.state_prefix = prefix


@torch.no_grad()
def _complete_constant(block: NormlabDecoderLayer, incompatible_keys) -> None:
    """After ``load_state_dict`` of any module around the block: weights without c are complete, c follows from them."""
    key = f"{block.state_prefix}c_attn"
    if key in incompatible_keys.missing_keys:
        block.c_attn = block.attention_variance_constant()
        incompatible_keys.missing_keys.remove(key)


def is_folded(model: Any) -> bool:
    """Whether the norms' gains were multiplied into the matrices (`fold_norms`), here or before the model was saved."""
    return bool(getattr(getattr(model, "config", None), "norms_folded", False))


def refuse_folded_training(model: nn.Module, *unused) -> None:
    """Forward pre-hook of a folded model."""
    if model.training:
        raise NormlabError("the norms are folded into the matrices, for inference: unfold() before training, or eval()")


class NormlabDecoderLayer(GradientCheckpointingLayer):
    """One block: h = sum(x + out(attn(in(x)))), then the same with the MLP; absent norms are the identity.

    With a carried statistic the MLP norm divides by sqrt(ms + c lambda_in^2/kappa^2 + eps), ms being the attention
    norm's mean square: no second reduction. c = ||W_V W_O||_F^2 / (T d) is the persistent float32 buffer ``c_attn``;
    it and lambda are constants there, ms is not: its gradient reaches the block's input.

    Where kernels compute the norms, a sum and the norm that reads it are one kernel, with the bits of two. A norm with
    hooks is run by itself.
    """

    c_attn: Tensor
    state_prefix: str

    def __init__(
        self, config: NormlabConfig, layer_idx: int, attention: nn.Module | None = None, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        scheme = get_scheme(config.scheme)
        self.self_attn: Any = attention or LlamaAttention(config=config, layer_idx=layer_idx)
        self.mlp: Any = mlp or LlamaMLP(config)
        if scheme.residual_init is not None:
            residual_linears: list[Any] = [self.self_attn.o_proj, self.mlp.down_proj]
            for linear in residual_linears:
                linear.init_std = config.initializer_range * scheme.residual_init(config.num_hidden_layers)
        self.layout = scheme.layout_at(layer_idx + 1, config.num_hidden_layers, config.post_fraction)
        for place, name in self.layout.places():
            self.add_module(name, scheme.norm(NormSite(place, layer_idx + 1, config)))
        self.carried = config.carried if scheme.carried and config.carried != "exact" else None
        self.train_seq_len = config.train_seq_len or config.max_position_embeddings
        if self.carried:
            self.register_buffer("c_attn", torch.zeros((), dtype=torch.float32))
            self.register_load_state_dict_pre_hook(_note_state_prefix)
            self.register_load_state_dict_post_hook(_complete_constant)

    def _apply(self, fn, recurse: bool = True):
        """Moves as any module, but keeps c in float32 when a model is cast to half precision."""
        before = self._buffers.get("c_attn")
        super()._apply(fn, recurse)
        after = self._buffers.get("c_attn")
        if before is not None and after is not None and after.dtype != torch.float32:
            self._buffers["c_attn"] = before.to(after.device)
        return self

    @torch.no_grad()
    def attention_variance_constant(self) -> Tensor:
        """c = ||W_V W_O||_F^2 / (T d), in float32, W_V's heads repeated to match the query heads; a scalar tensor.

        Times the variance of the attention's input it is the variance that attention adds to the residual stream when
        every position averages T independent tokens (2601.09719).
        """
        attention = self.self_attn
        value = attention.v_proj.weight.float()
        per_head = value.view(-1, attention.head_dim, value.shape[-1])
        value = per_head.repeat_interleave(attention.num_key_value_groups, dim=0).flatten(0, 1)
        with torch.autocast(value.device.type, enabled=False):  # float32 inside a mixed-precision step, too
            product = attention.o_proj.weight.float() @ value
        return product.square().sum() / (self.train_seq_len * value.shape[-1])

    def norm_at(self, place: str) -> Any:
        """The norm at a place of the layout, or None."""
        name = getattr(self.layout, place)
        return getattr(self, name) if name else None

    def _normalize(self, place: str, x: Tensor) -> Tensor:
        norm = self.norm_at(place)
        return x if norm is None else norm(x)

    def _add(self, place: str, branch: Tensor, residual: Tensor, **statistic: Tensor) -> tuple[Tensor, Tensor]:
        """s = residual + branch, and the norm at ``place`` of s (s itself where there is none)."""
        norm = self.norm_at(place)
        if _adds(norm, residual):
            return norm.add(branch, residual, **statistic)
        s = residual + branch
        return s, s if norm is None else norm(s, **statistic)

    def carried_mean_square(self, mean_square: Tensor, position_ids: Tensor | None) -> Tensor:
        """ms + c (lambda_in/kappa)^2, times T/(t+1) at position t when carried="causal"; (batch, tokens, 1),
        float32."""
        norm = self.norm_at("attn_in")
        correction = self.c_attn * norm.slope.detach().square()
        if self.carried == "causal":
            if position_ids is None:
                raise NormlabError('carried="causal" needs the tokens\' positions: pass position_ids to the block')
            correction = correction * self.train_seq_len / (position_ids[..., None] + 1)
        return mean_square + correction

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs,
    ) -> Tensor:
        residual = hidden_states
        statistic: dict[str, Tensor] = {}
        if self.carried:
            hidden_states, mean_square = self.norm_at("attn_in")(hidden_states, return_mean_square=True)
            statistic["mean_square"] = self.carried_mean_square(mean_square, position_ids)
        else:
            hidden_states = self._normalize("attn_in", hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = self._normalize("attn_out", hidden_states)
        if self.layout.attn_sum:
            residual = self._add("attn_sum", hidden_states, residual)[1]
            hidden_states = self._normalize("mlp_in", residual)
        else:
            residual, hidden_states = self._add("mlp_in", hidden_states, residual, **statistic)
        hidden_states = self.mlp(hidden_states)
        return self._add("mlp_sum", self._normalize("mlp_out", hidden_states), residual)[1]


class NormlabPreTrainedModel(LlamaPreTrainedModel):
    config: NormlabConfig
    config_class = NormlabConfig
    _no_split_modules = ["NormlabDecoderLayer"]
    _can_record_outputs = {"hidden_states": NormlabDecoderLayer, "attentions": LlamaAttention}
    _keys_to_ignore_on_load_missing = [r"(^|\.)c_attn$"]  # computed from the weights, so nothing to warn of

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        if isinstance(module, Norm):
            module.reset_parameters()
        elif isinstance(module, NormlabDecoderLayer):
            if module.carried:  # called after the block's matrices have their weights, whether drawn or loaded
                nn.init.constant_(module.c_attn, module.attention_variance_constant().item())
        elif isinstance(module, NormlabModel):
            if module.shared_scale is not None:
                nn.init.constant_(module.shared_scale, module.initial_scale)
        elif (std := getattr(module, "init_std", None)) is not None:
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)


class NormlabModel(NormlabPreTrainedModel, LlamaModel):
    """LlamaModel with the scheme's blocks, final norm and, where the scheme has one, learnable embedding scale."""

    def __init__(self, config: NormlabConfig) -> None:
        NormlabPreTrainedModel.__init__(self, config)
        scheme = get_scheme(config.scheme)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(NormlabDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm: Any = scheme.norm(NormSite("final", config.num_hidden_layers + 1, config))
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.shared_scale = None
        if scheme.embedding_scale is not None:
            self.initial_scale = scheme.embedding_scale(config.hidden_size)
            self.shared_scale = nn.Parameter(torch.full((1,), self.initial_scale))
        self.counts_positions = scheme.carries_statistic and config.carried == "causal"
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs,
    ):
        if self.shared_scale is not None:
            if inputs_embeds is None:
                inputs_embeds, input_ids = self.embed_tokens(input_ids), None
            inputs_embeds = inputs_embeds * self.shared_scale  # given ones too: they stand for embed_tokens' output
        if position_ids is None and self.counts_positions and attention_mask is not None:
            given: Any = input_ids if inputs_embeds is None else inputs_embeds
            if attention_mask.dim() == 2:  # a padded row's first token is at position 0, wherever it stands
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
        return LlamaModel.forward(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class NormlabForCausalLM(NormlabPreTrainedModel, LlamaForCausalLM):
    """A causal language model under any scheme of ``normlab.SCHEMES``.

    >>> model = NormlabForCausalLM(NormlabConfig(scheme="bhyt", hidden_size=128, num_hidden_layers=16))

    Parameter names are Llama's. ``pre_rmsnorm`` gives stock Llama's logits bit for bit with the same weights. Weights
    that lack BHyT's ``c_attn`` (released checkpoints, plain Llama) load as they are, and c is computed from them.

    Args:
        config: the model and its scheme.
        kernels: what computes the norms, also an argument of ``from_pretrained`` and never saved: "auto" (Triton on
            CUDA, PyTorch elsewhere), "triton" (an error where it cannot run), "torch" (PyTorch, rounding as Llama
            does).
    """

    def __init__(self, config: NormlabConfig, kernels: str = "auto") -> None:
        if kernels not in KERNELS:
            raise NormlabError(f"kernels is {kernels!r}: choose one of {', '.join(KERNELS)}")
        NormlabPreTrainedModel.__init__(self, config)
        self.model = NormlabModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, Norm):
                module.kernels = kernels
        if is_folded(self):
            self.register_forward_pre_hook(refuse_folded_training)
        self.post_init()

    @classmethod
    def from_released(cls, path: str, scheme: str | None = None, **kwargs) -> NormlabForCausalLM:
        """Load a released BHyT, LNS or Mix-LN checkpoint, mapping its configuration (``NormlabConfig.from_released``).

        Args:
            path: folder or hub name.
            scheme: needed when the configuration does not say (LNS, Mix-LN).
            kwargs: as for ``from_pretrained``.
        """
        released, _ = NormlabConfig.get_config_dict(path)
        return cls.from_pretrained(path, config=NormlabConfig.from_released(released, scheme), **kwargs)

    def refresh_carried(self) -> None:
        """Recompute BHyT's c from the present weights in every block that carries a statistic; elsewhere do nothing."""
        refresh_carried(self)

    def decay_parameter_names(self) -> list[str]:
        """Names of the parameters that weight decay acts on: every matrix, and what the scheme adds in ``decayed``."""
        decayed = get_scheme(self.config.scheme).decayed
        exempt = {
            f"{path}.{name}"
            for path, module in self.named_modules()
            if isinstance(module, Norm)
            for name, _ in module.named_parameters(recurse=False)
            if name not in decayed
        }
        if "shared_scale" not in decayed:
            exempt.add("model.shared_scale")
        exempt |= {name for name, _ in self.named_parameters() if name.endswith(".bias")}
        return [name for name, _ in self.named_parameters() if name not in exempt]


@torch.no_grad()
def refresh_carried(model: nn.Module) -> None:
    """``NormlabForCausalLM.refresh_carried`` for any model that holds our blocks, e.g. one made by ``swap_norms``."""
    if is_folded(model):
        raise NormlabError("refresh_carried: the norms are folded into the matrices c is made of: unfold() first")
    for module in model.modules():
        if isinstance(module, NormlabDecoderLayer) and module.carried:
            module.c_attn.copy_(module.attention_variance_constant())
