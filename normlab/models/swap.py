"""Give an existing Hugging Face model another normalization scheme."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel

from normlab.errors import NormlabError
from normlab.models.attention_mlp import changes_attention
from normlab.models.block import NormlabDecoderLayer, decoder_layer, matrix_of
from normlab.models.config import NormlabConfig
from normlab.models.model import NormlabPreTrainedModel
from normlab.norms import Norm
from normlab.norms.gain import HOOKS, is_plain_gain
from normlab.residuals import Residual
from normlab.schemes import NormSite, get_scheme

HOOK_OPTIONS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def swap_norms(model: PreTrainedModel, scheme: str, **fields: Any) -> PreTrainedModel:
    """Replace the blocks' norms and the final norm of a Llama-shaped model, in place, for continued training.

    Attention (with its biases, QK-norms, sliding windows) and MLP are kept. Each block becomes a
    ``NormlabDecoderLayer`` around them. A new norm in front of a branch takes the old one's gain, times its own start.
    So does the final norm, and the norm after attention of a block that has none in front of its MLP. So the outputs
    change as the scheme says: BHyT's are about lambda/kappa times smaller at the start.

    Args:
        model: a causal LM whose blocks hold ``self_attn`` (with v_proj, o_proj), ``mlp``, ``input_layernorm`` and
            ``post_attention_layernorm``: Llama, Mistral, Qwen2, Qwen3 and relatives.
        scheme: a key of ``normlab.SCHEMES`` that changes only norms and sums of the blocks.
        fields: fields of NormlabConfig, e.g. ``lam_input=3.0, train_seq_len=2048``, and ``rms_norm_eps``, which BHyT
            and LayerNorm do not read.

    Returns:
        The same model. In training, call ``normlab.models.refresh_carried(model)`` every max_steps/50 steps. Call
        ``normlab.models.set_schedules(model, step, total)`` before the first step and after each. Without it the
        branches of ProRes stay off, and norms with a schedule or running statistics keep their start.
        ``save_pretrained`` writes its weights under their names. To load them, build the original architecture, call
        ``swap_norms`` with the same arguments, then ``load_state_dict``.

    A swapped model can be swapped again while its blocks are Llama's but for the norms' class. The old gain is then
    over the start that the first swap multiplied it by, and what else the first scheme changed is gone.

    Raises:
        NormlabError: a model, norm or gain of another kind. One of this package's own models, or a swapped one whose
            blocks hold more than Llama's. A scheme that changes more than the blocks' norms and sums.
            A field that would change the attention. A carried statistic where attention does more with its values than
            v_proj and o_proj, as BitNet's, or keeps them as codes.
    """
    row = get_scheme(scheme)
    if row.ends.embedding_scale is not None:
        raise NormlabError(
            f"scheme {scheme} also scales the embeddings: train it from scratch, or swap to another scheme"
        )
    if unused := sorted(fields.keys() - NormlabConfig.__annotations__.keys() - {"rms_norm_eps"}):
        raise NormlabError(f"{unused[0]} changes nothing here: fields are {', '.join(NormlabConfig.__annotations__)}")
    if not row.changes_blocks_only:
        raise NormlabError(f"scheme {scheme} changes more than norms and sums of the blocks: train it from scratch")
    base: Any = getattr(model, "base_model", None)
    blocks = getattr(base, "layers", None)
    if isinstance(base, NormlabPreTrainedModel):
        raise NormlabError(
            f"a {type(model).__name__} is built for its scheme, {base.config.scheme}, and its configuration says so: "
            f'build one with NormlabConfig(scheme="{scheme}", ...), then load_state_dict'
        )
    needed = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if (
        not blocks
        or not isinstance(getattr(base, "norm", None), nn.Module)
        or any({name for name, _ in block.named_children()} != needed for block in blocks)
    ):
        if any(isinstance(block, NormlabDecoderLayer) for block in blocks or ()):
            raise NormlabError(
                f"the blocks of this {type(model).__name__} hold what an earlier swap_norms put there: build the "
                "original model again and swap that"
            )
        raise NormlabError(
            f"{type(model).__name__} has no Llama-shaped blocks ({', '.join(sorted(needed))}, final norm): "
            "swap_norms supports Llama, Mistral, Qwen2, Qwen3 and relatives"
        )
    for norm in (
        base.norm,
        *(block.get_submodule(name) for block in blocks for name in sorted(needed) if "norm" in name),
    ):
        bias = getattr(norm, "bias", None)
        if not is_plain_gain(norm) or (bias is not None and bool(bias.any())):
            raise NormlabError(f"{type(norm).__name__} is not a norm and a gain: swap_norms would lose what it is")
    if any(block._parameters for block in blocks) or not _adds_up(base, blocks):
        raise NormlabError(
            f"a block of {type(model).__name__} is not y = x + self_attn(norm(x)), then y + mlp(norm(y)), as where it "
            "multiplies its branches: swap_norms would leave that out"
        )
    if row.carries_statistic and not all(hasattr(block.self_attn, "v_proj") for block in blocks):
        raise NormlabError(
            f"scheme {scheme} needs v_proj and o_proj of the attention: {type(model).__name__} has others"
        )
    config = _llama_fields(model.config, scheme, fields)
    if changes_attention(config):
        raise NormlabError(
            "swap_norms keeps the model's attention: qk_norm and affine_attention are options of a NormlabConfig"
        )
    carrying = [block for index, block in enumerate(blocks) if config.carries_at(index + 1)]
    if carrying and not _has_plain_values(base, [block.self_attn for block in carrying]):
        raise NormlabError(
            f"attention of {type(model).__name__} is more than v_proj, weights of the tokens and o_proj, as where it "
            f'normalizes before o_proj: the statistic that {scheme} carries is not known there. Use carried="exact"'
        )
    rebuilt = [_rebuild(block, config, index) for index, block in enumerate(blocks)]
    base.norm = _take_gain(base.norm, row.norm_at(NormSite("final", len(blocks) + 1, config)))
    for index, block in enumerate(rebuilt):
        blocks[index] = block
        block.window = _window(block.self_attn, model.config)
    if config.carried == "causal" and row.carries_statistic:
        base.register_forward_pre_hook(_count_positions, with_kwargs=True)
    return model


def _count_positions(base: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Put a padded row's first token at position 0, as NormlabModel does: the statistic depends on it."""
    mask, tokens = kwargs.get("attention_mask"), kwargs.get("input_ids", kwargs.get("inputs_embeds"))
    if kwargs.get("position_ids") is None and mask is not None and mask.dim() == 2 and tokens is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        kwargs = kwargs | {"position_ids": positions}
    return args, kwargs


