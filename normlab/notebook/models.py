"""The models of the notebook on one's own model, what the probes find in them, and outliers of those that are kept."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.figures.outliers import MASSIVE, SINK
from normlab.models.pretrained import find_model, load_held_out, load_model
from normlab.notebook import train_small
from normlab.probes import attention_sinks, massive_activations, quantization_costs, record, sites
from normlab.release import shipped_models
from normlab.schemes import BASELINE, SCHEMES

if TYPE_CHECKING:
    import pandas as pd

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

    kept = find_model(BASELINE, num_hidden_layers=8) or train_small(BASELINE, **_RECIPE)
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


def kept_models() -> Iterator[tuple[str, Any, Tensor]]:
    """Each model that comes with normlab: its scheme's title, with fields and depth; the model; its held-out blocks."""
    for name in shipped_models():
        model = load_model(name)
        scheme, *fields = name.split("-")
        yield " ".join([SCHEMES[scheme].title, *fields]), model, load_held_out(name)


def outliers(rows: int = 4) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Of each kept model, on `rows` held-out blocks: largest activation and strongest sink; what 8 and 4 bits cost.

    Returns:
        The tables that `normlab.figures.outliers` and `normlab.figures.few_bits` draw.
    """
    import pandas as pd

    found: list[dict[str, Any]] = []
    costs: list[pd.DataFrame] = []
    for name, model, blocks in kept_models():
        batch = {"input_ids": blocks[:rows]}
        largest = massive_activations(model, batch, least=0.0).nearest or {}
        sink = attention_sinks(model, batch).nearest or {}
        place = ("row", "position")
        same = all(largest[one] == sink[one] for one in place)
        measured = {"ratio": largest["ratio"], "weight": sink["weight"], "same_token": same}
        found.append({"model": name, "scheme": model.config.scheme} | measured)
        costs.append(quantization_costs(model, [batch], progress=False).assign(model=name))
    return pd.DataFrame(found), pd.concat(costs, ignore_index=True)


def outliers_sentence(found: pd.DataFrame, costs: pd.DataFrame) -> str:
    """`outliers` in words."""
    massive = found.loc[found["ratio"] > MASSIVE, "model"]
    sinks = found.loc[found["weight"] > SINK, "model"]
    four = costs.query("bits == 4 and part == 'both'").set_index("model")["delta_loss"]
    return (
        f"Massive activations (above {MASSIVE:,} medians): {', '.join(massive) or 'in no model'}. Sinks (a head's mean "
        f"attention above {SINK}): {', '.join(sinks) or 'in no model'}. The largest activation and the strongest sink "
        f"are at one token in {int(found['same_token'].sum())} of {len(found)} models. Four bits cost {four.min():.2f} "
        f"({four.idxmin()}) to {four.max():.2f} ({four.idxmax()}) nats per token."
    )


def _answer(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits
