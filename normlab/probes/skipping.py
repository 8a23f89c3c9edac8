"""What a model loses where a block, attention or the MLP is skipped, and what later blocks do then.

Skipping a block is a forward hook that returns the block's input, or zero where the model adds the residual itself,
x + block(x). That equals deleting it, but every other layer keeps its index (LNS's scales stay). Skipping attention or
the MLP adds zero in its place, after the branch's output norm where there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.kept_pass import KeptPass
from normlab.probes.passes import Hook, hooked, on_blocks, residual_in, return_residual, return_zero
from normlab.probes.record import record
from normlab.probes.returned_loss import IGNORED_LABEL
from normlab.probes.runner import (
    Batch,
    Runner,
    interval,
    require_same_tokens,
    row_means,
    table_of,
    token_kl,
    token_losses,
)
from normlab.probes.sites import Sites

if TYPE_CHECKING:
    import pandas

PARTS = ("block", "attention", "mlp")
PART_OF = {"attn": "attention", "mlp": "mlp"}
Part = tuple[str, int]  # one of PARTS, and the layer
Change = dict[nn.Module, Hook]  # modules, and what makes each do nothing


def part_changes(runner: Runner, batch: Batch, parts: Sequence[str]) -> dict[Part, Change]:
    """How each part of a model is skipped.

    Branches of a kind in one block are skipped together. None can be if the block does not add up, if another block has
    the same one, or if one returns the stream with itself added and is not given the stream.
    """
    changes: dict[Part, Change] = {}
    if "block" in parts:
        changes |= {("block", block.layer): {block.module: runner.stream.pass_on} for block in runner.sites.blocks}
    if not set(parts) - {"block"}:
        return changes
    # What a branch adds is the output of its norm, or its own.
    residuals: dict[nn.Module, Tensor | None] = {}

    def see(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        residuals[module] = residual_in(args, kwargs, output)

    modules = [branch.module for block in runner.sites.blocks for branch in block.branches]
    with (
        record(runner.sites, ["relative_contribution"], masks=["all"]) as rec,
        hooked(*((module, see) for module in modules), must_run=False),
    ):
        runner.logits(batch)
    for (kind, layer), forms in rec.branches.items():
        part = PART_OF.get(kind, "")
        contained = [module for module, form in forms.items() if form == "contained"]
        if part in parts and all(residuals.get(module) is not None for module in contained):
            changes[part, layer] = {m: return_residual if m in contained else return_zero for m in forms}
    uses = Counter(module for module, _ in {(m, layer) for (_, layer), forms in rec.branches.items() for m in forms})
    return {part: change for part, change in changes.items() if not any(uses[module] > 1 for module in change)}


def skip_costs(
    runner: Runner, kept: KeptPass, skips: Callable[[Batch], dict[tuple[Part, ...], list[Change]]]
) -> pandas.DataFrame:
    """What the loss loses where parts are skipped together.

    Args:
        runner, kept: of the model.
        skips: called with the first batch: sets of parts, and how they are skipped.

    Returns:
        One row per set: `skipped loss skip_delta_loss standard_error low high output_kl output_kl_error tokens`.
    """
    import pandas

    sets: dict[tuple[Part, ...], list[Change]] = {}

    def sums(batch: Batch) -> tuple[Tensor, Tensor]:
        if not sets:
            sets.update(skips(batch))
        labels = runner.labels(batch)
        branches = {
            module
            for skipped in sets
            for (part, _), change in zip(skipped, sets[skipped], strict=True)
            if part != "block"
            for module in change
        }
        whole = kept.keep(partial(runner.logits, batch), branches)
        base, counted = token_losses(whole, labels), labels != IGNORED_LABEL
        values = [base.sum(1)]
        for skipped, changes in sets.items():
            with kept.changed(min(layer for _, layer in skipped), [hook for one in changes for hook in one.items()]):
                logits = runner.logits(batch)
            values.append((token_losses(logits, labels) - base).sum(1))
            values.append(torch.where(counted, token_kl(whole, logits), 0).sum(1))
        return torch.stack(values), counted.sum(1)

    means, errors, tokens = row_means(runner, sums)
    mean, error, rows = means.tolist(), errors.tolist(), []
    for i, skipped in enumerate(sets):
        delta, kl = 1 + 2 * i, 2 + 2 * i
        row = {"skipped": skipped, "loss": mean[0], "skip_delta_loss": mean[delta]}
        row |= interval(mean[delta], error[delta])
        rows.append(row | {"output_kl": mean[kl], "output_kl_error": error[kl], "tokens": tokens})
    return pandas.DataFrame(rows)


@torch.no_grad()
def skip_sensitivity(
    model: nn.Module | Sites,
    batches: Iterable[Batch],
    *,
    parts: Sequence[str] = ("block",),
    span: int = 1,
    layers: Sequence[int] | None = None,
    progress: bool = True,
) -> pandas.DataFrame:
    """Measure how much the loss rises when a part is skipped (2502.05795 Fig. 2, without renumbering layers).

    Args:
        model: a model with a language-model head, or its `sites`.
        batches: dicts of the model's arguments; `labels` are used when given (-100 = none), else the next token. Under
            another name they are what the returned loss is of.
        parts: some of "block", "attention", "mlp". All branches of a kind in a block are skipped together.
        span: skip this many consecutive ones; the row's `layer` is the first.
        layers: skip only at these (first) layers; default: at all.
        progress: show a progress bar.

    Returns:
        One row per skipped part: `part layer span loss skip_delta_loss standard_error low high output_kl
        output_kl_error tokens`. `loss` is the whole model's, in nats per token. `low` and `high` bound the 95% interval
        of `skip_delta_loss`, sequences taken as independent. `output_kl` = KL(whole || skipped), in nats per token.
        Where later blocks read what skipped ones make besides the stream (shared keys and values, T5's position bias),
        it is still made, which deletion cannot do: a column `read_by` lists those layers.

    Raises:
        NormlabError: unknown part, a span below 1, nothing to skip, no batch, no logits, no label that counts, or the
            residual stream is in parts, or added, where that cannot be told. A mask under a name that is not known:
            give it to `sites`.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise NormlabError(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if not isinstance(span, int) or span < 1:
        raise NormlabError(f"span is {span!r}: skip at least 1 block")
    runner = Runner(model, batches, progress, "skip sensitivity")
    kept, depth, places = KeptPass(runner.stream), runner.sites.depth, runner.sites.layers
    starts = places[: max(0, depth - span + 1)]
    chosen = None if layers is None else sorted({int(layer) for layer in layers})
    if wrong := sorted(set(chosen or ()) - set(starts)):
        raise NormlabError(f"there is no span of {span} from layer {wrong[0]}: layers are {places[0]} to {places[-1]}")

    def skips(batch: Batch) -> dict[tuple[Part, ...], list[Change]]:
        changes = part_changes(runner, batch, parts)
        firsts = starts if chosen is None else chosen
        sets = [tuple((part, first + i) for i in range(span)) for part in parts for first in firsts]
        found = {skipped: [changes[one] for one in skipped] for skipped in sets if changes.keys() >= set(skipped)}
        if not found:
            raise NormlabError(f"there is nothing to skip: {depth} blocks, span {span}, parts {', '.join(parts)}")
        return found

    table = skip_costs(runner, kept, skips)
    skipped = table.pop("skipped")
    table.insert(0, "part", [first[0] for first, *_ in skipped])
    table.insert(1, "layer", [first[1] for first, *_ in skipped])
    table.insert(2, "span", span)
    read_by = [kept.readers([layer for part, layer in one if part == "block"]) for one in skipped]
    return table.assign(read_by=[", ".join(map(str, layers)) for layers in read_by]) if any(read_by) else table


@torch.no_grad()
def skip_future_effect(
    model: nn.Module | Sites, batches: Iterable[Batch], *, progress: bool = True
) -> pandas.DataFrame:
    """Measure how much each later block's update changes when block s is skipped (2505.13898).

    The mean over tokens of ||u'_l - u_l||_2 / ||u_l||_2 for l > s, where u_l = h_l - h_{l-1}. u'_l is the same with
    block s the identity. Of a block l that adds exactly nothing to a token it is NaN, or infinite if the block adds
    something once s is skipped. Holds one batch's states and updates of all layers (2 x layers x tokens x width
    numbers).

    In half precision the rounding of the stream is part of both. Where updates are small it is most of the value: then
    measure the model in float32.

    Returns:
        One row per pair: `skipped layer value standard_error low high`. Arguments as for `skip_sensitivity`.

    Raises:
        NormlabError: one block only, or as for `angular_distance`.
    """
    runner = Runner(model, batches, progress, "skip future effect")
    layers = runner.sites.layers
    pairs = [{"skipped": s, "layer": layer} for s, layer in combinations(layers, 2)]
    if not pairs:
        raise NormlabError("skip_future_effect compares later blocks: the model has only one")

    kept = KeptPass(runner.stream)

    def sums(batch: Batch) -> tuple[Tensor, Tensor]:
        updates: dict[int, Tensor] = {}
        values: list[Tensor] = []

        def note(layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            before, after = runner.stream.through(args, kwargs, output)
            updates[layer] = (after - before).float()

        def compare(layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            before, after = runner.stream.through(args, kwargs, output)
            require_same_tokens(entered.shape, after)
            change = (after - before).float() - updates[layer]
            relative = torch.linalg.vector_norm(change, dim=-1) / torch.linalg.vector_norm(updates[layer], dim=-1)
            values.append(torch.where(counted, relative.to(counted.device), 0).sum(1))

        run = partial(runner.run, batch, needs_logits=False)
        kept.keep(run, see=note)
        entered = kept.states[0]
        counted = runner.counted(batch, entered)
        for block in runner.sites.blocks[:-1]:
            skip, later = (block.module, runner.stream.pass_on), range(block.layer + 1, layers.stop)
            with kept.changed(block.layer, [skip]), on_blocks(runner.stream, compare, later):
                run()
        return torch.stack(values), counted.sum(1)

    mean, error, _ = row_means(runner, sums)
    return table_of(pairs, mean, error)
