"""What costs least to drop, and how to drop it: spans of blocks, sets of attention and MLP branches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from normlab.errors import NormlabError
from normlab.probes.geometry import angular_distance
from normlab.probes.kept_pass import KeptPass
from normlab.probes.passes import evaluating
from normlab.probes.runner import Batch, Runner, listed
from normlab.probes.sites import Sites, sites
from normlab.probes.skipping import Change, Part, part_changes, skip_costs, skip_sensitivity

if TYPE_CHECKING:
    import pandas

CANDIDATES = 6  # spans of each length whose cost is measured: those that turn the stream least
BRANCHES = ("attention", "mlp")
COSTS = ("skip_delta_loss", "standard_error", "low", "high", "tokens")  # columns of both tables


def cheapest_spans(
    model: nn.Module | Sites,
    batches: Iterable[Batch],
    *,
    longest: int | None = None,
    candidates: int = CANDIDATES,
    progress: bool = True,
) -> pandas.DataFrame:
    """Find the span of consecutive blocks whose removal raises the loss least, at each length 1 .. `longest`.

    Of each length, the `candidates` spans with the smallest angle between their ends' residual streams (2403.17887) are
    skipped on every second batch. The cheapest is measured again on the other batches, because the data on which a
    minimum was chosen flatters it. A single batch serves for both. Blocks keep their index while others are skipped;
    where nothing depends on it, that is deletion. No span holds a block whose keys and values, or the like, later
    blocks read.

    Args:
        model, batches, progress: as for `skip_sensitivity`.
        longest: default: half of the blocks.
        candidates: spans tried per length.

    Returns:
        One row per length: `length first last skip_delta_loss standard_error low high tokens start stop keep`. Blocks
        count from 1, losses are nats per token, the interval is 95% with sequences taken as independent.
        `layers[start:stop]` in transformers are the blocks to drop. `keep` are the [begin, end) ranges that mergekit
        keeps.

    Raises:
        NormlabError: as for `skip_sensitivity`; a model of one block, or of blocks that later ones all read.
    """
    import pandas

    where = model if isinstance(model, Sites) else sites(model)
    _require_counts(candidates=candidates, longest=longest)
    choosing, measuring = _halves(batches)
    longest = where.depth // 2 if longest is None else longest
    if not 1 <= longest < where.depth:
        raise NormlabError(f"a span of 1 to {where.depth - 1} blocks can be dropped of {where.depth}, not of {longest}")
    first, last = where.layers[0], where.layers[-1]
    if first > 1:
        raise NormlabError(f"spans are of all blocks of a model: these are {where.depth} of it, {first} to {last}")
    angles = angular_distance(where, choosing, progress=progress)
    runner = Runner(where, choosing[:1], False, "")
    kept = KeptPass(runner.stream)
    with torch.no_grad(), evaluating(runner.model):
        for batch in runner:
            kept.keep(partial(runner.run, batch, needs_logits=False))
    rows = []
    for length in range(1, longest + 1):
        starts = [n for n in range(1, where.depth - length + 2) if not kept.readers(range(n, n + length))]
        if not starts:
            continue
        nearest = sorted(starts, key=lambda first: angles.loc[first - 1, first + length - 1])[:candidates]
        tried = skip_sensitivity(where, choosing, span=length, layers=nearest, progress=progress)
        best = int(_cheapest(tried)["layer"])
        measured = skip_sensitivity(where, measuring, span=length, layers=[best], progress=progress).iloc[0]
        last = best + length - 1
        ranges = [[0, best - 1], [last, where.depth]]
        row = {"length": length, "first": best, "last": last}
        row |= {name: measured[name] for name in COSTS}
        rows.append(row | {"start": best - 1, "stop": last, "keep": [r for r in ranges if r[0] < r[1]]})
    if not rows:
        raise NormlabError("later blocks read what every span makes besides the stream: none can be dropped")
    return pandas.DataFrame(rows)


def _halves(batches: Iterable[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Every second batch, to choose on, and the others, to measure on; a single one for both."""
    found = listed(batches)
    return found[::2], found[1::2] or found


