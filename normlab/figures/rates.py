"""Quantities against learning rate (N5): which rate each scheme stands, and how far a rate moves its stream."""

from __future__ import annotations

import math

import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.quantities import mean_of, quantity_row, values_of
from normlab.analysis.selection import (
    DIVERGED,
    NOT_LEARNED,
    NothingToShow,
    Selection,
    has_learned,
    in_order,
    one_precision,
    placed,
    recipes_in_words,
    require_one_length,
    require_one_text,
    seeds_in_words,
    summarize,
)
from normlab.figures import theme
from normlab.figures.draw import EndLabel, add_line, axis_bounds, label_ends, label_room, mark, value_axis
from normlab.figures.registry import register

_HEIGHT = 480
_MARGIN = dict(l=70, r=190, t=104, b=62)
_LEGEND_ROW = 20  # pixels of a scheme
_ASIDE = 0.016  # of the axis: from a triangle to the next


@register("loss_by_rate", "N5", "held-out loss against learning rate")
def loss_by_rate(runs: pd.DataFrame, depth: int | None = None) -> go.Figure:
    """Held-out loss after training against the learning rate, one line per scheme (N5).

    Lines go through means over seeds; dots are seeds. A scheme that was trained at one rate is a dot. The dotted line
    is the trigram model's loss. A triangle at the upper edge is of a scheme's runs at that rate that are above what is
    shown, or diverged; of several schemes they stand side by side. A run without a held-out loss is left out. Runs of
    unequal length, or measured on several texts, are not shown together. What else differs in their training is said
    under the title.

    Args:
        runs: the table of `normlab.load_runs`.
        depth: a number of blocks; default: the deepest, as `normlab.choose` takes it.
    """
    about, depth = _at_all_rates(runs, depth)
    tried = about.groupby("scheme")["lr"].nunique()
    if tried.max() < 2:
        raise NothingToShow(f"No scheme of {depth} blocks was trained at several learning rates.")
    learned, trigram = about.loc[has_learned(about), "eval_loss"], about["trigram_loss"].mean()
    shown = learned if len(learned) else about["eval_loss"]
    most = trigram if math.isfinite(trigram) else shown.replace(math.inf, math.nan).max()
    bounds = axis_bounds([shown.min(), most], False, 0.04)
    if bounds is None:
        raise NothingToShow(f"No run of {depth} blocks ended with a finite loss.")
    figure, ends, rates = go.Figure(), [], sorted(about["lr"].unique())
    reach = axis_bounds(rates, True, 0.05) or (0.0, 1.0)
    for name in in_order(about["scheme"]):
        rows, style = about[about["scheme"] == name].sort_values("lr"), theme.style_of(name)
        mean = rows.groupby("lr")["eval_loss"].mean()
        inside = mean.where(mean <= bounds[1])
        hover = "<br>rate %{x:g}: %{y:.3f} nats per token"
        add_line(figure, name, mean.index.tolist(), inside, hover, name=style.title)
        dots = rows[rows["eval_loss"] <= bounds[1]]
        add_line(figure, name, dots["lr"].tolist(), dots["eval_loss"], hover, mode="markers", showlegend=False,
                 marker=dict(color=style.color, size=6))  # fmt: skip
        if tried[name] == 1 and rows["lr"].iloc[0] < rates[-1] and inside.notna().all():
            text = f"  {style.title} {inside.iloc[0]:.3f}"  # beside its dot, as no line leads to the edge
            figure.add_scatter(x=list(inside.index), y=list(inside), text=text, textposition="middle right",
                               mode="text", textfont=dict(color=style.color, size=12), showlegend=False,
                               hoverinfo="skip")  # fmt: skip
        elif inside.notna().any():
            text = f"{style.title} (lowest {inside.min():.3f})"
            ends.append(EndLabel(float(inside.dropna().iloc[-1]), text, style.color))
    if math.isfinite(trigram):
        figure.add_hline(y=trigram, line=dict(color=theme.NEUTRAL, width=1.4, dash="dot"))
    label_ends(figure, ends, bounds, _HEIGHT - _MARGIN["t"] - _MARGIN["b"], False)
    above = about[about["eval_loss"] > bounds[1]]
    _add_triangles(figure, above, bounds[1], _ASIDE * (reach[1] - reach[0]))
    figure.update_xaxes(title_text="learning rate", **value_axis(reach, True))
    figure.update_xaxes(tickvals=rates, ticktext=[f"{rate:g}" for rate in rates])
    figure.update_yaxes(title_text="held-out loss, nats per token", range=bounds)
    figure.update_layout(showlegend=False, margin=_MARGIN | dict(r=label_room(ends)))
    tokens = about["tokens"].max() / 1e6
    words = [f"{depth} blocks" + (f", {tokens:.1f}M tokens" if math.isfinite(tokens) else "")]
    words += [f"width {about['width'].iloc[0]}"] if runs["width"].nunique() > 1 else []
    words += [f"dotted: trigram {trigram:.2f}"] if math.isfinite(trigram) else []
    beyond = ["above it"] * bool((above["status"] != DIVERGED).any())
    beyond += ["diverged"] * bool((above["status"] == DIVERGED).any())
    words += [f"triangles: {' or '.join(beyond)}"] if beyond else []
    unknown = int(about["eval_loss"].isna().sum())
    words += [f"without {_counted(unknown)} that logged no held-out loss"] if unknown else []
    words += [recipes_in_words(about)]
    return theme.titled(figure, "Held-out loss against learning rate", " · ".join(filter(None, words)), _HEIGHT)


