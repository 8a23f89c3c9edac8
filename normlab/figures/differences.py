"""Figures of `normlab.diff`: where two models part, and what each block adds."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from normlab.figures import theme
from normlab.figures.draw import finite
from normlab.figures.report import COLORS

_BEYOND = 3  # times the largest number: there a figure has what is not finite


def difference_figure(table: pd.DataFrame) -> go.Figure:
    """The difference of two models at each site in order of computation, and how far rounding moves it.

    Args:
        table: columns `site layer difference noise parts`, of `normlab.diff`. A difference that is not finite is drawn
            above all others.
    """
    names = [f"{site.replace('_', ' ')}, {layer}" for site, layer in zip(table["site"], table["layer"], strict=True)]
    least = max(float(table["noise"][table["noise"] > 0].min()) / 10 if (table["noise"] > 0).any() else 0, 1e-12)
    sizes = table[["difference", "noise"]]
    edge = max(_edge(sizes), _BEYOND * least)
    figure = go.Figure()
    for column, label, color in (("noise", "rounding", COLORS[6]), ("difference", "difference", COLORS[0])):
        figure.add_scatter(
            x=list(range(len(names))),
            y=finite(table[column].clip(lower=least, upper=edge)),
            name=label,
            mode="lines+markers",
            marker={"size": 5, "color": color},
            line={"color": color, "dash": "dot" if column == "noise" else "solid"},
            text=[f"{name}: {_size(value)}" for name, value in zip(names, table[column], strict=True)],
            hovertemplate="%{text}<extra>" + label + "</extra>",
        )
    parts = table["parts"].to_numpy()
    if parts.any():
        first = int(parts.argmax())
        side = "left" if first < len(names) / 2 else "right"  # of the text, which is between the two lines
        words = dict(text=f"parts at {names[first]}", y=0.5, yref="paper", xanchor=side)
        figure.add_vline(x=first, line={"color": COLORS[1]}, annotation=words)
    layers = table["layer"].tolist()
    starts = [i for i, layer in enumerate(layers) if i == 0 or layer != layers[i - 1]]
    figure.update_xaxes(tickvals=starts, ticktext=[str(layers[i]) for i in starts], title_text="layer")
    figure.update_yaxes(type="log", title_text="relative difference", exponentformat="power")
    title = "The models agree within rounding" if not parts.any() else "Where the models part"
    figure.update_layout(showlegend=True)
    about = "sites in order of computation; below the axis: no difference" + _not_finite(figure, sizes, edge)
    return theme.titled(figure, title, about, 430)


def added_figure(table: pd.DataFrame) -> go.Figure:
    """The error that each block adds on the first model's input, and what it does to the logits.

    Args:
        table: columns `layer difference noise parts logits`, the `added` of `normlab.diff`. An error that is not finite
            is the largest, and is drawn above all others.
    """
    names = ["embeddings", *(str(layer) for layer in table["layer"].iloc[1:-1]), "end"]
    sizes = table[["difference", "noise", "logits"]].astype(float)
    sizes = sizes.where(sizes > 0)
    edge = _edge(sizes)
    figure = go.Figure()
    for column, label, color, symbol in (
        ("noise", "rounding", COLORS[6], "line-ew-open"),
        ("difference", "added by the block", COLORS[0], "circle"),
        ("logits", "change of the logits by it alone", COLORS[1], "diamond-open"),
    ):
        figure.add_scatter(
            x=names,
            y=finite(sizes[column].clip(upper=edge)),
            name=label,
            mode="markers",
            marker={"size": 9, "color": color, "symbol": symbol, "line": {"width": 2, "color": color}},
            text=[_size(value) for value in sizes[column]],
            hovertemplate="%{x}: %{text}<extra>" + label + "</extra>",
        )
    most = sizes["difference"].where(table["parts"].astype(bool))
    title = "No block adds an error beyond rounding"
    if most.notna().any():
        first = int(np.nanargmax(most))
        name = names[first]
        title = f"Block {name} adds most error" if name.isdigit() else f"Most error is added by the {name}"
        title += "" if math.isfinite(most.iloc[first]) else ": it is not finite"
    figure.update_xaxes(type="category", title_text="block")
    figure.update_yaxes(type="log", title_text="relative difference", exponentformat="power")
    figure.update_layout(showlegend=True)
    words = "each block of B on A's input, against A's block; no marker: no difference"
    words += _not_finite(figure, sizes, edge)
    return theme.titled(figure, title, words, 430)


def _edge(sizes: pd.DataFrame) -> float:
    """Above all numbers: where a figure has what is not finite."""
    numbers = sizes.to_numpy(float)
    return _BEYOND * float(numbers.max(where=np.isfinite(numbers) & (numbers > 0), initial=0.0)) or 1.0


def _size(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def _not_finite(figure: go.Figure, sizes: pd.DataFrame, edge: float) -> str:
    """End the axis at the edge if something there is not finite, and say so."""
    if not np.isinf(sizes.to_numpy(float)).any():
        return ""
    figure.update_traces(cliponaxis=False).update_yaxes(range=[None, math.log10(edge)])
    return "; at the upper edge: not finite"