def _require_counts(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise NormlabError(f"{name} is {value!r}: give a whole number from 1 on")


def _cheapest(tried: pandas.DataFrame) -> pandas.Series:
    """The row of the least cost. NormlabError where no cost is a number."""
    if tried["skip_delta_loss"].isna().all():
        raise NormlabError("the loss is not finite: nothing can be told to be the cheapest")
    return tried.loc[tried["skip_delta_loss"].idxmin()]


@torch.no_grad()
def cheapest_branches(
    model: nn.Module | Sites,
    batches: Iterable[Batch],
    *,
    most: int | None = None,
    candidates: int = CANDIDATES,
    progress: bool = True,
) -> pandas.DataFrame:
    """Leave out attention and MLP branches together, one more at a time: each the cheapest beside those before it.

    At each size, of the `candidates` branches that cost least alone, the one that raises the loss least together with
    those left out already is left out too. That is measured on every second batch, and the resulting sets again on the
    others. A single batch serves for both. LLM-Drop (2406.15786) chooses all at once, by the angle between a branch's
    input and output. No set has a branch whose block later blocks read besides the stream (keys and values that they
    share).

    Args:
        model, batches, progress: as for `skip_sensitivity`.
        most: the size of the largest set; default: a quarter of the branches.
        candidates: branches tried per size.

    Returns:
        One row per size: `dropped part layer skip_delta_loss standard_error low high tokens drop_attn_list
        drop_mlp_list`. `part` and `layer` (from 1) are the branch that is new. The lists (from 0) are the whole set, as
        LLM-Drop's `config.json` has them. Losses and intervals as in `cheapest_spans`.

    Raises:
        NormlabError: as for `skip_sensitivity`; `most` is not 1 to one less than the branches that can be left out.
    """
    import pandas

    where = model if isinstance(model, Sites) else sites(model)
    _require_counts(candidates=candidates, most=most)
    choosing, measuring = _halves(batches)
    changes: dict[Part, Change] = {}

    def costs(batches: Sequence[Batch], sets: Iterable[tuple[Part, ...]] | None = None) -> pandas.DataFrame:
        runner = Runner(where, batches, progress, "branches left out")
        kept = KeptPass(runner.stream)

        def skips(batch: Batch) -> dict[tuple[Part, ...], list[Change]]:
            if not changes:
                changes.update(part_changes(runner, batch, BRANCHES))
                kept.keep(partial(runner.run, batch, needs_logits=False))
                for part, layer in [one for one in changes if kept.readers([one[1]])]:
                    del changes[part, layer]
                if not changes:
                    raise NormlabError(f"no attention or MLP of the {where.depth} blocks can be left out alone")
            chosen = [(one,) for one in changes] if sets is None else sets
            return {skipped: [changes[one] for one in skipped] for skipped in chosen}

        return skip_costs(runner, kept, skips)

    alone = costs(choosing).sort_values("skip_delta_loss", kind="stable")
    order = [part for (part,) in alone["skipped"]]
    most = max(1, len(order) // 4) if most is None else most
    if not 1 <= most < len(order):
        raise NormlabError(f"1 to {len(order) - 1} of {len(order)} branches can be left out, not {most}")
    left_out: tuple[Part, ...] = _cheapest(alone)["skipped"]
    while len(left_out) < most:
        tried = costs(choosing, [(*left_out, one) for one in order if one not in left_out][:candidates])
        left_out = _cheapest(tried)["skipped"]
    measured = costs(measuring, [left_out[:size] for size in range(1, most + 1)])
    rows = []
    for row in measured.to_dict("records"):
        part, layer = row["skipped"][-1]
        numbers = {name: row[name] for name in COSTS}
        lists = {
            name: [layer - 1 for kind, layer in row["skipped"] if kind == one]
            for name, one in (("drop_attn_list", "attention"), ("drop_mlp_list", "mlp"))
        }
        rows.append({"dropped": len(row["skipped"]), "part": part, "layer": layer} | numbers | lists)
    return pandas.DataFrame(rows)


def mergekit_config(model: str, keep: Sequence[Sequence[int]], dtype: str = "bfloat16") -> str:
    """The YAML of mergekit's `passthrough` merge of the blocks `keep`: [begin, end) ranges, counted from 0."""
    slices = chain.from_iterable(
        ("  - sources:", f"      - model: {json.dumps(model)}", f"        layer_range: [{begin}, {end}]")
        for begin, end in keep
    )
    return "\n".join(["slices:", *slices, "merge_method: passthrough", f"dtype: {dtype}", ""])