def _add_triangles(figure: go.Figure, above: pd.DataFrame, edge: float, aside: float) -> None:
    """Draw a triangle at the upper edge for each scheme and rate of these runs, those of one rate side by side.

    aside: from one to the next, in decades.
    """
    for rate, here in above.groupby("lr"):
        names = in_order(here["scheme"])
        for place, name in enumerate(names):
            own, style = here[here["scheme"] == name], theme.style_of(name)
            losses = ("diverged" if row.status == DIVERGED else f"{row.eval_loss:.2f}" for row in own.itertuples())
            figure.add_scatter(
                x=[rate * 10 ** (aside * (place - (len(names) - 1) / 2))],
                y=[edge],
                name=style.title,
                mode="markers",
                marker=mark(style.color, "triangle-up"),
                showlegend=False,
                cliponaxis=False,
                hovertemplate=f"<b>{style.title}</b><br>rate {rate:g}: {', '.join(losses)}<extra></extra>",
            )


@register("growth_by_rate", "N5", "growth of the stream against learning rate")
def quantity_by_rate(runs: pd.DataFrame, quantity: str = "growth", depth: int | None = None) -> go.Figure:
    """A quantity after training against the learning rate, one line per scheme (N5).

    Lines go through means over seeds, geometric ones of sizes; dots are seeds. A ring is a run that did not learn. Runs
    that diverged have no value: they are counted under the title, as is what runs were trained differently in. Runs of
    unequal length, or measured on several texts, are not shown together.

    Args:
        runs: the table of `normlab.load_runs`.
        quantity: a name of `normlab.analysis.quantities.QUANTITIES` or of `METRICS`, after the last block.
        depth: a number of blocks; default: the deepest, as `normlab.choose` takes it.
    """
    row, (about, depth) = quantity_row(quantity), _at_all_rates(runs, depth)
    label = "held-out loss" if quantity == "loss" else row.label
    shown = Selection(runs[runs["run"].isin(about.index)], about)
    values = values_of(shown, quantity).dropna(subset="value")
    if values.empty and about["status"].eq(DIVERGED).all():
        raise NothingToShow(f"All runs of {depth} blocks diverged, so {quantity} has no value after training.")
    if values.empty:
        raise NothingToShow(f"{quantity} was not measured in the runs of {depth} blocks.")
    figure = go.Figure()
    for name in in_order(values["scheme"]):
        own, style = values[values["scheme"] == name].sort_values("lr"), theme.style_of(name)
        mean = own.groupby("lr")["value"].agg(mean_of, metric=quantity)
        hover = f"<br>rate %{{x:g}}: %{{y:.4~g}}<br><i>{row.definition}</i>"
        symbols = ["circle-open" if status == NOT_LEARNED else "circle" for status in about["status"][own["run"]]]
        add_line(figure, name, mean.index.tolist(), mean, hover, name=style.title, legendgroup=name)
        add_line(figure, name, own["lr"].tolist(), own["value"], hover, mode="markers", showlegend=False,
                 legendgroup=name, marker=mark(style.color, symbols, 7))  # fmt: skip
    rates = sorted(values["lr"].unique())
    figure.update_xaxes(title_text="learning rate", **value_axis(axis_bounds(rates, True, 0.08), True))
    figure.update_xaxes(tickvals=rates, ticktext=[f"{rate:g}" for rate in rates])
    bounds = axis_bounds(values["value"], row.log, 0.08)
    figure.update_yaxes(title_text=row.axis, **value_axis(bounds, row.log))
    figure.update_layout(margin=_MARGIN | dict(r=30), legend=dict(tracegroupgap=0))
    seeds = seeds_in_words(values.groupby(["scheme", "lr"])["seed"].nunique())
    words = [f"{depth} blocks", f"width {about['width'].iloc[0]}", seeds, row.definition]
    diverged = int((about["status"] == DIVERGED).sum())
    words += [f"without {_counted(diverged)} that diverged"] if diverged else []
    about_runs = " · ".join(filter(None, [*words, shown.recipes()]))
    height = max(_HEIGHT, _MARGIN["t"] + _MARGIN["b"] + _LEGEND_ROW * (values["scheme"].nunique() + 1))
    return theme.titled(figure, f"{label[0].upper()}{label[1:]} against learning rate", about_runs, height)


def _counted(runs: int) -> str:
    return f"{runs} run{'s' if runs > 1 else ''}"


def _at_all_rates(runs: pd.DataFrame, depth: int | None) -> tuple[pd.DataFrame, int]:
    """The rows of `summarize` of one depth and width, at all learning rates, and the depth."""
    about = one_precision(placed(summarize(runs), "deepest" if depth is None else depth))
    if about.duplicated(["scheme", "lr", "seed"]).any():
        raise NothingToShow("Runs of one scheme, rate and seed differ in something else: keep those of one setting.")
    require_one_text(about)
    require_one_length(about)
    return about, int(about["depth"].iloc[0])
