"""Labels at the ends of lines, moved apart where lines end together.

EndLabel      text for the end of a line, in the line's colour
label_ends    as annotations, with a thin line to a label that had to move: for a figure that stands still
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


@dataclass(frozen=True)
class EndLabel:
    """Text for the end of a line, in the line's colour; `x` and `y`: where the line ends."""

    y: float
    text: str
    color: str
    x: float = 0.0


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
    for label, end, place in _placed(labels, bounds, pixels, log):
        shift = (end - place) / unit
        font = dict(size=12, color=label.color)
        where = dict(text=label.text, font=font, xref=f"x{axis} domain", x=1.0, xanchor="left", yref=f"y{axis}", y=end)
        line: dict[str, Any] = dict(showarrow=False, xshift=6)
        if abs(shift) >= 2:
            line = dict(showarrow=True, arrowhead=0, arrowwidth=0.8, arrowcolor=label.color, standoff=2)
            line |= dict(ax=22, ay=shift)
        figure.add_annotation(**where, **line)


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
    return 40 + round(6.6 * max((len(label.text) for label in labels), default=0))
