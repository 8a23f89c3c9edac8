"""A setting: a metric against it (B7), the difference of two schemes under each (N1), and what BHyT's own change (N2).

variant_differences     two schemes under each variant of a sweep, paired by seed
condition_differences   the same for the conditions of `normlab.analysis.notebook_tables.gain_or_bound`
by_setting              quantities against a setting, each seed a dot
saturation              the share of BHyT's tanh inputs beyond lambda, below Chebyshev's bound
carried_ratio           the exact statistic over the carried one by layer
loss_over_gain          BHyT's loss over its gain and the gamma it starts with
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.selection import NothingToShow, in_order
from normlab.analysis.theory import chebyshev_bound
from normlab.analysis.verdicts import in_words
from normlab.figures import theme
from normlab.figures.draw import (
    LEGEND_ABOVE,
    add_line,
    axis_bounds,
    beside,
    interval_bars,
    value_axis,
    whole,
)
from normlab.figures.registry import drawing
from normlab.probes.metrics import metric_row
from normlab.schemes import tagged

BOUNDED = tagged("bound")[0]
_DASHES = ("solid", "dot", "dash", "dashdot")
_ROW = 30  # pixels of a variant


@drawing
def variant_differences(
    table: pd.DataFrame, labels: Sequence[str], heads: Mapping[int, str] | None = None
) -> go.Figure:
    """Scheme a minus scheme b with its 95% interval, one row per variant.

    A disc is different, a square equivalent, a ring undecided (`normlab.analysis.verdicts`); all rows are one family.

    Args:
        table: what `normlab.compare_variants` returns.
        labels: names of its rows.
        heads: headings to put above rows, by the row's number.
    """
    if table.empty:
        raise NothingToShow("No variant to compare.")
    a, b = (theme.style_of(table[side].iloc[0]) for side in ("a", "b"))
    metric = metric_row(str(table["metric"].iloc[0]))
    is_ratio = table["kind"].iloc[0] == "ratio"
    neutral = 1.0 if is_ratio else 0.0
    figure = go.Figure()
    position, ticks = 0, []
    for number, (row, label) in enumerate(zip(table.itertuples(), labels, strict=True)):
        if heads and number in heads:
            beside(figure, position, -10, f"<b>{heads[number]}</b>", theme.NEUTRAL, left=True)
            position += 1
        _add_interval(figure, row, label, position, a.color)
        beside(figure, position, 16, _numbers(row, is_ratio), a.color)
        ticks.append((position, label))
        position += 1
    figure.add_vline(x=neutral, line=dict(color=theme.NEUTRAL, width=1.2, dash="dot"))
    positions, names = zip(*ticks, strict=True)
    figure.update_yaxes(tickvals=positions, ticktext=names, range=[position - 0.4, -0.8], showgrid=False, ticks="")
    bounds = axis_bounds(map(float, [neutral, *table["estimate"], *table["low"], *table["high"]]), is_ratio)
    words = f"ratio of {metric.label}" if is_ratio else f"difference in {metric.axis}"
    figure.update_xaxes(title_text=words, **value_axis(bounds, is_ratio))
    figure.update_layout(showlegend=False, margin=dict(l=250, r=300, t=100, b=62))
    title = f"{a.title} against {b.title}: {metric.label}"
    about = f"paired by seed · 95% interval · Holm over {len(table)} · {theme.VERDICT_KEY}"
    return theme.titled(figure, title, about, 190 + _ROW * position)


def condition_differences(table: pd.DataFrame) -> go.Figure:
    """`variant_differences` with one row per condition of `gain_or_bound.conditions`, headed by its group."""
    heads = {int(row.Index): str(row.group) for row in table.drop_duplicates("group").itertuples()}
    return variant_differences(table, list(table["condition"]), heads)


def _add_interval(figure: go.Figure, row: Any, label: str, position: int, color: str) -> None:
    mark = dict(color=color, size=9, symbol=theme.VERDICT_MARKS[row.verdict], line=dict(width=2, color=color))
    figure.add_scatter(
        x=[float(row.estimate)],
        y=[position],
        error_x=interval_bars(row.estimate, row.low, row.high, thickness=1.6, width=4, color=color),
        mode="markers",
        name=label,
        meta=dict(variant=label, verdict=row.verdict),
        marker=mark,
        hovertemplate=f"<b>{label}</b><br>%{{x:.4f}}, {in_words(row)}<extra></extra>",
    )


def _numbers(row: Any, is_ratio: bool) -> str:
    form = "{:.3f}" if is_ratio else "{:+.3f}"
    text = form.format(row.estimate) if math.isfinite(row.estimate) else "–"
    if math.isfinite(row.low):
        text += f" [{form.format(row.low)}, {form.format(row.high)}]"
    return f"{text}, {row.seeds} seed{'s' if row.seeds != 1 else ''}"


def _geometric(values: pd.Series) -> float:
    return float(np.exp(np.log(values).mean()))


@drawing
def by_setting(values: pd.DataFrame, setting: str, panels: Mapping[str, str], title: str, subtitle: str) -> go.Figure:
    """Values against a setting on a log axis, one panel per quantity.

    Each seed is a dot, the mean over seeds (geometric on a log axis) a line.

    Args:
        values: columns `panel scheme setting seed value`, one row per run.
        setting: label of the horizontal axis.
        panels: by name in `values`, "log" or "linear"; drawn in this order.
    """
    if values.empty:
        raise NothingToShow("No run has the setting.")
    figure = make_subplots(1, len(panels), subplot_titles=list(panels), horizontal_spacing=0.09)
    for column, (panel, kind) in enumerate(panels.items(), 1):
        shown, log = values[values["panel"] == panel], kind == "log"
        for name in in_order(shown["scheme"].unique()):
            rows, style = shown[shown["scheme"] == name].sort_values("setting"), theme.style_of(name)
            mean = rows.groupby("setting")["value"].agg(_geometric if log else "mean")
            hover = f"<br>{setting} %{{x:g}}: %{{y:.4~g}}"
            look: dict[str, Any] = dict(
                name=style.title, legendgroup=name, meta=dict(scheme=name, panel=panel), row=1, col=column
            )
            add_line(figure, name, mean.index.tolist(), mean, hover, showlegend=column == 1, **look)
            dot = dict(color=style.color, size=6, opacity=0.6)
            add_line(figure, name, rows["setting"].tolist(), rows["value"], hover, mode="markers", marker=dot,
                     showlegend=False, **look)  # fmt: skip
        figure.update_yaxes(**value_axis(axis_bounds(shown["value"], log, 0.1), log), row=1, col=column)
        reach = axis_bounds(shown["setting"], True, 0.08)
        figure.update_xaxes(title_text=setting, **value_axis(reach, True), row=1, col=column)
    figure.update_layout(legend=dict(orientation="h", x=0, y=-0.22), margin=dict(l=60, r=30, t=120, b=90))
    figure.update_annotations(font=dict(size=14))
    return theme.titled(figure, title, subtitle, 460)


@drawing
def saturation(shares: pd.DataFrame, width: int) -> go.Figure:
    """Share of tanh inputs beyond lambda against kappa, one line per condition, below Chebyshev's bound 1/kappa^2.

    Args:
        shares: columns `condition kappa share`; shares of zero are off the logarithmic axis, and the subtitle says so.
        width: of the model; beyond kappa = sqrt(width) no input can exceed lambda.
    """
    if shares.empty:
        raise NothingToShow("No share was measured.")
    kappas = sorted(shares["kappa"].unique())
    bound = [chebyshev_bound(kappa) for kappa in kappas]
    figure = go.Figure()
    figure.add_scatter(x=kappas, y=bound, name="Chebyshev bound 1/κ²", line=dict(color=theme.NEUTRAL, width=2))
    for dash, (condition, rows) in zip(_DASHES, shares.groupby("condition", sort=False), strict=False):
        visible = rows["share"].where(rows["share"] > 0)
        add_line(figure, BOUNDED, rows["kappa"].tolist(), visible, f"<br>{condition}<br>κ %{{x:g}}: %{{y:.3~g}}",
                 name=str(condition), mode="markers+lines", line=dict(dash=dash))  # fmt: skip
    figure.add_vline(x=width**0.5, line=dict(color=theme.NEUTRAL, dash="dot"))
    bounds = axis_bounds([*bound, *shares["share"]], True, 0.05)
    figure.update_yaxes(title_text="share beyond λ", **value_axis(bounds, True)).update_xaxes(title_text="κ")
    figure.update_layout(legend=LEGEND_ABOVE, margin=dict(l=80, r=30, t=110, b=58))
    zeros = " · shares of zero are not drawn" if shares["share"].eq(0).any() else ""
    title = "Saturation against κ: the share of tanh inputs beyond λ"
    return theme.titled(figure, title, f"dotted: κ = √{width}, beyond which no input exceeds λ{zeros}", 460)


def carried_ratio(stages: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Exact over carried mean square at the MLP's norm by layer, one line per stage of training. At 1 they agree.

    Args:
        stages: by name, columns `layer value` (`carried_var_ratio`).
    """
    figure = go.Figure()
    for dash, (stage, rows) in zip(_DASHES[::-1][-len(stages) :], stages.items(), strict=True):
        add_line(figure, BOUNDED, whole(rows["layer"]), rows["value"], f"<br>{stage}<br>layer %{{x}}: %{{y:.3f}}",
                 name=stage, mode="lines+markers", line=dict(dash=dash))  # fmt: skip
    figure.add_hline(y=1, line=dict(color=theme.NEUTRAL, dash="dot"))
    bounds = axis_bounds([1.0, *(value for rows in stages.values() for value in rows["value"])], True, 0.1)
    figure.update_xaxes(title_text="layer", dtick=1)
    figure.update_yaxes(title_text="exact / carried", **value_axis(bounds, True))
    figure.update_layout(legend=LEGEND_ABOVE, margin=dict(l=72, r=30, t=110, b=58))
    return theme.titled(figure, "The carried statistic at the MLP's norm", "dotted: exact and carried agree", 420)


