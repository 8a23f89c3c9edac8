"""What blocks are good for: what skipping one costs (C2), what later blocks then do differently (D2), or both."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.figures import theme as look
from normlab.figures.labels import EndLabel, label_ends, label_room


def skip_cost(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Loss with block l skipped minus loss of the whole model, by layer, a line a model with its 95% interval.

    Args:
        tables: by scheme (or any name of a model), what `normlab.skip_sensitivity` returns.
    """
    title = "Loss added by skipping a block"
    rows = {name: table[table["part"] == "block"].sort_values("layer") for name, table in tables.items() if len(table)}
    if not any(len(table) for table in rows.values()):
        return look.message_figure("No block was skipped: pass tables of normlab.skip_sensitivity.", title)
    figure = go.Figure()
    ends = []
    for name, table in rows.items():
        style = look.style_of(name)
        mean = table["skip_delta_loss"].to_numpy(float)
        up, down = (np.nan_to_num(np.abs(table[side].to_numpy(float) - mean)) for side in ("high", "low"))
        figure.add_scatter(
            x=[int(layer) for layer in table["layer"]],
            y=look.finite(mean),
            error_y=dict(type="data", array=up.tolist(), arrayminus=down.tolist(), thickness=1, width=3),
            mode="lines+markers",
            name=name,
            meta=dict(scheme=name),
            line=dict(color=style.color, dash=style.dash, width=2),
            hovertemplate=f"<b>{style.title}</b><br>block %{{x}} skipped: %{{y:+.4f}} nats per token"
            "<br><i>skip_delta_loss: loss with the block as identity minus loss of the whole</i><extra></extra>",
        )
        ends.append(EndLabel(float(mean[-1]), style.title, style.color))
    height, margin = 480, dict(l=72, r=label_room(ends), t=96, b=58)
    reach = [value for table in rows.values() for value in (*table["low"], *table["high"], *table["skip_delta_loss"])]
    bounds = look.axis_bounds([0.0, *map(float, reach)], False) or (-1.0, 1.0)
    figure.update_yaxes(range=bounds, title_text="nats per token")
    figure.update_xaxes(title_text="skipped block", dtick=max(1, max(len(table) for table in rows.values()) // 12))
    figure.add_hline(y=0, line=dict(color=look.NEUTRAL, width=1.2, dash="dot"))
    label_ends(figure, ends, bounds, height - margin["t"] - margin["b"], False)
    figure.update_layout(showlegend=False, margin=margin)
    return look.titled(figure, title, "the others keep their place and their scales · bars: 95% interval", height)


def future_effect(table: pd.DataFrame, title: str = "What later blocks do when one is skipped") -> go.Figure:
    """Relative change of block l's update when block s is skipped, as a heat map: s across, l upwards.

    Args:
        table: what `normlab.probes.skip_future_effect` returns.
    """
    if not len(table):
        return look.message_figure("No pair of blocks: that needs a model of two blocks or more.", title)
    known = table["value"][np.isfinite(table["value"])]
    wide = table.pivot(index="layer", columns="skipped", values="value")
    figure = go.Figure(
        go.Heatmap(
            x=[int(s) for s in wide.columns],
            y=[int(layer) for layer in wide.index],
            z=[look.finite(row) for row in wide.to_numpy(float)],
            colorscale=[list(stop) for stop in look.SEQUENTIAL],
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
    return look.titled(figure, title, "change of a later block's update, relative to its size", 480)


def skip_map(
    cost: pd.DataFrame, effect: pd.DataFrame, chosen: int, name: str = "model", theme: str = "light"
) -> go.Figure:
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
    accent, depth = look.ink(look.style_of(name).color, theme), int(cost["layer"].max())
    line = skip_cost({name: cost}).data[0].update(name="cost", line_color=accent)
    heat = future_effect(effect).data[0] if len(effect) else go.Heatmap()
    figure.add_trace(line, row=1, col=1)
    figure.add_trace(heat.update(name="effect", colorbar=dict(x=0.63, len=0.9, title=None)), row=1, col=2)
    own = effect[effect["skipped"] == chosen].sort_values("layer")
    column = dict(x=[int(layer) for layer in own["layer"]], y=look.finite(own["value"]), line=dict(color=accent))
    figure.add_scatter(name="column", mode="lines+markers", row=1, col=3, **column)
    ring = dict(symbol="circle-open", size=15, color="#d55e00")
    place = dict(x=[chosen], y=look.finite(cost.loc[cost["layer"] == chosen, "skip_delta_loss"]))
    figure.add_scatter(name="chosen", mode="markers", marker=ring, row=1, col=1, **place)
    across = dict(range=[0.5, depth + 0.5], dtick=max(1, depth // 6))
    for panel, text in enumerate(("skipped block", "skipped block", "later block"), 1):
        figure.update_xaxes(title_text=text, col=panel, **across)
    figure.update_yaxes(title_text="nats per token", col=1)
    figure.update_yaxes(title_text="later block", col=2, **across)
    figure.update_yaxes(title_text="relative change", rangemode="tozero", col=3)
    if effect.empty:
        look.note(figure, "one block:<br>none comes after it", "2")
    if not np.isfinite(cost["loss"].iloc[0]):
        look.note(figure, "the model is broken:<br>its loss is not finite")
    margin = dict(t=48, l=66, r=24, b=54)
    return figure.update_layout(
        template=look.template(theme), height=440, showlegend=False, autosize=True, margin=margin
    )
