"""Figures of outliers in several models: massive activations beside attention sinks, and what few bits cost."""

from __future__ import annotations

import math

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.figures import theme
from normlab.figures.draw import LEGEND_ABOVE, finite, interval_bars, mark
from normlab.figures.registry import drawing

MASSIVE, SINK = 1000, 0.3  # of 2402.17762 and 2410.10781: medians of |h|, and a head's mean attention
# Bits and part of a bar, its name and colour.
BARS = (
    ((8, "both"), "8 bits, weights and activations", theme.NEUTRAL),
    ((4, "weights"), "4 bits, weights", "#56b4e9"),
    ((4, "activations"), "4 bits, activations", "#e69f00"),
    ((4, "both"), "4 bits, both", "#d55e00"),
)


@drawing
def outliers(table: pd.DataFrame) -> go.Figure:
    """Each model's largest activation against its strongest attention sink; filled where one token has both.

    Args:
        table: columns `model scheme ratio weight same_token`: a name, |h| over its layer's median, the most that a head
            gives to one token, and whether the two are the same token.
    """
    panels = {
        "ratio": ("largest activation: |h| over the layer's median", MASSIVE),
        "weight": ("strongest sink: a head's mean attention", SINK),
    }
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.06)
    for column, (name, (words, limit)) in enumerate(panels.items(), 1):
        for row in table.to_dict("records"):
            symbol = "circle" if row["same_token"] else "circle-open"
            figure.add_scatter(
                x=[row[name]],
                y=[row["model"]],
                name=row["model"],
                mode="markers",
                marker=mark(theme.style_of(row["scheme"]).color, symbol, 12),
                hovertemplate="%{y}: %{x:.3~g}<extra></extra>",
                row=1,
                col=column,
            )
        line = dict(color=theme.NEUTRAL, dash="dot", width=1.4)
        figure.add_vline(x=limit, line=line, row=1, col=column)
        figure.update_xaxes(title_text=words, row=1, col=column)
    most = max(2 * MASSIVE, *table["ratio"])
    figure.update_xaxes(type="log", range=[0, math.log10(most) + 0.1], dtick=1, row=1, col=1)
    figure.update_xaxes(range=[0, 1], row=1, col=2)
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_layout(showlegend=False)
    words = "filled: both at one token, open: at two; dotted: from where the papers call them massive, and a sink"
    return theme.titled(figure, "Massive activations and attention sinks", words, 180 + 36 * len(table))


@drawing
def few_bits(table: pd.DataFrame) -> go.Figure:
    """Loss added where blocks compute with 8 or 4 bits, by model.

    Args:
        table: the tables of `normlab.probes.quantization_costs`, with a column `model`.
    """
    figure = go.Figure()
    for (bits, part), name, color in BARS:
        rows = table[(table["bits"] == bits) & (table["part"] == part)]
        figure.add_bar(
            name=name,
            x=rows["model"].tolist(),
            y=finite(rows["delta_loss"]),
            error_y=interval_bars(rows["delta_loss"], rows["low"], rows["high"]),
            marker=dict(color=color),
            hovertemplate=f"%{{x}}, {name}: %{{y:+.4f}} nats per token<extra></extra>",
        )
    figure.update_yaxes(title_text="nats per token")
    figure.update_layout(barmode="group", bargap=0.25, legend=LEGEND_ABOVE)
    words = "linear layers rounded to nearest, per output channel and per token; bars: 95% interval"
    return theme.titled(figure, "Loss added by few bits", words, 440)
