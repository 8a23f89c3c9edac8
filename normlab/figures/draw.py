"""Pieces that figures share: a scheme's line, marks and intervals, panels, axes, labels at the ends of lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.selection import NothingToShow, Selection, choose
from normlab.figures.theme import NEUTRAL, style_of

LINE = 15  # pixels of a line of text
LETTER = 6.6  # pixels of a letter
LEGEND_ABOVE = dict(orientation="h", x=1, xanchor="right", y=1.02, yanchor="bottom")
Bounds = tuple[float, float]


def selected(runs: pd.DataFrame | Selection, depth: str | None = "deepest", *, same_rate: bool = False) -> Selection:
    """A selection as it is, or the runs of a table at its deepest depth (None: at all depths).

    Args:
        same_rate: all schemes of a depth at one learning rate, where they share one: for magnitudes.

    Raises:
        NothingToShow: a selection of several depths where one is shown.
    """
    if isinstance(runs, Selection):
        if depth is not None and len(runs.depths) > 1:
            depths = ", ".join(map(str, runs.depths))
            raise NothingToShow(f"The selection has depths {depths}: keep one, as normlab.choose(runs, depth) does.")
        return runs.at_one_rate() if same_rate else runs
    return choose(runs, depth, same_rate=same_rate)


def finite(values: Iterable[float]) -> list[float | None]:
    """Numbers as a page can have them: None, a gap, for what is not finite."""
    return [float(value) if math.isfinite(value) else None for value in values]


def whole(values: Iterable[float]) -> list[int]:
    """Layers, steps or widths as plain integers."""
    return [int(value) for value in values]


def add_line(
    figure: go.Figure,
    scheme: str,
    x: Sequence[float | None],
    y: Iterable[float],
    hover: str,
    *,
    line: dict[str, Any] | None = None,
    **trace: Any,
) -> None:
    """Add a scheme's line in its colour and dash.

    Args:
        hover: what a point says below the scheme's title.
        line: changes to the line's look.
        trace: other properties of the trace, and its panel's `row` and `col`.
    """
    style = style_of(scheme)
    look = dict(color=style.color, dash=style.dash, width=2) | (line or {})
    own = dict(name=scheme, mode="lines", meta=dict(scheme=scheme)) | trace
    text = f"<b>{style.title}</b>{hover}<extra></extra>"
    figure.add_scatter(x=list(x), y=finite(y), line=look, hovertemplate=text, **own)


def mark(color: str, symbol: str | list[str], size: int = 9) -> dict[str, Any]:
    """A marker whose open symbols are as thick as a line."""
    return dict(color=color, size=size, symbol=symbol, line=dict(width=2, color=color))


def interval_bars(middle: Any, low: Any, high: Any, **look: Any) -> dict[str, Any]:
    """Error bars from `low` to `high`; none where an end is not finite."""
    middle, low, high = (np.atleast_1d(np.asarray(ends, dtype=float)) for ends in (middle, low, high))
    known = np.isfinite(low) & np.isfinite(high)
    up, down = (np.where(known, side, 0.0).tolist() for side in (high - middle, middle - low))
    return dict(type="data", symmetric=False, array=up, arrayminus=down, thickness=1, width=3) | look


def panels(
    names: Sequence[str], titles: Sequence[str], across: str, columns: int, height: int, gap: int, **grid: Any
) -> tuple[go.Figure, list[dict], int]:
    """A grid with one panel per name, each one's `row` and `col`, and the height of all, in pixels.

    Titles begin at the panel's left edge. The lowest panel of a column has the title `across` below it.
    """
    columns = max(1, min(columns, len(names)))
    rows = -(-len(names) // columns)
    inner = rows * height + (rows - 1) * gap
    grid |= dict(vertical_spacing=gap / inner if rows > 1 else 0.0)
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=titles, **grid)
    cells = [dict(row=index // columns + 1, col=index % columns + 1) for index in range(len(names))]
    for index, (title, cell) in enumerate(zip(figure.layout.annotations, cells, strict=True)):
        title.x = figure.get_subplot(**cell).xaxis.domain[0]
        below = across if index + columns >= len(names) else None
        figure.update_xaxes(title_text=below, showticklabels=True, **cell)
    figure.update_annotations(xanchor="left", align="left", font=dict(size=13), yshift=2)
    return figure, cells, inner


def axis_bounds(values: Iterable[float], log: bool, pad: float = 0.06) -> Bounds | None:
    """Range of all finite values with some room, as plotly takes it (decades where `log`); None for no value."""
    kept = [math.log10(v) if log else float(v) for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not kept:
        return None
    low, high = min(kept), max(kept)
    room = (high - low) * pad or max(abs(high), 1.0) * pad
    return low - room, high + room


def value_axis(bounds: Bounds | None, log: bool) -> dict[str, Any]:
    """Settings of an axis over `bounds`; a log axis has plain numbers at decades, at 2 and 5 where there is room."""
    if not log or bounds is None:
        return dict(type="linear", range=bounds, tickmode="auto")
    low, high = bounds
    decades = range(math.floor(low), math.ceil(high) + 1)
    by_span = ((0.5, (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)), (2.4, (1, 2, 5)), (math.inf, (1,)))
    leaders = next(leaders for span, leaders in by_span if high - low <= span)
    every = max(1, round(len(decades) / 7))
    ticks = [leader * 10.0**decade for decade in decades if decade % every == 0 for leader in leaders]
    if high - low <= 0.3:  # within a factor of two: equal steps, about five
        span = 10**high - 10**low
        decade = 10.0 ** math.floor(math.log10(span))
        step = min((leader * decade for leader in (0.1, 0.2, 0.5, 1, 2, 5)), key=lambda s: abs(span / s - 5))
        ticks = [step * n for n in range(math.ceil(10**low / step), math.floor(10**high / step) + 1)]
    shown = [tick for tick in ticks if low <= math.log10(tick) <= high]
    return dict(type="log", tickmode="array", range=bounds, tickvals=shown, ticktext=[_tick_text(t) for t in shown])


def _tick_text(tick: float) -> str:
    if 1e-3 <= tick < 1e5:
        return f"{tick:,.10g}"
    return f"{tick:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e")


def short(value: float) -> str:
    """A number in three digits."""
    if value == 0 or 0.001 <= abs(value) < 100_000:
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.1e}"


def least_and_most(values: pd.Series, written: Callable[[float], str] = short) -> str:
    """The smallest and the largest finite value by scheme, in words: "2 (LNS) to 9 (Pre-LN)"."""
    ordered = values[np.isfinite(values)].sort_values()
    ends = [f"{written(value)} ({style_of(str(scheme)).title})" for scheme, value in ordered.iloc[[0, -1]].items()]
    return " to ".join(dict.fromkeys(ends))


@dataclass(frozen=True)
class EndLabel:
    """Text for the end of a line at (`x`, `y`), in the line's colour."""

    y: float
    text: str
    color: str
    x: float = 0.0


