"""Figures of one model: who writes a logit, what a change does, what its blocks are good for.

logit_attribution    shares of a logit by component, by two methods
shares_and_effects   what was attributed to a component against what a small change of it does
by_tool              a metric by layer, as several tools measured it
intervention         a model as it is and when changed: layers, saturation, next token
skip_cost            loss added by skipping a block (C2)
future_effect        what later blocks do then (D2)
skip_map             both, and one block's column
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.notebook_tables.attribution import components
from normlab.analysis.selection import NothingToShow
from normlab.figures import theme
from normlab.figures.draw import (
    LEGEND_ABOVE,
    SEQUENTIAL_SCALE,
    EndLabel,
    add_line,
    axis_bounds,
    finite,
    interval_bars,
    label_ends,
    label_room,
    note,
    value_axis,
    whole,
)
from normlab.figures.registry import drawing
from normlab.probes.metrics import metric_row

METHODS = {
    "frozen": ("#0072b2", "share of the logit, norm held fixed; the shares add up to it"),
    "jacobian": ("#d55e00", "effect of a small change of the component, to first order"),
}
# The third method is for comparison only. In `shares_and_effects` each method has its symbol.
_LINEAR = ("#8a8f98", "tanh taken for its argument")
_SYMBOLS = {"frozen": "square-open", "jacobian": "circle", "linear": "x-thin-open"}
_TOOLS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_NO_SHARES = "Nothing was attributed: pass tables of direct_logit_attribution."
BEFORE, AFTER = "as it is", "intervened"
_TOP = 8  # tokens of the next-token distribution that are shown
# The middle panel of `intervention` shows the first of these that the model has; only the first has a bound.
_SHARES = {"saturation": "share of tanh inputs beyond λ", "saturation_95": "share of tanh inputs with |tanh z| > 0.95"}
BOUND = "saturation_bound"
MEASURED = ("token_l2_mean", BOUND, *_SHARES)


@drawing
def logit_attribution(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Bars by component, one colour per method.

    Args:
        tables: by method ("frozen", "jacobian"), what `normlab.models.lens.direct_logit_attribution` returns;
            `.attrs["name"]` may say what was attributed if it is not a logit but a difference of two.
    """
    if not tables:
        raise NothingToShow(_NO_SHARES)
    figure = go.Figure()
    sums = []
    for method, table in tables.items():
        color, meaning = METHODS[method]
        rows = table[~table["component"].isin(["bias", "remainder"]) | (table["contribution"].abs() > 1e-3)]
        figure.add_bar(
            name=method,
            x=[_component(row.component, row.layer) for row in rows.itertuples()],
            y=finite(rows["contribution"]),
            marker=dict(color=color),
            hovertemplate=f"<b>{method}</b><br>%{{x}}: %{{y:+.3f}}<br><i>{meaning}</i><extra></extra>",
        )
        shares = table.loc[table["component"] != "remainder", "contribution"].sum()
        sums.append(f"{method} shares add up to {round(shares, 3) + 0.0:.3f}")
    figure.update_xaxes(title_text="component", type="category")
    figure.update_yaxes(title_text="share of the logit (nats)", zeroline=True, zerolinecolor=theme.NEUTRAL)
    figure.update_layout(barmode="group", bargap=0.3, legend=LEGEND_ABOVE, margin=dict(l=72, r=24, t=96, b=64))
    first = next(iter(tables.values())).attrs
    small = " · ".join([f"{first.get('name', 'logit')} {first['logit']:.3f}", *sums])
    theme.titled(figure, theme.in_one("Who writes the logit", small), "", 440)
    return figure.update_layout(autosize=True)


def _component(component: str, layer: int) -> str:
    return f"{component} {layer}" if component in ("attn", "mlp") else component