def _window(attention: nn.Module, config: Any) -> int | None:
    """How many tokens a token attends to at most. Mistral's attention reads it from the configuration alone.

    Llama's keeps a field that it does not know, and ignores it.
    """
    known = getattr(config, "sliding_window", None) if hasattr(type(config)(), "sliding_window") else None
    found: int | None = getattr(attention, "sliding_window", known)
    return found


def _llama_fields(source: Any, scheme: str, fields: dict[str, Any]) -> NormlabConfig:
    names = set(LlamaConfig().to_dict()) - {"model_type", "architectures", "transformers_version"}
    known = {name: getattr(source, name) for name in names if hasattr(source, name)}
    return NormlabConfig(**{**known, "scheme": scheme, **fields})


@torch.no_grad()
def _adds_up(base: Any, blocks: Iterable[Any]) -> bool:
    """Run a few tokens: True if each block is a sum of what enters it and its two branches, each behind its norm."""
    seen: list[dict[str, Any]] = []

    def keep(own: dict[str, Any], what: str, module: nn.Module, *call: Any) -> None:
        """A hook on a norm's input, or on another module's output."""
        own[what] = call[-1][0] if isinstance(call[-1], tuple) and what != "mlp" else call[-1]

    with ExitStack() as hooks:
        for block in blocks:
            own: dict[str, Any] = {}
            seen.append(own)
            for what, module in (("x", block.input_layernorm), ("y", block.post_attention_layernorm)):
                hooks.callback(module.register_forward_pre_hook(partial(keep, own, what)).remove)
            for what, module in (("attn", block.self_attn), ("mlp", block.mlp), ("out", block)):
                hooks.callback(module.register_forward_hook(partial(keep, own, what)).remove)
        base(torch.arange(4, device=base.norm.weight.device)[None])
    return all(
        isinstance(own["mlp"], Tensor)
        and _near(own["x"] + own["attn"], own["y"])
        and _near(own["y"] + own["mlp"], own["out"])
        for own in seen
    )


