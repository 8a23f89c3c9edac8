"""One block: its norms, the mean square that BHyT carries from attention to MLP, and how branches join the stream."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import normlab_kernels as nk
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from normlab.errors import NormlabError, first_line
from normlab.models.attention_mlp import NormedAttention, NormedMLP, changes_attention, changes_mlp
from normlab.models.config import NormlabConfig
from normlab.models.embeddings_head import changes_embeddings, changes_head
from normlab.norms import Norm
from normlab.norms.gain import HOOKS
from normlab.residuals import Residual
from normlab.schemes import CORRECTIONS, PARTS, NormSite, Sublayer, correction_factors, get_scheme

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # not of 8 bits, which go with a scale


def _fuses_add(norm: Any, x: Tensor) -> bool:
    """True if the addition is fused into the norm: it has such a kernel, kernels are active, and no hooks attached."""
    active = isinstance(norm, Norm) and norm.fuses_add and nk.chooses_kernels(x, norm.kernels)
    return active and not any(getattr(norm, kind) for kind in HOOKS)


def _in_use(norm: Any) -> Any:
    """The norm that a call of this one runs: of the copies that PEFT's LN tuning makes, the active one."""
    copies = getattr(norm, "ln_tuning_layers", None)
    if copies is None:
        return norm
    is_base = norm.disable_adapters or norm.merged or not norm.active_adapters
    return norm.base_layer if is_base else copies[norm.active_adapters[0]]


