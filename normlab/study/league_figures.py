"""Figures of the league (N4), from the table of `normlab.study.league.standings` or data/league.csv.

A scheme without a run is named below the figure.
"""

from __future__ import annotations

import math
from textwrap import wrap

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.selection import NothingToShow
from normlab.figures import theme
from normlab.figures.draw import LINE, axis_bounds, beside, footnote, interval_bars, least_and_most, mark, value_axis
from normlab.figures.registry import FIGURES as FIGURES
from normlab.figures.registry import register
from normlab.schemes import BASELINE
from normlab.study.league import NOT_RUN
from normlab.study.questions import BELOW, LOST, UNFINISHED

NO_FINALS = "No final run of the league in this table: these are made after the search."
SETS = ("may be the best", "not the best", "too few final runs", LOST, "only searched", BELOW,
        UNFINISHED)  # fmt: skip
# quantity -> (title, axis, whether it is a ratio)
QUANTITIES = {
    "loss": ("Held-out loss in the league", "nats per token", False),
    "growth": ("Growth of a token's L2 norm from the first block to the last", "last block / first", True),
    "deep_cost": ("Loss added by leaving out each deep block but the last", "sum of nats per token", False),
}
_TRIGRAMS = {"loss": "trigram_loss", "search_loss": "search_trigram_loss"}
_SYMBOLS = {True: "circle", False: "circle-open"}  # whether a scheme may be the best
_ROW = 23  # pixels of a scheme
_LETTERS = 95  # of a line below the axes: what a notebook shows there on a small screen
_WORST = 0.5  # nats above a scheme's best loss from which colours no longer differ


@register("league_losses", "N4", "the league: which schemes may be the best", reads="league", quantity="loss")
@register("league_growth", "N4", "the league: growth of the stream", reads="league", quantity="growth")
@register("league_deep_cost", "N4", "the league: what leaving out deep blocks costs", reads="league",
          quantity="deep_cost")  # fmt: skip
def by_scheme(table: pd.DataFrame, quantity: str = "loss") -> go.Figure:
    """A row per scheme, in the sets of the table's `says`. Final runs have intervals. The search has one seed.

    Sizes compare at one rate only. So growth is shown at the rates that nearly all schemes share, too.

    Args:
        table: of `normlab.study.league.standings`.
        quantity: a name of `QUANTITIES`.
    """
    title, axis, log = QUANTITIES[quantity]
    columns = {name: words for name, words in _columns(table, quantity).items() if np.isfinite(table[name]).any()}
    if not columns:
        raise NothingToShow(NO_FINALS)
    rows = table[np.isfinite(table[list(columns)].astype(float)).any(axis=1)]
    rows = rows.sort_values("says", key=lambda says: says.map(SETS.index), kind="stable").reset_index(drop=True)
    is_first = rows["says"].ne(rows["says"].shift())
    rows["position"] = np.arange(len(rows)) + is_first.cumsum()  # a heading takes a row
    grid = dict(shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=[*columns.values()])
    figure = make_subplots(1, len(columns), **grid).update_annotations(font=dict(size=13))
    for position, words in rows.loc[is_first, ["position", "says"]].itertuples(index=False):
        beside(figure, position - 1, -10, f"<b>{words}</b>", theme.NEUTRAL, left=True)
    for place, name in enumerate(columns, 1):
        ends = [rows.get(f"{name}_{end}", pd.Series(math.nan, rows.index)) for end in ("low", "high")]
        _add_column(figure, rows, name, ends, place)
        level = table[_TRIGRAMS[name]].max() if name in _TRIGRAMS else math.nan
        held = [*rows[name], *ends[0], *ends[1], level]
        figure.update_xaxes(title_text=axis, **value_axis(axis_bounds(map(float, held), log), log), row=1, col=place)
        if math.isfinite(level):
            figure.add_vline(float(level), line=dict(color=theme.NEUTRAL, dash="dot", width=1.2), row=1, col=place)
    names = [theme.name_of(scheme) for scheme in rows["scheme"]]
    bottom = int(rows["position"].max())
    figure.update_yaxes(tickvals=rows["position"].tolist(), ticktext=names, ticks="", range=[bottom + 0.6, -0.6])
    below = _name_missing(figure, table)
    figure.update_layout(showlegend=False, margin=dict(l=190, r=30, t=116, b=below))
    about = "● may be the best, ○ others · bars: 95% interval over seeds"
    about += " · dotted: a trigram model of the text" * (quantity == "loss")
    first = quantity if quantity in columns else next(iter(columns))  # growth is that of models that have learned
    height = 116 + below + _ROW * max(bottom, 3)
    return theme.titled(figure, title + _message(rows, first, columns[first]), about, height)


