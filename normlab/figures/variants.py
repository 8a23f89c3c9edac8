"""What a setting changes: a metric against it, and the difference of two schemes under each (B7, N1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.selection import in_order
from normlab.analysis.verdicts import in_words
from normlab.figures import theme
from normlab.probes.metrics import metric_row

_ROW = 30  # pixels a variant


def variant_differences(
    table: pd.DataFrame, labels: Sequence[str], heads: Mapping[int, str] | None = None
) -> go.Figure:
    """Scheme a minus scheme b with its 95% interval, a row a variant: a disc where they are different, a square where
    equivalent, a ring where undecided (`normlab.analysis.verdicts`), all rows being one family.

    Args:
        table: what `normlab.compare_variants` returns.
        labels: names of its rows.
        heads: headings to put above rows, by the row's number.
    """
    if table.empty:
        return theme.message_figure("No variant to compare.")
    a, b = (theme.style_of(table[side].iloc[0]) for side in ("a", "b"))
    metric = metric_row(str(table["metric"].iloc[0]))
    ratio = table["kind"].iloc[0] == "ratio"
    neutral = 1.0 if ratio else 0.0
    figure = go.Figure()
    place, ticks = 0.0, []
    for number, (row, label) in enumerate(zip(table.itertuples(), labels, strict=True)):
        if heads and number in heads:
            _write(figure, place, -10, f"<b>{heads[number]}</b>", theme.NEUTRAL, right=True)
            place += 1
        figure.add_trace(_interval(row, label, place, a.color))
        _write(figure, place, 16, _numbers(row, ratio), a.color)
        ticks.append((place, label))
        place += 1
    figure.add_vline(x=neutral, line=dict(color=theme.NEUTRAL, width=1.2, dash="dot"))
    figure.update_yaxes(
        tickvals=[where for where, _ in ticks],
        ticktext=[label for _, label in ticks],
        range=[place - 0.4, -0.8],
        showgrid=False,
        ticks="",
    )
    reach = [neutral, *table["estimate"], *table["low"], *table["high"]]
    bounds = theme.axis_bounds(map(float, reach), ratio)
    word = "ratio of" if ratio else "difference in"
    figure.update_xaxes(
        title_text=f"{word} {metric.label if ratio else metric.axis}", **theme.value_axis(bounds, ratio)
    )
    figure.update_layout(showlegend=False, margin=dict(l=250, r=300, t=100, b=62))
    title = f"{a.title} against {b.title}: {metric.label}"
    about = f"paired by seed · 95% interval · Holm over {len(table)} · {theme.VERDICT_KEY}"
    return theme.titled(figure, title, about, 190 + round(_ROW * place))


def condition_differences(table: pd.DataFrame) -> go.Figure:
    """`variant_differences`, a row a condition of `normlab.analysis.gain.conditions`, with a heading a group."""
    heads = {int(row.Index): str(row.group) for row in table.drop_duplicates("group").itertuples()}
    return variant_differences(table, list(table["condition"]), heads)


def _interval(row: Any, label: str, place: float, color: str) -> go.Scatter:
    low, high, estimate = (float(getattr(row, name)) for name in ("low", "high", "estimate"))
    wide = math.isfinite(low) and math.isfinite(high)
    return go.Scatter(
        x=[estimate],
        y=[place],
        error_x=dict(
            type="data",
            array=[high - estimate if wide else 0.0],
            arrayminus=[estimate - low if wide else 0.0],
            thickness=1.6,
            width=4,
            color=color,
        ),
        mode="markers",
        name=label,
        meta=dict(variant=label, verdict=row.verdict),
        marker=dict(color=color, size=9, symbol=theme.VERDICT_MARKS[row.verdict], line=dict(width=2, color=color)),
        hovertemplate=f"<b>{label}</b><br>%{{x:.4f}}, {in_words(row)}<extra></extra>",
    )


def _numbers(row: object, ratio: bool) -> str:
    low, high, estimate, seeds = (getattr(row, name) for name in ("low", "high", "estimate", "seeds"))
    form = "{:.3f}" if ratio else "{:+.3f}"
    text = form.format(estimate) if math.isfinite(estimate) else "–"
    if math.isfinite(low):
        text += f" [{form.format(low)}, {form.format(high)}]"
    return f"{text}, {seeds} seed{'s' if seeds != 1 else ''}"


def _write(figure: go.Figure, place: float, shift: int, text: str, color: str, right: bool = False) -> None:
    """Text right of the plot, or left of it ending at its edge."""
    side = dict(x=0, xanchor="right") if right else dict(x=1, xanchor="left")
    figure.add_annotation(
        xref="paper",
        yref="y",
        y=place,
        xshift=shift,
        text=text,
        showarrow=False,
        font=dict(size=12, color=color),
        **side,
    )


def _geometric(values: pd.Series) -> float:
    return float(np.exp(np.log(values).mean()))


def by_setting(values: pd.DataFrame, setting: str, panels: Mapping[str, str], title: str, subtitle: str) -> go.Figure:
    """Values against a setting on a log axis, one panel a quantity: each seed a dot, the mean over
    seeds (geometric on a log axis) a line.

    Args:
        values: columns `panel scheme setting seed value`, one row a run.
        setting: label of the horizontal axis.
        panels: by name in `values`, "log" or "linear"; drawn in this order.
    """
    if values.empty:
        return theme.message_figure("No run has the setting.", title)
    figure = make_subplots(1, len(panels), subplot_titles=list(panels), horizontal_spacing=0.09)
    for column, (panel, kind) in enumerate(panels.items(), 1):
        shown = values[values["panel"] == panel]
        for name in in_order(shown["scheme"].unique()):
            own = shown[shown["scheme"] == name].sort_values("setting")
            mean = own.groupby("setting")["value"].agg(_geometric if kind == "log" else "mean")
            style = theme.style_of(name)
            about = dict(name=style.title, legendgroup=name, meta=dict(scheme=name, panel=panel))
            hover = f"<b>{style.title}</b><br>{setting} %{{x:g}}: %{{y:.4~g}}<extra></extra>"
            figure.add_scatter(
                x=mean.index.tolist(),
                y=mean.tolist(),
                mode="lines",
                line=dict(color=style.color, dash=style.dash, width=2),
                showlegend=column == 1,
                hovertemplate=hover,
                row=1,
                col=column,
                **about,
            )
            figure.add_scatter(
                x=own["setting"].tolist(),
                y=own["value"].tolist(),
                mode="markers",
                marker=dict(color=style.color, size=6, opacity=0.6),
                showlegend=False,
                hovertemplate=hover,
                row=1,
                col=column,
                **about,
            )
        bounds = theme.axis_bounds(shown["value"], kind == "log", 0.1)
        figure.update_yaxes(**theme.value_axis(bounds, kind == "log"), row=1, col=column)
        reach = theme.axis_bounds(shown["setting"], True, 0.08)
        figure.update_xaxes(title_text=setting, **theme.value_axis(reach, True), row=1, col=column)
    figure.update_layout(legend=dict(orientation="h", x=0, y=-0.22), margin=dict(l=60, r=30, t=120, b=90))
    figure.update_annotations(font=dict(size=14))
    return theme.titled(figure, title, subtitle, 460)
