"""Use of depth in trained models, by scheme and over seeds: measurements of every run after its last step."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.selection import (
    NOT_LEARNED,
    NothingToShow,
    depths_of_most,
    experiments_of,
    in_order,
    of_one_setting,
    rates_in_words,
    recipes_in_words,
    seeds_in_words,
    title_of,
)
from normlab.analysis.verdicts import bracketed, means
from normlab.errors import NormlabError
from normlab.figures import theme
from normlab.figures.draw import add_line, axis_bounds, finite, least_and_most, panels, value_axis, whole
from normlab.figures.registry import register

# metric -> (title, axis)
BY_LAYER = {
    "skip_delta_loss": ("Loss added by", "nats per token"),  # and which of `PARTS`
    "jacobian_identity": ("How far a block's Jacobian is from the identity", "‖J − I‖ / ‖I‖"),
    "logit_lens_kl": ("How far the prediction after a layer is from the last", "KL, nats per token"),
}
# metric -> (title, upwards, across, unit)
BY_PAIR = {
    "angular_distance": ("Angle between the stream after two layers", "earlier layer", "later layer", "angle / π"),
    "skip_future_effect": ("What later blocks do when one is skipped", "later block", "skipped block", "change"),
}
PARTS = {
    "block": "leaving out one block",
    "attention": "leaving out one block's attention",
    "mlp": "leaving out one block's MLP",
    "deleted": "deleting one block and renumbering the others",
}
_BELOW = 5.0  # a logarithmic axis goes to that part of the lowest mean, and cuts intervals there
_PANEL, _GAP, _MARGIN = 170, 62, dict(l=72, r=30, t=120, b=58)  # pixels


@register("skip_cost", "C2", "loss added by leaving out one block", reads="experiments", metric="skip_delta_loss")
@register("jacobian_identity", "C4", "how far a block's Jacobian is from the identity", reads="experiments",
          metric="jacobian_identity")  # fmt: skip
@register("logit_lens", "D3", "how far the prediction after a layer is from the last", reads="experiments",
          metric="logit_lens_kl")  # fmt: skip
def by_layer(
    experiments: pd.DataFrame,
    metric: str = "skip_delta_loss",
    *,
    part: str = "block",
    depth: int | None = None,
    log: bool = False,
) -> go.Figure:
    """One number per layer, one panel per scheme: the mean over seeds with its interval; each seed is a dot.

    All panels have the same axis. The grey line in each is the first scheme's. The title gives the mean of the deeper
    half without the last layer, of the schemes that have learned where it is least and most. Intervals are those of
    `means`, the schemes shown at a layer being one family.

    Args:
        experiments: table of `normlab.load_experiments`.
        metric: a name of `BY_LAYER`.
        part: for skip_delta_loss, what is left out: a name of `PARTS`.
        depth: default the deepest at which most schemes were run.
        log: logarithmic axis. It ends at a fifth of the lowest positive mean: intervals are cut there, seeds below it
            are not drawn, and the subtitle says so.

    Raises:
        NormlabError: an unknown metric or part.
    """
    if metric not in BY_LAYER or part not in PARTS:
        raise NormlabError(f"no figure of {metric}, {part}: metrics {', '.join(BY_LAYER)}; parts {', '.join(PARTS)}")
    title, axis = BY_LAYER[metric]
    title += f" {PARTS[part]}" if metric == "skip_delta_loss" else ""
    rows, about = _of_depth(experiments, metric, part, depth)
    if rows.empty:
        raise NothingToShow(f"No run measured {metric} ({PARTS[part]}).")
    failed = in_order(rows.loc[rows["status"] == NOT_LEARNED, "scheme"]) if "status" in rows else []
    by_layer = rows[["scheme", "seed", "value"]].assign(depth=rows["layer"].astype(int))
    measured = means(by_layer, metric).rename(columns={"a": "scheme", "depth": "layer"})
    table = measured.sort_values("layer")
    remarks = ["dots are seeds, shaded: 95% interval"] if rows["seed"].nunique() > 1 else []
    is_number = np.isfinite(rows["value"].astype(float))
    remarks += [] if is_number.all() else [f"{(~is_number).sum()} of {len(rows)} values not finite"]
    rows = rows[is_number]
    lowest = -math.inf
    if log:  # a line to what a logarithm does not have would fall out of the figure
        table["estimate"] = table["estimate"].where(table["estimate"] > 0)
        lowest = table["estimate"].min() / _BELOW
        visible = rows["value"] >= lowest
        remarks += [] if visible.all() else [f"{(~visible).sum()} of {len(rows)} dots lie below the axis"]
        rows = rows[visible]
        if (table["low"] < lowest).any():
            remarks.append("intervals are cut at the axis")
    drawn = [*rows["value"], *(end for side in ("estimate", "low", "high") for end in table[side] if end >= lowest)]
    bounds = axis_bounds(drawn if log else [0.0, *drawn], log) or (-1.0, 1.0)
    bottom = 10 ** bounds[0] if log else -math.inf
    table["low"] = table["low"].clip(lower=bottom)
    names = in_order(table.dropna(subset="estimate")["scheme"])
    if not names:
        raise NothingToShow(f"No mean of {metric} is finite{' and positive' * log}.")
    remarks += [f"grey: {theme.style_of(names[0]).title}"] if len(names) > 1 else []
    remarks += [f"not learned: {'; '.join(map(title_of, failed))}"] if failed else []
    start, end = int(table["layer"].min()), int(table["layer"].max())
    word = "block" if start else "layer"
    titles = [theme.name_of(name) for name in names]
    grid = dict(shared_yaxes=True, horizontal_spacing=0.022)
    figure, cells, inner = panels(names, titles, word, 4, _PANEL, _GAP, **grid)
    grey = dict(color=theme.NEUTRAL, width=1.2)
    first = table[table["scheme"] == names[0]]
    ticks = list(range(start, end + 1, max(1, round((end - start) / 6))))
    x = dict(range=[start - 0.4, end + 0.4], tickvals=ticks)
    for name, cell in zip(names, cells, strict=True):
        if name != names[0]:
            figure.add_scatter(x=whole(first["layer"]), y=finite(first["estimate"]), mode="lines", line=grey,
                               name="reference", hoverinfo="skip", **cell)  # fmt: skip
        _add_scheme(figure, table[table["scheme"] == name], rows[rows["scheme"] == name], metric, cell)
        figure.update_xaxes(**x, **cell)
    figure.update_yaxes(**value_axis(bounds, log)).update_yaxes(title_text=axis, col=1)
    figure.update_layout(showlegend=False, margin=_MARGIN)
    height = inner + _MARGIN["t"] + _MARGIN["b"]
    subtitle = about + ("<br>" + " · ".join(remarks) if remarks else "")
    learned = measured[~measured["scheme"].isin(failed)]
    extremes = _of_deeper_half(measured if learned.empty else learned, word)
    return theme.titled(figure, f"{title}: {extremes}", subtitle, height)


def _of_deeper_half(table: pd.DataFrame, word: str) -> str:
    """The mean over the deeper half of the layers without the last, of the schemes where it is least and most."""
    last = int(table["layer"].max())
    first = last // 2 + 1
    through = max(first, last - 1)
    deeper = table[table["layer"].between(first, through)].groupby("scheme")["estimate"].mean()
    where = f"mean of {word}s {first} to {through}" if through > first else f"{word} {first}"
    return f"{where}, {least_and_most(deeper)}"


def _add_scheme(figure: go.Figure, means: pd.DataFrame, dots: pd.DataFrame, metric: str, cell: dict) -> None:
    """Draw one panel: the interval as a band, seeds as dots, the mean as a line."""
    name = str(means["scheme"].iloc[0])
    color = theme.style_of(name).color
    band = means[np.isfinite(means["low"]) & np.isfinite(means["high"]) & means["estimate"].notna()]
    if len(band):
        x = [*whole(band["layer"]), *whole(band["layer"][::-1])]
        figure.add_scatter(x=x, y=finite([*band["low"], *band["high"][::-1]]), mode="lines", fill="toself",
                           fillcolor=theme.faded(color, 0.16), line=dict(width=0), hoverinfo="skip",
                           name=f"{name} band", **cell)  # fmt: skip
    figure.add_scatter(
        x=whole(dots["layer"]),
        y=dots["value"].tolist(),
        mode="markers",
        name=f"{name} seeds",
        marker=dict(color=color, size=4, opacity=0.45),
        customdata=dots["seed"].astype(int).tolist(),
        hovertemplate="seed %{customdata}, %{x}: %{y:.4~g}<extra></extra>",
        **cell,
    )
    ends = [bracketed(low, high, "{:.4g}".format) for low, high in zip(means["low"], means["high"], strict=True)]
    hover = f"<br>%{{x}}: %{{y:.4~g}}%{{text}}<br><i>{metric}</i>"
    add_line(figure, name, whole(means["layer"]), means["estimate"], hover, text=ends, **cell)


@register("angular_distance", "C3", "angle between the stream after two layers", reads="experiments",
          metric="angular_distance")  # fmt: skip
@register("skip_future_effect", "D2", "what later blocks do when one is skipped", reads="experiments",
          metric="skip_future_effect")  # fmt: skip
def by_pair(experiments: pd.DataFrame, metric: str = "angular_distance", *, depth: int | None = None) -> go.Figure:
    """One number per pair of layers, one panel per scheme, one colour scale: the mean over seeds.

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
    rows, about = _of_depth(experiments, metric, "block", depth)
    if rows.empty:
        raise NothingToShow(f"No run measured {metric}.")
    names = in_order(rows["scheme"])
    titles = [theme.style_of(name).title for name in names]
    grid = dict(shared_xaxes=True, shared_yaxes=True, horizontal_spacing=0.04)
    figure, cells, inner = panels(names, titles, across, 3, 244, 74, **grid)
    for name, text, cell in zip(names, titles, cells, strict=True):
        wide = rows[rows["scheme"] == name].pivot_table(index="layer", columns="other", values="value")
        hover = f"<b>{text}</b><br>{upwards} %{{y}}, {across} %{{x}}: %{{z:.3f}} ({unit})<extra></extra>"
        z = [finite(row) for row in wide.to_numpy(float)]
        figure.add_heatmap(x=whole(wide.columns), y=whole(wide.index), z=z, coloraxis="coloraxis", hovertemplate=hover,
                           hoverongaps=False, **cell)  # fmt: skip
    high = float(np.nanquantile(rows["value"], 0.995))
    bar = dict(title=dict(text=unit, side="top"), thickness=10, outlinewidth=0)
    figure.update_layout(coloraxis=dict(colorscale=theme.SEQUENTIAL, cmin=0.0, cmax=high, colorbar=bar))
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False).update_yaxes(title_text=upwards, col=1)
    figure.update_layout(margin=dict(l=72, r=60, t=130, b=58))
    return theme.titled(figure, title + _of_pairs(rows, metric), f"{about} · means over seeds", inner + 188)


