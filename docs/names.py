"""The table of docs/beside.md: one tensor's names in normlab, TransformerLens, nnterp and interp-engine.

texts   the table by the name that marks it in the page

TransformerLens's names are found: those whose tensors equal ours on one model. Those of nnterp and interp-engine are as
they document them, in nnterp/standardized_transformer.py (2026-07-02) and docs/ENGINE_HOOK_MAPPINGS.md (2026-08-21).
"""

from __future__ import annotations

import copy
import importlib.util
import re

import torch
from tables import ROOT, table
from transformers import LlamaConfig, LlamaForCausalLM

from normlab.differences.capture import WORDS, capture, roles_of

# Site of `diff` -> that of `record`, nnterp's name, interp-engine's. Their blocks i count from 0.
ROWS = {
    "embeddings": ("", "token_embeddings", "embeddings"),
    "attn_norm_in": ("attn_norm_in", "layers_input[i]", "resid_pre.i"),
    "attn_norm_out": ("", "attentions_input[i]", "attn_in.i"),
    "attn_out": ("attn", "attentions_output[i]", "attn_out.i"),
    "mlp_norm_in": ("mlp_norm_in", "", "resid_mid.i"),
    "mlp_norm_out": ("", "mlps_input[i]", "mlp_in.i"),
    "mlp_out": ("mlp", "mlps_output[i]", "mlp_out.i"),
    "block_out": ("block_out", "layers_output[i]", "resid_post.i"),
    "final_norm_out": ("", "ln_final.output", "final_norm"),
    "logits": ("", "logits", "lm_head"),
}
PAGE = ROOT / "docs" / "beside.md"
SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=64)


def texts() -> dict[str, str]:
    if importlib.util.find_spec("transformer_lens") is None:  # as it was made where it is installed
        kept = re.search(r"<!-- names_beside -->\n\n(.*?)\n\n<!-- / -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
        return {"names_beside": kept[1] if kept else ""}
    lens = lens_names()
    head = ("the tensor", "`normlab.diff`", "`normlab.record`", "TransformerLens", "nnterp", "interp-engine")
    rows = ((WORDS[site], *(f"`{name}`" if name else "" for name in (site, own, lens[site], *others)))
            for site, (own, *others) in ROWS.items())  # fmt: skip
    return {"names_beside": table(head, rows)}


def lens_names() -> dict[str, str]:
    """TransformerLens's name of each site, by equal tensors: of several the least nested, then the most telling."""
    model, ids = a_model(seed=0)
    ours = capture(model, {"input_ids": ids}, roles_of(model, {"input_ids": ids})).tensors
    cache = lens_cache(model, ids)
    names = {}
    for site in ROWS:
        layer, x = next((layer, x) for (name, layer), x in ours.items() if name == site and layer != 1)
        block = f"blocks.{layer - 1}." if 1 <= layer <= 3 else ""
        equal = [name for name, y in cache.items() if _is_of(name, block) and are_equal(x, y)]
        names[site] = min(equal, key=lambda name: (name.count("."), -len(name)), default="")
        names[site] = names[site].replace(block, "blocks.i.") if block else names[site]
    return names


def _is_of(name: str, block: str) -> bool:
    return name.startswith(block) if block else not name.startswith(("blocks.", "rotary"))


def are_equal(x: torch.Tensor, y: object) -> bool:
    """True but for float32's rounding."""
    return isinstance(y, torch.Tensor) and x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-5)


def a_model(seed: int) -> tuple[LlamaForCausalLM, torch.Tensor]:
    """A Llama of three blocks with gains off 1, and tokens."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model, torch.randint(5, 60, (2, 12))


@torch.no_grad()
def lens_cache(model: LlamaForCausalLM, ids: torch.Tensor) -> dict[str, object]:
    """What TransformerLens keeps of a pass, by its names."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    bridge = build_bridge_from_module(copy.deepcopy(model), "LlamaForCausalLM", hf_config=model.config)
    return dict(bridge.run_with_cache(ids)[1].items())
