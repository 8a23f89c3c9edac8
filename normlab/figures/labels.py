"""Labels at the ends of lines, moved apart where lines end together.

EndLabel      text for the end of a line, in the line's colour
label_ends    right of a panel as annotations, with thin lines if any had to move: for a figure that stands still
label_inside  the same within a panel, for lines that end there
label_trace   as one trace of text: for a figure that moves, where it costs nothing
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

LINE = 15  # pixels of a line of text
_LETTER = 6.6  # pixels of a letter


@dataclass(frozen=True)
class EndLabel:
    """Text for the end of a line, in the line's colour; `x` and `y`: where the line ends; `clear`: the text starts
    right of this x, too."""

    y: float
    text: str
    color: str
    x: float = 0.0
    clear: float = -math.inf


def spread(positions: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Move positions apart to at least `gap`, each as little as it can, inside [low, high] if they fit.

    Labels that would overlap form a block around their common centre; blocks that touch merge.
    """

    def bottom(members: list[int]) -> float:
        """The place of a block's lowest member."""
        length = (len(members) - 1) * gap
        centre = sum(positions[member] for member in members) / len(members)
        return max(min(centre - length / 2, high - length), low)

    blocks: list[list[int]] = []  # members from low to high
    for place in sorted(range(len(positions)), key=lambda i: positions[i]):
        blocks.append([place])
        while len(blocks) > 1 and bottom(blocks[-1]) - bottom(blocks[-2]) < len(blocks[-2]) * gap:
            upper = blocks.pop()
            blocks[-1] = blocks[-1] + upper
    return [at for _, at in sorted((m, bottom(block) + rank * gap) for block in blocks for rank, m in enumerate(block))]


def _placed(
    labels: Sequence[EndLabel], bounds: tuple[float, float], pixels: float, log: bool
) -> list[tuple[EndLabel, float, float]]:
    """Those that the axis can show, each with where its line ends and where it goes, in units of the axis."""
    shown = [label for label in labels if math.isfinite(label.y) and (label.y > 0 or not log)]
    ends = [math.log10(label.y) if log else label.y for label in shown]
    places = spread(ends, LINE * (bounds[1] - bounds[0]) / pixels, *bounds)
    return list(zip(shown, ends, places, strict=True))


def label_ends(
    figure: go.Figure, labels: Sequence[EndLabel], bounds: tuple[float, float], pixels: float, log: bool, axis: str = ""
) -> None:
    """Write labels right of the panel `axis` ("" is the first, "2" the second).

    Args:
        bounds: the y-axis range, as plotly takes it (decades where `log`).
        pixels: height of the panel.
    """
    unit = (bounds[1] - bounds[0]) / pixels
    placed = _placed(labels, bounds, pixels, log)
    moved = any(abs(end - place) >= 2 * unit for _, end, place in placed)  # then all stand in one column
    for label, end, place in placed:
        where = dict(xref=f"x{axis} domain", x=1.0, yref=f"y{axis}", y=end)
        figure.add_annotation(**where, **_words(label), **_leader(label.color, 22, (end - place) / unit, moved))


def label_inside(
    figure: go.Figure,
    labels: Sequence[EndLabel],
    lines: Sequence[tuple[Sequence[float], Sequence[float]]],
    bounds: tuple[float, float],
    size: tuple[float, float],
    across: float,
    axis: str = "",
) -> None:
    """Write labels right of their lines' ends in the panel `axis`, up or down where a line or a label is in the way.

    Args:
        labels: `x` in units of its axis (decades where it is logarithmic), `y` on a linear one.
        lines: all that are drawn in the panel, (x, y) in the same units.
        bounds: the y-axis range.
        size: width and height of the panel in pixels.
        across: how much of x the width holds.
    """
    unit, pixel = (bounds[1] - bounds[0]) / size[1], across / size[0]
    taken = list(lines)
    for label in sorted(labels, key=lambda label: -label.y):
        start = max(label.x, label.clear)
        edges = [start + 10 * pixel, start + (26 + _LETTER * len(label.text)) * pixel]
        span = np.linspace(edges[0], edges[1], 25)
        crossed = np.concatenate([np.interp(span, x, y, left=math.nan, right=math.nan) for x, y in taken])
        crossed = crossed[np.isfinite(crossed)]
        tries = [label.y + side * step * unit for step in range(0, 120, 3) for side in (1, -1)]
        free = (at for at in tries if bounds[0] < at < bounds[1] and np.all(np.abs(crossed - at) >= 0.6 * LINE * unit))
        place = next(free, label.y)
        taken += [(edges, [place + part * LINE * unit] * 2) for part in (-0.4, 0.4)]
        shift = (label.y - place) / unit
        where = dict(xref=f"x{axis}", x=label.x, yref=f"y{axis}", y=label.y)
        right = 16 + (start - label.x) / pixel
        figure.add_annotation(
            **where, **_words(label), **_leader(label.color, right, shift, abs(shift) >= 2 or right > 16)
        )


def _words(label: EndLabel) -> dict[str, Any]:
    return dict(text=label.text, font=dict(size=12, color=label.color), xanchor="left")


def _leader(color: str, right: float, down: float, drawn: bool) -> dict[str, Any]:
    """How far a label stands from its line's end, in pixels, and whether a thin line leads to it."""
    if not drawn:
        return dict(showarrow=False, xshift=6, yshift=-down)
    return dict(showarrow=True, arrowhead=0, arrowwidth=0.8, arrowcolor=color, standoff=2, ax=right, ay=down)


def label_trace(
    labels: Sequence[EndLabel], bounds: tuple[float, float] | None, pixels: float, log: bool
) -> dict[str, Any] | None:
    """The labels as a trace named "labels", each right of its line's end; None where there is none to show. Arguments
    as for `label_ends`."""
    placed = [] if bounds is None else _placed(labels, bounds, pixels, log)
    if not placed:
        return None
    return dict(
        type="scatter",
        mode="text",
        name="labels",
        textposition="middle right",
        hoverinfo="skip",
        cliponaxis=False,
        x=np.array([label.x for label, _, _ in placed]),
        y=np.array([10**place if log else place for _, _, place in placed]),
        text=[f" {label.text}" for label, _, _ in placed],
        textfont=dict(color=[label.color for label, _, _ in placed], size=12),
    )


def label_room(labels: Sequence[EndLabel]) -> int:
    """Pixels that labels need right of a panel."""
    return 40 + round(_LETTER * max((len(label.text) for label in labels), default=0))
