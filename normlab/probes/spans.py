"""What to cut: the span of consecutive blocks that costs least to drop, at each length.

`cheapest_spans`  the spans, with what they cost and its interval
`mergekit_config` a mergekit configuration that drops one
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from normlab.errors import NormlabError
from normlab.probes.geometry import angular_distance
from normlab.probes.sites import Sites, sites
from normlab.probes.skipping import skip_sensitivity

if TYPE_CHECKING:
    import pandas

CANDIDATES = 6  # spans of each length whose cost is measured: those that turn the stream least


def cheapest_spans(
    model: nn.Module | Sites,
    batches: Iterable[dict[str, Any]],
    *,
    longest: int | None = None,
    candidates: int = CANDIDATES,
    progress: bool = True,
) -> pandas.DataFrame:
    """The span of consecutive blocks whose removal raises the loss least, at each length 1 .. `longest`.

    Of each length, the `candidates` spans with the smallest angle between their ends' residual streams (2403.17887) are
    skipped on every other batch, and the cheapest is measured again on the rest: what a minimum is chosen on flatters
    it. Blocks keep their index while others are skipped; where nothing depends on it, that is deletion.

    Args:
        model, batches, progress: as for `skip_sensitivity`.
        longest: default: half of the blocks.

    Returns:
        One row a length: `length first last skip_delta_loss standard_error low high tokens`, blocks counted from 1,
        nats a token, the 95% interval with sequences taken as independent; `start stop`, so that transformers'
        `layers[start:stop]` are the blocks to drop; `keep`, the [begin, end) ranges that mergekit keeps.

    Raises:
        NormlabError: as for `skip_sensitivity`; a model of one block.
    """
    import pandas

    where = model if isinstance(model, Sites) else sites(model)
    given = list(batches)
    choosing, measuring = given[::2], given[1::2] or given
    longest = where.depth // 2 if longest is None else longest
    if not 1 <= longest < where.depth:
        raise NormlabError(f"a span of 1 to {where.depth - 1} blocks can be dropped of {where.depth}, not of {longest}")
    angles = angular_distance(where, choosing, progress=progress)
    rows = []
    for length in range(1, longest + 1):
        starts = range(1, where.depth - length + 2)
        nearest = sorted(starts, key=lambda first: angles.loc[first - 1, first + length - 1])[:candidates]
        tried = skip_sensitivity(where, choosing, span=length, layers=nearest, progress=progress)
        best = int(tried.loc[tried["skip_delta_loss"].idxmin(), "layer"])
        found = skip_sensitivity(where, measuring, span=length, layers=[best], progress=progress).iloc[0]
        last = best + length - 1
        ranges = [[0, best - 1], [last, where.depth]]
        row = {"length": length, "first": best, "last": last}
        row |= {name: found[name] for name in ("skip_delta_loss", "standard_error", "low", "high", "tokens")}
        rows.append(row | {"start": best - 1, "stop": last, "keep": [r for r in ranges if r[0] < r[1]]})
    return pandas.DataFrame(rows)


def mergekit_config(model: str, keep: Sequence[Sequence[int]], dtype: str = "bfloat16") -> str:
    """The YAML of mergekit's `passthrough` merge of the blocks `keep` of a model: [begin, end) ranges, counted from
    0."""
    slices = chain.from_iterable(
        ("  - sources:", f"      - model: {json.dumps(model)}", f"        layer_range: [{begin}, {end}]")
        for begin, end in keep
    )
    return "\n".join(["slices:", *slices, "merge_method: passthrough", f"dtype: {dtype}", ""])
