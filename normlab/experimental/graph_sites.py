"""`graph_sites`: where the tensors of a model's residual stream are, found before its steps are compiled.

Compiled code cannot compare values as `record` does. So which norm is at which site, and by what the loss divides, is
found once, by a pass of a few random tokens through the uncompiled model. Where the tensors are is then data (`Watch`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes import Sites, record
from normlab.probes.forward_call import IGNORED_LABEL, Place, labels_averaged, loss_and_logits
from normlab.probes.layout import find_hidden_state, find_output, read_by, same_tensor
from normlab.probes.metrics import GRADIENT_SITES, SITES

ROWS, LENGTH, UNLABELLED, ITEMS = 2, 16, 3, 7  # 28 labels when they are shifted, 29 when not; none of them is 7


@dataclass(frozen=True, eq=False)
class Watch:
    """One tensor of the residual stream, and the places that it is at.

    Args:
        module: whose tensor it is.
        is_output: what the module returns; else what it is called with.
        reader: the block that reads one stream of it, where it holds several.
        width: features per token.
        places: (site, layer) of h.
        gradients: (site, layer) of dLoss/dh.
    """

    module: nn.Module
    is_output: bool
    reader: nn.Module | None
    width: int
    places: tuple[Place, ...]
    gradients: tuple[Place, ...]


@dataclass(frozen=True)
class Averaging:
    """The divisor between the summed loss of a model's tokens and the loss that it returns.

    Args:
        shifted: labels are compared with the logits of the token before.
        mean: it is the number of labels; else 1.
        items: it is `num_items_in_batch` when the caller gives that.
    """

    shifted: bool
    mean: bool
    items: bool

    def divisor(self, arguments: Mapping[str, Any]) -> Any:
        """The divisor of a call with these arguments."""
        if self.items and arguments.get("num_items_in_batch") is not None:
            return arguments["num_items_in_batch"]
        if not self.mean:
            return 1.0
        counted = arguments.get("shift_labels")
        if counted is None:
            counted = arguments["labels"][:, 1:] if self.shifted else arguments["labels"]
        return (counted != IGNORED_LABEL).sum()


@dataclass(frozen=True)
class GraphSites:
    """The tensors, the loss (None if it could not be determined), and what cannot be measured and why."""

    watches: tuple[Watch, ...]
    averaging: Averaging | None
    absent: dict[str, str]


def root_of(where: Sites) -> nn.Module:
    """The module that is called with the batch by name, inside what wraps it (DDP, `torch.compile`)."""
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for module in where.ancestors:
        parameters = inspect.signature(module.forward).parameters.values()
        if not hasattr(module, "_orig_mod") and any(p.kind is named for p in parameters):
            return module
    return where.ancestors[-1]


def graph_sites(where: Sites) -> GraphSites:
    """Run the uncompiled model once or twice, without gradients, on 2 x 16 random tokens; its state is left alone.

    Raises:
        NormlabError: the model takes no `input_ids`, runs a block twice in a call, or does not keep its activations as
            (batch, length, ..., features).
    """
    model = root_of(where)
    batch = _batch(model)
    notes: list[_Note] = []
    with _evaluating(model), torch.no_grad(), record(where, ["token_l2_mean"], masks=["all"]) as recorder:
        with _noting(where, notes):
            try:
                output = model(**batch)
            except TypeError as error:
                raise NormlabError(
                    f"compiled statistics try {type(model).__name__} out on input_ids and labels: {error}"
                ) from error
        averaging = _averaging(model, batch, output)
    stats = recorder.stats()
    ran = [note.module for note in notes if note.is_block and not note.is_output]
    if ran != [block.module for block in where.blocks]:
        raise NormlabError("compiled statistics need every block to run once in a call, in order: use record")
    norm_sites = {norm: place for norm, place in recorder.norm_sites.items() if place[0] in SITES}
    final = [note.module for note in notes if note.module in where.outer_norms]
    if "final_norm_in" in set(stats.moments["site"]) and final:
        norm_sites[final[-1]] = ("final_norm_in", where.depth)
    return GraphSites(tuple(_watches(where, notes, norm_sites)), averaging, dict(stats.manifest["absent"]))


def _batch(model: nn.Module) -> dict[str, Tensor]:
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(embedding, nn.Embedding):
        raise NormlabError(
            "compiled statistics need a transformers model of tokens, to find its sites with a few of them"
        )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.num_embeddings, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :UNLABELLED] = IGNORED_LABEL
    device = embedding.weight.device
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, because branches do not add up with dropout; every module's former mode after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(eq=False)
class _Note:
    """A tensor that passed by, and its version at that time."""

    module: nn.Module
    is_block: bool
    is_output: bool
    reader: nn.Module | None
    x: Tensor
    version: int

    def same_as(self, other: _Note) -> bool:
        return self.reader is other.reader and self.version == other.version and same_tensor(self.x, other.x)


@contextmanager
def _noting(where: Sites, notes: list[_Note]) -> Iterator[None]:
    """Note every block's input and output and every norm's input."""
    blocks = [block.module for block in where.blocks]
    readers = {block: block if hasattr(block, "enter") else None for block in blocks}
    norms = [norm for block in where.blocks for norm in (*block.norms, *block.inner_norms)]
    handles = []

    def note(module: nn.Module, x: Tensor | None, is_output: bool = False) -> None:
        if x is not None:
            index = blocks.index(module) if module in readers else 0
            reader = readers.get(blocks[min(index + is_output, len(blocks) - 1)] if module in readers else module)
            notes.append(_Note(module, module in readers, is_output, reader, x, x._version))

    def entered(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        state = find_hidden_state(args, kwargs)
        note(module, None if state is None else state[0])

    for module in (*blocks, *norms, *where.outer_norms):
        handles.append(module.register_forward_pre_hook(entered, with_kwargs=True))
    for module in blocks:
        handles.append(module.register_forward_hook(lambda m, args, output: note(m, find_output(output), True)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watches(where: Sites, notes: Sequence[_Note], norm_sites: Mapping[nn.Module, Place]) -> Iterator[Watch]:
    """One watch for all notes of the same tensor, at the first of them."""
    layers = {block.module: block.index for block in where.blocks}
    groups: list[tuple[_Note, list[Place], list[Place]]] = []
    for note in notes:
        layer, outputs, inputs = layers.get(note.module, 0), [], []
        if not note.is_block:
            outputs = inputs = [norm_sites[note.module]] if note.module in norm_sites else []
        elif note.is_output:
            outputs = [("block_out", layer)]
        else:
            outputs, inputs = ([("block_out", 0)] if layer == 1 else []), [("block_in", layer)]
        group = next((group for group in groups if group[0].same_as(note)), None)
        if group is None:
            groups.append(group := (note, [], []))
        group[1].extend(outputs)
        group[2].extend((GRADIENT_SITES[site], at) for site, at in inputs)
    for note, places, gradients in groups:
        if not places and not gradients:
            continue
        if tuple(note.x.shape[:2]) != (ROWS, LENGTH) or note.x.ndim < 3:
            raise NormlabError(
                f"compiled statistics need activations of (batch, length, features), not {tuple(note.x.shape)} for "
                f"{ROWS} x {LENGTH} tokens: use record"
            )
        view = note.x if note.reader is None else read_by(note.reader, note.x)
        yield Watch(note.module, note.is_output, note.reader, view.shape[-1], tuple(places), tuple(gradients))


def _averaging(model: nn.Module, batch: Mapping[str, Tensor], output: Any) -> Averaging | None:
    """The reading of the loss under which it is the cross-entropy of its logits."""
    loss, logits = loss_and_logits(output)
    if loss is None or logits is None:
        return None
    result = labels_averaged(loss, logits, batch["labels"])
    if result is None:
        return None
    divisor, shifted = result
    parameters = inspect.signature(model.forward).parameters
    takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    items = None
    if takes_more or "num_items_in_batch" in parameters:
        loss, logits = loss_and_logits(model(**batch, num_items_in_batch=torch.tensor(ITEMS, device=loss.device)))
        assert loss is not None and logits is not None
        items = labels_averaged(loss, logits, batch["labels"], items=ITEMS)
    return Averaging(shifted=shifted, mean=divisor != 1.0, items=items is not None and items[0] == ITEMS)
