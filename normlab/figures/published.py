"""What papers print and what these runs came to, in one figure: every scheme over a base scheme."""

from __future__ import annotations

import math

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.published import HERE, QUANTITIES, ratios_to
from normlab.analysis.selection import NothingToShow, choose, in_order
from normlab.figures import theme
from normlab.figures.registry import register
from normlab.probes.metrics import metric_row
from normlab.schemes import SCHEMES

TITLES = {"perplexity": "perplexity"} | {
    name: f"{metric_row(name).label},<br>last layer" for name in QUANTITIES if name != "perplexity"
}
OURS = ("circle", "square", "diamond", "triangle-up", "triangle-down")
THEIRS = ("x-thin-open", "cross-thin-open", "asterisk-open", "y-up-open", "hourglass-open", "bowtie-open", "star-open")
BROKEN = {"perplexity": 3.0}  # a model so many times worse than the base did not train: marked, not drawn to scale
_MARK = 13  # pixels from a mark of a scheme to the next


@register("published_ratios", "N1", "ratios to the base scheme, the papers' and ours", overlays=True)
def published_ratios(
    runs: pd.DataFrame, published: pd.DataFrame | None = None, *, base: str | None = None
) -> go.Figure:
    """Ratios to a base scheme of perplexity, and of size and variance after the last layer: theirs and ours.

    A row is a scheme, as high as its marks need that stand one below the other. Filled marks are these runs, a shape a
    depth, with intervals; thin marks are what papers print for their own, far larger models, a shape a model. Left of 1
    is lower than the base. A perplexity of more than three times the base's is a model that did not train: an arrow at
    the edge, its ratio when hovered.

    Args:
        published: table of `normlab.load_published`.
        base: the scheme that ratios refer to; default the first of the registry.
    """
    base = base or next(iter(SCHEMES))
    title = f"Ratios to {theme.style_of(base).title}: what papers print, and these runs"
    try:
        chosen = choose(runs, depth=None)
        table = ratios_to(base, runs, _no_values() if published is None else published)
    except NothingToShow as why:
        return theme.message_figure(str(why), title)
    if table.empty:
        return theme.message_figure(f"No run of another scheme beside {base}.", title)
    schemes = in_order(table["scheme"])
    shapes = _shapes(table)
    places, deepest = _places(table, schemes)
    figure = make_subplots(
        1, len(QUANTITIES), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=[*TITLES.values()]
    )
    for column, quantity in enumerate(QUANTITIES, 1):
        rows = table[table["quantity"] == quantity]
        for scheme, place in places.items():
            _add_scheme(figure, rows[rows["scheme"] == scheme], place, scheme, shapes, column)
        figure.add_vline(
            1.0, line=dict(color=theme.style_of(base).color, width=1), row=1, col=column, exclude_empty_subplots=False
        )
        bounds = theme.axis_bounds(_within(rows, quantity), True, 0.1)
        figure.update_xaxes(theme.value_axis(bounds, True), title_text="ratio", row=1, col=column)
    for (source, model), shape in shapes.items():
        figure.add_trace(_key(source, model, shape))
    names = [f"<b style='color:{theme.style_of(name).color}'>{theme.style_of(name).title}</b>" for name in schemes]
    figure.update_yaxes(tickvals=[*places.values()], ticktext=names, range=[deepest, -1], showgrid=False)
    figure.update_annotations(font=dict(size=13))
    figure.update_layout(legend=dict(x=1.01, y=1, xanchor="left"), margin=dict(l=150, r=230, t=132, b=60))
    subtitle = f"ours: {chosen.describe()}<br>sizes at one learning rate where schemes of a depth share one"
    if any(ratio > _edge(quantity) for quantity, ratio in zip(table["quantity"], table["ratio"], strict=True)):
        subtitle += f" · ▶ more than {BROKEN['perplexity']:g} times the base's perplexity: did not train"
    return theme.titled(figure, title, subtitle, 192 + round(_MARK * (deepest + 1)))


