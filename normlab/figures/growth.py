"""Activations and gradients by layer: while a model trains (B1, B3, C1), and after the last layer (N1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.quantities import last_values, mean_of
from normlab.analysis.selection import DIVERGED, NothingToShow, Selection
from normlab.analysis.verdicts import DIFFERENT, SEEDS, bracketed, differences, judged
from normlab.figures import theme
from normlab.figures.draw import (
    add_line,
    axis_bounds,
    beside,
    finite,
    footnote,
    least_and_most,
    panels,
    selected,
    short,
    value_axis,
)
from normlab.figures.published import published_points, published_source, published_trace
from normlab.figures.registry import register
from normlab.probes.metrics import Metric, metric_row, site_label

MOST_STEPS = 9  # more lines in a panel than this blur into each other
_COLUMNS = 4
_PANEL, _GAP = 190, 92  # pixels
_ROW = 34  # pixels of a scheme after the last layer
# Text columns right of the plot, in pixels from its edge.
_TEXTS = {"before": 16, "after": 112, "published": 272}


@register("token_l2_growth", "B1", "L2 norm of a token by layer and training step", overlays=True)
@register("variance_growth", "B1, C1", "variance over features by layer and training step", overlays=True,
          metric="feature_var_mean")  # fmt: skip
@register("gradient_total_growth", "B3", "gradient norm of the batch by layer and training step",
          metric="grad_l2_total", log=True)  # fmt: skip
@register("gradient_token_growth", "B3", "gradient norm of a token by layer and training step",
          metric="grad_l2_mean", log=True)  # fmt: skip
def layer_growth(
    runs: pd.DataFrame | Selection,
    metric: str = "token_l2_mean",
    *,
    published: pd.DataFrame | None = None,
    log: bool = False,
) -> go.Figure:
    """A metric against layer at several training steps, one panel per scheme (BHyT Fig. 3, The Curse of Depth).

    Lines are means (geometric for sizes) over seeds; step 0, before training, is dashed. All schemes of a depth have
    one learning rate where they share one. A gradient at layer l is that at the input of block l. It is of the loss
    summed over tokens, so values do not depend on how batches are cut. Titles are of the runs that did not diverge.

    Args:
        metric: a name of `METRICS`; it is shown where its row there says.
        published: table of `normlab.load_published`; values of the same metric are drawn as diamonds with their reading
            error.
        log: one logarithmic value axis for all panels, to compare sizes; else a linear one for each, to see its growth.
    """
    row, shown = metric_row(metric), selected(runs, same_rate=True)
    site = row.default_site
    measured = shown.rows(site, metric, "all")
    rows = _mean_over_seeds(measured, metric)
    if rows.empty:
        raise NothingToShow(f"{metric} was not measured at: {site_label(site)}.")
    points = published_points(published, metric, shown.schemes, site)
    there = set(rows["scheme"].unique())
    schemes = [name for name in shown.schemes if name in there]
    ended = _mean_over_seeds(measured[measured["status"] != DIVERGED], metric)
    titles = [_panel_title(shown, ended[ended["scheme"] == name], name) for name in schemes]
    grid = dict(shared_yaxes=log, horizontal_spacing=0.022 if log else 0.05)
    figure, cells, inner = panels(schemes, titles, "layer", _COLUMNS, _PANEL, _GAP, **grid)
    last = float(rows["step"].max())
    deepest = int(max([*rows["layer"], *points["layer"]]))
    layers = [0, deepest + 0.3 if len(points) else deepest]
    for name, cell in zip(schemes, cells, strict=True):
        mine, printed = (table[table["scheme"] == name] for table in (rows, points))
        held = [rows, points] if log else [mine, printed]
        bounds = axis_bounds(pd.concat([table["value"].astype(float) for table in held]), log)
        figure.update_yaxes(**value_axis(bounds, log), **cell)
        for step in _shown_steps({int(s) for s in mine["step"].unique()}):
            _add_step(figure, mine[mine["step"] == step], step, last, row, cell)
        if len(printed):
            figure.add_trace(published_trace(printed, row.name), **cell)
        figure.update_xaxes(range=layers, nticks=6, **cell)
    figure.update_yaxes(title_text=row.axis, col=1)
    figure.add_trace(_step_bar(last), row=1, col=1)
    if len(points):
        footnote(figure, f"◇ published at that layer of its own model: {published_source(points)}.")
    figure.update_layout(showlegend=False, margin=dict(l=70, r=92, t=138, b=72))
    axes = "" if log else " · each panel has its own axis"
    about = f"{site_label(site)} · {shown.describe()}<br>dashed: step 0{axes}"
    title = f"{row.label[0].upper()}{row.label[1:]} by layer{_range_of_growth(ended) if row.is_ratio else ''}"
    return theme.titled(figure, title, about, inner + 210)


def _range_of_growth(rows: pd.DataFrame) -> str:
    """The smallest and the largest ratio of the last layer to layer 1 at the last step, over schemes."""
    last = rows[rows["step"] == rows.groupby("scheme", observed=True)["step"].transform("max")]
    wide = last.pivot(index="scheme", columns="layer", values="value").astype(float)
    ratios = (wide[wide.columns.max()] / wide[1]).dropna() if 1 in wide else pd.Series(dtype=float)
    if np.isfinite(ratios).sum() < 2:
        return ""
    return f": {least_and_most(ratios, lambda ratio: f'×{short(ratio)}')} from layer 1 to {wide.columns.max()}"


def _mean_over_seeds(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Columns scheme, step, layer, value, low, high, seeds; non-finite values are left out of the mean."""
    finite = rows[np.isfinite(rows["value"].astype(float)) & rows["layer"].notna()]
    grouped = finite.groupby(["scheme", "step", "layer"], observed=True)["value"]
    mean = partial(mean_of, metric=metric)
    return grouped.agg(value=mean, low="min", high="max", seeds="count").reset_index()


def _shown_steps(steps: set[int]) -> list[int]:
    """At most `MOST_STEPS` of the measured steps, the first and the last among them, evenly spread over the list."""
    ordered = sorted(steps)
    if len(ordered) <= MOST_STEPS:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)]


def _panel_title(shown: Selection, rows: pd.DataFrame, name: str) -> str:
    """The scheme in its colour, the last layer's value before and after training, and what went wrong."""
    ends = rows[rows["layer"] == rows["layer"].max()].sort_values("step")["value"]
    growth = f"last layer {short(ends.iloc[0])} → {short(ends.iloc[-1])}" if len(ends) > 1 else ""
    small = "<br>".join(part for part in (growth, shown.remark(name)) if part)
    control = " (control)" if theme.style_of(name).is_control else ""
    below = f"<br><span style='font-size:11px;color:{theme.NEUTRAL}'>{small or '&nbsp;'}</span>"
    return theme.name_of(name) + control + below


def _add_step(figure: go.Figure, rows: pd.DataFrame, step: int, last: float, row: Metric, cell: dict) -> None:
    rows, name = rows.sort_values("layer"), str(rows["scheme"].iloc[0])
    color = theme.NEUTRAL if step == 0 else theme.step_color(step, last)
    hover = (
        f", {'before training' if step == 0 else f'step {step:,}'}<br>layer %{{x}}: %{{y:.4~g}}"
        "<br>seeds: %{customdata[0]:.4~g} to %{customdata[1]:.4~g} (%{customdata[2]})"
        f"<br><i>{row.name}: {row.definition}</i>"
    )
    add_line(
        figure,
        name,
        rows["layer"].astype(int).tolist(),
        rows["value"],
        hover,
        line=dict(color=color, width=1.8, dash="dash" if step == 0 else "solid"),
        name=f"{name} step {step}",
        meta=dict(scheme=name, step=step),
        customdata=rows[["low", "high", "seeds"]].to_numpy(dtype=float).tolist(),
        **cell,
    )


def _step_bar(last: float) -> go.Scatter:
    """A colour bar for the training step, on a trace that draws nothing."""
    bar = dict(title=dict(text="step<br>&nbsp;", side="top", font=dict(size=12)), tickfont=dict(size=12), thickness=10)
    bar |= dict(len=200, lenmode="pixels", y=1.0, yanchor="top", x=1.015, outlinewidth=0)
    marker = dict(color=[0.0], cmin=0.0, cmax=max(last, 1.0), colorscale=theme.STEPS, showscale=True, colorbar=bar)
    return go.Scatter(x=[None], y=[None], mode="markers", hoverinfo="skip", name="training step", marker=marker)


@register("growth_before_after", "N1", "last layer before and after training, with both controls", overlays=True)
def growth_before_after(
    runs: pd.DataFrame | Selection, metric: str = "token_l2_mean", *, published: pd.DataFrame | None = None
) -> go.Figure:
    """The last layer's value at step 0 (ring) and after training (disc), and its ratio to the first scheme shown.

    A scheme that ends low because it began low is seen at a glance: both ends of its line are low. Ratios are paired by
    seed; the 95% interval (`normlab.analysis.verdicts`) is in brackets. Control schemes are always among the rows.

    Args:
        published: table of `normlab.load_published`. Its ratios at the same metric are listed next to ours, each in one
            model after its last layer; a footnote names the model.
    """
    row, shown = metric_row(metric), selected(runs, same_rate=True)
    start, end = _ends_of(shown, metric)
    mean = partial(mean_of, metric=metric)
    table = end.groupby("scheme", observed=True)["value"].agg(end=mean, low="min", high="max", seeds="count")
    table["start"] = start.groupby("scheme", observed=True)["value"].agg(mean)
    table = table.sort_values("end", na_position="last")
    if table["end"].notna().sum() == 0:
        if shown.runs["status"].eq(DIVERGED).all():
            raise NothingToShow(f"All of these runs diverged, so {metric} has no value after training.")
        raise NothingToShow(f"{metric} was not measured at: {site_label('block_out')}.")
    base, names = shown.schemes[0], [str(name) for name in table.index]
    points = _printed_ratios(published_points(published, metric, shown.schemes), base)
    points = points if row.is_ratio else points.iloc[:0]
    printed = points.set_index("scheme")["ratio"].astype(np.float64)
    pairs = {
        when: {n: differences(values, n, base, metric).iloc[0] for n in names if n != base}
        for when, values in (("before", start), ("after", end))
    }
    figure = go.Figure()
    for position, (name, ends) in enumerate(table.iterrows()):
        _add_ends(figure, str(name), ends, position, row)
    _add_ratios(figure, names, pairs, base, row, printed)
    ticks = dict(tickvals=list(range(len(table))), ticktext=[_tick(shown, name) for name in names], ticks="")
    figure.update_yaxes(range=[len(table) - 0.4, -1.1], showgrid=False, tickfont=dict(size=13), **ticks)
    bounds = axis_bounds([*table["start"], *table["end"]], row.log)
    figure.update_xaxes(title_text=row.axis, **value_axis(bounds, row.log))
    right, bottom = (400, 82) if len(printed) else (275, 62)
    figure.update_layout(showlegend=False, margin=dict(l=150, r=right, t=100, b=bottom))
    if len(printed):
        sources = (f"layer {layer}: {published_source(own)}" for layer, own in points.groupby("layer", sort=False))
        footnote(figure, f"published: ratio in another model after its {'; after '.join(sources)}.")
    title = f"{row.label[0].upper()}{row.label[1:]} after the last layer{_end(table, pairs['after'], base, row)}"
    about = f"{shown.describe()} · {'○ step 0, ' * bool(table['start'].notna().any())}● after training"
    about += " · clearly: after Holm's correction" * ("clearly" in title)
    return theme.titled(figure, title, about, 180 + 20 * bool(len(printed)) + _ROW * (len(table) + 1))


def _printed_ratios(points: pd.DataFrame, base: str) -> pd.DataFrame:
    """Published values with their `ratio` to `base` after the last layer of the same model, one per scheme.

    Of several models that have a scheme it is the first.
    """
    found = []
    for _, own in points.groupby(["paper", "where", "model"], sort=False, dropna=False):
        last = own[own["layer"] == own["layer"].max()]
        below = last.loc[last["scheme"] == base, "value"]
        if len(below) == 1 and len(last) > 1:
            found.append(last.assign(ratio=last["value"] / below.iloc[0]))
    return pd.concat(found).drop_duplicates("scheme") if found else points.iloc[:0].assign(ratio=np.nan)


def _ends_of(shown: Selection, metric: str) -> list[pd.DataFrame]:
    """The last layer's values before and after training, one row per run."""
    return [last_values(shown, metric, site="block_out", mask="all", step=step) for step in (0, None)]


def _end(table: pd.DataFrame, pairs: Mapping[str, pd.Series], base: str, row: Metric) -> str:
    """Count the schemes that differ from `base` after training; of fewer seeds than four the range of ratios to it.

    Of metrics that are no ratios, count the schemes that rise.
    """
    known = table.dropna(subset=["start", "end"])
    if known.empty:  # not measured before training
        return ""
    if not row.is_ratio or base not in known.index or len(known) < 2:
        return f": rises in training under {(known['end'] > known['start']).sum()} of {len(known)} schemes"
    found = pd.DataFrame({name: pair for name, pair in pairs.items() if name in known.index}).T.infer_objects()
    if not np.isfinite(found["estimate"]).any():
        return ""
    title, tested = theme.style_of(base).title, found[found["seeds"] >= SEEDS].dropna(subset="p")
    if tested.empty:
        return f": {least_and_most(found['estimate'])} of {title}'s when trained"
    apart = int(judged(tested)["verdict"].eq(DIFFERENT).sum())
    differ = "differ" if apart > 1 else "differs"
    of = "schemes" if len(tested) == len(found) else "with four seeds"
    return f": {apart or 'none'} of {len(tested)} {of} clearly {differ} from {title} when trained"


def _tick(shown: Selection, name: str) -> str:
    remark = shown.remark(name)
    small = ", ".join(word for word in ("control" if theme.style_of(name).is_control else "", remark) if word)
    return theme.name_of(name) + (f"<br><span style='font-size:10px'>{small}</span>" if small else "")


def _add_ends(figure: go.Figure, name: str, ends: pd.Series, position: int, row: Metric) -> None:
    color = theme.style_of(name).color
    after = f"after training; seeds {ends['low']:.4g} to {ends['high']:.4g} ({int(ends['seeds'])})"
    x = finite([ends["start"], ends["end"]])
    ring_and_disc = dict(size=[11, 12], symbol=["circle-open", "circle"], line=dict(width=2, color=color))
    add_line(
        figure,
        name,
        x,
        [position, position],
        f"<br>%{{x:.4~g}}, %{{customdata[0]}}<br><i>{row.name}: {row.definition}</i>",
        line=dict(color=theme.faded(color, 0.45), width=3, dash="solid"),
        mode="lines+markers",
        marker=dict(color=color, opacity=1) | ring_and_disc,
        customdata=[["step 0"], [after]],
    )


def _add_ratios(
    figure: go.Figure,
    names: list[str],
    pairs: Mapping[str, Mapping[str, pd.Series]],
    base: str,
    row: Metric,
    printed: pd.Series,
) -> None:
    """Columns of text right of the rows: ratio or difference to `base` at step 0, after training, published."""
    heads = {"before": "step 0", "after": "trained"} | ({"published": "published"} if len(printed) else {})
    word = "ratio to" if row.is_ratio else "difference from"
    beside(figure, -0.95, _TEXTS["before"], f"<b>{word} {theme.style_of(base).title}</b>", theme.NEUTRAL)
    for key, head in heads.items():
        beside(figure, -0.55, _TEXTS[key], head, theme.NEUTRAL)
    for position, name in enumerate(names):
        same = "1" if row.is_ratio else "0"
        cells = {when: same if name == base else _ratio(own[name]) for when, own in pairs.items()}
        cells["before"] = cells["before"].split(" ")[0]
        if name in printed.index:
            cells["published"] = f"{printed[name]:.2f}"
        for key, text in cells.items():
            beside(figure, position, _TEXTS[key], text, theme.style_of(name).color)


def _ratio(pair: pd.Series) -> str:
    if not math.isfinite(pair["estimate"]):
        return "–"
    return short(pair["estimate"]) + bracketed(pair["low"], pair["high"], short)