def whole(weight: Tensor) -> Tensor:
    """The weight, gathered from all ranks if it is sharded."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def matrix_of(linear: Any) -> Tensor:
    """The whole matrix of a linear layer in float32, with PEFT's active adapters merged.

    NormlabError: adapters of a kind that cannot be merged, or a weight that is kept as codes, as in 8 bits.
    """
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATS:
        kept = f"keeps it in {weight.dtype}" if isinstance(weight, Tensor) else "has none"
        raise NormlabError(
            f"c is of the numbers in v_proj's and o_proj's weight, and {type(linear).__name__} {kept}: "
            'use carried="exact", which needs no c'
        )
    is_plain = not hasattr(linear, "base_layer")
    if is_plain or getattr(linear, "merged", False) or getattr(linear, "disable_adapters", False):
        return whole(weight).float()
    hooks: dict[int, Any] = {id(getattr(part, kind)): OrderedDict() for part in linear.modules() for kind in HOOKS}
    copied = copy.deepcopy(linear, hooks).float()  # nobody's hooks see this copy
    try:
        copied.merge()
    except Exception as error:  # of PEFT's
        raise NormlabError(f"an adapter cannot be merged into a matrix of c: {first_line(error)}") from error
    return whole(copied.weight)


def _note_state_prefix(block: NormlabDecoderLayer, state_dict: dict[str, Tensor], prefix: str, *unused) -> None:
    block.state_prefix = prefix


@torch.no_grad()
def _complete_constant(block: NormlabDecoderLayer, incompatible_keys) -> None:
    """After ``load_state_dict`` of weights without c, compute it from them."""
    key = f"{block.state_prefix}c_attn"
    if key in incompatible_keys.missing_keys:
        block.c_attn = block.attention_variance_constant()
        incompatible_keys.missing_keys.remove(key)


class NormlabDecoderLayer(GradientCheckpointingLayer):
    """One block: ``h = sum(x + out(attn(in(x))))``, then the same with the MLP. Absent norms are the identity.

    With a carried statistic the MLP norm divides by ``sqrt(ms + c lambda_in^2/kappa^2 + eps)``. Here ms is the
    attention norm's mean square, so there is no second reduction. The persistent float32 buffer ``c_attn`` holds
    ``c = ||W_V W_O||_F^2 / (T d)``. It and lambda are constants there. The gradient of ms reaches the block's input.
    ``NormlabConfig.correction`` adds learned scalars, ``calibration`` a fixed factor.

    Kernels compute a sum and the norm that reads it in one pass, with the bits of two. A norm with hooks runs alone.
    """

    c_attn: Tensor
    state_prefix: str

    def __init__(
        self, config: NormlabConfig, layer_idx: int, attention: nn.Module | None = None, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        scheme = get_scheme(config.scheme)
        self.self_attn: Any = attention or (NormedAttention if changes_attention(config) else LlamaAttention)(
            config=config, layer_idx=layer_idx
        )
        self.mlp: Any = mlp or (NormedMLP if changes_mlp(config) else LlamaMLP)(config)
        if scheme.branches.softmax_scale is not None and config.qk_norm != "l2":  # whose own scale is learned
            self.self_attn.scaling = scheme.branches.softmax_scale(config)  # type: ignore[assignment]
        if scheme.init is not None:
            for name, linear in (*self.self_attn.named_children(), *self.mlp.named_children()):
                if isinstance(linear, nn.Linear):
                    linear.init_std = scheme.init(name, config)  # type: ignore[assignment]
        self.layout = scheme.layout_at(layer_idx + 1, config)
        for place, name in self.layout.places():
            self.add_module(name, scheme.norm_at(NormSite(place, layer_idx + 1, config)))
        self.carried = config.carried if config.carries_at(layer_idx + 1) else None
        self.train_seq_len = config.train_seq_len or config.max_position_embeddings
        self.window: int | None = None  # tokens that a token attends to at most; `swap_norms` keeps the model's
        if self.carried:
            self.register_buffer("c_attn", torch.zeros((), dtype=torch.float32))
            self.register_load_state_dict_pre_hook(_note_state_prefix)
            self.register_load_state_dict_post_hook(_complete_constant)
            self.correction = config.correction
            self.calibration = config.calibration[layer_idx] if config.calibration else 1.0
            for name, start in CORRECTIONS[config.correction].items():
                self.register_parameter(name, nn.Parameter(torch.tensor(start)))
        self.kept_growth: tuple[Tensor, Tensor, tuple[Any, ...], Tensor] | None = None

    def _apply(self, fn, recurse: bool = True):
        """Move as any module does, but keep c in float32 when a model is cast to half precision."""
        before = self._buffers.get("c_attn")
        super()._apply(fn, recurse)
        self.kept_growth = None
        after = self._buffers.get("c_attn")
        if before is not None and after is not None and after.dtype != torch.float32:
            self._buffers["c_attn"] = before.to(after.device)
        return self

    def train(self, mode: bool = True) -> NormlabDecoderLayer:
        self.kept_growth = None
        return super().train(mode)

    @torch.no_grad()
    def attention_variance_constant(self) -> Tensor:
        """``c = ||W_V W_O||_F^2 / (T d)``, a float32 scalar, with W_V's heads repeated to match the query heads.

        Attention over T independent tokens adds c times its input's variance to the residual stream (2601.09719). If
        the weights are sharded, every rank has to call this.
        """
        attention = self.self_attn
        value = matrix_of(attention.v_proj)
        per_head = value.view(-1, attention.head_dim, value.shape[-1])
        value = per_head.repeat_interleave(attention.num_key_value_groups, dim=0).flatten(0, 1)
        with torch.autocast(value.device.type, enabled=False):  # float32 inside a mixed-precision step, too
            product = matrix_of(attention.o_proj) @ value
        return product.square().sum() / (self.train_seq_len * value.shape[-1])

    def norm_at(self, place: str) -> Any:
        """The norm at a place of the layout, or None."""
        name = getattr(self.layout, place)
        return getattr(self, name) if name else None

    def _normalize(self, place: str, x: Tensor) -> Tensor:
        norm = self.norm_at(place)
        return x if norm is None else norm(x)

    def _add(
        self,
        place: str,
        branch: Tensor,
        residual: Tensor,
        mean_square: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ``s = residual + branch`` and the norm at ``place`` of s, or s twice if there is none."""
        norm = self.norm_at(place)
        if _fuses_add(norm, residual):
            if mean_square is None:
                return norm.add(branch, residual)
            if self.correction != "none" or self.calibration != 1.0:
                return norm.add(branch, residual, self.carried_mean_square(mean_square, position_ids))
            correction = self.carried_correction(position_ids)
            if correction.numel() > 1:  # positions may be one sequence's, for all
                correction = correction.expand_as(mean_square)
            return norm.add(branch, residual, mean_square, correction)
        s = residual + branch
        if mean_square is not None:
            return s, norm(s, mean_square=self.carried_mean_square(mean_square, position_ids))
        return s, s if norm is None else norm(s)

    def carried_mean_square(self, mean_square: Tensor, position_ids: Tensor | None) -> Tensor:
        """``ms' = f (s ms + a r)``, ``(batch, tokens, 1)``, float32.

        r is `carried_correction`. The learned s and a (see ``NormlabConfig.correction``) and the fixed f are 1 by
        default.
        """
        correction = self.carried_correction(position_ids)
        if self.correction == "none" and self.calibration == 1.0:
            return mean_square + correction
        learned = {name: getattr(self, name).float() for name in CORRECTIONS[self.correction]}
        stays, adds = correction_factors(self.correction, learned)
        return (mean_square * stays + correction * adds) * self.calibration

    def carried_correction(self, position_ids: Tensor | None) -> Tensor:
        """``r = c (lambda_in/kappa)^2``, a constant. For "causal" ``(batch, tokens, 1)``, times T/(t+1) at token t.

        Within a window of w tokens that is T/min(t+1, w).
        """
        growth = self._growth()
        if self.carried == "causal":
            if position_ids is None:
                raise NormlabError('carried="causal" needs the tokens\' positions: pass position_ids to the block')
            attended = position_ids[..., None] + 1
            growth = growth / (attended if self.window is None else attended.clamp(max=self.window))
        return growth

    def _growth(self) -> Tensor:
        """``c (lambda_in/kappa)^2``, for "causal" times T.

        In evaluation it is cached until c or lambda is replaced or written to, or the mode is set, so that a decoded
        token runs no kernel for it. A write through ``.data`` is not seen before that. A captured CUDA graph keeps it.
        """
        norm = _in_use(self.norm_at("attn_in"))
        c, lam = self.c_attn, norm.lam
        keeps = not (self.training or torch.compiler.is_compiling() or torch.is_inference_mode_enabled())
        keeps = keeps and not (c.is_inference() or lam.is_inference())
        if keeps:
            versions = (c._version, lam._version, norm.kappa)
            kept = self.kept_growth
            if kept is not None and kept[0] is c and kept[1] is lam and kept[2] == versions:
                return kept[3]
        growth = c * norm.slope.detach().square()
        if self.carried == "causal":
            growth = growth * self.train_seq_len
        if keeps:
            self.kept_growth = (c, lam, versions, growth)
        return growth

    def forward(self, hidden_states: Tensor, position_ids: Tensor | None = None, **arguments: Any) -> Tensor:
        residual = hidden_states
        mean_square = None
        if self.carried:
            hidden_states, mean_square = self.norm_at("attn_in")(hidden_states, return_mean_square=True)
        else:
            hidden_states = self._normalize("attn_in", hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, position_ids=position_ids, **arguments)
        hidden_states = self._normalize("attn_out", hidden_states)
        if self.layout.attn_sum:
            residual = self._add("attn_sum", hidden_states, residual)[1]
            hidden_states = self._normalize("mlp_in", residual)
        else:
            residual, hidden_states = self._add("mlp_in", hidden_states, residual, mean_square, position_ids)
        hidden_states = self.mlp(hidden_states)
        return self._add("mlp_sum", self._normalize("mlp_out", hidden_states), residual)[1]


