"""`graph_sites`: where the tensors of a model's residual stream are, found before its steps are compiled.

Compiled code cannot compare values as `record` does. So a few random tokens go through the uncompiled model first. That
pass tells which norm is at which site, and by what the loss divides. Where the tensors are is then data (`Watch`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes import Sites, record
from normlab.probes.experiments import evaluating, hooked
from normlab.probes.forward_call import IGNORED_LABEL, Place, labels_averaged, loss_and_logits
from normlab.probes.layout import find_hidden_state
from normlab.probes.metrics import GRADIENT_SITES

ROWS, LENGTH, UNLABELLED, ITEMS = 2, 16, 3, 7  # 28 labels when they are shifted, 29 when not; none of them is 7


@dataclass(frozen=True, eq=False)
class Watch:
    """A tensor of the residual stream at one place.

    Args:
        module: whose tensor it is.
        is_output: what the module returns; else what it is called with.
        reader: the block that reads one stream of it, where it holds several.
        width: features per token.
        place: site and layer of h; None where its gradient alone is measured.
        gradient: site and layer of dLoss/dh; None where h alone is measured.
    """

    module: nn.Module
    is_output: bool
    reader: nn.Module | None
    width: int
    place: Place | None
    gradient: Place | None


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
    batch, blocks = _batch(model), [block.module for block in where.blocks]
    norms = [norm for block in where.blocks for norm in (*block.norms, *block.inner_norms)]
    ran: list[nn.Module] = []
    shapes: dict[nn.Module, tuple[int, ...]] = {}  # of what blocks and norms read

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        ran.append(module)
        if (state := find_hidden_state(args, kwargs)) is not None:
            shapes[module] = tuple(state[0].shape)

    with evaluating(model), torch.no_grad():
        with (
            record(where, ["token_l2_mean"], masks=["all"]) as recorder,
            hooked(*((module, note) for module in (*blocks, *norms, *where.outer_norms))),
        ):
            try:
                output = model(**batch)
            except TypeError as error:
                raise NormlabError(
                    f"compiled statistics try {type(model).__name__} out on input_ids and labels: {error}"
                ) from error
        averaging = _averaging(model, batch, output)
    stats = recorder.stats()
    if [module for module in ran if module in blocks] != blocks:
        raise NormlabError("compiled statistics need every block to run once in a call, in order: use record")
    for module in (*blocks, *recorder.norm_sites):
        if shapes[module][:2] != (ROWS, LENGTH) or len(shapes[module]) < 3:
            raise NormlabError(
                f"compiled statistics need activations of (batch, length, features), not {shapes[module]} for "
                f"{ROWS} x {LENGTH} tokens: use record"
            )
    widths = {(row.site, row.layer): row.width for row in stats.moments.itertuples()}
    return GraphSites(tuple(_watches(blocks, recorder.norm_sites, widths)), averaging, dict(stats.manifest["absent"]))


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


def _watches(
    blocks: list[nn.Module], norm_sites: Mapping[nn.Module, Place], widths: Mapping[Place, int]
) -> Iterator[Watch]:
    readers = [block if hasattr(block, "enter") else None for block in blocks]
    for i, (block, following) in enumerate(zip(blocks, [*readers[1:], readers[-1]], strict=True)):
        before, after = ("block_out", i), ("block_out", i + 1)
        entered = before if i == 0 else None  # the others are the output of the block before
        yield Watch(block, False, readers[i], widths[before], entered, ("block_in_grad", i + 1))
        yield Watch(block, True, following, widths[after], after, None)
    for norm, (site, layer) in norm_sites.items():
        if site in GRADIENT_SITES:
            yield Watch(norm, False, None, widths[site, layer], (site, layer), (GRADIENT_SITES[site], layer))


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
