"""Figures of recordings: one model, or the same metric of several models, texts or revisions.

layer_figure     a metric against layer, one line per site
layer_heatmap    all metrics and sites against layer
recorded_lines   a metric against layer, one line per model, text or revision
recorded_map     the same as a heat map
skip_costs       loss added by leaving out parts
lens             KL from each layer's prediction to the last
angles           angle between the stream after two layers
difference_figure  where two models part, site by site
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from textwrap import wrap

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from normlab.errors import NormlabError
from normlab.figures import theme
from normlab.figures.draw import axis_bounds, interval_bars, value_axis, whole
from normlab.figures.layers import BY_LAYER, BY_PAIR
from normlab.probes.metrics import metric_row, site_label, site_order

# Okabe and Ito, colour-blind safe.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LOG_DECADES = 1.5  # a logarithmic axis from this many decades on
WHOLE_TICKS = 32  # layers up to which each has a tick


def layer_figure(table: pd.DataFrame, metric: str, mask: str = "all") -> go.Figure:
    """`metric` against layer, one line per site.

    Args:
        table: columns `site layer metric mask value`.
        mask: of the tokens.

    Raises:
        NormlabError: the table has no such rows.
    """
    rows, row = _measured(table, metric, mask), metric_row(metric)
    values = rows["value"]
    log = bool((values > 0).all()) and values.max() > values.min() * 10**LOG_DECADES
    figure = _lines(((str(site), line) for site, line in rows.groupby("site", sort=False)), 6)
    title = f"{row.label[0].upper()}{row.label[1:]} by layer"
    figure.update_yaxes(exponentformat="power", **value_axis(axis_bounds(values, log), log))
    return _titled(figure, title, f"{metric}: {row.definition}", row.axis, 450)


def recorded_lines(lines: pd.DataFrame, by: str, metric: str, site: str) -> go.Figure:
    """A metric at a site against layer, one line per value of `by`: a model, a text or a revision.

    Args:
        lines: columns `by`, layer, value.
    """
    row, names = metric_row(metric), list(dict.fromkeys(lines[by]))
    colors = [theme.step_color(i, max(1, len(names) - 1)) for i in range(len(names))] if by == "revision" else COLORS
    figure = _lines(((str(name), lines[lines[by] == name]) for name in names), 5, colors)
    log = row.log and bool((lines["value"] > 0).all())
    figure.update_yaxes(exponentformat="power", **value_axis(axis_bounds(lines["value"], log), log))
    return _titled(figure, f"{row.label}, {site_label(site)}", row.definition, row.axis)


def recorded_map(lines: pd.DataFrame, by: str, metric: str, site: str) -> go.Figure:
    """The same as a heat map, one column per value of `by`; the logarithm of a metric that spans decades."""
    row = metric_row(metric)
    grid = lines.pivot_table(index="layer", columns=by, values="value", sort=False).sort_index()
    grid = grid.reindex(columns=list(dict.fromkeys(lines[by])))
    log = row.log and bool((lines["value"] > 0).all())
    figure = go.Figure(
        go.Heatmap(
            z=(grid.map(math.log10) if log else grid).values.tolist(),
            x=[str(name) for name in grid.columns],
            y=whole(grid.index),
            customdata=grid.values.tolist(),
            hovertemplate="%{x}, layer %{y}: %{customdata:.4g}<extra></extra>",
            colorscale="Viridis",
            colorbar={"title": "log10" if log else row.unit, "exponentformat": "power", "outlinewidth": 0},
        )
    )
    figure.update_xaxes(title_text=by, type="category")
    figure.update_yaxes(title_text="layer", dtick=1 if len(grid) <= WHOLE_TICKS // 2 else None)
    return theme.titled(figure, f"{row.label} over training, {site_label(site)}", "", 300 + 8 * len(grid))


def layer_heatmap(table: pd.DataFrame, metric: str | None = None, mask: str = "all") -> go.Figure:
    """One row per metric and site, one column per layer; the value is one hover away.

    Each row has its own colour scale, from its smallest value (dark) to its largest. It is logarithmic where the
    metric's axis is. A row of equal values is between the two.

    Args:
        table: columns `site layer metric mask value`.
        metric: only this one.
        mask: of the tokens.

    Raises:
        NormlabError: the table has no such rows.
    """
    rows = _measured(table[table["layer"].notna()], metric, mask)
    grid = rows.pivot_table(index=["metric", "site"], columns="layer", values="value", sort=False)
    metrics = list(dict.fromkeys(rows["metric"]))
    order = sorted(grid.index, key=lambda index: (metrics.index(index[0]), site_order(index[1])))
    grid = grid.reindex(sorted(grid.columns), axis=1).loc[order]
    values = grid.to_numpy(dtype=float)
    shares = np.vstack([_share(line, metric_row(name).log) for line, (name, _) in zip(values, order, strict=True)])
    figure = go.Figure(
        go.Heatmap(
            z=shares,
            x=whole(grid.columns),
            y=[f"{metric_row(name).label}, {site_label(site)}" for name, site in order],
            customdata=values,
            hovertemplate="%{y}<br>layer %{x}: %{customdata:.4g}<extra></extra>",
            colorscale="Viridis",
            zmin=0,
            zmax=1,
            colorbar={"title": "of the row", "tickvals": [0, 1], "ticktext": ["least", "most"], "outlinewidth": 0},
        )
    )
    figure.update_xaxes(title_text="layer", dtick=1 if grid.shape[1] <= WHOLE_TICKS else None, showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    title = "All metrics" if metric is None else metric_row(metric).label
    return theme.titled(figure, title, "each row on its own scale", 180 + 22 * len(order))


def _measured(table: pd.DataFrame, metric: str | None, mask: str) -> pd.DataFrame:
    rows = table[(table["mask"] == mask) & ((table["metric"] == metric) if metric is not None else True)]
    if rows.empty:
        raise NormlabError(f"the table has no rows for metric {metric!r} with mask {mask!r}")
    return rows


def _share(values: np.ndarray, log: bool) -> np.ndarray:
    """Each value's position between the smallest and the largest, 0 to 1; NaN for what is not finite."""
    finite = np.where(np.isfinite(values), values, np.nan)
    if log and np.nanmin(finite, initial=np.inf) > 0:
        finite = np.log(finite)
    low, high = np.nanmin(finite, initial=np.inf), np.nanmax(finite, initial=-np.inf)
    return (finite - low) / (high - low) if high > low else np.where(np.isnan(finite), np.nan, 0.5)