def _columns(table: pd.DataFrame, quantity: str) -> dict[str, str]:
    """The columns of the table that show a quantity, with what they were measured on."""
    final, searched = (f"{table[name].max() / 1e6:.2f}M tokens" for name in ("tokens", "search_tokens"))
    few, most = table["seeds"].min(), table["seeds"].max()
    seeds = "one seed" if most == 1 else f"{most:.0f} seeds" if few == most else f"{few:.0f} to {most:.0f} seeds"
    if quantity == "loss":
        return {"loss": f"final runs: {final}, {seeds}", "search_loss": f"best of the search: {searched}, one seed"}
    if quantity == "growth":
        rates = table.filter(regex="^growth_at_").count()
        # Only some schemes have a third rate, and a diverged run has no growth.
        most = rates[rates > 0.8 * rates.max()].sort_values(ascending=False, kind="stable").index
        shared = {name: f"search: {name.replace('growth_at_', 'rate ')}, one seed" for name in most}
        return shared | {"growth": f"final runs, own rates, {seeds}"}
    return {name: f"final runs, {final}, {seeds}" for name in (quantity,) if name in table}


def _add_column(figure: go.Figure, rows: pd.DataFrame, name: str, ends: list[pd.Series], place: int) -> None:
    for row, value, low, high in zip(rows.itertuples(), rows[name].astype(float), *ends, strict=True):
        if not math.isfinite(value):
            continue
        style = theme.style_of(row.scheme)
        figure.add_scatter(
            x=[value],
            y=[row.position],
            error_x=interval_bars(value, low, high, color=style.color) if math.isfinite(low) else None,
            mode="markers",
            name=style.title,
            meta=dict(scheme=row.scheme, column=name),
            marker=mark(style.color, _SYMBOLS[row.in_set]),
            hovertemplate=f"<b>{style.title}</b><br>%{{x:.4~g}}, {row.says}<extra></extra>",
            row=1,
            col=place,
        )


def _message(rows: pd.DataFrame, name: str, words: str) -> str:
    compared = rows["says"].isin(SETS[:2]).sum()
    if name == "loss" and compared:
        return f": {rows['in_set'].sum()} of {compared} schemes may be the best"
    values = rows.set_index("scheme")[name].astype(float)
    values = values[np.isfinite(values)].sort_values()
    if name in ("loss", "search_loss"):
        ends = [f"{values.iloc[place]:.2f}" for place in (0, -1)]
        what = "with too few final runs to compare" if name == "loss" else "only searched"
        return f": {len(values)} {what}, {' to '.join(dict.fromkeys(ends))} nats"
    return f": {least_and_most(values)}, {words.removeprefix('search: ').partition(',')[0]}"


def _name_missing(figure: go.Figure, table: pd.DataFrame) -> int:
    """Name below the axes the schemes that diverged at every rate tried, and those without a run.

    Returns:
        The margin that this takes.
    """
    lines = []
    for words, which in (("Diverged", table["search_loss"] == math.inf), ("Not run", table["says"] == NOT_RUN)):
        names = "; ".join(table.loc[which, "title"])
        lines += wrap(f"{words}: {names}", _LETTERS) if names else []
    footnote(figure, "<br>".join(lines))
    return 70 + (LINE + 1) * len(lines)