@drawing
def loss_over_gain(configs: pd.DataFrame) -> go.Figure:
    """Held-out loss of BHyT over its gain g = lambda/kappa and the gamma it starts with, means over seeds.

    Only runs at the smallest width and without planted outliers are shown.

    Args:
        configs: table of `normlab.load_configs` with a column `g`.
    """
    plain = configs[configs["scheme"].eq(BOUNDED) & configs["outlier_channels"].eq(0)]
    plain = plain[plain["width"].eq(plain["width"].min())]
    if plain.empty:
        raise NothingToShow("No run of BHyT.")
    mean = plain.groupby(["g", "gamma0"])["eval_loss"].agg(["mean", "count"]).reset_index()
    product, grey = float(mean["g"].min() * mean["gamma0"].max()), dict(color=theme.NEUTRAL, dash="dash")
    along = [float(mean["g"].min()) / 1.4, float(mean["g"].max()) * 1.4]
    figure = go.Figure()
    figure.add_scatter(
        x=along, y=[product / g for g in along], mode="lines", line=grey, hoverinfo="skip", name="g · γ₀"
    )
    colors = dict(color=mean["mean"].tolist(), colorscale="Viridis", colorbar=dict(title="nats", thickness=10))
    figure.add_scatter(
        x=mean["g"].tolist(),
        y=mean["gamma0"].tolist(),
        mode="markers+text",
        name="held-out loss",
        text=[f"{loss:.3f}" for loss in mean["mean"]],
        textposition="top right",
        marker=dict(size=18, **colors),
        customdata=mean["count"].tolist(),
        hovertemplate="g %{x:g}, γ₀ %{y:g}: %{text} nats, %{customdata} seed(s)<extra></extra>",
    )
    for update, values, name in (
        (figure.update_xaxes, mean["g"], "g = λ/κ at the attention norm"),
        (figure.update_yaxes, mean["gamma0"], "γ₀"),
    ):
        axis = value_axis(axis_bounds(values, True, 0.15), True)
        ticks = sorted(values.unique())
        update(title_text=name, **axis | dict(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks]))
    figure.update_layout(showlegend=False, margin=dict(l=72, r=30, t=96, b=58))
    about = f"dashed: g · γ₀ = {product:g}, BHyT's own small-signal map · {int(configs['steps'].max())} steps"
    return theme.titled(figure, "Held-out loss over λ/κ and γ₀", about, 460)
