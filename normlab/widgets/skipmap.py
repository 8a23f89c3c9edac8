"""SkipMap: which blocks a model needs, and what the others do without one; click a block, or move the slider."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import ipywidgets as widgets
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import nn

from normlab.figures import theme as look
from normlab.figures.skipping import future_effect, skip_cost
from normlab.probes import skip_future_effect, skip_sensitivity
from normlab.widgets.live import Frame, finite


class SkipMap(Frame):
    """Loss added by skipping each block, a heat map of what later blocks then change, the chosen block's column.

    Measuring takes two forward passes a block and batch, once; moving afterwards costs nothing. What is not finite is
    a gap, and the line beside the slider says which model breaks: the whole one, or the one without the chosen block.

    Args:
        model: a causal language model, ours or another.
        batches: dicts of its arguments (`input_ids`, perhaps `labels`).
        name: scheme of the model, for its colour and title.
        theme: "light" or "dark"; default: as JupyterLab's.
    """

    def __init__(
        self, model: nn.Module, batches: Iterable[dict[str, Any]], name: str = "model", theme: str | None = None
    ) -> None:
        super().__init__(theme)
        batches = list(batches)
        self.name = name
        self.cost = skip_sensitivity(model, batches, progress=False)
        depth = int(self.cost["layer"].max())
        self.effect = (
            skip_future_effect(model, batches, progress=False)
            if depth > 1
            else pd.DataFrame(columns=["skipped", "layer", "value"])
        )
        self.block = widgets.IntSlider(value=1, min=1, max=depth, description="block", disabled=depth == 1)
        self.block.observe(lambda _: self.redraw(), names="value")
        self.said = widgets.HTML()
        self.fill(self._panels(depth), widgets.HBox([self.block, self.said]))
        for trace in self.figure.data:
            trace.on_click(self._clicked)

    def _panels(self, depth: int) -> go.Figure:
        titles = ["loss added by skipping it", "change of later blocks' updates", "that column"]
        figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.12)
        figure.update_annotations(font=dict(size=13))
        cost = skip_cost({self.name: self.cost}).data[0]
        accent = look.ink(look.style_of(self.name).color, self.theme)
        cost.update(name="cost", mode="markers+lines", y=finite(self.cost["skip_delta_loss"]), line_color=accent)
        figure.add_trace(cost, row=1, col=1)
        figure.add_trace(self._heat(), row=1, col=2)
        if self.effect.empty:
            _note(figure, "2", "one block:<br>none comes after it")
        if not math.isfinite(self.cost["loss"].iloc[0]):
            _note(figure, "", "the model is broken:<br>its loss is not finite")
        figure.add_scatter(name="column", mode="lines+markers", line=dict(color=accent), row=1, col=3)
        figure.add_scatter(
            name="chosen", mode="markers", marker=dict(symbol="circle-open", size=15, color="#d55e00"), row=1, col=1
        )
        for column, text in ((1, "skipped block"), (2, "skipped block"), (3, "later block")):
            figure.update_xaxes(title_text=text, col=column, range=[0.5, depth + 0.5], dtick=max(1, depth // 6))
        figure.update_yaxes(title_text="nats per token", col=1)
        figure.update_yaxes(title_text="later block", range=[0.5, depth + 0.5], dtick=max(1, depth // 6), col=2)
        figure.update_yaxes(title_text="relative change", rangemode="tozero", col=3)
        return figure.update_layout(
            template=look.template(self.theme),
            height=440,
            showlegend=False,
            autosize=True,
            margin=dict(t=48, l=66, r=24, b=54),
        )

    def _heat(self) -> go.Heatmap:
        if self.effect.empty:
            return go.Heatmap(name="effect")
        heat = future_effect(self.effect).data[0]
        return heat.update(name="effect", colorbar=dict(x=0.63, len=0.9, title=None))

    def _clicked(self, trace: Any, points: Any, _: Any) -> None:
        """A click in the first two panels chooses the block under it."""
        if points.xs and trace.name in ("cost", "effect"):
            self.block.value = int(points.xs[0])

    def redraw(self) -> None:
        """Show the chosen block's column and mark it."""
        with self.figure.changing() as traces:
            chosen = self.block.value
            column = self.effect[self.effect["skipped"] == chosen].sort_values("layer")
            traces["column"].update(x=[int(v) for v in column["layer"]], y=finite(column["value"]))
            cost = self.cost[self.cost["layer"] == chosen].iloc[0]
            traces["chosen"].update(x=[chosen], y=finite([cost["skip_delta_loss"]]))
            after = " · no block comes after it" if column.empty else ""
            self.said.value = _sentence(chosen, cost) + after


def _note(figure: go.Figure, axis: str, text: str) -> None:
    where = dict(x=0.5, y=0.5, xref=f"x{axis} domain", yref=f"y{axis} domain")
    figure.add_annotation(text=text, showarrow=False, font=dict(color=look.NEUTRAL), **where)


def _sentence(block: int, cost: pd.Series) -> str:
    if not math.isfinite(cost["loss"]):
        return "the whole model's loss is not finite: the model is broken, and skipping a block has no cost to measure"
    whole = f"whole model {cost['loss']:.4f}"
    if not math.isfinite(cost["skip_delta_loss"]):
        return f"without block {block} the loss is not finite: the model breaks, {whole}"
    low, high = cost["low"], cost["high"]
    between = f" [{low:+.4f}, {high:+.4f}]" if math.isfinite(low) and math.isfinite(high) else ""
    return f"without block {block}: {cost['skip_delta_loss']:+.4f}{between} nats per token, {whole}"
