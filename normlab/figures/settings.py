"""A setting: the difference of two schemes under each (N1), and what BHyT's κ changes (N2)."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.quantities import quantity_row
from normlab.analysis.selection import NothingToShow
from normlab.analysis.theory import chebyshev_bound
from normlab.analysis.verdicts import DIFFERENT, bracketed, in_words, interval_in_words
from normlab.figures import theme
from normlab.figures.draw import LEGEND_ABOVE, add_line, axis_bounds, beside, interval_bars, mark, value_axis
from normlab.figures.registry import drawing
from normlab.schemes import tagged

BOUNDED = tagged("bound")[0]
_DASHES = ("solid", "dot", "dash", "dashdot")
_ROW = 30  # pixels of a variant


@drawing
def variant_differences(table: pd.DataFrame) -> go.Figure:
    """Scheme a minus scheme b with its interval, one row per variant, under the heading of its group.

    A disc is different, a square equivalent, a ring undecided (`normlab.analysis.verdicts`); all rows are one family.

    Args:
        table: what `normlab.compare_variants` returns, with columns `condition` (the rows' names) and `group` (their
            headings; rows of a group follow each other).
    """
    if table.empty:
        raise NothingToShow("No variant to compare.")
    a, b = (theme.style_of(table[side].iloc[0]) for side in ("a", "b"))
    metric = quantity_row(str(table["metric"].iloc[0]))
    is_ratio = table["kind"].iloc[0] == "ratio"
    neutral = 1.0 if is_ratio else 0.0
    heads, names = table["group"], table["condition"]
    is_first = heads.ne(heads.shift(fill_value=""))
    positions = [number + shift for number, shift in enumerate(is_first.cumsum())]  # a heading takes a row
    figure = go.Figure()
    for position, head in zip(positions, heads.where(is_first, ""), strict=True):
        if head:
            beside(figure, position - 1, -10, f"<b>{head}</b>", theme.NEUTRAL, left=True)
    for position, row, name in zip(positions, table.itertuples(), names, strict=True):
        figure.add_scatter(
            x=[float(row.estimate)],
            y=[position],
            error_x=interval_bars(row.estimate, row.low, row.high, thickness=1.6, width=4, color=a.color),
            mode="markers",
            name=name,
            meta=dict(variant=name, verdict=row.verdict),
            marker=mark(a.color, theme.VERDICT_MARKS[row.verdict]),
            hovertemplate=f"<b>{name}</b><br>%{{x:.4f}}, {in_words(row)}<extra></extra>",
        )
        beside(figure, position, 16, _numbers(row, is_ratio), a.color)
    figure.add_vline(x=neutral, line=dict(color=theme.NEUTRAL, width=1.2, dash="dot"))
    ticks = dict(tickvals=positions, ticktext=names.tolist(), ticks="")
    figure.update_yaxes(range=[positions[-1] + 0.6, -0.8], showgrid=False, **ticks)
    bounds = axis_bounds(map(float, [neutral, *table["estimate"], *table["low"], *table["high"]]), is_ratio)
    words = f"ratio of {metric.label}" if is_ratio else f"difference in {metric.axis}"
    figure.update_xaxes(title_text=words, **value_axis(bounds, is_ratio))
    figure.update_layout(showlegend=False, margin=dict(l=250, r=300, t=100, b=62))
    told = f"{(table['verdict'] == DIFFERENT).sum()} of {len(table)} {'ratios' if is_ratio else 'differences'}"
    title = f"{a.title} against {b.title}, {metric.label}: {told} clearly differ from {neutral:g}"
    about = f"paired by seed · {interval_in_words(table)} · Holm over {len(table)} · {theme.VERDICT_KEY}"
    return theme.titled(figure, title, about, 190 + _ROW * (positions[-1] + 1))


def _numbers(row: Any, is_ratio: bool) -> str:
    written = ("{:.3f}" if is_ratio else "{:+.3f}").format
    text = written(row.estimate) if math.isfinite(row.estimate) else "–"
    return f"{text}{bracketed(row.low, row.high, written)}, {row.seeds} seed{'s' if row.seeds != 1 else ''}"


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
    for dash, (condition, rows) in zip(cycle(_DASHES), shares.groupby("condition", sort=False), strict=False):
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
