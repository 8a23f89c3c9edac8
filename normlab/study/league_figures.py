"""Figures of the league (N4), from the table of `normlab.study.league.standings`. Losses by rate: `loss_by_rate`."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.selection import NothingToShow, seeds_in_words
from normlab.figures import theme
from normlab.figures.draw import axis_bounds, least_and_most, mark, value_axis
from normlab.figures.registry import FIGURES as FIGURES
from normlab.figures.registry import register
from normlab.schemes import BASELINE

# Column of the table -> its panel's title, what it begins a figure's title with, its axis, whether the axis is log.
PANELS = {
    "loss": ("held-out loss at the best rate", "Held-out loss", "nats per token", False),
    "step": ("time of a training step", "Time of a step", "over Pre-LN's", False),
    "growth": ("growth of the stream", "Growth of the stream", "last block over block 1", True),
    "deep_cost": ("cost of leaving out a deep block", "Cost of a deep block", "nats per token", False),
}
_ROW, _TOP, _BOTTOM = 24, 116, 62  # pixels


@register("league_losses", "N4", "the league: held-out loss, and time of a step", reads="league",
          columns=("loss", "step"))  # fmt: skip
@register("league_depth", "N4", "the league: growth, and cost of deep blocks, at one rate", reads="league",
          columns=("growth", "deep_cost"))  # fmt: skip
def by_scheme(table: pd.DataFrame, columns: tuple[str, ...] = ("loss", "step")) -> go.Figure:
    """A row per scheme, the lowest loss first, and a panel per column. A line is at Pre-LN's value.

    Losses are of each scheme's best rate, sizes of one rate for all. A triangle is a loss above a trigram model's, or
    of a run that diverged: right of what is shown. Where no scheme has learned, all finite losses are shown.

    Args:
        table: of `normlab.study.league.standings`.
        columns: names of `PANELS`.
    """
    shown = [name for name in columns if np.isfinite(table[name].astype(float)).any()]
    if not shown:
        raise NothingToShow(f"No scheme of the table has a {' or a '.join(PANELS[name][0] for name in columns)}.")
    titles = [PANELS[name][0] for name in shown]
    figure = make_subplots(1, len(shown), shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=titles)
    figure.update_annotations(font=dict(size=13))
    for place, name in enumerate(shown, 1):
        _add_panel(figure, table, name, dict(row=1, col=place))
    names = [theme.name_of(scheme) for scheme in table["scheme"]]
    rows = list(range(len(table)))
    figure.update_yaxes(tickvals=rows, ticktext=names, ticks="", range=[len(table) - 0.5, -0.5])
    figure.update_layout(showlegend=False, margin=dict(l=190, r=30, t=_TOP, b=_BOTTOM))
    values = table.set_index("scheme")[shown[0]].astype(float)
    learned = values[table.set_index("scheme")["learned"].astype(bool)]
    title = f"{PANELS[shown[0]][1]}: {least_and_most(learned if np.isfinite(learned).any() else values)}"
    return theme.titled(figure, title, _about(table, shown), _TOP + _BOTTOM + _ROW * max(len(table), 4))


def _add_panel(figure: go.Figure, table: pd.DataFrame, name: str, cell: dict[str, int]) -> None:
    _, _, axis, log = PANELS[name]
    values, outside = table[name].astype(float), _outside(table, name)
    bounds = axis_bounds(values[~outside], log)
    if bounds is None:
        return
    for place, (row, value) in enumerate(zip(table.itertuples(), values, strict=True)):
        if math.isnan(value):
            continue
        style = theme.style_of(row.scheme)
        end = 10 ** bounds[1] if log else bounds[1]
        words = f"{value:.3f}" if math.isfinite(value) else "diverged"
        figure.add_scatter(
            x=[end if outside.iloc[place] else value],
            y=[place],
            mode="markers",
            name=style.title,
            meta=dict(scheme=row.scheme, column=name),
            marker=mark(style.color, "triangle-right" if outside.iloc[place] else "circle"),
            cliponaxis=False,
            hovertemplate=f"<b>{style.title}</b><br>{words} {axis}<extra></extra>",
            **cell,
        )
    base = values[(table["scheme"] == BASELINE) & ~outside]
    if len(base) and math.isfinite(base.iloc[0]):
        color = theme.style_of(BASELINE).color
        figure.add_vline(float(base.iloc[0]), line=dict(color=color, width=1, dash="dot"), **cell)
    figure.update_xaxes(title_text=axis, **value_axis(bounds, log), **cell)


def _outside(table: pd.DataFrame, name: str) -> pd.Series:
    """True for values right of what a panel shows: infinite ones, and losses of what has not learned, if some has."""
    values = table[name].astype(float)
    outside = values == math.inf
    if name == "loss" and table["learned"].any():
        outside |= values.notna() & ~table["learned"].astype(bool)
    return outside


def _about(table: pd.DataFrame, shown: list[str]) -> str:
    words = [f"{table['depth'].iloc[0]} blocks"]
    if "loss" in shown:
        words += [seeds_in_words(table["seeds"]), "dotted: Pre-LN"]
        words += [] if table["learned"].any() else ["no scheme has learned"]
        reason = "not learned" if table["learned"].any() else "diverged"
        words += [f"triangle: {reason}, further right"] if _outside(table, "loss").any() else []
        words += ["no intervals, so no rank"] if table["low"].isna().all() else []
    else:
        words += [f"all at rate {table['at'].iloc[0]:g}, seed {table['of_seed'].iloc[0]}", "dotted: Pre-LN"]
    return " · ".join([*words, *filter(None, table["unlike"].unique())])
