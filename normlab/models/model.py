"""NormlabForCausalLM: Hugging Face Llama whose blocks take their norms from a scheme.

Attention, rotary embedding, MLP, KV cache, masks, loss and generation are transformers'. Ours is the block
(`normlab.models.block`). A scheme may also change attention and MLP (`attention_mlp`), or embeddings and head
(`embeddings_head`).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaAttention

from normlab.errors import NormlabError, first_line
from normlab.loading import hub_or_cache
from normlab.models.attention_mlp import RotaryEmbedding
from normlab.models.block import FinalNorm, NormlabDecoderLayer, decoder_layer
from normlab.models.config import NormlabConfig
from normlab.models.embeddings_head import EmbeddingEnd, Head, Projection, changes_embeddings, changes_head
from normlab.norms import Norm
from normlab.norms.base import ConstantStart
from normlab.residuals import Residual
from normlab.schemes import CORRECTIONS, NormSite, Rate, get_scheme
from normlab.schemes.start import is_made_anew, own_draws, start_again

KERNELS = ("auto", "triton", "torch")


def is_folded(model: Any) -> bool:
    """True if the norms' gains are multiplied into the matrices (`fold_norms`), here or before the model was saved."""
    return bool(getattr(getattr(model, "config", None), "norms_folded", False))


def refuse_folded_training(model: nn.Module, *unused) -> None:
    """Refuse training mode; a forward pre-hook of a folded model."""
    if model.training:
        raise NormlabError("the norms are folded into the matrices, for inference: unfold() before training, or eval()")


class NormlabPreTrainedModel(LlamaPreTrainedModel):
    config: NormlabConfig
    config_class = NormlabConfig
    _no_split_modules = ["NormlabDecoderLayer", "JoiningDecoderLayer"]
    _can_record_outputs = {"hidden_states": NormlabDecoderLayer, "attentions": LlamaAttention}
    _keys_to_ignore_on_load_missing = [r"(^|\.)c_attn$"]  # computed from the weights, so nothing to warn of

    def _initialize_weights(self, module: Any, is_custom_code: bool = False) -> None:
        # Of custom code transformers leaves out a module whose own tensors are loaded, whatever those inside it lack.
        super()._initialize_weights(module, is_custom_code and not is_made_anew(module))

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        place = getattr(module, "draws_at", None)  # of a matrix that only some models have
        with nullcontext() if place is None else own_draws(place):
            self._start(module)

    def _start(self, module: Any) -> None:
        if getattr(module, "is_inside_placed", False):
            return  # of a norm or residual rule, which gives it its start
        if isinstance(module, Projection):
            module.reset_parameters()
        elif hasattr(module, "start_place"):
            start_again(module)
        elif isinstance(module, ConstantStart):
            module.reset_parameters()
        elif isinstance(module, NormlabDecoderLayer):
            if module.carried:  # called after the block's matrices have their weights, whether drawn or loaded
                init.copy_(module.c_attn, module.attention_variance_constant())
                for name, start in CORRECTIONS[module.correction].items():
                    init.constant_(getattr(module, name), start)
        elif isinstance(module, NormlabModel):
            if module.shared_scale is not None:
                nn.init.constant_(module.shared_scale, module.initial_scale)
        elif (std := getattr(module, "init_std", None)) is not None:
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            # Llama starts the padding token at 0, where norms without a large eps have gradients that overflow.
            init.normal_(module.weight, std=self.config.initializer_range)
        else:
            super()._init_weights(module)
        if isinstance(module, Head):
            module.reset_scale()


