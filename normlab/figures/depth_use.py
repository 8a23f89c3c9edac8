"""How trained models use their depth, scheme by scheme and over seeds: what every run measured after its last step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.claims import means
from normlab.analysis.selection import depths_of_most, experiments_of, in_order, seeds_in_words
from normlab.errors import NormlabError
from normlab.figures import theme
from normlab.figures.labels import EndLabel, label_ends, label_room
from normlab.figures.registry import register

# metric -> (title, axis)
BY_LAYER = {
    "skip_delta_loss": ("Loss added by leaving out one block", "nats per token"),
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
    "block": "block skipped",
    "attention": "attention skipped",
    "mlp": "MLP skipped",
    "deleted": "block deleted, the others renumbered",
}


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
    """One number a layer, a line a scheme: the mean over seeds, with its interval; each seed is a dot.

    The interval is mean +- t(0.95, df) sd / sqrt(seeds), the sd of a layer pooled over all schemes shown,
    where seeds move them alike (`normlab.analysis.claims.means`).

    Args:
        experiments: table of `normlab.load_experiments`.
        metric: a name of `BY_LAYER`.
        part: for skip_delta_loss, what is left out: a name of `PARTS`.
        depth: default the deepest at which most schemes were run.
        log: logarithmic axis, on which values at or below zero are not shown.

    Raises:
        NormlabError: an unknown metric or part.
    """
    if metric not in BY_LAYER or part not in PARTS:
        raise NormlabError(f"no figure of {metric}, {part}: metrics {', '.join(BY_LAYER)}; parts {', '.join(PARTS)}")
    title, axis = BY_LAYER[metric]
    rows, about = _chosen(experiments, metric, part, depth, schemes)
    if rows.empty:
        return theme.message_figure(f"No run measured {metric} ({PARTS[part]}).", title)
    table = means(rows.assign(depth=rows["layer"].astype(int)), metric)
    if log:  # a line to what a logarithm does not have would fall out of the figure
        rows, table = rows[rows["value"] > 0], table.assign(estimate=table["estimate"].where(table["estimate"] > 0))
    figure, ends = go.Figure(), []
    for scheme in in_order(table.dropna(subset="estimate")["a"]):
        own, dots = table[table["a"] == scheme].sort_values("depth"), rows[rows["scheme"] == scheme]
        style = theme.style_of(scheme)
        figure.add_trace(_seeds(dots, style))
        figure.add_trace(_mean_line(own, style, metric))
        ends.append(EndLabel(float(own["estimate"].dropna().iloc[-1]), style.title, style.color))
    reach = [*rows["value"], *table["low"].dropna(), *table["high"].dropna()]
    bounds = theme.axis_bounds(reach if log else [0.0, *reach], log) or (-1.0, 1.0)
    figure.update_yaxes(title_text=axis, **theme.value_axis(bounds, log))
    first, last = int(rows["layer"].min()), int(rows["layer"].max())
    figure.update_xaxes(title_text="layer" if first == 0 else "block", dtick=max(1, (last - first) // 12))
    margin = dict(l=72, r=label_room(ends), t=96, b=58)
    label_ends(figure, ends, bounds, 500 - margin["t"] - margin["b"], log)
    figure.update_layout(showlegend=False, margin=margin)
    what = f"{PARTS[part]} · " if metric == "skip_delta_loss" else ""
    spread = " · dots are seeds, bars 95% intervals, spread pooled where alike" if rows["seed"].nunique() > 1 else ""
    return theme.titled(figure, title, f"{what}{about}{spread}", 500)


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
    figure.update_xaxes(title_text=across, row=lines).update_yaxes(title_text=upwards, col=1)
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


def _seeds(dots: pd.DataFrame, style: theme.Style) -> go.Scatter:
    return go.Scatter(
        x=dots["layer"].astype(int).tolist(),
        y=dots["value"].tolist(),
        mode="markers",
        name=style.name,
        marker=dict(color=style.color, size=5, opacity=0.35),
        customdata=dots["seed"].tolist(),
        hovertemplate=f"{style.title}, seed %{{customdata}}, %{{x}}: %{{y:.4~g}}<extra></extra>",
    )


def _mean_line(own: pd.DataFrame, style: theme.Style, metric: str) -> go.Scatter:
    half = np.nan_to_num((own["high"] - own["estimate"]).to_numpy(float))
    return go.Scatter(
        x=own["depth"].tolist(),
        y=[None if math.isnan(value) else value for value in own["estimate"]],
        error_y=dict(type="data", array=half.tolist(), thickness=1, width=3),
        mode="lines",
        name=style.name,
        meta=dict(scheme=style.name),
        line=dict(color=style.color, dash=style.dash, width=2),
        hovertemplate=f"<b>{style.title}</b><br>%{{x}}: %{{y:.4~g}}<br><i>{metric}</i><extra></extra>",
    )


def _heat(wide: pd.DataFrame, name: str, upwards: str, across: str, unit: str) -> go.Heatmap:
    return go.Heatmap(
        x=[int(place) for place in wide.columns],
        y=[int(place) for place in wide.index],
        z=[[float(v) if math.isfinite(v) else None for v in row] for row in wide.to_numpy(float)],
        coloraxis="coloraxis",
        hovertemplate=f"<b>{name}</b><br>{upwards} %{{y}}, {across} %{{x}}: %{{z:.3f}} ({unit})<extra></extra>",
    )