@drawing
def shares_and_effects(tables: Mapping[str, pd.DataFrame], effects: pd.DataFrame) -> go.Figure:
    """Each component's share against the measured effect of a small change of it: on the dotted line they agree.

    Args:
        tables: by method ("frozen", "jacobian", "linear"), what `normlab.models.lens.direct_logit_attribution` returns.
        effects: what `normlab.models.lens.component_effects` returns.
    """
    if not tables:
        raise NothingToShow(_NO_SHARES)
    measured = components(effects)
    figure = go.Figure()
    low, high = axis_bounds(measured["effect"], log=False, pad=0.1) or (0.0, 1.0)
    agree = dict(color=theme.NEUTRAL, dash="dot", width=1.4)
    figure.add_scatter(x=[low, high], y=[low, high], name="as measured", mode="lines", line=agree, hoverinfo="skip")
    for method, table in tables.items():
        color, meaning = METHODS.get(method, _LINEAR)
        rows = components(table).merge(measured[["name", "effect"]], on="name")
        hover = f"measured %{{x:.4f}}, {method} %{{y:.4f}}<br><i>{meaning}</i>"
        figure.add_scatter(
            x=finite(rows["effect"]),
            y=finite(rows["contribution"]),
            name=method,
            text=rows["name"].tolist(),
            mode="markers",
            marker=dict(color=color, size=10, symbol=_SYMBOLS[method], line=dict(width=2, color=color)),
            hovertemplate=f"<b>%{{text}}</b><br>{hover}<extra></extra>",
        )
    figure.update_xaxes(title_text="measured: nats per relative change of the component")
    figure.update_yaxes(title_text="attributed (nats)")
    figure.update_layout(legend=LEGEND_ABOVE)
    name = next(iter(tables.values())).attrs.get("name", "logit")
    about = f"one dot per component · on the dotted line, its share of the {name} is its measured effect"
    return theme.titled(figure, "What a small change of a component does, and what was attributed to it", about, 500)


@drawing
def by_tool(table: pd.DataFrame, metric: str) -> go.Figure:
    """A metric by layer as several tools measured it: the first a line, the others rings on it where they agree.

    Args:
        table: columns `tool layer value`, the tools in the order in which they are drawn.
        metric: a name of `METRICS`, for the axis.
    """
    if table.empty:
        raise NothingToShow("No tool measured anything.")
    row, figure = metric_row(metric), go.Figure()
    tools = list(dict.fromkeys(table["tool"]))
    for number, tool in enumerate(tools):
        rows, color = table[table["tool"] == tool].sort_values("layer"), _TOOLS[number % len(_TOOLS)]
        ring = dict(color=color, size=11 + 4 * number, symbol="circle-open", line=dict(width=2))
        look = dict(mode="markers", marker=ring) if number else dict(mode="lines", line=dict(color=color, width=2.2))
        hover = f"<b>{tool}</b>, layer %{{x}}: %{{y:.4~g}}<extra></extra>"
        x, y = whole(rows["layer"]), finite(rows["value"])
        figure.add_scatter(x=x, y=y, name=str(tool), hovertemplate=hover, **look)
    every = max(1, round(int(table["layer"].max()) / 12))
    figure.update_xaxes(title_text="layer (0 = embeddings)", dtick=every)
    figure.update_yaxes(title_text=row.axis, **value_axis(axis_bounds(table["value"], row.log), row.log))
    figure.update_layout(legend=LEGEND_ABOVE)
    about = "one stream, measured by " + " and by ".join(map(str, tools))
    return theme.titled(figure, f"{row.label[0].upper()}{row.label[1:]} by layer", about, 420)


@dataclass(frozen=True)
class Answer:
    """A model's loss (nats per token), next-token probabilities at the last position, and layer statistics."""

    loss: float
    next_token: np.ndarray
    stats: pd.DataFrame

    def profile(self, metric: str, site: str) -> pd.Series:
        """The metric by layer."""
        keep = (self.stats["metric"] == metric) & (self.stats["site"] == site) & (self.stats["mask"] == "all")
        return self.stats[keep].set_index("layer")["value"].sort_index()