@register("league_rates", "N4", "the league: loss at each learning rate", reads="league")
def league_rates(table: pd.DataFrame) -> go.Figure:
    """The search's loss by scheme and learning rate. Dark is far above the scheme's best loss.

    Args:
        table: of `normlab.study.league.standings`.
    """
    rows = table.dropna(subset="search_loss").sort_values("search_loss").reset_index(drop=True)
    if rows.empty:
        raise NothingToShow("No run of the league's search in this table.")
    losses = rows.filter(regex="^loss_at_").rename(columns=lambda name: float(name.removeprefix("loss_at_")))
    losses = losses[sorted(losses)].astype(float)
    above = losses.sub(rows["search_loss"].replace(math.inf, math.nan), axis=0)
    words = losses.map(lambda loss: "" if math.isnan(loss) else f"{loss:.2f}" if math.isfinite(loss) else "diverged")
    figure = go.Figure()
    figure.add_heatmap(
        x=[f"{rate:g}" for rate in losses],
        y=rows["title"].tolist(),
        z=above.clip(upper=_WORST).astype(object).where(losses.notna() & above.notna(), None).values.tolist(),
        text=words.values.tolist(),
        texttemplate="%{text}",
        colorscale=theme.SEQUENTIAL,
        zmin=0.0,
        zmax=_WORST,
        xgap=2,
        ygap=2,
        colorbar=dict(title="nats above<br>its best", thickness=10, outlinewidth=0),
        hovertemplate="<b>%{y}</b>, rate %{x}: %{text}<extra></extra>",
    )
    figure.update_xaxes(type="category", title_text="learning rate", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    below = _name_missing(figure, table)
    figure.update_layout(margin=dict(l=190, r=30, t=96, b=below))
    several = rows[losses.notna().sum(axis=1) > 1]
    wide = int((several["valley"] > 1).sum())
    title = f"Learning rates: {wide} of {len(several)} schemes have a second one within 0.05 nats of their best"
    if several.empty:
        title = f"Learning rates: {len(rows)} schemes, each tried at one"
    about = f"the search's losses, {table['search_tokens'].max() / 1e6:.2f}M tokens, one seed · empty: not tried"
    return theme.titled(figure, title, about, 110 + below + _ROW * max(len(rows), 4))


@register("league_costs", "N4", "the league: gain on Pre-LN in the same training time", reads="league")
def league_costs(table: pd.DataFrame) -> go.Figure:
    """Pre-LN's loss at the same compute minus a scheme's, with the time of a training step next to it.

    Right of zero a scheme gains more than its steps cost. Intervals are of the loss alone.

    Args:
        table: of `normlab.study.league.standings`.
    """
    rows = table.dropna(subset="equal_compute").sort_values("equal_compute", ascending=False).reset_index(drop=True)
    if rows.empty:
        raise NothingToShow(NO_FINALS)
    figure = go.Figure()
    for place, row in rows.iterrows():
        style = theme.style_of(row["scheme"])
        figure.add_scatter(
            x=[row["equal_compute"]],
            y=[place],
            error_x=interval_bars(row["equal_compute"], row["equal_low"], row["equal_high"], color=style.color)
            if math.isfinite(row["equal_low"])
            else None,
            mode="markers",
            marker=mark(style.color, _SYMBOLS[row["in_set"]]),
            name=style.title,
            hovertemplate=f"<b>{style.title}</b><br>%{{x:+.3f}} nats, a step x {row['step_cost']:.2f}<extra></extra>",
        )
        beside(figure, place, 12, f"x {row['step_cost']:.2f}", style.color)
    beside(figure, -1, 12, "<b>step</b>", theme.NEUTRAL)
    figure.add_vline(0.0, line=dict(color=theme.style_of(BASELINE).color, width=1))
    held = rows[["equal_compute", "equal_low", "equal_high"]].to_numpy(float).ravel()
    figure.update_xaxes(
        title_text="nats per token, at equal compute", **value_axis(axis_bounds([0.0, *held], False), False)
    )
    names = [theme.name_of(scheme) for scheme in rows["scheme"]]
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=names, ticks="", range=[len(rows) - 0.4, -1.4])
    figure.update_layout(showlegend=False, margin=dict(l=190, r=90, t=96, b=70))
    tested = rows.dropna(subset="equal_low")
    above = int((tested["equal_low"] > 0).sum())
    found = f"above zero under {above or 'none'} of {len(tested)} schemes, each tested alone"
    if tested.empty:
        found = f"{len(rows)} schemes with too few final runs to compare"
    title = f"Gain on Pre-LN in the same time: {found}"
    about = "● may be the best, ○ others · bars: 95% interval over seeds, of the loss alone"
    return theme.titled(figure, title, about, 166 + _ROW * max(len(rows) + 1, 4))
