"""Norm folding for inference: move a norm's gain into the matrices that read the norm.

    W (gamma * n(x)) = (W diag(gamma)) n(x)

This holds for every norm that only linear layers read: RMSNorm, LayerNorm, DyT and BHyT. n is the norm without its
gain, with its tanh. `fold_norms` multiplies, sets the gains to one and returns a `FoldedNorms`, which undoes it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.models.block import JoiningDecoderLayer, NormlabDecoderLayer
from normlab.models.model import is_folded, refuse_folded_training
from normlab.norms import NoNorm
from normlab.norms.gain import gain_name, is_plain_gain
from normlab.schemes.scheme import part_of

READERS = {"attn_in": ("q_proj", "k_proj", "v_proj"), "mlp_in": ("gate_proj", "up_proj")}
WRITERS = ("o_proj", "down_proj")
STOCK_PLACES = (("attn_in", "input_layernorm"), ("mlp_in", "post_attention_layernorm"))
STOCK_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


@dataclass
class _Site:
    """A norm and the linear layers that read it, by name; or the reason why it cannot be folded."""

    name: str
    norm: Any
    readers: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


def _places(block: Any, name: str) -> list[tuple[str, str]]:
    if isinstance(block, NormlabDecoderLayer):
        return block.layout.places()
    if {part for part, _ in block.named_children()} != STOCK_PARTS:
        raise NormlabError(
            f"fold_norms: {name} is a {type(block).__name__}, not a block of {', '.join(sorted(STOCK_PARTS))} as in "
            "Llama, Mistral, Qwen2, Qwen3, nor one of this package's"
        )
    return list(STOCK_PLACES)


def _sites(model: Any) -> Iterator[_Site]:
    """Every norm of the blocks, then the final one."""
    base = getattr(model, "base_model", None)
    blocks, final = getattr(base, "layers", None), getattr(base, "norm", None)
    if not blocks or not isinstance(final, nn.Module):
        raise NormlabError(f"fold_norms: {type(model).__name__} has no Llama-shaped blocks and final norm")
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        for place, attribute in _places(block, names[block]):
            site = _Site(f"{names[block]}.{attribute}", getattr(block, attribute))
            owner = block.self_attn if part_of(place) == "attn" else block.mlp
            if _keeps_read(block, place):
                site.refused = "its output is kept in the residual stream"
            elif place in READERS:
                gate = ("affine_gate",) if place == "attn_in" and hasattr(owner, "affine_gate") else ()
                readers = (*READERS[place], *gate)
                site.readers = {f"{names[owner]}.{name}": getattr(owner, name, None) for name in readers}
                site.refused = _other_reader(owner, readers, names)
                if not site.refused and not isinstance(block, NormlabDecoderLayer):
                    site.refused = _kept_by_block(block)
            else:
                site.refused = "its output goes into the residual stream"
            yield site
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    site = _Site(names[final], final)
    if head is None:
        site.refused = "the model has no head that reads it"
    else:
        site.readers = {names[head]: head}
    yield site


def _keeps_read(block: Any, place: str) -> bool:
    """True if the block's residual rule uses the norm's output too."""
    joins = isinstance(block, JoiningDecoderLayer)
    return joins and place in READERS and block.rule_at(part_of(place)).keeps_read


def _other_reader(owner: Any, readers: Collection[str], names: dict[nn.Module, str]) -> str:
    """Why more than its readers may read a norm, in attention or an MLP of the model's own, or an empty string."""
    for name, part in owner.named_children():
        is_known = name in readers or name in WRITERS
        if not is_known and any(isinstance(module, nn.Linear) for module in part.modules()):
            return f"{names[part]} may read it too"
    return ""


def _kept_by_block(block: Any) -> str:
    """Why a norm's output may go into the residual stream of a stock block, or an empty string.

    The block's own code is run with constants in place of its parts: its output may depend on none of the norms.
    """
    x = torch.zeros(1, 1, 1)

    def output(of_norms: float) -> Tensor:
        stub = copy.copy(block)
        norms = {attribute: lambda *_, **__: torch.full_like(x, of_norms) for _, attribute in STOCK_PLACES}
        stub.__dict__["_modules"] = {"self_attn": lambda *_, **__: (x, None), "mlp": lambda *_, **__: x, **norms}
        found = type(block).forward(stub, x, position_embeddings=None)
        return found[0] if isinstance(found, tuple) else found

    try:
        alike = torch.equal(output(0.0), output(1.0))
    except Exception:  # whatever code of others raises
        return f"what {type(block).__name__} does with it cannot be told"
    return "" if alike else "its output is kept in the residual stream"


def _why_not(site: _Site, uses: Counter[Tensor]) -> str:
    """Return the reason why a site cannot be folded, or an empty string."""
    if site.refused:
        return site.refused
    for name, linear in site.readers.items():
        if type(linear) is not nn.Linear:
            return f"{name} is {type(linear).__name__}, not a plain nn.Linear"
        if not linear.weight.is_floating_point():
            return f"{name} holds {linear.weight.dtype}"
        if uses[linear.weight] > 1:
            return f"the matrix of {name} is used elsewhere too (tied embeddings, blocks that share it)"
    if isinstance(site.norm, NoNorm):
        return "there is no norm"
    weight, bias = getattr(site.norm, gain_name(site.norm), None), getattr(site.norm, "bias", None)
    if not isinstance(weight, nn.Parameter) or not is_plain_gain(site.norm):
        return f"the weight of {type(site.norm).__name__} is not a factor of its output"
    if uses[weight] > 1:
        return "its weight is used elsewhere too"
    if bias is not None and _bias_stays(site) and bool(((weight == 0) & (bias != 0)).any()):
        return "its bias would have to be divided by a gain of 0, as no bias reads it"
    return ""