class JoiningDecoderLayer(NormlabDecoderLayer):
    """One block: ``state = join(state, out(f(in(enter(state)))), sum)`` for attention, then for the MLP.

    The scheme's rules (`normlab.residuals`) are ``attn_residual`` and ``mlp_residual``, or ``residual`` for both.
    Input and output are the whole state, one tensor. With several streams, ``enter`` gives what the block reads. Probes
    measure a branch's output before the rule weighs it.
    """

    def __init__(
        self, config: Any, layer_idx: int, attention: nn.Module | None = None, mlp: nn.Module | None = None
    ) -> None:
        super().__init__(config, layer_idx, attention, mlp)
        scheme = get_scheme(config.scheme)
        if scheme.residual is None or self.carried:
            raise NormlabError(f"scheme {config.scheme} joins its branches by plain addition: use NormlabDecoderLayer")
        self.rule_names = {part: "residual" if scheme.shares_residual else f"{part}_residual" for part in PARTS}
        for part, name in self.rule_names.items():
            if name not in self._modules:
                self.add_module(name, scheme.rule_at(Sublayer(part, layer_idx + 1, config)))
        for part in PARTS:  # the usual site is that of the inner norm, if a branch has two norms of the stream
            inner, outer = self.norm_at(f"{part}_in"), self.norm_at(f"{part}_sum")
            if inner is not None and outer is not None:
                outer.probe_site = f"{part}_sum_norm_in"
            if (usual := outer if inner is None else inner) is not None:
                usual.probe_site = f"{part}_norm_in"

    def enter(self, state: Tensor) -> Tensor:
        """The first branch's input, from the previous block's state or the embeddings."""
        rule = self.rule_at("attn")
        return rule.enter(rule.open(state))

    def rule_at(self, part: str) -> Residual:
        """The residual rule of "attn" or "mlp"."""
        rule: Residual = getattr(self, self.rule_names[part])
        return rule

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:  # type: ignore[override]
        state = self.rule_at("attn").open(hidden_states)
        state = self._sublayer("attn", state, lambda x: self.self_attn(hidden_states=x, **arguments)[0])
        return self._sublayer("mlp", state, self.mlp)

    def _sublayer(self, part: str, state: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        rule = self.rule_at(part)
        read = self._normalize(f"{part}_in", rule.enter(state))
        update = self._normalize(f"{part}_out", branch(read))
        return rule.join(state, update, lambda total: self._normalize(f"{part}_sum", total), read)


class FinalNorm(nn.Module):
    """``norm(leave(state))``: one stream of several, then the final norm."""

    probe_role = "residual"  # the norm is the one inside

    def __init__(self, leave: Residual, norm: nn.Module) -> None:
        super().__init__()
        self.leave = leave
        self.norm = norm

    def forward(self, state: Tensor) -> Tensor:
        return self.norm(self.leave(state))


def decoder_layer(
    config: Any, layer_idx: int, attention: nn.Module | None = None, mlp: nn.Module | None = None
) -> NormlabDecoderLayer:
    """The scheme's block."""
    joins = get_scheme(config.scheme).residual is not None
    return (JoiningDecoderLayer if joins else NormlabDecoderLayer)(config, layer_idx, attention, mlp)


def is_llama_but_for_norms(config: Any) -> bool:
    """True if the model is Llama's parts joined by plain addition, and differs in norms and embedding scale only."""
    scheme = get_scheme(config.scheme)
    inside = changes_attention(config) or changes_mlp(config)
    return scheme.residual is None and not (inside or changes_embeddings(config) or changes_head(config))