@torch.no_grad()
def _has_plain_values(base: Any, attentions: list[Any]) -> bool:
    """Run single tokens: True if attention then is v_proj, heads repeated, and o_proj, each its matrix and bias.

    A sharded attention is not tried, since each part of it gives parts.
    """
    if any(isinstance(parameter, DTensor) for own in attentions for parameter in own.parameters()):
        return True
    seen: dict[tuple[int, str], Any] = {}
    modes = {part: part.training for own in attentions for part in own.modules()}

    def keep(key: tuple[int, str], module: nn.Module, inputs: tuple, output: Any) -> None:
        seen[key] = inputs, output[0] if isinstance(output, tuple) else output

    with ExitStack() as undo:
        for part, mode in modes.items():  # dropout, also that of adapters, is in none of the matrices
            undo.callback(setattr, part, "training", mode)
            part.training = False
        for index, own in enumerate(attentions):
            undo.callback(own.v_proj.register_forward_hook(partial(keep, (index, "values"))).remove)
            undo.callback(own.register_forward_hook(partial(keep, (index, "output"))).remove)
        base(torch.arange(4, device=base.norm.weight.device)[:, None])

    def applied(part: Any, x: Tensor) -> Tensor:
        bias = part(torch.zeros_like(x[:1]))  # with what adapters make of it
        return F.linear(x.float(), matrix_of(part)) + bias.float()

    def is_plain(index: int, own: Any) -> bool:
        (x,), values = seen[index, "values"]
        heads = values.unflatten(-1, (-1, own.head_dim)).repeat_interleave(own.num_key_value_groups, dim=-2)
        output = seen[index, "output"][1]
        return _near(values, applied(own.v_proj, x)) and _near(output, applied(own.o_proj, heads.flatten(-2)))

    return all(is_plain(index, own) for index, own in enumerate(attentions))


def _near(x: Tensor, y: Tensor) -> bool:
    tolerance = 4 * max(torch.finfo(tensor.dtype).eps for tensor in (x, y)) ** 0.75
    return bool((x - y).abs().max() <= tolerance * y.abs().max())


def _take_gain(old: Any, new: Any) -> nn.Module:
    """Return the new norm with the old one's gain, times its own start. An old gain of ours is over its start."""
    weight = old.weight.data
    if isinstance(old, Norm):
        if not (start := old.starts.get("weight")):
            raise NormlabError(f"{type(old).__name__} does not say where its gain starts: build the model again")
        weight = (weight + old.centre) / start
    new.to(weight.device, weight.dtype)
    gain = getattr(new, "weight", None)
    if gain is not None:
        if gain.shape != weight.shape:
            raise NormlabError(
                f"{type(new).__name__} has {gain.numel()} numbers as gain, not {weight.numel()}: train it from scratch"
            )
        is_ours = isinstance(new, Norm)
        start, centre = (new.starts.get("weight", gain.data), new.centre) if is_ours else (gain.data, 0.0)
        gain.data.copy_(weight * start - centre)
    return new


_KINDS: dict[tuple[type, type], type] = {}


def _kind(ours: type, theirs: type) -> type:
    """Our block, which is one of the model's blocks too: transformers finds hidden states by their class."""
    if issubclass(theirs, NormlabDecoderLayer):  # swapped before
        theirs = theirs.__bases__[1]
    if (ours, theirs) not in _KINDS:
        _KINDS[ours, theirs] = type(ours.__name__, (ours, theirs), {"__reduce__": _reduced})
    return _KINDS[ours, theirs]


def _reduced(block: nn.Module) -> tuple[Any, ...]:
    return _made, type(block).__bases__, block.__getstate__()


def _made(ours: type, theirs: type) -> Any:
    kind: Any = _kind(ours, theirs)
    return kind.__new__(kind)


@torch.no_grad()
def _rebuild(block: Any, config: NormlabConfig, index: int) -> NormlabDecoderLayer:
    rebuilt = decoder_layer(config, index, attention=block.self_attn, mlp=block.mlp)
    template = block.post_attention_layernorm.weight  # a quantized matrix's type is that of its codes
    names = dict(rebuilt.layout.places())
    before_mlp = names.get("mlp_in", names.get("attn_sum"))
    old = {names.get("attn_in"): block.input_layernorm, before_mlp: block.post_attention_layernorm}
    for name in names.values():
        norm = getattr(rebuilt, name)
        _take_gain(old[name], norm) if name in old else norm.to(template.device, template.dtype)
    for child in rebuilt.children():
        if isinstance(child, Residual):
            child.to(template.device, template.dtype)
    for parameter in rebuilt.parameters(recurse=False):
        parameter.data = parameter.data.to(template.device, template.dtype)
    rebuilt.gradient_checkpointing = getattr(block, "gradient_checkpointing", False)
    if hasattr(block, "_gradient_checkpointing_func"):
        rebuilt._gradient_checkpointing_func = block._gradient_checkpointing_func
    if rebuilt.carried:
        rebuilt.c_attn = rebuilt.attention_variance_constant()
    rebuilt.__class__ = _kind(type(rebuilt), type(block))
    for hooks in (*HOOKS, *HOOK_OPTIONS):  # one of them may collect hidden states
        getattr(rebuilt, hooks).update(getattr(block, hooks))
    return rebuilt.train(block.training)
