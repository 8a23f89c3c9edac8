"""Which schemes train at a great depth, and what their layers say of it (N3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.notebook_tables.curse_of_depth import BEYOND, DIVERGES, MARGIN, STALLS, TRAINS, outcomes
from normlab.analysis.selection import NothingToShow, Selection, choose, mean_of
from normlab.figures import theme
from normlab.figures.registry import register
from normlab.probes.metrics import metric_row

_MARKS = {TRAINS: "circle", STALLS: "circle-open", DIVERGES: "x"}
_WORDS = {TRAINS: "● {} train", STALLS: "○ {} stall", DIVERGES: "× {} diverge"}
_ROW = 22  # pixels a scheme
_COLUMNS = 48  # of a profile: layers are drawn to the nearest of so many places between the first and the last
# (site, metric, which step, title)
_PROFILES = (
    ("block_in_grad", "grad_l2_total", "first", "Gradient before training"),
    ("block_out", "token_l2_mean", "last", "Stream after training"),
)


@register("trains_at_depth", "N3", "which schemes train at the greatest depth, and the layers that say why")
def trains_at_depth(
    runs: pd.DataFrame,
    *,
    depth: int | str | None = "deepest",
    width: int | None = None,
    schemes: Sequence[str] | None = None,
) -> go.Figure:
    """A row a scheme, best held-out loss first: its loss, its gradients by layer before training, its stream by layer
    at the last measurement.

    Outcomes are those of `normlab.analysis.limit.outcomes`: a disc trains, a ring stalls, a cross diverges. A cross has
    no loss: it stands `BEYOND` above the unigram entropy, and so do losses further up. Gradients are of the batch at
    each block's input (``grad_l2_total``, step 0), the stream is its L2 norm a token (``token_l2_mean``, the last step
    measured), both geometric means over seeds; each row of a profile runs from its first layer to its last.

    Args:
        runs: the table of `normlab.load_runs`.
        depth: number of blocks, or "deepest".
    """
    title = "Who trains at this depth"
    try:
        chosen = choose(runs, depth, width, schemes)
    except NothingToShow as why:
        return theme.message_figure(str(why), title)
    table = outcomes(chosen.runs)
    if table["entropy"].isna().all():
        return theme.message_figure("the runs do not know their unigram entropy: train them anew.", title)
    figure = make_subplots(
        rows=1,
        cols=3,
        shared_yaxes=True,
        column_widths=[0.36, 0.32, 0.32],
        horizontal_spacing=0.08,
        subplot_titles=[
            "Held-out loss<br>nats a token",
            *(f"{name}<br>{metric_row(metric).axis}" for _, metric, _, name in _PROFILES),
        ],
    )
    figure.update_annotations(font=dict(size=13))
    for outcome, mark in _MARKS.items():
        own = table[table["outcome"] == outcome]
        figure.add_trace(
            go.Scatter(
                x=own["shown"],
                y=[theme.style_of(name).title for name in own.index],
                mode="markers",
                name=outcome,
                marker=dict(symbol=mark, size=9, color=[theme.style_of(name).color for name in own.index]),
                hovertemplate="%{y}: %{x:.3f} nats<extra>" + outcome + "</extra>",
                meta={"outcome": outcome, "schemes": list(own.index)},
            ),
            row=1,
            col=1,
        )
    figure.add_vline(x=float(table["entropy"].median()) - MARGIN, line=dict(dash="dot", width=1), row=1, col=1)
    for column, (site, metric, when, _) in enumerate(_PROFILES, 2):
        figure.add_trace(_profile(chosen, list(table.index), site, metric, when, column), row=1, col=column)
        figure.update_xaxes(tickvals=[0, 0.5, 1], ticktext=["first", "half", "last"], title="layer", row=1, col=column)
    figure.update_yaxes(range=[len(table) - 0.5, -0.5], tickfont=dict(size=11))
    figure.update_layout(showlegend=False, margin=dict(l=170, r=90, t=134, b=60))
    counts = ", ".join(words.format((table["outcome"] == outcome).sum()) for outcome, words in _WORDS.items())
    marks = f"dotted: {MARGIN} below the unigram entropy · × and losses further up are drawn {BEYOND} above it"
    return theme.titled(figure, title, f"{chosen.describe()} · {counts}<br>{marks}", 234 + _ROW * len(table))


def _profile(chosen: Selection, names: list[str], site: str, metric: str, when: str, column: int) -> go.Heatmap:
    rows = chosen.rows(site, metric, "all")
    rows = rows[rows["value"].gt(0) & np.isfinite(rows["value"].astype(float)) & rows["layer"].notna()]
    steps = rows.groupby("scheme", observed=True)["step"]
    rows = rows[rows["step"] == steps.transform("min" if when == "first" else "max")]
    places = np.linspace(0, 1, _COLUMNS)
    values = np.full((len(names), _COLUMNS), np.nan)
    for number, name in enumerate(names):
        own = rows[rows["scheme"] == name].groupby("layer")["value"].apply(mean_of, metric=metric)
        if len(own):
            layers = own.index.to_numpy(float)
            nearest = np.round(layers[0] + places * (layers[-1] - layers[0]))
            values[number] = np.log10(np.interp(nearest, layers, own.to_numpy(float)))
    ticks: dict[str, Any] = theme.value_axis(theme.axis_bounds(10 ** values.ravel(), True), True)
    return go.Heatmap(
        x=places,
        y=[theme.style_of(name).title for name in names],
        z=values,
        colorscale=[list(stop) for stop in theme.SEQUENTIAL],
        colorbar=dict(
            thickness=8,
            len=0.5,
            x=0.653 if column == 2 else 1.01,
            y=0.75,
            tickfont=dict(size=10),
            tickvals=np.log10(ticks.get("tickvals", [])),
            ticktext=ticks.get("ticktext"),
        ),
        hovertemplate="%{y}, %{x:.0%} of the layers: 10^%{z:.2f}<extra>" + metric_row(metric).label + "</extra>",
        meta={"metric": metric},
    )