def _of_pairs(rows: pd.DataFrame, metric: str) -> str:
    """The finding in words: that the deeper half turns the stream less, or the skipped block that changes most."""
    if metric == "angular_distance":
        turns = rows[rows["other"].eq(rows["layer"] + 1) & rows["other"].gt(1)]
        is_deep = (turns["other"] > turns["depth"] // 2).rename("deep")
        halves = turns.groupby(["scheme", is_deep], observed=True)["value"].mean().unstack()
        if halves.shape[1] < 2:
            return ""
        count = int((halves[True] < halves[False]).sum())
        return f": block 1 apart, the deeper half turns it less under {count} of {len(halves)} schemes"
    mean = rows.groupby(["scheme", "other"], observed=True)["value"].mean().unstack()
    most = mean.idxmax(axis=1)
    return f": most for block {int(most.mode()[0])} under {(most == most.mode()[0]).sum()} of {len(most)} schemes"


def _of_depth(experiments: pd.DataFrame, metric: str, part: str, depth: int | None) -> tuple[pd.DataFrame, str]:
    """The rows of one depth, and a description of the runs they are from."""
    rows = experiments_of(experiments, metric, part if metric == "skip_delta_loss" else "block")
    depth = max(depths_of_most(rows), default=None) if depth is None else depth
    rows = of_one_setting(rows[rows["depth"] == depth])
    if rows.empty:
        return rows, ""
    seeds = seeds_in_words(rows.groupby("scheme", observed=True)["seed"].nunique())
    widths = ", ".join(str(width) for width in sorted(rows["width"].unique()))
    parts = [f"depth {depth}", f"width {widths}", seeds, rates_in_words(rows), recipes_in_words(rows)]
    return rows, " · ".join(filter(None, parts))
