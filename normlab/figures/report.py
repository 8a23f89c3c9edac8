"""Figures of recordings: one model, or the same metric of several models, texts or revisions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from normlab.errors import NormlabError
from normlab.figures import theme
from normlab.figures.draw import axis_bounds, interval_bars, value_axis, whole
from normlab.figures.layers import BY_LAYER, BY_PAIR
from normlab.probes.metrics import metric_row, site_label, site_order

# Okabe and Ito, colour-blind safe.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LOG_DECADES = 1.5  # a logarithmic axis from this many decades on
WHOLE_TICKS = 32  # layers up to which each has a tick


def layer_figure(
    table: pd.DataFrame, metric: str, mask: str = "all", by: str = "site", schemes: Mapping[str, str] | None = None
) -> go.Figure:
    """`metric` against layer, one line per value of `by`: sites, or models, texts, revisions at one site.

    Args:
        table: columns `site layer metric mask value`, and `by`.
        mask: of the tokens.
        schemes: value of `by` -> the scheme whose colour its line has; default: none.

    Raises:
        NormlabError: the table has no such rows.
    """
    rows, row = _measured(table, metric, mask), metric_row(metric)
    where = "by layer" if by == "site" else f"by layer, {site_label(rows['site'].iloc[0])}"
    title = f"{row.label[0].upper()}{row.label[1:]} {where}"
    return _lines(rows, by, title, f"{metric}: {row.definition}", row.axis, schemes)


def recorded_map(lines: pd.DataFrame, by: str, metric: str, site: str) -> go.Figure:
    """A metric at a site as a heat map, one column per value of `by`; the logarithm of a metric that spans decades.

    Args:
        lines: columns `by`, layer, value.
    """
    row = metric_row(metric)
    grid = lines.pivot_table(index="layer", columns=by, values="value", sort=False).sort_index()
    grid = grid.reindex(columns=list(dict.fromkeys(lines[by])))
    log = row.log and bool((lines["value"] > 0).all())
    shown, names = grid.map(math.log10) if log else grid, [str(name) for name in grid.columns]
    hover = "%{x}, layer %{y}: %{customdata:.4g}<extra></extra>"
    bar = {"title": "log10" if log else row.unit, "exponentformat": "power"}
    figure = _heat_map(
        names, grid.index, shown.values.tolist(), bar, customdata=grid.values.tolist(), hovertemplate=hover
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
    grid = rows.groupby(["metric", "site", "layer"], sort=False)["value"].mean().unstack()
    metrics = list(dict.fromkeys(rows["metric"]))
    order = sorted(grid.index, key=lambda index: (metrics.index(index[0]), site_order(index[1])))
    grid = grid.reindex(sorted(grid.columns), axis=1).loc[order]
    values = grid.to_numpy(dtype=float)
    shares = np.vstack([_share(line, metric_row(name).log) for line, (name, _) in zip(values, order, strict=True)])
    names = [f"{metric_row(name).label}, {site_label(site)}" for name, site in order]
    hover = "%{y}<br>layer %{x}: %{customdata:.4g}<extra></extra>"
    bar = {"title": "of the row", "tickvals": [0, 1], "ticktext": ["least", "most"]}
    figure = _heat_map(grid.columns, names, shares, bar, zmin=0, zmax=1, customdata=values, hovertemplate=hover)
    figure.update_xaxes(title_text="layer", dtick=1 if grid.shape[1] <= WHOLE_TICKS else None, showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    title = "All metrics" if metric is None else metric_row(metric).label
    return theme.titled(figure, title, "each row on its own scale", 180 + 22 * len(order))


def _heat_map(x: Any, y: Any, z: Any, bar: dict[str, Any], **trace: Any) -> go.Figure:
    """`z` in colours over names or layers. What has no value is blank, and says nothing when hovered."""
    x, y = (axis if isinstance(axis, list) else whole(axis) for axis in (x, y))
    look = {"colorscale": theme.SEQUENTIAL, "colorbar": bar | {"outlinewidth": 0}, "hoverongaps": False}
    return go.Figure(go.Heatmap(x=x, y=y, z=z, **look, **trace))


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


def _lines(
    rows: pd.DataFrame,
    by: str,
    title: str,
    words: str,
    axis: str,
    schemes: Mapping[str, str] | None = None,
    along: str = "layer",
) -> go.Figure:
    """One line with markers per value of `by`; tables have columns `by`, layer, value, and perhaps low and high.

    `along` is what the column layer holds.
    """
    figure, names = go.Figure(), list(dict.fromkeys(rows[by]))
    if by == "revision" and len(names) > 1:
        looks = [{"color": theme.step_color(i, len(names) - 1)} for i in range(len(names))]
    else:
        looks = _looks(names, schemes)
    for name, look in zip(names, looks, strict=True):
        line = rows[rows[by] == name].sort_values("layer")
        bars = interval_bars(line["value"], line["low"], line["high"]) if "low" in rows else None
        figure.add_scatter(
            x=whole(line["layer"]),
            y=line["value"].tolist(),
            error_y=bars,
            name=str(name),
            mode="lines+markers",
            line=look,
            marker={"size": 6},
            hovertemplate=f"{name}, {along} %{{x}}: %{{y:.4g}}<extra></extra>",
        )
    held = rows[["value", *({"low", "high"} & set(rows))]].to_numpy(float)
    log = bool((held > 0).all()) and held.max() > held.min() * 10**LOG_DECADES
    bounds = axis_bounds(held.ravel(), log)
    figure.layout.yaxis = dict(title_text=axis, exponentformat="power", **value_axis(bounds, log))
    figure.layout.xaxis = dict(title_text=along, dtick=1 if rows["layer"].max() <= WHOLE_TICKS else None)
    figure.layout.showlegend = len(names) > 1
    return theme.titled(figure, title, "<br>".join(wrap(words, 100)), 450)


def _looks(names: Sequence[str], schemes: Mapping[str, str] | None) -> list[dict[str, str]]:
    """Colour and dash of each line: a scheme's own, other dashes for more lines of it; the others take free colours."""
    schemes = schemes or {}
    taken = {theme.style_of(scheme).color for scheme in schemes.values()}
    free = cycle([color for color in COLORS if color not in taken] or COLORS)
    looks: list[dict[str, str]] = []
    for name in names:
        if name in schemes:
            style = theme.style_of(schemes[name])
            ours = [{"color": style.color, "dash": dash} for dash in (style.dash, *theme.DASHES)]
            look = next((one for one in ours if one not in looks), ours[0])
        else:
            look = {"color": next(free)}
        looks.append(look)
    return looks


