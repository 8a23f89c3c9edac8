"""Published values: diamonds over the figures of layers, and ratios to a base scheme next to those of these runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.published import HERE, SHARED, ratios_to
from normlab.analysis.selection import NothingToShow, choose, in_order
from normlab.analysis.verdicts import bracketed
from normlab.figures import theme
from normlab.figures.draw import add_line, axis_bounds, interval_bars, mark, value_axis
from normlab.figures.registry import register
from normlab.probes.metrics import metric_row
from normlab.schemes import BASELINE

TITLES = {"perplexity": "perplexity"} | {
    name: f"{metric_row(name).label},<br>last layer" for name in SHARED if name != "perplexity"
}
OURS = ("circle", "square", "diamond", "triangle-up", "triangle-down")
THEIRS = (
    "x-thin-open", "cross-thin-open", "asterisk-open", "y-up-open", "hourglass-open", "bowtie-open", "star-open",
    "hash-open", "y-left-open",
)  # fmt: skip
BROKEN = {"perplexity": 3.0}  # a model so many times worse than the base did not train: marked, not drawn to scale
_NO_VALUES = pd.DataFrame(columns=["paper", "where", "model", "metric", "scheme", "value", "relative_error"])
_NO_POINTS = pd.DataFrame(columns=["paper", "where", "model", "scheme", "layer", "value"])
_MARK = 13  # pixels from a mark of a scheme to the next


def published_points(
    published: pd.DataFrame | None, metric: str, schemes: Sequence[str], site: str = "block_out"
) -> pd.DataFrame:
    """Published values of these schemes at a layer, comparable with what was measured at `site`: block outputs only."""
    if published is None or site != "block_out":
        return _NO_POINTS  # an explorer's page asks thousands of times
    keep = (published["metric"] == metric) & published["scheme"].isin(schemes) & published["layer"].notna()
    return published[keep]


def published_trace(points: pd.DataFrame, metric: str, color: str | Sequence[str] = theme.NEUTRAL) -> dict[str, Any]:
    """Diamonds with the error of reading them off a plot, as plain data; paper and model are one hover away."""
    row = metric_row(metric)
    text = [f"{p.paper} (arXiv {p.arxiv}), {p.where}<br>{p.model}, {p.method}: {p.note}" for p in points.itertuples()]
    errors = (points["value"] * points["relative_error"].fillna(0.0)).astype(float).tolist()
    return dict(
        type="scatter",
        x=points["layer"].to_numpy(int),
        y=points["value"].to_numpy(float),
        error_y=dict(type="data", array=errors, thickness=1.2, width=3),
        mode="markers",
        cliponaxis=False,
        name="published",
        meta=dict(published=True),
        text=text,
        marker=dict(symbol="diamond-open", size=7, color=color, line=dict(width=1.4)),
        hovertemplate=f"published: %{{y}}<br>%{{text}}<br><i>{row.name}: {row.definition}</i><extra></extra>",
    )


def published_source(points: pd.DataFrame) -> str:
    """The sources of published values, and the error of reading them off a plot."""
    sources = sorted({f"{p.paper} {p.where}, {p.model}" for p in points.itertuples()})
    error = points["relative_error"].max()
    return "; ".join(sources) + (f", read off the plot ±{error:.0%}" if error > 0 else "")


@register("published_ratios", "N1", "ratios to the base scheme, the papers' and ours", overlays=True)
def published_ratios(runs: pd.DataFrame, published: pd.DataFrame | None = None) -> go.Figure:
    """Ratios to Pre-LN of perplexity, size and variance after the last layer.

    Each scheme's row is as high as its marks, which are drawn one below the other. Filled marks are these runs, one
    shape per depth, with intervals. Thin marks are the papers' far larger models, one shape per model. Left of 1 is
    lower than the base. A perplexity of more than three times the base's is a model that did not train: an arrow at
    the edge, its ratio when hovered.

    Args:
        runs: the table of `normlab.load_runs`.
        published: table of `normlab.load_published`.
    """
    shown = choose(runs, depth=None)
    table = ratios_to(BASELINE, runs, _NO_VALUES if published is None else published)
    if table.empty:
        raise NothingToShow(f"No run of another scheme to compare with {BASELINE}.")
    schemes = in_order(table["scheme"])
    shapes = _shapes(table)
    positions, deepest = _positions(table, schemes)
    grid = dict(shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=[*TITLES.values()])
    figure = make_subplots(1, len(SHARED), **grid)
    for column, quantity in enumerate(SHARED, 1):
        rows = table[table["quantity"] == quantity]
        for scheme, position in positions.items():
            _add_scheme(figure, rows[rows["scheme"] == scheme], position, scheme, shapes, column)
        line = dict(color=theme.style_of(BASELINE).color, width=1)
        figure.add_vline(1.0, line=line, row=1, col=column, exclude_empty_subplots=False)
        held = rows[["ratio", "low", "high"]].to_numpy(float)
        bounds = axis_bounds([1.0, *np.minimum(held[np.isfinite(held)], _edge(quantity))], True, 0.1)
        figure.update_xaxes(value_axis(bounds, True), title_text="ratio", row=1, col=column)
    for (source, model), shape in shapes.items():
        name = f"ours, {model}" if source == HERE else f"{source}, {model}"
        figure.add_scatter(
            x=[None], y=[None], mode="markers", marker=mark(theme.NEUTRAL, shape), name=name
        )  # the legend
    names = [theme.name_of(scheme) for scheme in schemes]
    figure.update_yaxes(tickvals=[*positions.values()], ticktext=names, range=[deepest, -1], showgrid=False)
    figure.update_annotations(font=dict(size=13))
    figure.update_layout(legend=dict(x=1.01, y=1, xanchor="left"), margin=dict(l=150, r=230, t=132, b=60))
    subtitle = f"ours: {shown.describe()}<br>sizes at one learning rate where schemes of a depth share one"
    subtitle += " · differs: by the interval of our deepest models"
    if any(ratio > _edge(quantity) for quantity, ratio in zip(table["quantity"], table["ratio"], strict=True)):
        subtitle += f" · ▶ more than {BROKEN['perplexity']:g} times the base's perplexity: did not train"
    title = f"Ratios to {theme.style_of(BASELINE).title}: {_agreement(table)}"
    return theme.titled(figure, title, subtitle, 192 + round(_MARK * (deepest + 1)))


def _agreement(table: pd.DataFrame) -> str:
    """The number of published ratios on the side of 1 on which the whole interval of our deepest models lies.

    Where all of ours are of one seed, the side on which ours lie.
    """
    is_ours = table["source"] == HERE
    ours = table[is_ours].sort_values("depth").drop_duplicates(["quantity", "scheme"], keep="last")
    ours = ours.set_index(["quantity", "scheme"])
    ours = ours[["ratio", "low", "high"]].add_prefix("our_")
    both = table[~is_ours].join(ours, on=["quantity", "scheme"], how="inner")
    if both.empty:
        return "no published ones to compare with"
    if both["our_low"].isna().all():
        alike = int(((both["ratio"] < 1) == (both["our_ratio"] < 1)).sum())
        return f"by one seed, {alike} of {len(both)} published ones lie on the side of ours"
    below, above = both["our_high"] < 1, both["our_low"] > 1
    same = ((both["ratio"] < 1) & below | (both["ratio"] > 1) & above).sum()
    if not (told := (below | above).sum()):
        return f"none of ours with a published one differs from 1, of {len(both)}"
    return f"where ours differs from 1, {same} of {told} published ones lie on its side"


def _positions(table: pd.DataFrame, schemes: list[str]) -> tuple[dict[str, float], float]:
    """The middle of each scheme's row, and the end of the last; unit: the distance between two marks.

    A row is as high as its marks in the panel that has most of them.
    """
    most = table.groupby(["scheme", "quantity"]).size().groupby("scheme").max().clip(lower=2)
    positions, start = {}, 0.0
    for scheme in schemes:
        positions[scheme] = start + (most[scheme] - 1) / 2
        start += most[scheme] + 0.7
    return positions, start - 0.7


def _edge(quantity: str) -> float:
    """The largest ratio that is drawn to scale."""
    return BROKEN.get(quantity, math.inf)


def _shapes(table: pd.DataFrame) -> dict[tuple[str, str], str]:
    """A mark for every (source, model), ours by depth first."""
    is_ours = table["source"] == HERE
    ours, theirs = (
        list(dict.fromkeys(zip(rows["source"], rows["model"], strict=True)))
        for rows in (table[is_ours].sort_values("depth", kind="stable"), table[~is_ours])
    )
    cycles = ((ours, itertools.cycle(OURS)), (theirs, itertools.cycle(THEIRS)))
    return {pair: mark for group, marks in cycles for pair, mark in zip(group, marks, strict=False)}


def _add_scheme(
    figure: go.Figure, rows: pd.DataFrame, middle: float, scheme: str, shapes: dict[tuple[str, str], str], column: int
) -> None:
    """Draw one scheme's marks, one below the other in the order of the legend."""
    color = theme.style_of(scheme).color
    by_pair = {(row.source, row.model): row for row in rows.itertuples()}
    order = [pair for pair in shapes if pair in by_pair]
    for rank, pair in enumerate(order):
        row, edge = by_pair[pair], _edge(by_pair[pair].quantity)
        broken = row.ratio > edge
        low, high = (math.nan, math.nan) if broken else (row.low, row.high)
        seeds = "" if pd.isna(row.seeds) else f", {int(row.seeds)} seeds"
        ends = bracketed(row.low, row.high, "{:.3g}".format)
        symbol = "arrow-right" if broken else shapes[pair]
        add_line(
            figure,
            scheme,
            [edge if broken else row.ratio],
            [middle + rank - (len(order) - 1) / 2],
            f"<br>{row.ratio:.3g}{ends}<br>{', '.join(pair)}{seeds}",
            mode="markers",
            marker=mark(color, symbol),
            error_x=interval_bars(row.ratio, low, high, thickness=1.2, width=0, color=color),
            showlegend=False,
            row=1,
            col=column,
        )
