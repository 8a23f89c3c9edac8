"""Measure what each block, and each part of one, adds to the difference of two models.

B runs on A's values: what a block or part of it reads is A's, and its output is compared with A's. So an error that
only passes through does not count.

`compare_sites(a, b, ...)`    two captures, site by site
`added_by_blocks(a, b, ...)`  one row per block: the error that it adds, and what that does to the logits
`explained_parts(...)`        how many parts have the cause of the first, and what the block has that adds most
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd
from torch import Tensor

from normlab.differences.capture import EMBEDDINGS, LOGITS, Site, capture, capture_until, relative_difference
from normlab.differences.cause import Cause
from normlab.differences.causes import Evidence, Side, causes_of, has_cause, rotary_tables

ROUNDINGS = 6.0  # of float32, by which two float64 copies may differ
FOLLOWED = 8  # blocks whose error is followed to the logits, those that add most: each takes a pass
Tensors = Mapping[Site, Tensor]
COLUMNS = ["layer", "difference", "noise", "ratio", "parts", "logits"]


class Row(NamedTuple):
    """One site of the table. parts: True where the difference is beyond rounding."""

    site: Site
    difference: float
    noise: float
    parts: bool

    @property
    def ratio(self) -> float:
        """The difference in roundings."""
        return self.difference / self.noise if self.noise else math.inf if self.difference else 0.0


def compare_sites(a: Tensors, b: Tensors, rounded: Tensors, least: float, mask: Tensor | None) -> list[Row]:
    """Compare two captures; `rounded` is the first one in a coarser dtype.

    As many numbers in another shape are another layout, and not compared.
    """
    rows = []
    for site in (site for site in a if site in b):
        if a[site].shape != b[site].shape and a[site].numel() == b[site].numel():
            continue
        noise = relative_difference(a[site], rounded[site], mask)
        difference = relative_difference(a[site], b[site], mask)
        parts = math.isinf(difference) or difference > max(least, ROUNDINGS * noise)
        rows.append(Row(site, difference, noise, parts))
    return rows


def _on_values_of_a(a: Side, side: Side, given: Tensors) -> Side:
    captured = capture(side.model, side.inputs, side.roles, given=given)
    return Side(captured, side.model, side.inputs, side.roles)


def added_by_blocks(a: Side, b: Side, rounded: Side, least: float, mask: Tensor | None) -> pd.DataFrame:
    """One row per block, of index 1 to depth; 0 are the embeddings, depth + 1 is what follows the blocks.

    difference: relative, between the outputs of A's and of B's block on A's input; noise: the same of `rounded`, A in a
    coarser dtype. logits: relative difference of A's logits where its block's output is B's, of the `FOLLOWED` blocks
    that add most. Empty where B's stream has another shape.
    """
    given = {site: x for site, x in a.tensors.items() if site.name in (EMBEDDINGS, "block_out")}
    of_b, of_rounded = (_on_values_of_a(a, side, given).tensors for side in (b, rounded))
    if any(site not in of_b or of_b[site].shape != x.shape for site, x in given.items()):
        return pd.DataFrame(columns=COLUMNS)
    rows = compare_sites(a.tensors, of_b, of_rounded, least, mask)
    rows = [row for row in rows if row.site in given or row.site.name == LOGITS]
    end = Site(LOGITS, a.captured.depth + 1)
    logits = {}
    for row in sorted((row for row in rows if row.parts), key=lambda row: -row.difference)[:FOLLOWED]:
        moved = of_b[end] if row.site == end else None
        if moved is None:
            moved = capture_until(end, a.model, a.inputs, a.roles, given={row.site: of_b[row.site]})
        logits[row.site] = relative_difference(a.tensors[end], moved, mask)
    table = [(r.site.layer, r.difference, r.noise, r.ratio, r.parts, logits.get(r.site, math.nan)) for r in rows]
    return pd.DataFrame(table, columns=COLUMNS)


def explained_parts(
    evidence: Evidence, cause: Cause | None, rounded: Side, least: float, most: int | None
) -> tuple[Cause | None, list[str]]:
    """The first cause with the number of parts that have it, and sentences about the block that adds most.

    Args:
        evidence: of the first site that differs.
        cause: of that site.
        rounded: A in a coarser dtype.
        least: relative difference that counts.
        most: the block that adds most, if it is another than the first.
    """
    a, b, first, mask = evidence
    given = {site: x for site, x in a.tensors.items() if site.name != LOGITS}
    b, rounded = (_on_values_of_a(a, side, given) for side in (b, rounded))
    rows = [row for row in compare_sites(a.tensors, b.tensors, rounded.tensors, least, mask) if row.parts]
    kind = "_norm_out" if first.name.endswith("_norm_out") else first.name
    alike = [site for site in a.tensors if site.name.endswith(kind)]
    sharing = {first}
    if cause is not None:
        others = [row.site for row in rows if row.site in alike and row.site != first]
        sharing |= {site for site in others if has_cause(Evidence(a, b, site, mask), cause)}
        if len(sharing) > 1:
            tables = cause.of_rotary and rotary_tables(b.model) == len(alike)
            what = "rotary tables" if tables else "norms" if kind == "_norm_out" else "blocks"
            count = "all" if len(sharing) == len(alike) else f"{len(sharing)} of"
            cause = cause._replace(words=f"{count} {len(alike)} {what}: {cause.words}")
    worst = max((row for row in rows if row.site.layer == most), key=lambda row: row.difference, default=None)
    if most is None or worst is None or worst.site in sharing:
        return cause, []
    site = worst.site
    found = causes_of(Evidence(a, b, site, mask))[:1] or [Cause("differs", f"by {worst.difference:.1e}")]
    where = f"block {site.layer}, " if 1 <= site.layer <= a.captured.depth else ""
    return cause, [f"{where}{site.words()}: {found[0]}"]