def intervention(
    before: Answer, now: Answer, word: Callable[[int], str] = "#{}".format, no_share: str = ""
) -> go.Figure:
    """Size of the residual stream by layer; share of flat tanh inputs with its Chebyshev bound; next token.

    Args:
        before, now: the model as it is (grey, dashed, hatched), and changed.
        word: a token's text.
        no_share: said where the model has no share to show.
    """
    share = next((name for name in _SHARES if len(before.profile(name, "attn_norm_in"))), None)
    titles = ["size of the residual stream", _SHARES[share or "saturation"], "next token"]
    widths = [0.38, 0.34, 0.28]
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.1, column_widths=widths)
    figure.update_annotations(font=dict(size=13))
    accent = "#0072b2"
    top = np.argsort(-np.maximum(before.next_token, now.next_token), kind="stable")[:_TOP]
    words = [word(int(token)) for token in top]
    keys = {}
    for name, answer, color, dash, hatch in (
        (BEFORE, before, theme.NEUTRAL, "dash", "/"),
        (AFTER, now, accent, "solid", ""),
    ):
        keys[name] = line = dict(color=color, width=2.2, dash=dash)
        size, flat = answer.profile("token_l2_mean", "block_out"), answer.profile(share or "saturation", "attn_norm_in")
        _add_profile(figure, f"{name} size", size, line, _hover(name, "token_l2_mean"), 1)
        _add_profile(figure, f"{name} share", flat, line, _hover(name, share or "saturation"), 2, "lines+markers")
        figure.add_bar(
            name=f"{name} token",
            x=finite(answer.next_token[top]),
            y=words,
            marker=dict(color=color, pattern=dict(shape=hatch)),
            orientation="h",
            hovertemplate="%{x:.3f}<extra></extra>",
            row=1,
            col=3,
        )
    bound = dict(color=accent, width=1.2, dash="dot")
    _add_profile(figure, "bound", now.profile(BOUND, "attn_norm_in"), bound, "Chebyshev bound %{y:.4~g}", 2)
    figure.update_traces(showlegend=False)
    keys |= {"Chebyshev bound": bound} if share == "saturation" else {}
    for name, line in keys.items():  # the legend
        figure.add_scatter(name=name, x=[None], y=[None], mode="lines", line=line, row=1, col=1)
    depth = int(before.profile("token_l2_mean", "block_out").index.max())
    figure.update_xaxes(title_text="layer", range=[0, depth], col=1)
    figure.update_xaxes(title_text="layer", range=[0.5, depth + 0.5], col=2)
    figure.update_xaxes(title_text="probability", col=3)
    figure.update_yaxes(rangemode="tozero", title_text=metric_row("token_l2_mean").axis, col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    figure.update_yaxes(autorange="reversed", type="category", col=3)
    if share is None:
        note(figure, no_share, "2")
    legend, margin = dict(orientation="h", x=0, y=1.1, yanchor="bottom"), dict(t=84, l=66, r=24, b=54)
    return figure.update_layout(template=theme.template(), height=460, legend=legend, autosize=True, margin=margin)


def _add_profile(
    figure: go.Figure, name: str, values: pd.Series, line: dict, hover: str, column: int, mode: str = "lines"
) -> None:
    x, y = whole(values.index), finite(values)
    text = f"{hover}<extra></extra>"
    figure.add_scatter(name=name, x=x, y=y, mode=mode, line=line, hovertemplate=text, row=1, col=column)


def _hover(name: str, metric: str) -> str:
    return f"{name}<br>layer %{{x}}: %{{y:.4~g}}<br><i>{metric_row(metric).definition}</i>"


@drawing
def skip_cost(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Loss with block l skipped minus loss of the whole model, by layer, one line per model with its 95% interval.

    Args:
        tables: by scheme (or any name of a model), what `normlab.skip_sensitivity` returns.
    """
    rows = {name: table[table["part"] == "block"].sort_values("layer") for name, table in tables.items() if len(table)}
    if not any(len(table) for table in rows.values()):
        raise NothingToShow("No block was skipped: pass tables of normlab.skip_sensitivity.")
    figure, ends = go.Figure(), []
    for name, table in rows.items():
        style, mean = theme.style_of(name), table["skip_delta_loss"].to_numpy(float)
        hover = (
            "<br>block %{x} skipped: %{y:+.4f} nats per token"
            "<br><i>skip_delta_loss: loss with the block as identity minus loss of the whole</i>"
        )
        bars = interval_bars(mean, table["low"], table["high"])
        add_line(figure, name, whole(table["layer"]), mean, hover, mode="lines+markers", error_y=bars)
        ends.append(EndLabel(float(mean[-1]), style.title, style.color))
    height, margin = 480, dict(l=72, r=label_room(ends), t=96, b=58)
    held = [value for table in rows.values() for value in (*table["low"], *table["high"], *table["skip_delta_loss"])]
    bounds = axis_bounds([0.0, *map(float, held)], False) or (-1.0, 1.0)
    figure.update_yaxes(range=bounds, title_text="nats per token")
    figure.update_xaxes(title_text="skipped block", dtick=max(1, max(len(table) for table in rows.values()) // 12))
    figure.add_hline(y=0, line=dict(color=theme.NEUTRAL, width=1.2, dash="dot"))
    label_ends(figure, ends, bounds, height - margin["t"] - margin["b"], False)
    figure.update_layout(showlegend=False, margin=margin)
    about = "the others keep their place and their scales · bars: 95% interval"
    return theme.titled(figure, "Loss added by skipping a block", about, height)


@drawing
def future_effect(table: pd.DataFrame) -> go.Figure:
    """Relative change of block l's update when block s is skipped, as a heat map: s across, l upwards.

    Args:
        table: what `normlab.probes.skip_future_effect` returns.
    """
    if not len(table):
        raise NothingToShow("No pair of blocks: that needs a model of two blocks or more.")
    known = table["value"][np.isfinite(table["value"])]
    wide = table.pivot(index="layer", columns="skipped", values="value")
    figure = go.Figure(
        go.Heatmap(
            x=whole(wide.columns),
            y=whole(wide.index),
            z=[finite(row) for row in wide.to_numpy(float)],
            colorscale=SEQUENTIAL_SCALE,
            zmin=0.0,
            zmax=float(known.max()) if len(known) else 1.0,
            colorbar=dict(title=dict(text="relative<br>change", side="top"), thickness=10, outlinewidth=0),
            hovertemplate="block %{x} skipped: block %{y}'s update changes by %{z:.3f} of its size"
            "<br><i>skip_future_effect: mean over tokens of ‖u' − u‖/‖u‖</i><extra></extra>",
        )
    )
    every = max(1, len(wide) // 12)
    figure.update_xaxes(title_text="skipped block", showgrid=False, dtick=every)
    figure.update_yaxes(title_text="later block", showgrid=False, dtick=every)
    about = "change of a later block's update, relative to its size"
    return theme.titled(figure, "What later blocks do when one is skipped", about, 480)


def skip_map(cost: pd.DataFrame, effect: pd.DataFrame, chosen: int, name: str = "model") -> go.Figure:
    """Loss added by skipping each block, a heat map of what later blocks then change, the chosen block's column.

    Args:
        cost: what `normlab.skip_sensitivity` returns.
        effect: what `normlab.probes.skip_future_effect` returns; without rows for a model of one block.
        chosen: the block whose column is shown.
        name: scheme of the model.
    """
    titles = ["loss added by skipping it", "change of later blocks' updates", "that column"]
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.12)
    figure.update_annotations(font=dict(size=13))
    accent, depth = theme.style_of(name).color, int(cost["layer"].max())
    figure.add_trace(skip_cost({name: cost}).data[0].update(name="cost"), row=1, col=1)
    heat = future_effect(effect).data[0] if len(effect) else go.Heatmap()
    figure.add_trace(heat.update(name="effect", colorbar=dict(x=0.63, len=0.9, title=None)), row=1, col=2)
    column = effect[effect["skipped"] == chosen].sort_values("layer")
    x, y = whole(column["layer"]), finite(column["value"])
    figure.add_scatter(name="column", mode="lines+markers", x=x, y=y, line=dict(color=accent), row=1, col=3)
    ring = dict(symbol="circle-open", size=15, color="#d55e00")
    y = finite(cost.loc[cost["layer"] == chosen, "skip_delta_loss"])
    figure.add_scatter(name="chosen", mode="markers", marker=ring, x=[chosen], y=y, row=1, col=1)
    across = dict(range=[0.5, depth + 0.5], dtick=max(1, depth // 6))
    for panel, text in enumerate(("skipped block", "skipped block", "later block"), 1):
        figure.update_xaxes(title_text=text, col=panel, **across)
    figure.update_yaxes(title_text="nats per token", col=1)
    figure.update_yaxes(title_text="later block", col=2, **across)
    figure.update_yaxes(title_text="relative change", rangemode="tozero", col=3)
    if effect.empty:
        note(figure, "one block:<br>none comes after it", "2")
    if not np.isfinite(cost["loss"].iloc[0]):
        note(figure, "the model is broken:<br>its loss is not finite")
    page = dict(height=440, showlegend=False, autosize=True, margin=dict(t=48, l=66, r=24, b=54))
    return figure.update_layout(template=theme.template(), **page)
