"""Norms taken out of a trained model, one at a time; the fine-tuning in between is `normlab.training.removal`.

load_removable(folder)      a trained Pre-LN model whose RMSNorms can each become a fixed gain
removable_norms(model)      their names, in the order of removal
remove_norm(model, name)    one of them becomes x gamma / r, r its mean rms on given text
fold_removed(model)         what is left of all of them goes into the matrices
as_llama(model)             the result as a stock Llama
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from normlab.errors import NormlabError
from normlab.models.attention_mlp import changes_attention
from normlab.models.config import NormlabConfig
from normlab.models.fold import fold_norms
from normlab.models.model import NormlabForCausalLM
from normlab.models.pretrained import model_folder
from normlab.norms import RMSNorm, TaperNorm
from normlab.schemes import BASELINE, REMOVABLE, get_scheme

HUGE_EPS = 1e12  # sqrt(mean(x^2) + 1e12) is 1e6 for any x
OWN = NormlabConfig.model_type


def load_removable(name: str | Path) -> NormlabForCausalLM:
    """A trained model in float32 with the same function, each of whose RMSNorms, the final one too, is a ``TaperNorm``:
    an RMSNorm until `remove_norm`.

    Args:
        name: folder or hub name of a Llama, the folder of a run that kept its weights, a model that comes with
            normlab, or what `NormlabForCausalLM.from_released` loads.

    Raises:
        NormlabError: norms other than RMSNorms in front of the branches and the head, or branches that do not simply
            add: nothing says that a fixed gain could stand for them.
    """
    folder: Any = name if Path(name).is_dir() or not _comes_along(name) else model_folder(name)
    fields, _ = NormlabConfig.get_config_dict(folder)
    if fields.get("model_type") == OWN:
        source = NormlabForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        plain = fields.get("model_type") == LlamaConfig.model_type and "norm_type" not in fields
        source = NormlabForCausalLM.from_released(folder, BASELINE if plain else None, dtype=torch.float32)
    row, sites = get_scheme(source.config.scheme), removable_norms(source)
    other = [name for name in sites if type(source.get_submodule(name)) is not RMSNorm]
    places = 1 + sum(len(layer.layout.places()) for layer in source.model.layers)
    if other or row.residual is not None or not row.changes_blocks_only or len(sites) != places:
        raise NormlabError(
            f"norms of scheme {row.name} cannot be removed: only an RMSNorm before a branch or the head becomes a "
            "fixed gain"
        )
    config = NormlabConfig.from_dict({**source.config.to_dict(), "scheme": REMOVABLE, "taper_final": True})
    model = NormlabForCausalLM(config)
    model.load_state_dict(source.state_dict(), strict=False)
    with torch.no_grad():
        for name in sites:
            norm, own = cast(RMSNorm, source.get_submodule(name)), cast(TaperNorm, model.get_submodule(name))
            own.weight.copy_(norm.gamma() * norm.scale - own.centre)
    return model.eval()


def _comes_along(name: str | Path) -> bool:
    from normlab.release import shipped_models

    return str(name) in shipped_models()


def removable_norms(model: NormlabForCausalLM) -> list[str]:
    """Names of all norms of a model of `load_removable` in the order in which they go: before the MLPs from the first
    block to the last, before attention likewise, then the final norm (Heimersheim, 2409.13710)."""
    layouts = list(enumerate(layer.layout for layer in model.model.layers))
    inside = [
        f"model.layers.{i}.{getattr(layout, place)}"
        for place in ("mlp_in", "attn_in")
        for i, layout in layouts
        if getattr(layout, place)
    ]
    return [*inside, "model.norm"]


@torch.no_grad()
def remove_norm(model: NormlabForCausalLM, name: str, batches: list[Tensor]) -> float:
    """Let norm `name` compute x gamma / r from here on; r, the mean of sqrt(mean(x^2) + eps) over all tokens of the
    batches, is returned. 2409.13710 freezes the average standard deviation in the same way, and treats the first
    token apart for a while, which is not done here."""
    norm = cast(TaperNorm, model.get_submodule(name))
    seen: list[Tensor] = []
    handle = norm.register_forward_pre_hook(
        lambda _, inputs: seen.append((inputs[0].float().square().mean(-1) + norm.eps).sqrt().flatten())
    )
    try:
        for ids in batches:
            model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        handle.remove()
    rms = torch.cat(seen).mean()
    norm.fix(1 / rms)
    return rms.item()


@torch.no_grad()
def fold_removed(model: NormlabForCausalLM) -> None:
    """Multiply each removed norm's gamma/r into the matrices that read it (`fold_norms`): where nothing else reads
    them, as the embeddings do a tied head, the norm is x itself afterwards."""
    for module in model.modules():
        if isinstance(module, TaperNorm):
            if module.gate != 0:
                raise NormlabError("fold_removed: a norm has not been removed; its gain alone could be folded")
            module.fixed_weight.copy_(module.fixed_gain() - module.centre)
            module.inverse_rms.fill_(1.0)
    fold_norms(model.eval(), partial=True)


@torch.no_grad()
def as_llama(model: NormlabForCausalLM) -> LlamaForCausalLM:
    """A model without norms as a stock Llama: its norms stay as modules that divide by sqrt(mean(x^2) + 1e12) = 1e6
    and multiply by 1e6 times the gain, the form in which norm-free GPT-2s are published. Not for float16, where x/1e6
    is 0.

    Raises:
        NormlabError: attention that is more than Llama's; norms of queries and keys would read the same eps.
    """
    config = model.config
    if changes_attention(config):
        raise NormlabError("as_llama: a stock Llama has no norms of queries and keys, and no affine attention")
    fields = {name: value for name, value in config.to_dict().items() if name in LlamaConfig().to_dict()}
    fields |= {"model_type": LlamaConfig.model_type, "rms_norm_eps": HUGE_EPS}
    llama = LlamaForCausalLM(LlamaConfig.from_dict(fields))
    missing = llama.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing, missing
    for name in removable_norms(model):
        own, stock = cast(TaperNorm, model.get_submodule(name)), cast(Any, llama.get_submodule(name))
        stock.weight.copy_(own.fixed_gain() * HUGE_EPS**0.5)
    return llama.eval()
