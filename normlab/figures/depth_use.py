"""How trained models use their depth, scheme by scheme and over seeds: what every run measured after its last step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.selection import depths_of_most, experiments_of, in_order, seeds_in_words
from normlab.analysis.verdicts import means
from normlab.errors import NormlabError
from normlab.figures import theme
from normlab.figures.labels import EndLabel, label_ends, label_room
from normlab.figures.registry import register

# metric -> (title, axis)
BY_LAYER = {
    "skip_delta_loss": ("Loss added by", "nats per token"),  # and which of `PARTS`
    "jacobian_identity": ("How far a block's Jacobian is from the identity", "‖J − I‖ / ‖I‖"),
    "logit_lens_kl": ("How far the prediction after a layer is from the last", "KL, nats per token"),
}
BY_PAIR = {
    "angular_distance": (
        "Angle between the stream after two layers",
        "earlier layer",
        "later layer",
        "angle / π",
    ),
    "skip_future_effect": ("What later blocks do when one is skipped", "later block", "skipped block", "change"),
}
PARTS = {
    "block": "leaving out one block",
    "attention": "leaving out one block's attention",
    "mlp": "leaving out one block's MLP",
    "deleted": "deleting one block and renumbering the others",
}
_BELOW = 5.0  # a logarithmic axis goes to that part of the lowest mean, and cuts intervals there


@register("skip_cost", "C2", "loss added by leaving out one block", reads="experiments", metric="skip_delta_loss")
@register(
    "jacobian_identity",
    "C4",
    "how far a block's Jacobian is from the identity",
    reads="experiments",
    metric="jacobian_identity",
)
@register(
    "logit_lens", "D3", "how far the prediction after a layer is from the last", reads="experiments",
    metric="logit_lens_kl",
)  # fmt: skip
def by_layer(
    experiments: pd.DataFrame,
    metric: str = "skip_delta_loss",
    *,
    part: str = "block",
    depth: int | None = None,
    schemes: Sequence[str] | None = None,
    log: bool = False,
) -> go.Figure:
    """One number a layer, a line a scheme: the mean over seeds, with its interval; each seed is a dot. The schemes of a
    layer stand side by side.

    The interval is that of `normlab.analysis.verdicts.means`, the schemes shown at a layer being one family.

    Args:
        experiments: table of `normlab.load_experiments`.
        metric: a name of `BY_LAYER`.
        part: for skip_delta_loss, what is left out: a name of `PARTS`.
        depth: default the deepest at which most schemes were run.
        log: logarithmic axis. It goes no deeper than a fifth of the lowest positive mean: seeds below it are not
            drawn, and the subtitle says so; an interval that reaches below it is cut at the axis, with a triangle.

    Raises:
        NormlabError: an unknown metric or part.
    """
    if metric not in BY_LAYER or part not in PARTS:
        raise NormlabError(f"no figure of {metric}, {part}: metrics {', '.join(BY_LAYER)}; parts {', '.join(PARTS)}")
    title, axis = BY_LAYER[metric]
    title += f" {PARTS[part]}" if metric == "skip_delta_loss" else ""
    rows, about = _chosen(experiments, metric, part, depth, schemes)
    if rows.empty:
        return theme.message_figure(f"No run measured {metric} ({PARTS[part]}).", title)
    first, last = int(rows["layer"].min()), int(rows["layer"].max())
    table = means(rows.assign(depth=rows["layer"].astype(int)), metric)
    remarks = ["dots are seeds, bars 95% intervals"] if rows["seed"].nunique() > 1 else []
    lowest = -math.inf
    if log:  # a line to what a logarithm does not have would fall out of the figure
        table = table.assign(estimate=table["estimate"].where(table["estimate"] > 0))
        lowest = table["estimate"].min() / _BELOW
        seen = rows["value"] >= lowest
        remarks += [] if seen.all() else [f"{(~seen).sum()} of {len(rows)} dots lie below the axis"]
        rows = rows[seen]
    drawn = [*rows["value"], *(end for side in ("estimate", "low", "high") for end in table[side] if end >= lowest)]
    bounds = theme.axis_bounds(drawn if log else [0.0, *drawn], log) or (-1.0, 1.0)
    bottom = 10 ** bounds[0] if log else -math.inf
    figure, ends = go.Figure(), []
    names = in_order(table.dropna(subset="estimate")["a"])
    for name, aside in zip(names, _aside(len(names), last - first), strict=True):
        own, dots = table[table["a"] == name].sort_values("depth"), rows[rows["scheme"] == name]
        style = theme.style_of(name)
        figure.add_trace(_seeds(dots, style, aside))
        figure.add_trace(_mean_line(own, style, metric, aside, bottom))
        below = own[own["estimate"].notna() & (own["low"] < bottom)]
        if len(below):
            figure.add_trace(_cut_ends(below, style, aside, bottom))
        ends.append(EndLabel(float(own["estimate"].dropna().iloc[-1]), style.title, style.color))
    figure.update_yaxes(title_text=axis, **theme.value_axis(bounds, log))
    figure.update_xaxes(
        title_text="layer" if first == 0 else "block",
        tickvals=list(range(first, last + 1, max(1, (last - first) // 12))),
        range=[first - 0.35, last + 0.35],
    )
    margin = dict(l=72, r=label_room(ends), t=96, b=58)
    label_ends(figure, ends, bounds, 500 - margin["t"] - margin["b"], log)
    figure.update_layout(showlegend=False, margin=margin)
    if any(trace.meta and trace.meta.get("cut") for trace in figure.data):
        remarks.append("▼ an interval goes on below it")
    return theme.titled(figure, title, about + ("<br>" + " · ".join(remarks) if remarks else ""), 500)


@register(
    "angular_distance",
    "C3",
    "angle between the stream after two layers",
    reads="experiments",
    metric="angular_distance",
)
@register(
    "skip_future_effect",
    "D2",
    "what later blocks do when one is skipped",
    reads="experiments",
    metric="skip_future_effect",
)
def by_pair(
    experiments: pd.DataFrame,
    metric: str = "angular_distance",
    *,
    depth: int | None = None,
    schemes: Sequence[str] | None = None,
) -> go.Figure:
    """One number a pair of layers, a panel a scheme, one colour scale: the mean over seeds.

    Args:
        experiments: table of `normlab.load_experiments`.
        metric: a name of `BY_PAIR`.
        depth: default the deepest at which most schemes were run.

    Raises:
        NormlabError: an unknown metric.
    """
    if metric not in BY_PAIR:
        raise NormlabError(f"no figure of {metric} by pairs of layers: choose from {', '.join(BY_PAIR)}")
    title, upwards, across, unit = BY_PAIR[metric]
    rows, about = _chosen(experiments, metric, "block", depth, schemes)
    if rows.empty:
        return theme.message_figure(f"No run measured {metric}.", title)
    names = in_order(rows["scheme"])
    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    titles = [theme.style_of(name).title for name in names]
    figure = make_subplots(lines, columns, shared_xaxes=True, shared_yaxes=True, subplot_titles=titles,
                           horizontal_spacing=0.04, vertical_spacing=0.26 / lines)  # fmt: skip
    for place, name in enumerate(names):
        wide = rows[rows["scheme"] == name].pivot_table(index="layer", columns="other", values="value")
        line, column = place // columns + 1, place % columns + 1
        figure.add_trace(_heat(wide, theme.style_of(name).title, upwards, across, unit), row=line, col=column)
    high = float(np.nanquantile(rows["value"], 0.995))
    bar = dict(title=dict(text=unit, side="top"), thickness=10, outlinewidth=0)
    figure.update_layout(
        coloraxis=dict(colorscale=[list(stop) for stop in theme.SEQUENTIAL], cmin=0.0, cmax=high, colorbar=bar)
    )
    figure.update_xaxes(showgrid=False).update_yaxes(showgrid=False)
    figure.update_xaxes(showticklabels=True).update_yaxes(title_text=upwards, col=1)
    for place in range(max(0, len(names) - columns), len(names)):  # the lowest of each column
        figure.update_xaxes(title_text=across, row=place // columns + 1, col=place % columns + 1)
    figure.update_layout(margin=dict(l=72, r=60, t=130, b=58))
    return theme.titled(figure, title, f"{about} · means over seeds", 150 + 300 * lines)


def _chosen(
    experiments: pd.DataFrame, metric: str, part: str, depth: int | None, schemes: Sequence[str] | None
) -> tuple[pd.DataFrame, str]:
    """The rows of one depth, and in words what they are of."""
    part = part if metric == "skip_delta_loss" else "block"
    rows = experiments_of(experiments, metric, part)
    rows = rows if schemes is None else rows[rows["scheme"].isin(schemes)]
    if depth is None:
        depth = max(depths_of_most(rows), default=None)
    rows = rows[rows["depth"] == depth]
    if rows.empty:
        return rows, ""
    seeds = seeds_in_words(rows.groupby("scheme", observed=True)["seed"].nunique())
    widths = ", ".join(str(width) for width in sorted(rows["width"].unique()))
    return rows, f"depth {depth} · width {widths} · {seeds}"


def _aside(count: int, layers: int) -> list[float]:
    """How far each of so many schemes stands beside its layer, in layers, of which the figure holds so many."""
    step = min(0.013 * layers, 0.4 / max(1, count))
    return [(place - (count - 1) / 2) * step for place in range(count)]


def _seeds(dots: pd.DataFrame, style: theme.Style, aside: float) -> go.Scatter:
    return go.Scatter(
        x=[int(layer) + aside for layer in dots["layer"]],
        y=dots["value"].tolist(),
        mode="markers",
        name=style.name,
        marker=dict(color=style.color, size=5, opacity=0.35),
        customdata=dots[["seed", "layer"]].astype(int).to_numpy().tolist(),
        hovertemplate=f"{style.title}, seed %{{customdata[0]}}, %{{customdata[1]}}: %{{y:.4~g}}<extra></extra>",
    )


def _mean_line(own: pd.DataFrame, style: theme.Style, metric: str, aside: float, bottom: float) -> go.Scatter:
    """The means, with intervals that end at `bottom` where they would go further."""
    above, below = own["high"] - own["estimate"], own["estimate"] - own["low"].clip(lower=bottom)
    above, below = (np.nan_to_num(side.to_numpy(float)).tolist() for side in (above, below))
    return go.Scatter(
        x=(own["depth"] + aside).tolist(),
        y=[None if math.isnan(value) else value for value in own["estimate"]],
        error_y=dict(
            type="data",
            symmetric=False,
            array=above,
            arrayminus=below,
            thickness=1,
            width=3,
            color=theme.faded(style.color, 0.5),
        ),
        customdata=own["depth"].tolist(),
        mode="lines",
        name=style.name,
        meta=dict(scheme=style.name),
        line=dict(color=style.color, dash=style.dash, width=2),
        hovertemplate=f"<b>{style.title}</b><br>%{{customdata}}: %{{y:.4~g}}<br><i>{metric}</i><extra></extra>",
    )


def _cut_ends(below: pd.DataFrame, style: theme.Style, aside: float, bottom: float) -> go.Scatter:
    return go.Scatter(
        x=(below["depth"] + aside).tolist(),
        y=[bottom] * len(below),
        mode="markers",
        name=style.name,
        meta=dict(scheme=style.name, cut=True),
        cliponaxis=False,
        marker=dict(symbol="triangle-down", size=7, color=theme.faded(style.color, 0.5)),
        customdata=below[["depth", "low"]].to_numpy(float).tolist(),
        hovertemplate=f"<b>{style.title}</b><br>%{{customdata[0]}}: the interval goes on to %{{customdata[1]:.4~g}}"
        "<extra></extra>",
    )


def _heat(wide: pd.DataFrame, name: str, upwards: str, across: str, unit: str) -> go.Heatmap:
    return go.Heatmap(
        x=[int(place) for place in wide.columns],
        y=[int(place) for place in wide.index],
        z=[[float(v) if math.isfinite(v) else None for v in row] for row in wide.to_numpy(float)],
        coloraxis="coloraxis",
        hovertemplate=f"<b>{name}</b><br>{upwards} %{{y}}, {across} %{{x}}: %{{z:.3f}} ({unit})<extra></extra>",
    )