def skip_costs(table: pd.DataFrame, schemes: Mapping[str, str] | None = None) -> go.Figure:
    """Loss added by leaving out a part of a block: the table of `normlab.probes.skip_sensitivity`."""
    words = "skip_delta_loss: loss with the part skipped minus loss of the whole model; bars: 95% interval"
    rows = table.rename(columns={"skip_delta_loss": "value"})
    return _lines(rows, "part", "Loss added by leaving out a part", words, "nats per token", schemes)


def lens(table: pd.DataFrame, schemes: Mapping[str, str] | None = None) -> go.Figure:
    """KL from the prediction of each layer to the last: the table of `normlab.probes.logit_lens_kl`."""
    words = "logit_lens_kl: KL(prediction from the layer || final prediction)"
    return _lines(table.assign(line="KL"), "line", BY_LAYER["logit_lens_kl"][0], words, "nats", schemes)


def angles(table: pd.DataFrame) -> go.Figure:
    """Angle between the stream after two layers: the table of `normlab.probes.angular_distance`."""
    figure = _heat_map(table.columns, table.index, table.values.tolist(), {"exponentformat": "power"}, zmin=0)
    ticks = dict(title_text="layer", dtick=1 if len(table) <= WHOLE_TICKS else None)
    figure.update_xaxes(**ticks).update_yaxes(**ticks)
    words = "angular_distance: arccos(cos(h_l, h_m))/pi, mean over tokens; 0 = embeddings"
    return theme.titled(figure, BY_PAIR["angular_distance"][0], words, 480)


def branch_costs(table: pd.DataFrame, by: str = "line", schemes: Mapping[str, str] | None = None) -> go.Figure:
    """Loss added by leaving out branches together: tables of `normlab.probes.cheapest_branches`.

    Args:
        table: one table, or several with a column `by`.
        by: a line per value.
        schemes: value of `by` -> the scheme whose colour its line has; default: none.
    """
    rows = table.assign(**({} if by in table else {by: "cheapest"}), layer=table["dropped"])
    words = "one branch more each time, the cheapest beside those before it; bars: 95% interval"
    title, value = "Loss added by leaving out branches together", rows.rename(columns={"skip_delta_loss": "value"})
    return _lines(value, by, title, words, "nats per token", schemes, "branches left out")


def void_shares(table: pd.DataFrame, by: str = "rule", schemes: Mapping[str, str] | None = None) -> go.Figure:
    """Share of tokens that a block hardly changes: tables of `normlab.probes.void_tokens`.

    Args:
        table: one table, or the rows of one rule of several, with a column `by`.
        by, schemes: as in `branch_costs`.
    """
    words = {
        "void": "void: the token's norm grows by less than {} of the range of its growth in the blocks before",
        "small": "small: the block changes the token by less than {} of its norm",
    }
    rules = table[["rule", "limit"]].drop_duplicates()
    shown = "; ".join(words[row.rule].format(f"{row.limit:g}") for row in rules.itertuples())
    return _lines(table, by, "Tokens that a block hardly changes", shown, "share of tokens", schemes)


def layer_map(table: pd.DataFrame, shallow: str, deep: str) -> go.Figure:
    """How well layers of one model predict those of another: the table of `normlab.probes.layer_maps`.

    Args:
        table: what it returns.
        shallow, deep: names of the two models.
    """
    best = table.iloc[1:].dropna(axis=1, how="all").idxmin()
    bar, hover = {"title": "left"}, "layer %{y} predicts layer %{x}: %{z:.3f} is left<extra></extra>"
    figure = _heat_map(
        table.columns, table.index, table.values.tolist(), bar, zmin=0, zmax=1, hovertemplate=hover, name="left"
    )
    figure.add_scatter(
        x=[0, int(table.columns[-1])],
        y=[0, int(table.index[-1])],
        name="equal relative depth",
        mode="lines",
        line={"color": "white", "dash": "dot"},
        hoverinfo="skip",
    )
    ring = {"symbol": "circle-open", "size": 11, "color": COLORS[1], "line": {"width": 2}}
    figure.add_scatter(
        x=whole(best.index), y=whole(best), name="best layer", mode="markers", marker=ring, hoverinfo="skip"
    )
    figure.update_xaxes(title_text=f"layer of {deep}", dtick=1 if table.shape[1] <= WHOLE_TICKS else None)
    figure.update_yaxes(title_text=f"layer of {shallow}", dtick=1 if table.shape[0] <= WHOLE_TICKS else None)
    words = (
        "share of a layer's variance that a linear map from the other model's layer leaves; "
        "dotted: equal relative depth; rings: the layer that leaves least, 0 not counted"
    )
    figure.update_layout(showlegend=False)
    return theme.titled(figure, "Which layer predicts which", "<br>".join(wrap(words, 100)), 430)