def _bias_stays(site: _Site) -> bool:
    """True if a reader has no bias. The norm then keeps its bias, divided by the gain."""
    return any(linear.bias is None for linear in site.readers.values())


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@torch.no_grad()
def _folded(site: _Site, originals: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Compute a site's folded parameters from the originals. Nothing is written."""
    norm, linears = site.norm, list(site.readers.values())
    weight = getattr(norm, gain_name(norm))
    gamma = originals[weight]
    new = {weight: torch.ones_like(gamma)}
    for linear in linears:
        matrix = originals[linear.weight]
        new[linear.weight] = (_wide(matrix) * _wide(gamma)).to(matrix.dtype)
    if (bias := getattr(norm, "bias", None)) is None:
        return new
    beta = _wide(originals[bias])
    if _bias_stays(site):
        new[bias] = torch.where(beta == 0, 0.0, beta / _wide(gamma)).to(bias.dtype)
        return new
    new[bias] = torch.zeros_like(bias)
    for linear in linears:
        added = _wide(originals[linear.weight]) @ beta
        new[linear.bias] = (_wide(originals[linear.bias]) + added).to(linear.bias.dtype)
    return new


def _parameters(site: _Site) -> list[Tensor]:
    modules = [site.norm, *site.readers.values()]
    parameters = [getattr(module, name, None) for module in modules for name in (gain_name(module), "bias")]
    return [parameter for parameter in parameters if parameter is not None]


def _use_config(model: Any, config: Any) -> None:
    """Give `config` to every module that has the model's configuration."""
    present = model.config
    for module in model.modules():
        if getattr(module, "config", None) is present:
            module.config = config


class FoldedNorms:
    """A model with folded norms, and the way back. As a context manager it unfolds at the end.

    Until then the model has a copy of its configuration that says so, since other models may share the original.

    Attributes:
        names: the folded norms.
        left: {norm: why it is not folded}.
    """

    def __init__(self, model: Any, sites: list[_Site], left: dict[str, str]) -> None:
        self.model, self.left = model, left
        self.names = [site.name for site in sites]
        self._sites = sites
        self._originals = {p: p.detach().clone() for site in sites for p in _parameters(site)}
        with torch.no_grad():
            for site in sites:
                for parameter, value in _folded(site, self._originals).items():
                    parameter.copy_(value)
        self._config = model.config
        _use_config(model, copy.copy(model.config))
        model.config.norms_folded = True
        self._handle: Any = model.register_forward_pre_hook(refuse_folded_training)

    @torch.no_grad()
    def unfold(self) -> None:
        """Put the original weights back, bit for bit. A second call does nothing.

        Raises:
            NormlabError: a folded weight was changed, or cast to another dtype. Nothing is undone then.
        """
        if self._handle is None:
            return
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        if any(p not in names or p.dtype != original.dtype for p, original in self._originals.items()):
            raise NormlabError("unfold: the model was cast or its parameters replaced since they were folded")
        originals = {p: original.to(p.device) for p, original in self._originals.items()}
        for site in self._sites:
            for parameter, value in _folded(site, originals).items():
                if not torch.equal(parameter, value):
                    raise NormlabError(f"unfold: {names[parameter]} was changed since it was folded: load it anew")
        for parameter, original in originals.items():
            parameter.copy_(original)
        self._handle.remove()
        self._handle, self._sites, self._originals = None, [], {}
        _use_config(self.model, self._config)

    def __enter__(self) -> FoldedNorms:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.unfold()


def fold_norms(model: nn.Module, *, partial: bool = False) -> FoldedNorms:
    """Multiply every norm's gain into the matrices that read it, in place, for inference; reversible bit for bit.

        with normlab.models.fold_norms(model):
            model.generate(...)

    The attention norm's gamma goes into q_proj, k_proj and v_proj. The MLP norm's goes into gate_proj and up_proj, the
    final norm's into the head. The gains become 1. Logits stay equal to rounding. LNS's 1/sqrt(layer) stays in the
    norm. A LayerNorm's bias beta becomes W beta in the readers' biases, or beta/gamma in the norm if a reader has none.
    BHyT's c_attn keeps its value.

    A product cannot be divided back exactly, so the originals of all changed tensors are kept: as many bytes again.
    ``save_pretrained`` writes the folded weights, a valid model, with ``norms_folded`` in its configuration. Loaded, it
    computes the same and cannot be unfolded. While folded, a forward pass in training mode and ``refresh_carried`` are
    refused. The last hidden state is the norm's output before its gain.

    Args:
        model: a causal LM of this package (any scheme, `swap_norms` too) or a stock Llama, Mistral, Qwen2, Qwen3.
        partial: fold the norms that can be folded and list the others in ``left``.

    Returns:
        The handle that undoes it.

    Raises:
        NormlabError: another architecture, a folded model, or, unless ``partial``, a norm that cannot be folded. Such a
            norm is read by other than plain nn.Linear layers (LoRA, quantized), by a matrix that others read too, or
            by more than Llama's matrices, in a block's attention or MLP.
            Or its output goes into the residual stream (Post-LN, Peri-LN). Nothing is changed then.
    """
    if is_folded(model):
        raise NormlabError("fold_norms: the norms of this model are folded already")
    sites = list(_sites(model))
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    uses = Counter(parameter for module in modules for parameter in module.parameters(recurse=False))
    left = {site.name: why for site in sites if (why := _why_not(site, uses))}
    if left and not partial:
        name, why = next(iter(left.items()))
        others = f", and so for {len(left) - 1} more" if len(left) > 1 else ""
        raise NormlabError(f"cannot fold {name}: {why}{others}; partial=True folds the others")
    return FoldedNorms(model, [site for site in sites if site.name not in left], left)