def spread(positions: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Move positions apart to at least `gap`, each as little as it can, inside [low, high] if they fit.

    Labels that would overlap form a block around their common centre; blocks that touch merge.
    """

    def bottom(members: list[int]) -> float:
        """Position of a block's lowest member."""
        length = (len(members) - 1) * gap
        centre = sum(positions[member] for member in members) / len(members)
        return max(min(centre - length / 2, high - length), low)

    blocks: list[list[int]] = []  # members from low to high
    for index in sorted(range(len(positions)), key=lambda i: positions[i]):
        blocks.append([index])
        while len(blocks) > 1 and bottom(blocks[-1]) - bottom(blocks[-2]) < len(blocks[-2]) * gap:
            upper = blocks.pop()
            blocks[-1] = blocks[-1] + upper
    return [at for _, at in sorted((m, bottom(block) + rank * gap) for block in blocks for rank, m in enumerate(block))]


def _positioned(
    labels: Sequence[EndLabel], bounds: Bounds, pixels: float, log: bool
) -> list[tuple[EndLabel, float, float]]:
    """Labels that the axis can show, each with its line's end and its own position, in units of the axis."""
    shown = [label for label in labels if math.isfinite(label.y) and (label.y > 0 or not log)]
    ends = [math.log10(label.y) if log else label.y for label in shown]
    positions = spread(ends, LINE * (bounds[1] - bounds[0]) / pixels, *bounds)
    return list(zip(shown, ends, positions, strict=True))


def label_ends(
    figure: go.Figure, labels: Sequence[EndLabel], bounds: Bounds, pixels: float, log: bool, axis: str = ""
) -> None:
    """Write labels right of the panel `axis` ("" is the first, "2" the second), with thin lines if any had to move.

    Args:
        bounds: the y-axis range, as plotly takes it (decades where `log`).
        pixels: height of the panel.
    """
    unit = (bounds[1] - bounds[0]) / pixels
    positioned = _positioned(labels, bounds, pixels, log)
    moved = any(abs(end - position) >= 2 * unit for _, end, position in positioned)
    for label, end, position in positioned:
        if moved:
            leader = dict(showarrow=True, arrowhead=0, arrowwidth=0.8, arrowcolor=label.color, standoff=2, ax=22)
            leader["ay"] = (end - position) / unit
        else:
            leader = dict(showarrow=False, xshift=6, yshift=(position - end) / unit)
        at = dict(xref=f"x{axis} domain", x=1.0, yref=f"y{axis}", y=end, xanchor="left")
        figure.add_annotation(text=label.text, font=dict(size=12, color=label.color), **at, **leader)


def label_trace(labels: Sequence[EndLabel], bounds: Bounds | None, pixels: float, log: bool) -> dict[str, Any] | None:
    """Labels as a trace named "labels", each right of its line's end; None where there is none to show.

    Arguments as for `label_ends`.
    """
    positioned = [] if bounds is None else _positioned(labels, bounds, pixels, log)
    if not positioned:
        return None
    return dict(
        type="scatter",
        mode="text",
        name="labels",
        textposition="middle right",
        hoverinfo="skip",
        cliponaxis=False,
        x=np.array([label.x for label, _, _ in positioned]),
        y=np.array([10**position if log else position for _, _, position in positioned]),
        text=[f" {label.text}" for label, _, _ in positioned],
        textfont=dict(color=[label.color for label, _, _ in positioned], size=12),
    )


def label_room(labels: Sequence[EndLabel]) -> int:
    """Pixels that labels need right of a panel."""
    return 40 + round(LETTER * max((len(label.text) for label in labels), default=0))


def note(figure: go.Figure, text: str, axis: str = "") -> None:
    """Write words in the middle of the panel `axis` ("" is the first, "2" the second)."""
    middle = dict(x=0.5, y=0.5, xref=f"x{axis} domain", yref=f"y{axis} domain")
    figure.add_annotation(text=text, showarrow=False, font=dict(color=NEUTRAL), **middle)


def footnote(figure: go.Figure, text: str) -> None:
    """Write a line below the axis titles."""
    corner = dict(x=0, xref="paper", xanchor="left", y=0, yref="paper", yanchor="top", yshift=-46)
    figure.add_annotation(text=text, showarrow=False, align="left", font=dict(size=12, color=NEUTRAL), **corner)


def beside(figure: go.Figure, y: float, shift: int, text: str, color: str, left: bool = False) -> None:
    """Write text right of the plot at `y`, or left of it, `shift` pixels from its edge."""
    side = dict(x=0, xanchor="right") if left else dict(x=1, xanchor="left")
    at = dict(xref="paper", yref="y", y=y, xshift=shift)
    figure.add_annotation(text=text, showarrow=False, align="left", font=dict(size=12, color=color), **at, **side)
