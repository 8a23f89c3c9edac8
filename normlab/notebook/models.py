"""The models of the notebook on one's own model, and what the probes find in them."""

from __future__ import annotations

import argparse
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.models.pretrained import find_model, load_held_out, load_model
from normlab.notebook import train_small
from normlab.probes import record, sites
from normlab.schemes import BASELINE

_RECIPE: dict[str, Any] = dict(
    depth=6, steps=200, width=64, batch_size=4, block_length=64, vocab_size=512, lr=5e-3, eval_blocks=32
)


class Subject(NamedTuple):
    """A causal language model, (4, length) ids of a text, and its tokenizer."""

    model: Any
    tokens: Tensor
    words: Any


def own_model(name: str, length: int) -> Subject:
    """A Hugging Face model by its name or folder. It reads a file of Python's standard library."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = AutoTokenizer.from_pretrained(name)
    ids = words(inspect.getsource(argparse)).input_ids[: 4 * length]
    return Subject(AutoModelForCausalLM.from_pretrained(name).eval(), torch.tensor(ids).reshape(4, length), words)


def small_llama() -> Subject:
    """Transformers' own Llama with the weights of a Pre-LN model that comes with normlab, or is trained here.

    It reads text that it has not seen.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    kept = find_model(BASELINE) or train_small(BASELINE, **_RECIPE)
    ours = load_model(kept)
    model = LlamaForCausalLM(LlamaConfig.from_dict(ours.config.to_dict())).eval()
    model.load_state_dict(ours.state_dict())
    return Subject(model, load_held_out(kept)[:4], AutoTokenizer.from_pretrained(kept))


def found_by_probes(model: nn.Module, *inputs: Tensor, **named: Tensor) -> dict[str, Any]:
    """What the probes find in a model by its structure, and whether it computes the same bits while they measure."""
    there = sites(model)
    with torch.no_grad():
        alone = _answer(model(*inputs, **named))
        with record(model, metrics=["token_l2_mean"]):
            measured = _answer(model(*inputs, **named))
    row = {"model": type(model).__name__, "blocks": there.depth, "norms in a block": len(there.blocks[0].norms)}
    row |= {"norms after them": len(there.outer_norms), "not found": ", ".join(there.missing) or "nothing"}
    return row | {"same bits while measured": torch.equal(alone, measured)}


def _answer(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits
