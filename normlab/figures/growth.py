"""Activations and gradients by layer while a model trains: one panel a scheme, colour = training step (B1, B3, C1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.selection import NothingToShow, Selection, choose, mean_of
from normlab.figures import theme
from normlab.figures.registry import register
from normlab.probes.metrics import MASKS, Metric, metric_row, site_label

MOST_STEPS = 9  # more lines in a panel than this blur into each other
_PANEL, _GAP = 190, 62  # pixels


@register(
    "token_l2_growth", "B1", "L2 norm of a token by layer and training step", overlays=True, metric="token_l2_mean"
)
@register(
    "variance_growth",
    "B1, C1",
    "variance over features by layer and training step",
    overlays=True,
    metric="feature_var_mean",
)
def layer_growth(
    runs: pd.DataFrame,
    metric: str = "token_l2_mean",
    *,
    site: str = "block_out",
    depth: int | str | None = "deepest",
    width: int | None = None,
    schemes: Sequence[str] | None = None,
    mask: str = "all",
    published: pd.DataFrame | None = None,
    log: bool = False,
    columns: int = 4,
) -> go.Figure:
    """A metric against layer at several training steps, one panel a scheme (BHyT Fig. 3, The Curse of Depth).

    Lines are means (geometric for sizes) over seeds of the chosen learning rate; step 0, before training, is dashed.

    Args:
        runs: the table of `normlab.load_runs`.
        metric: a name of `METRICS` that was measured at `site`.
        depth: number of blocks, or "deepest".
        mask: "all" (padding excluded) or "no_first" (each row's first token excluded, too).
        published: table of `normlab.load_published`; values of the same metric are drawn as diamonds with their reading
            error.
        log: one logarithmic value axis for all panels, to compare sizes; else a linear one for each, to see its growth.
        columns: panels in a row.
    """
    row = metric_row(metric)
    title = f"{row.label[0].upper()}{row.label[1:]} by layer"
    try:
        chosen = choose(runs, depth, width, schemes, same_rate=True)
    except NothingToShow as why:
        return theme.message_figure(str(why), title)
    rows = _mean_over_seeds(chosen.rows(site, metric, mask), metric)
    if rows.empty:
        where = site_label(site)
        return theme.message_figure(f"{metric} was not measured at: {where}, {MASKS.get(mask, mask)}.", title)
    points = _published_points(published if site == "block_out" else None, metric, chosen.schemes)
    axes = "" if log else " · each panel has its own axis"
    subtitle = f"{site_label(site)}, {MASKS.get(mask, mask)} · {chosen.describe()} · dashed: step 0{axes}"
    figure = _panels(chosen, rows, points, row, log, columns)
    return theme.titled(figure, title, subtitle, int(figure.layout.height))


@register(
    "gradient_total_growth", "B3", "gradient norm of the batch by layer and training step", metric="grad_l2_total"
)
@register("gradient_token_growth", "B3", "gradient norm of a token by layer and training step", metric="grad_l2_mean")
def gradient_growth(
    runs: pd.DataFrame,
    metric: str = "grad_l2_total",
    *,
    site: str = "block_in_grad",
    depth: int | str | None = "deepest",
    width: int | None = None,
    schemes: Sequence[str] | None = None,
    mask: str = "all",
    log: bool = True,
    columns: int = 4,
) -> go.Figure:
    """Gradient norm by layer at several training steps (B3); layer l: the gradient at the input of block l.

    The loss is summed over tokens, so values do not depend on how batches are cut. Arguments as for `layer_growth`.
    """
    return layer_growth(
        runs, metric, site=site, depth=depth, width=width, schemes=schemes, mask=mask, log=log, columns=columns
    )


def _mean_over_seeds(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Columns scheme, step, layer, value, low, high, seeds; non-finite values are left out of the mean."""
    finite = rows[np.isfinite(rows["value"].astype(float)) & rows["layer"].notna()]
    grouped = finite.groupby(["scheme", "step", "layer"], observed=True)["value"]
    mean = partial(mean_of, metric=metric)
    return grouped.agg(value=mean, low="min", high="max", seeds="count").reset_index()


def shown_steps(steps: Sequence[int], most: int = MOST_STEPS) -> list[int]:
    """At most `most` of the measured steps, the first and the last among them, evenly spread over the list."""
    steps = sorted(set(steps))
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _published_points(published: pd.DataFrame | None, metric: str, schemes: Sequence[str]) -> pd.DataFrame:
    if published is None:
        return pd.DataFrame(columns=["scheme", "layer", "value"])
    keep = (published["metric"] == metric) & published["scheme"].isin(schemes) & published["layer"].notna()
    return published[keep]


def _panels(
    chosen: Selection, rows: pd.DataFrame, points: pd.DataFrame, row: Metric, log: bool, columns: int
) -> go.Figure:
    schemes = [name for name in chosen.schemes if name in set(rows["scheme"])]
    columns = min(columns, len(schemes))
    lines = -(-len(schemes) // columns)
    height = lines * _PANEL + (lines - 1) * _GAP + 190
    inner = height - 190
    figure = make_subplots(
        rows=lines,
        cols=columns,
        shared_yaxes=log,
        horizontal_spacing=0.022 if log else 0.05,
        vertical_spacing=_GAP / inner if lines > 1 else 0.0,
        subplot_titles=[_panel_title(chosen, rows, name, row) for name in schemes],
    )
    figure.update_annotations(xanchor="left", align="left", font=dict(size=13), yshift=2)
    last = float(rows["step"].max())
    deepest = int(max([*rows["layer"], *points["layer"]]))
    layers = [0, deepest + 0.3 if len(points) else deepest]
    for place, name in enumerate(schemes):
        where = dict(row=place // columns + 1, col=place % columns + 1)
        figure.layout.annotations[place].x = figure.get_subplot(**where).xaxis.domain[0]
        own, published = (table[table["scheme"] == name] for table in (rows, points))
        reach = [rows, points] if log else [own, published]
        bounds = theme.axis_bounds(pd.concat([table["value"].astype(float) for table in reach]), log)
        figure.update_yaxes(**theme.value_axis(bounds, log), **where)
        for step in shown_steps([int(s) for s in own["step"].unique()]):
            figure.add_trace(_line(own[own["step"] == step], step, last, row, name), **where)
        if len(published):
            figure.add_trace(_diamond(published, row), **where)
        lowest = place + columns >= len(schemes)
        figure.update_xaxes(
            title_text="layer" if lowest else None, showticklabels=True, range=layers, nticks=6, **where
        )
    for line in range(lines):
        figure.update_yaxes(title_text=row.axis, row=line + 1, col=1)
    _step_bar(figure, last)
    if len(points):
        _published_key(figure, points)
    return figure.update_layout(height=height, showlegend=False, margin=dict(l=70, r=92, t=118, b=72))


def _panel_title(chosen: Selection, rows: pd.DataFrame, name: str, row: Metric) -> str:
    """The scheme in its colour, what went wrong with it, and the last layer's value before and after training."""
    style = theme.style_of(name)
    remark = chosen.remark(name)
    head = f"<b style='color:{style.color}'>{style.title}</b>" + (" (control)" if style.is_control else "")
    own = rows[rows["scheme"] == name]
    ends = own[own["layer"] == own["layer"].max()].sort_values("step")["value"]
    tail = f"last layer {short(ends.iloc[0])} → {short(ends.iloc[-1])}" if len(ends) > 1 else ""
    small = " · ".join(part for part in (tail, f"<b>{remark}</b>" if remark else "") if part)
    return f"{head}<br><span style='font-size:11px;color:{theme.NEUTRAL}'>{small or '&nbsp;'}</span>"


def short(value: float) -> str:
    """A number in three digits."""
    if value == 0 or 0.01 <= abs(value) < 10_000:
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.1e}"


def _line(rows: pd.DataFrame, step: int, last: float, row: Metric, name: str) -> go.Scatter:
    start = step == 0
    rows = rows.sort_values("layer")
    return go.Scatter(
        x=[int(layer) for layer in rows["layer"]],
        y=[float(value) for value in rows["value"]],
        customdata=rows[["low", "high", "seeds"]].to_numpy(dtype=float).tolist(),
        mode="lines",
        name=f"{name} step {step}",
        meta=dict(scheme=name, step=step),
        line=dict(
            color=theme.NEUTRAL if start else theme.step_color(step, last), width=1.8, dash="dash" if start else "solid"
        ),
        hovertemplate=(
            f"<b>{theme.style_of(name).title}</b>, {'before training' if start else f'step {step:,}'}"
            "<br>layer %{x}: %{y:.4~g}"
            "<br>seeds: %{customdata[0]:.4~g} to %{customdata[1]:.4~g} (%{customdata[2]})"
            f"<br><i>{row.name}: {row.definition}</i><extra></extra>"
        ),
    )


def _diamond(points: pd.DataFrame, row: Metric) -> go.Scatter:
    about = [f"{p.paper} (arXiv {p.arxiv}), {p.where}<br>{p.model}, {p.method}: {p.note}" for p in points.itertuples()]
    return go.Scatter(
        x=[int(layer) for layer in points["layer"]],
        y=[float(value) for value in points["value"]],
        error_y=dict(
            type="data",
            array=[float(v) for v in points["value"] * points["relative_error"].fillna(0.0)],
            thickness=1.2,
            width=3,
        ),
        mode="markers",
        cliponaxis=False,
        name="published",
        meta=dict(published=True),
        text=about,
        marker=dict(symbol="diamond-open", size=7, color=theme.NEUTRAL, line=dict(width=1.4)),
        hovertemplate=f"published: %{{y}}<br>%{{text}}<br><i>{row.name}: {row.definition}</i><extra></extra>",
    )


def _step_bar(figure: go.Figure, last: float) -> None:
    """A colour bar for the training step, on a trace that draws nothing."""
    figure.add_trace(
        go.Scatter(
            x=[None],
            y=[None],
            mode="markers",
            hoverinfo="skip",
            name="training step",
            marker=dict(
                color=[0.0],
                cmin=0.0,
                cmax=max(last, 1.0),
                colorscale=[list(stop) for stop in theme.STEPS],
                showscale=True,
                colorbar=dict(
                    title=dict(text="step<br>&nbsp;", side="top", font=dict(size=12)),
                    tickfont=dict(size=12),
                    thickness=10,
                    len=200,
                    lenmode="pixels",
                    y=1.0,
                    yanchor="top",
                    x=1.015,
                    outlinewidth=0,
                ),
            ),
        ),
        row=1,
        col=1,
    )


def _published_key(figure: go.Figure, points: pd.DataFrame) -> None:
    footnote(figure, f"◇ published at that layer of its own model: {published_source(points)}.")


def published_source(points: pd.DataFrame) -> str:
    """Where published values are from, in words, and how far off they may have been read."""
    sources = sorted({f"{p.paper} {p.where}, {p.model}" for p in points.itertuples()})
    error = points["relative_error"].max()
    return "; ".join(sources) + (f", read off the plot ±{error:.0%}" if error > 0 else "")


def footnote(figure: go.Figure, text: str) -> None:
    """A line below the axis titles."""
    figure.add_annotation(
        text=text,
        x=0,
        xref="paper",
        xanchor="left",
        y=0,
        yref="paper",
        yanchor="top",
        yshift=-46,
        showarrow=False,
        font=dict(size=12, color=theme.NEUTRAL),
    )