def _lines(named: Iterable[tuple[str, pd.DataFrame]], size: int, colors: Iterable[str] = COLORS) -> go.Figure:
    """One line with markers per name; tables have columns layer, value."""
    figure, colors = go.Figure(), list(colors)
    for i, (name, line) in enumerate(named):
        line = line.sort_values("layer")
        figure.add_scatter(
            x=whole(line["layer"]),
            y=line["value"].tolist(),
            name=name,
            mode="lines+markers",
            line={"color": colors[i % len(colors)]},
            marker={"size": size},
            hovertemplate=f"{name}, layer %{{x}}: %{{y:.4g}}<extra></extra>",
        )
    return figure.update_layout(showlegend=True)


def _titled(figure: go.Figure, title: str, definition: str, axis: str, height: int = 430) -> go.Figure:
    last = max(max(trace.x) for trace in figure.data)
    figure.update_xaxes(title_text="layer", dtick=1 if last <= WHOLE_TICKS else None)
    figure.update_yaxes(title_text=axis, exponentformat="power")
    return theme.titled(figure, title, "<br>".join(wrap(definition, 100)), height)


def skip_costs(table: pd.DataFrame) -> go.Figure:
    """Loss added by leaving out a part of a block: the table of `normlab.probes.skip_sensitivity`."""
    parts = [(str(part), line) for part, line in table.groupby("part", sort=False)]
    figure = _lines(((part, line.rename(columns={"skip_delta_loss": "value"})) for part, line in parts), 6)
    for trace, (_, line) in zip(figure.data, parts, strict=True):
        line = line.sort_values("layer")
        trace.error_y = interval_bars(line["skip_delta_loss"], line["low"], line["high"])
    words = "skip_delta_loss: loss with the part skipped minus loss of the whole model; bars: 95% interval"
    return _titled(figure, "Loss added by leaving out a part", words, "nats per token")


def lens(table: pd.DataFrame) -> go.Figure:
    """KL from the prediction of each layer to the last: the table of `normlab.probes.logit_lens_kl`."""
    words = "logit_lens_kl: KL(prediction from the layer || final prediction)"
    figure = _lines([("KL", table)], 6).update_layout(showlegend=False)
    return _titled(figure, BY_LAYER["logit_lens_kl"][0], words, "nats")


def angles(table: pd.DataFrame) -> go.Figure:
    """Angle between the stream after two layers: the table of `normlab.probes.angular_distance`."""
    bar = {"exponentformat": "power", "outlinewidth": 0}
    layers = dict(x=whole(table.columns), y=whole(table.index))
    figure = go.Figure(go.Heatmap(**layers, z=table.values.tolist(), colorscale="Viridis", zmin=0, colorbar=bar))
    figure.update_yaxes(dtick=1 if len(table) <= WHOLE_TICKS else None)
    words = "angular_distance: arccos(cos(h_l, h_m))/pi, mean over tokens; 0 = embeddings"
    return _titled(figure, BY_PAIR["angular_distance"][0], words, "layer", 480)


def difference_figure(table: pd.DataFrame) -> go.Figure:
    """The difference of two models at each site in order of computation, and how far rounding moves it.

    Args:
        table: columns `site layer difference noise parts`, of `normlab.diff`.
    """
    names = [f"{site.replace('_', ' ')}, {layer}" for site, layer in zip(table["site"], table["layer"], strict=True)]
    least = max(float(table["noise"][table["noise"] > 0].min()) / 10 if (table["noise"] > 0).any() else 0, 1e-12)
    finite = table[["difference", "noise"]].replace(math.inf, np.nan)
    largest = float(finite.max().max())
    figure = go.Figure()
    for column, label, color in (("noise", "rounding", COLORS[6]), ("difference", "difference", COLORS[0])):
        values = table[column].clip(lower=least, upper=max(largest, least) * 3)
        figure.add_scatter(
            x=list(range(len(names))),
            y=values.tolist(),
            name=label,
            mode="lines+markers",
            marker={"size": 5, "color": color},
            line={"color": color, "dash": "dot" if column == "noise" else "solid"},
            customdata=[[name, value] for name, value in zip(names, table[column], strict=True)],
            hovertemplate="%{customdata[0]}: %{customdata[1]:.3g}<extra>" + label + "</extra>",
        )
    parts = table["parts"].to_numpy()
    if parts.any():
        first = int(parts.argmax())
        figure.add_vline(x=first, line={"color": COLORS[1]}, annotation_text=f"parts at {names[first]}")
    layers = table["layer"].tolist()
    starts = [i for i, layer in enumerate(layers) if i == 0 or layer != layers[i - 1]]
    figure.update_xaxes(tickvals=starts, ticktext=[str(layers[i]) for i in starts], title_text="layer")
    figure.update_yaxes(type="log", title_text="relative difference", exponentformat="power")
    title = "The models agree within rounding" if not parts.any() else "Where the models part"
    figure.update_layout(showlegend=True)
    return theme.titled(figure, title, "sites in order of computation; below the axis: no difference", 430)