class NormlabModel(NormlabPreTrainedModel, LlamaModel):
    """LlamaModel with the scheme's blocks, final norm and embeddings."""

    def __init__(self, config: NormlabConfig) -> None:
        NormlabPreTrainedModel.__init__(self, config)
        scheme = get_scheme(config.scheme)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(decoder_layer(config, index) for index in range(config.num_hidden_layers))
        if scheme.loops:
            first = [name for name, _ in self.layers[0].named_parameters() if name.startswith(("self_attn.", "mlp."))]
            later = range(1, config.num_hidden_layers)
            self._tied_weights_keys = {f"layers.{n}.{name}": f"layers.0.{name}" for n in later for name in first}
        self.norm: Any = scheme.norm_at(NormSite("final", config.num_hidden_layers + 1, config))
        if scheme.leave is not None:
            self.norm = FinalNorm(scheme.leave_at(config), self.norm)
        self.rotary_emb = RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.shared_scale = None
        if scheme.ends.embedding_scale is not None:
            self.initial_scale = scheme.ends.embedding_scale(config.hidden_size)
            self.shared_scale = nn.Parameter(torch.full((1,), self.initial_scale))
        self.embedding_end = EmbeddingEnd(config) if changes_embeddings(config) else None
        # Logits depend on where a row begins: by the statistic, or by scales per channel after the rotation.
        is_causal = scheme.carries_statistic and config.carried == "causal"
        self.counts_positions = is_causal or scheme.branches.spherical
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Parameters that are others, by name. ``tie_word_embeddings`` does not say so of blocks."""
        return super().get_expanded_tied_weights_keys(True) if all_submodels else {**(self._tied_weights_keys or {})}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs,
    ):
        older = kwargs.pop("past_key_values", None)  # the name before transformers 5.24
        cache = older if cache is None else cache
        if (self.shared_scale is not None or self.embedding_end is not None) and (input_ids is None) != (
            inputs_embeds is None
        ):
            embeds: Any = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            input_ids = None
            inputs_embeds = embeds * self.shared_scale if self.embedding_end is None else self.embedding_end(embeds)
        if position_ids is None and self.counts_positions and attention_mask is not None:
            tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
            if attention_mask.dim() == 2:  # a padded row's first token is at position 0, wherever it is
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        return LlamaModel.forward(self, input_ids, attention_mask, position_ids, cache, inputs_embeds, **kwargs)


class NormlabForCausalLM(NormlabPreTrainedModel, LlamaForCausalLM):
    """A causal language model under any scheme of ``normlab.SCHEMES``.

    >>> model = NormlabForCausalLM(NormlabConfig(scheme="bhyt", hidden_size=128, num_hidden_layers=16))

    Parameter names are Llama's. ``pre_rmsnorm`` gives stock Llama's logits bit for bit with the same weights. Weights
    without BHyT's ``c_attn`` (released checkpoints, plain Llama) load as they are, and c is computed from them.

    Args:
        config: the model and its scheme.
        kernels: backend of the norms. "auto": Triton on CUDA, else PyTorch. "triton": an error where it cannot run.
            "torch": PyTorch, rounding as Llama does. Also an argument of ``from_pretrained``, and never saved.
    """

    def __init__(self, config: NormlabConfig, kernels: str = "auto") -> None:
        if kernels not in KERNELS:
            raise NormlabError(f"kernels is {kernels!r}: choose one of {', '.join(KERNELS)}")
        NormlabPreTrainedModel.__init__(self, config)
        self.model = NormlabModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = (
            Head(config) if changes_head(config) else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        scheme = get_scheme(config.scheme)
        if scheme.ends.head_std is not None:
            self.lm_head.init_std = scheme.ends.head_std
        for module in self.modules():
            if isinstance(module, Norm):
                module.kernels = kernels
        if is_folded(self):
            self.register_forward_pre_hook(refuse_folded_training)
        self.post_init()
        if scheme.after_step is not None:
            scheme.after_step(self)

    @classmethod
    def from_released(cls, path: str, scheme: str | None = None, **kwargs) -> NormlabForCausalLM:
        """Load a released BHyT, LNS, Mix-LN, OLMo 2 or Qwen 3 checkpoint.

        Its configuration is mapped to ours by ``NormlabConfig.from_released``.

        Args:
            path: folder or hub name.
            scheme: needed when the configuration does not say (LNS, Mix-LN).
            kwargs: as for ``from_pretrained``.

        Raises:
            NormlabError: nothing of that name can be loaded, or a configuration that has no counterpart here.
        """
        try:
            with hub_or_cache(path):
                released, _ = NormlabConfig.get_config_dict(path)
                return cls.from_pretrained(path, config=NormlabConfig.from_released(released, scheme), **kwargs)
        except OSError as error:
            raise NormlabError(f"no model could be loaded from {path}: {first_line(error)}") from error

    def _get_resized_lm_head(self, old_lm_head: Any, *args: Any, **kwargs: Any) -> Any:
        resized = super()._get_resized_lm_head(old_lm_head, *args, **kwargs)
        return old_lm_head.with_rows_of(resized) if isinstance(old_lm_head, Head) else resized

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A head that does more than multiply by its matrix takes no adapter that adds to its output.

        NormlabError: such an adapter. Merged into the matrix it would give other logits.
        """
        if isinstance(getattr(value, "base_layer", None), Head) and not hasattr(value, "parameter_name"):
            raise NormlabError(
                f"the head of scheme {self.config.scheme} is more than a matrix, no adapter on it can be merged: train "
                f'it whole, with modules_to_save=["{name}"], or adapt it by target_parameters=["{name}.weight"]'
            )
        super().__setattr__(name, value)

    def refresh_carried(self) -> None:
        """Recompute BHyT's c from the present weights in every block that carries a statistic."""
        refresh_carried(self)

    def set_schedules(self, step: int, total: int) -> None:
        """Set every schedule in norms, residual rules and attention to `step` of `total` optimizer steps.

        Call it before the first step; ``after_step`` does it from there on.
        """
        set_schedules(self, step, total)

    def after_step(self, step: int, total: int) -> None:
        """Apply what the scheme does to weights and schedules after each optimizer step; for most schemes nothing."""
        act = get_scheme(self.config.scheme).after_step
        if act is not None:
            act(self)
        self.set_schedules(step, total)

    def decay_parameter_names(self) -> list[str]:
        """Names of the parameters that weight decay acts on.

        These are the matrices outside norms and residual rules, unless the scheme decays none, and the scheme's
        ``decayed``. A zero-centred gain is one too: decay pulls it to 1.
        """
        scheme = get_scheme(self.config.scheme)
        parts = [(path, module) for path, module in self.named_modules() if isinstance(module, Norm | Residual)]
        inside = {f"{path}.{name}" for path, module in parts for name, _ in module.named_parameters(recurse=False)}
        around_one = {f"{path}.{gain}" for path, module in parts if module.centre for gain in module.gains}

        def decays(name: str, parameter: Tensor) -> bool:
            if name in inside or parameter.dim() < 2:
                return name in around_one or name.rsplit(".", 1)[-1] in scheme.decayed
            return scheme.decays_matrices

        return [name for name, parameter in self.named_parameters() if decays(name, parameter)]

    def apply_rates(self, optimizer: torch.optim.Optimizer, gain_lr_ratio: float = 1.0) -> None:
        """Split a fresh optimizer's groups by the scheme's factors on learning rate, Adam's eps and weight decay.

        Args:
            optimizer: its groups are replaced. Without any factor they stay.
            gain_lr_ratio: factor on the learning rate of every parameter with fewer than two dimensions: gains, lambda,
                alpha, residual scales and biases.

        Raises:
            NormlabError: the scheme has a factor on something that the optimizer does not have, such as SGD an eps.
        """
        scheme_rates = get_scheme(self.config.scheme).rates
        if scheme_rates is None and gain_lr_ratio == 1:
            return
        rates = scheme_rates or (lambda *unused: Rate())

        def rate_of(parameter: nn.Parameter) -> Rate:
            rate = rates(names[parameter], parameter.dim(), self.config)
            return replace(rate, lr=rate.lr * gain_lr_ratio) if parameter.dim() < 2 else rate

        names = {parameter: name for name, parameter in self.named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            by_rate: dict[Rate, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_rate.setdefault(rate_of(parameter), []).append(parameter)
            for rate, parameters in by_rate.items():
                factors = {field: factor for field, factor in vars(rate).items() if factor != 1}
                if missing := factors.keys() - group.keys():
                    raise NormlabError(
                        f"scheme {self.config.scheme} has a factor on {missing.pop()}, which "
                        f"{type(optimizer).__name__} has not: use AdamW"
                    )
                changed = {field: group[field] * factor for field, factor in factors.items()}
                groups.append({**group, **changed, "params": parameters})
        optimizer.param_groups = groups


def set_schedules(model: nn.Module, step: int, total: int) -> None:
    """``NormlabForCausalLM.set_schedules`` for any model with our blocks, e.g. one made by ``swap_norms``."""
    for module in model.modules():
        if isinstance(module, ConstantStart):
            module.at_step(step, total)


@torch.no_grad()
def refresh_carried(model: nn.Module) -> None:
    """``NormlabForCausalLM.refresh_carried`` for any model with our blocks, e.g. one made by ``swap_norms``."""
    if is_folded(model):
        raise NormlabError("refresh_carried: the norms are folded into the matrices c is made of: unfold() first")
    for module in model.modules():
        if isinstance(module, NormlabDecoderLayer) and module.carried:
            module.c_attn.copy_(module.attention_variance_constant())
