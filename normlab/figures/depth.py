"""Depth: held-out loss against it (C5), and which schemes still train at a great one (N3)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.outcomes import BEYOND, DIVERGES, MARGIN, STALLS, TRAINS, UNKNOWN, outcomes
from normlab.analysis.quantities import last_values, mean_of
from normlab.analysis.selection import (
    DIVERGED,
    FINISHED,
    NOT_LEARNED,
    NothingToShow,
    Selection,
    require_one_length,
)
from normlab.analysis.verdicts import LEVEL, bracketed, differences, in_words, judged, means
from normlab.figures import theme
from normlab.figures.draw import (
    EndLabel,
    add_line,
    axis_bounds,
    interval_bars,
    label_ends,
    label_trace,
    mark,
    note,
    selected,
    value_axis,
)
from normlab.figures.registry import register
from normlab.figures.training import LOSS, levels_in_words, mark_levels, ngram_levels
from normlab.probes.metrics import metric_row

_MARGIN = dict(l=70, r=30, t=140, b=64)
_DIFFERENCE_ROW = 24  # pixels of a scheme's differences
_LEFT, _BETWEEN = 0.4, 0.27  # of the width: the panel of losses, and the space for labels right of it
_MARKS = {TRAINS: "circle", STALLS: "circle-open", DIVERGES: "x"}
_WORDS = {TRAINS: "● {} train", STALLS: "○ {} stall", DIVERGES: "× {} diverge"}
_ROW = 22  # pixels of a scheme at a great depth
_COLUMNS = 48  # of a profile: layers are drawn to the nearest of so many positions between the first and the last
# (site, metric, which step, title)
_PROFILES = (
    ("block_in_grad", "grad_l2_total", "first", "Gradient before training"),
    ("block_out", "token_l2_mean", "last", "Stream after training"),
)


@register("depth_scaling", "C5", "held-out loss against depth")
def depth_scaling(runs: pd.DataFrame | Selection) -> go.Figure:
    """Held-out loss after training against depth (C5), and differences from the first scheme shown, paired by seed.

    Left: means over seeds. Open markers are not learned, crosses on the upper edge diverged.
    Right: one row per scheme and one panel per depth, drawn where both schemes learned, with 95% intervals. All
    differences shown are one family (`normlab.analysis.verdicts`). Discs are different, squares equivalent, rings
    undecided.
    """
    shown = selected(runs, depth=None)
    require_one_length(shown.runs, across=True)
    points = _depth_points(shown)
    if points["mean"].notna().sum() == 0 and not points["diverged"].any():
        raise NothingToShow("No held-out loss was logged in these runs.")
    base, depths = shown.schemes[0], shown.depths
    names = [name for name in shown.schemes if name != base]
    share = (1 - _LEFT - _BETWEEN) / len(depths)
    titles = ["after training", *(f"depth {depth}" for depth in depths)]
    figure = make_subplots(
        rows=1, cols=1 + len(depths), column_widths=[_LEFT, *[share] * len(depths)], subplot_titles=titles
    )
    figure.update_annotations(font=dict(size=13))
    starts = [_LEFT + _BETWEEN + index * share for index in range(len(depths))]
    for index, start in enumerate(starts):
        figure.layout[f"xaxis{index + 2}"].domain = [start, start + share - 0.015]
        figure.layout.annotations[index + 1].x = start + share / 2
    figure.layout.xaxis.domain, figure.layout.annotations[0].x = [0, _LEFT], _LEFT / 2
    height = _MARGIN["t"] + _MARGIN["b"] + max(340, _DIFFERENCE_ROW * len(names))
    levels = ngram_levels(shown)
    _add_losses(figure, shown, points, levels, height - _MARGIN["t"] - _MARGIN["b"])
    family = _add_differences(figure, shown, base, names)
    figure.update_layout(showlegend=False, margin=_MARGIN)
    tested = _tested(family, shown)
    right = f"right, difference from {theme.style_of(base).title}, paired by seed, {tested}"
    marks = f"left: ○ not learned, × diverged · {right}"
    about = "<br>".join(filter(None, [shown.describe(), marks, levels_in_words(levels)]))
    return theme.titled(figure, f"Held-out loss against depth{_falls(points, depths)}", about, height)


def _tested(family: pd.DataFrame, shown: Selection) -> str:
    """How the differences were tested, in words, or why they were not."""
    if count := int(family["p"].notna().sum()):
        return f"{LEVEL:.0%} intervals, Holm over {count}: {theme.VERDICT_KEY}"
    if shown.runs.groupby(["scheme", "depth"])["seed"].nunique().max() == 1:
        return "one seed: no intervals"
    if family.empty:
        return "no seed in common that learned" if len(shown.schemes) > 1 else "no other scheme"
    return "one seed in common: no intervals"


def _falls(points: pd.DataFrame, depths: list[int]) -> str:
    """The number of schemes that end lower at the deepest depth than at the shallowest, in words."""
    ends = points.pivot(index="scheme", columns="depth", values="mean")[[depths[0], depths[-1]]].dropna()
    if len(depths) < 2 or ends.empty:
        return ""
    lower = int((ends[depths[-1]] < ends[depths[0]]).sum())
    return f": lower at {depths[-1]} blocks than at {depths[0]} under {lower} of {len(ends)} schemes"


def _depth_points(shown: Selection) -> pd.DataFrame:
    """By scheme and depth: mean and interval of the last loss, and its seeds.

    `not_learned` tells whether one of these seeds has not learned, `diverged` whether another one diverged.
    """
    values = last_values(shown, "loss").join(shown.runs["status"], on="run")
    is_known, place = values["value"].notna(), ["scheme", "depth"]
    about = values[place].assign(
        not_learned=is_known & values["status"].eq(NOT_LEARNED), diverged=values["status"].eq(DIVERGED)
    )
    points = means(values, "loss").rename(columns={"a": "scheme", "estimate": "mean"})
    return points.merge(about.groupby(place, as_index=False).any(), on=place).sort_values("depth")


def _add_losses(
    figure: go.Figure, shown: Selection, points: pd.DataFrame, levels: dict[str, float], pixels: int
) -> None:
    """Draw the left panel: one line per scheme, with a label at its end, or beside its last dot if that is before."""
    lowest = [min(levels.values())] if levels else []
    bounds = axis_bounds([*points["mean"], *lowest], False) or (0.0, 1.0)
    labels: list[EndLabel] = []
    inside: dict[int, list[EndLabel]] = {}  # by depth
    for name in shown.schemes:
        mine, style = points[points["scheme"] == name], theme.style_of(name)
        drawn, broken = mine[mine["mean"].notna()], mine[mine["diverged"]]
        text = [
            f"{row.seeds} seed(s)"
            + (f", {LEVEL:.0%} interval {row.low:.3f} to {row.high:.3f}" if math.isfinite(row.low) else "")
            + (f", {remark}" if (remark := shown.remark(name, row.depth)) else "")
            for row in drawn.itertuples()
        ]
        symbols = ["circle-open" if not_learned else "circle" for not_learned in drawn["not_learned"]]
        hover = f"<br>depth %{{x}}: %{{y:.4f}}, %{{text}}<br><i>loss: {LOSS.definition}</i>"
        add_line(figure, name, drawn["depth"].tolist(), drawn["mean"], hover, row=1, col=1, mode="lines+markers",
                 text=text, marker=dict(color=style.color, size=7, symbol=symbols),
                 meta=dict(scheme=name, panel="loss"))  # fmt: skip
        if len(broken):
            text = [shown.remark(name, depth) for depth in broken["depth"]]
            add_line(figure, name, broken["depth"].tolist(), [bounds[1]] * len(broken),
                     "<br>depth %{x}: %{text}", text=text, row=1, col=1, mode="markers", name=f"{name} diverged",
                     cliponaxis=False, marker=dict(symbol="x", size=9, color=style.color),
                     meta=dict(scheme=name, panel="loss", diverged=True))  # fmt: skip
        for row in drawn.tail(1).itertuples():
            if row.depth == shown.depths[-1]:
                labels.append(EndLabel(float(row.mean), style.title, style.color))
            else:
                name_of_dot = EndLabel(float(row.mean), f" {style.title}", style.color, float(row.depth))
                inside.setdefault(int(row.depth), []).append(name_of_dot)
    for ends in inside.values():
        if names := label_trace(ends, bounds, pixels, False):
            figure.add_trace(names, row=1, col=1)
    figure.update_yaxes(range=bounds, title_text=LOSS.axis, col=1)
    labels += mark_levels(figure, levels, bounds, columns=(1,))
    label_ends(figure, labels, bounds, pixels, False)
    ticks = dict(tickvals=shown.depths, ticktext=[str(depth) for depth in shown.depths])
    first, last = shown.depths[0], shown.depths[-1]
    edge = 0.12 * max(1.0, math.log2(last / first) / 4)  # decades
    span = [math.log10(first) - edge, math.log10(last) + edge]
    figure.update_xaxes(type="log", title_text="depth (blocks)", range=span, **ticks, col=1)


def _add_differences(figure: go.Figure, shown: Selection, base: str, names: list[str]) -> pd.DataFrame:
    """Draw the panels on the right; return the differences, the family that Holm's correction is over."""
    values = last_values(shown, "loss")
    learned = values[values["run"].isin(shown.runs.index[shown.runs["status"] == FINISHED])]
    present = set(learned["scheme"].unique())
    pairs = [differences(learned, name, base, "loss") for name in names if {name, base} <= present]
    if not pairs:
        for column in range(2, 2 + len(shown.depths)):
            figure.update_xaxes(visible=False, col=column).update_yaxes(visible=False, col=column)
        note(figure, f"no scheme to compare<br>with {theme.style_of(base).title}", "2")
        return pd.DataFrame({"p": []})
    family = judged(pd.concat(pairs, ignore_index=True))
    family = family[family["seeds"] > 0]
    bounds = axis_bounds([0.0, *family["estimate"], *family["low"], *family["high"]], False)
    ticktext = [theme.name_of(name) for name in names]
    for column, depth in enumerate(shown.depths, 2):
        for row in family[family["depth"] == depth].itertuples():
            color = theme.style_of(row.a).color
            ends = bracketed(row.low, row.high, "{:+.4f}".format)
            hover = f"<br>depth {depth}: %{{x:+.4f}}{ends}<br>{in_words(row)}, {row.seeds} seed(s)"
            add_line(figure, row.a, [float(row.estimate)], [names.index(row.a)], hover,
                     row=1, col=column, mode="markers", marker=mark(color, theme.VERDICT_MARKS[row.verdict], 8),
                     error_x=interval_bars(row.estimate, row.low, row.high, thickness=1.4, color=color),
                     meta=dict(scheme=row.a, panel="difference", depth=int(row.depth)))  # fmt: skip
        figure.add_vline(x=0, line=dict(color=theme.NEUTRAL, width=1.4, dash="dot"), row=1, col=column)
        figure.update_xaxes(range=bounds, nticks=5, col=column)
        ticks = dict(tickvals=list(range(len(names))), ticktext=ticktext, showticklabels=column == 2, ticks="")
        figure.update_yaxes(range=[len(names) - 0.5, -0.5], **ticks, col=column)
    figure.update_xaxes(title_text=f"loss difference ({LOSS.unit})", col=2 + (len(shown.depths) - 1) // 2)
    return family


@register("trains_at_depth", "N3", "which schemes train at the greatest depth, and the layers that say why")
def trains_at_depth(runs: pd.DataFrame | Selection) -> go.Figure:
    """One row per scheme, lowest held-out loss first: loss, gradients by layer at step 0, last stream by layer.

    Outcomes are those of `outcomes`: a disc trains, a ring stalls, a cross diverges. A cross has no loss: it is drawn
    `BEYOND` above the unigram entropy, as are losses above that. A scheme that logged no held-out loss has no mark.
    Gradients are of the batch at each block's input (``grad_l2_total``), the stream is its L2 norm per token
    (``token_l2_mean``). Both are geometric means over seeds. Each row of a profile spans its first layer to its last.
    Runs that diverged have no stream after training.
    """
    shown = selected(runs)
    table = outcomes(shown.runs)
    if table["entropy"].isna().all():
        raise NothingToShow("the runs do not know their unigram entropy: train them anew.")
    figure = make_subplots(
        rows=1,
        cols=3,
        shared_yaxes=True,
        column_widths=[0.36, 0.32, 0.32],
        horizontal_spacing=0.08,
        subplot_titles=[
            "Held-out loss<br>nats a token",
            *(f"{name}{_lacking(shown, *where)}<br>{metric_row(where[1]).axis}" for *where, name in _PROFILES),
        ],
    )
    figure.update_annotations(font=dict(size=13))
    for outcome, symbol in _MARKS.items():
        own = table[table["outcome"] == outcome]
        styles = [theme.style_of(name) for name in own.index]
        figure.add_scatter(
            x=own["shown"],
            y=[style.title for style in styles],
            mode="markers",
            name=outcome,
            marker=dict(symbol=symbol, size=9, color=[style.color for style in styles]),
            text=[_loss_in_words(loss, outcome) for loss in own["loss"]],
            hovertemplate="%{y}: %{text}<extra>" + outcome + "</extra>",
            meta={"outcome": outcome, "schemes": list(own.index)},
            row=1,
            col=1,
        )
    line = dict(color=theme.NEUTRAL, dash="dot", width=1.4)
    figure.add_vline(x=float(table["entropy"].median()) - MARGIN, line=line, row=1, col=1)
    for column, (site, metric, when, _) in enumerate(_PROFILES, 2):
        figure.add_trace(_profile(shown, list(table.index), site, metric, when, column), row=1, col=column)
        figure.update_xaxes(tickvals=[0, 0.5, 1], ticktext=["first", "half", "last"], title="layer", row=1, col=column)
    figure.update_yaxes(range=[len(table) - 0.5, -0.5], tickfont=dict(size=11))
    figure.update_layout(showlegend=False, margin=dict(l=170, r=90, t=134, b=60))
    counts = ", ".join(words.format((table["outcome"] == outcome).sum()) for outcome, words in _WORDS.items())
    unknown = int((table["outcome"] == UNKNOWN).sum())
    counts += f", {unknown} without a held-out loss" if unknown else ""
    marks = f"dotted: {MARGIN} below the unigram entropy · × and losses further up are drawn {BEYOND} above it"
    about = f"{shown.describe()} · {counts}<br>{marks}"
    title = f"Which schemes train at depth {shown.depths[0]}: {(table['outcome'] == TRAINS).sum()} of {len(table)}"
    return theme.titled(figure, title, about, 234 + _ROW * len(table))


def _loss_in_words(loss: float, outcome: str) -> str:
    """The loss itself, which may lie further up than its mark; of a scheme that diverged, that of its other seeds."""
    nats = f"{loss:.3f} nats" if math.isfinite(loss) else ""
    if outcome == DIVERGES:
        return f"diverged, {nats} over the other seeds" if nats else "diverged"
    return nats


def _lacking(shown: Selection, site: str, metric: str, when: str) -> str:
    """What a panel's title says of a profile that no run has."""
    return "" if len(_profile_rows(shown, site, metric, when)) else ": not measured"


def _profile_rows(shown: Selection, site: str, metric: str, when: str) -> pd.DataFrame:
    """The values of a metric by layer: before training ("first"), or at each scheme's last step."""
    rows = shown.rows(site, metric, "all")
    rows = rows[rows["value"].gt(0) & np.isfinite(rows["value"].astype(float)) & rows["layer"].notna()]
    if when == "first":
        return rows[rows["step"] == 0]
    rows = rows[rows["status"] != DIVERGED]  # what a run measured before it diverged is not of the end of training
    return rows[rows["step"] == rows.groupby("scheme", observed=True)["step"].transform("max")]


def _profile(shown: Selection, names: list[str], site: str, metric: str, when: str, column: int) -> go.Heatmap:
    rows = _profile_rows(shown, site, metric, when)
    positions = np.linspace(0, 1, _COLUMNS)
    values = np.full((len(names), _COLUMNS), np.nan)
    for number, name in enumerate(names):
        own = rows[rows["scheme"] == name].groupby("layer")["value"].apply(mean_of, metric=metric)
        if len(own):
            layers = own.index.to_numpy(float)
            nearest = np.round(layers[0] + positions * (layers[-1] - layers[0]))
            values[number] = np.log10(np.interp(nearest, layers, own.to_numpy(float)))
    ticks: dict[str, Any] = value_axis(axis_bounds(10 ** values.ravel(), True), True)
    return go.Heatmap(
        x=positions,
        y=[theme.style_of(name).title for name in names],
        z=values,
        colorscale=theme.SEQUENTIAL,
        hoverongaps=False,
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