def _no_values() -> pd.DataFrame:
    return pd.DataFrame(columns=["paper", "where", "model", "metric", "scheme", "value", "relative_error"])


def _places(table: pd.DataFrame, schemes: list[str]) -> tuple[dict[str, float], float]:
    """The middle of each scheme's row, a row being as high as its marks in the panel that has most of them, and where
    the last row ends; in units of the distance between two marks."""
    most = table.groupby(["scheme", "quantity"]).size().groupby("scheme").max().clip(lower=2)
    places, start = {}, 0.0
    for scheme in schemes:
        places[scheme] = start + (most[scheme] - 1) / 2
        start += most[scheme] + 0.7
    return places, start - 0.7


def _edge(quantity: str) -> float:
    """Where ratios that are no result of training stand."""
    return BROKEN.get(quantity, math.inf)


def _shapes(table: pd.DataFrame) -> dict[tuple[str, str], str]:
    """A mark for every (source, model), ours by depth first."""
    pairs = list(dict.fromkeys(zip(table["source"], table["model"], strict=True)))
    ours = sorted((pair for pair in pairs if pair[0] == HERE), key=lambda pair: int(pair[1].split()[1]))
    theirs = [pair for pair in pairs if pair[0] != HERE]
    marks = {pair: OURS[number % len(OURS)] for number, pair in enumerate(ours)}
    return marks | {pair: THEIRS[number % len(THEIRS)] for number, pair in enumerate(theirs)}


def _add_scheme(
    figure: go.Figure, rows: pd.DataFrame, place: float, scheme: str, shapes: dict[tuple[str, str], str], column: int
) -> None:
    """One scheme's marks, one below the other in the order of the legend."""
    color = theme.style_of(scheme).color
    order = [pair for pair in shapes if pair in set(zip(rows["source"], rows["model"], strict=True))]
    for rank, pair in enumerate(order):
        row = rows[(rows["source"] == pair[0]) & (rows["model"] == pair[1])].iloc[0]
        edge = _edge(row["quantity"])
        broken = row["ratio"] > edge
        interval = dict(type="data", symmetric=False, thickness=1.2, width=0, color=color)
        if not math.isnan(row["low"]) and not broken:
            interval |= dict(array=[row["high"] - row["ratio"]], arrayminus=[row["ratio"] - row["low"]])
        seeds = "" if pd.isna(row["seeds"]) else f", {int(row['seeds'])} seeds"
        ends = "" if math.isnan(row["low"]) else f" [{row['low']:.3g}, {row['high']:.3g}]"
        mark = go.Scatter(
            x=[edge if broken else row["ratio"]],
            y=[place + rank - (len(order) - 1) / 2],
            mode="markers",
            marker=dict(
                color=color, size=9, symbol="arrow-right" if broken else shapes[pair], line=dict(color=color, width=2)
            ),
            error_x=interval,
            name=scheme,
            meta=dict(scheme=scheme),
            showlegend=False,
            hovertemplate=f"<b>{theme.style_of(scheme).title}</b><br>{row['ratio']:.3g}{ends}"
            f"<br>{', '.join(pair)}{seeds}<extra></extra>",
        )
        figure.add_trace(mark, row=1, col=column)


def _within(rows: pd.DataFrame, quantity: str) -> list[float]:
    """What an axis must hold: 1, and ratios with their intervals, up to where marks stand at the edge."""
    values = rows[["ratio", "low", "high"]].to_numpy(float).ravel()
    return [1.0, *(min(value, _edge(quantity)) for value in values if math.isfinite(value))]


def _key(source: str, model: str, shape: str) -> go.Scatter:
    name = f"ours, {model}" if source == HERE else f"{source}, {model}"
    mark = dict(color=theme.NEUTRAL, size=9, symbol=shape, line=dict(color=theme.NEUTRAL, width=2))
    return go.Scatter(x=[None], y=[None], mode="markers", marker=mark, name=name)
