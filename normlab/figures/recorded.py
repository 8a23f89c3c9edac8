"""What a report shows of one model, or of several recordings side by side."""

from __future__ import annotations

import math
from textwrap import wrap
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from normlab.figures import theme
from normlab.figures.depth_use import BY_LAYER, BY_PAIR
from normlab.figures.layers import COLORS
from normlab.probes.metrics import metric_row, site_label

WHOLE_TICKS = 32  # layers up to which each has a tick


def recorded_lines(lines: pd.DataFrame, by: str, metric: str, site: str) -> go.Figure:
    """A metric at a site against layer, one line a value of `by`: a model, a text or a revision.

    lines: columns `by`, layer, value.
    """
    row, names = metric_row(metric), list(dict.fromkeys(lines[by]))
    figure = go.Figure()
    for i, name in enumerate(names):
        line = lines[lines[by] == name]
        color = theme.step_color(i, max(1, len(names) - 1)) if by == "revision" else COLORS[i % len(COLORS)]
        figure.add_scatter(
            x=line["layer"].astype(int).tolist(),
            y=line["value"].tolist(),
            name=name,
            mode="lines+markers",
            line={"color": color},
            marker={"size": 5},
            hovertemplate=f"{name}, layer %{{x}}: %{{y:.4g}}<extra></extra>",
        )
    log = row.log and bool((lines["value"] > 0).all())
    figure.update_xaxes(title_text="layer", dtick=1 if lines["layer"].max() <= WHOLE_TICKS else None)
    axis = theme.value_axis(theme.axis_bounds(lines["value"], log), log)
    figure.update_yaxes(title_text=row.axis, exponentformat="power", **axis)
    figure.update_layout(showlegend=True)
    return theme.titled(figure, f"{row.label}, {site_label(site)}", _folded(row.definition), 430)


def recorded_map(lines: pd.DataFrame, by: str, metric: str, site: str) -> go.Figure:
    """The same as a heat map, a column each; of a metric that spans decades the logarithm."""
    row = metric_row(metric)
    grid = lines.pivot_table(index="layer", columns=by, values="value", sort=False).sort_index()
    grid = grid.reindex(columns=list(dict.fromkeys(lines[by])))
    log = row.log and bool((lines["value"] > 0).all())
    shown = grid.map(math.log10) if log else grid
    bar: dict[str, Any] = {"title": "log10" if log else row.unit, "exponentformat": "power", "outlinewidth": 0}
    heat = go.Heatmap(
        z=shown.values.tolist(),
        x=[str(name) for name in grid.columns],
        y=[int(layer) for layer in grid.index],
        customdata=grid.values.tolist(),
        hovertemplate="%{x}, layer %{y}: %{customdata:.4g}<extra></extra>",
        colorscale="Viridis",
        colorbar=bar,
    )
    figure = go.Figure(heat)
    figure.update_xaxes(title_text=by, type="category")
    figure.update_yaxes(title_text="layer", dtick=1 if len(grid) <= WHOLE_TICKS // 2 else None)
    return theme.titled(figure, f"{row.label} over training, {site_label(site)}", "", 300 + 8 * len(grid))


def _folded(text: str) -> str:
    return "<br>".join(wrap(text, 100))


def _titled(figure: go.Figure, title: str, definition: str, y: str, height: int = 430) -> go.Figure:
    last = max(max(trace.x) for trace in figure.data)
    figure.update_xaxes(title_text="layer", dtick=1 if last <= WHOLE_TICKS else None)
    figure.update_yaxes(title_text=y, exponentformat="power")
    return theme.titled(figure, title, _folded(definition), height)


def skip_costs(table: pd.DataFrame) -> go.Figure:
    """Loss added by leaving out a part of a block: the table of `normlab.probes.skip_sensitivity`."""
    figure = go.Figure()
    for color, (part, line) in zip(COLORS, table.groupby("part", sort=False), strict=False):
        bars = {"type": "data", "array": [0 if math.isnan(e) else e for e in (line["high"] - line["skip_delta_loss"])]}
        figure.add_scatter(
            x=line["layer"].tolist(),
            y=line["skip_delta_loss"].tolist(),
            error_y=bars,
            name=str(part),
            mode="lines+markers",
            line={"color": color},
        )
    figure.update_layout(showlegend=True)
    words = "skip_delta_loss: loss with the part skipped minus loss of the whole model; bars: 95% interval"
    return _titled(figure, "Loss added by leaving out a part", words, "nats a token")


def lens(table: pd.DataFrame) -> go.Figure:
    """What each layer already predicts: the table of `normlab.probes.logit_lens_kl`."""
    figure = go.Figure()
    figure.add_scatter(
        x=table["layer"].tolist(), y=table["value"].tolist(), mode="lines+markers", line={"color": COLORS[0]}
    )
    words = "logit_lens_kl: KL(prediction from the layer || final prediction)"
    return _titled(figure, BY_LAYER["logit_lens_kl"][0], words, "nats")


def angles(table: pd.DataFrame) -> go.Figure:
    """Angle between the stream after two layers: the table of `normlab.probes.angular_distance`."""
    heat = go.Heatmap(
        z=table.values.tolist(),
        x=[int(layer) for layer in table.columns],
        y=[int(layer) for layer in table.index],
        colorscale="Viridis",
        zmin=0,
        colorbar={"exponentformat": "power", "outlinewidth": 0},
    )
    words = "angular_distance: arccos(cos(h_l, h_m))/pi, mean over tokens; 0 = embeddings"
    figure = go.Figure(heat).update_yaxes(dtick=1 if len(table) <= WHOLE_TICKS else None)
    return _titled(figure, BY_PAIR["angular_distance"][0], words, "layer", 480)
