"""SkipMap: which blocks a model needs, and what the others do without one; click a block, or move the slider."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import nn

from normlab.figures import theme as look
from normlab.figures.skipping import future_effect, skip_cost
from normlab.probes import skip_future_effect, skip_sensitivity
from normlab.widgets.live import LiveFigure


class SkipMap(widgets.VBox):
    """Loss added by skipping each block, a heat map of what later blocks then change, the chosen block's column.

    Measuring takes two forward passes a block and batch, once; moving afterwards costs nothing.

    Args:
        model: a causal language model, ours or another.
        batches: dicts of its arguments (`input_ids`, perhaps `labels`).
        name: scheme of the model, for its colour and title.

    Raises:
        NormlabError: a model with one block only.
    """

    def __init__(
        self, model: nn.Module, batches: Iterable[dict[str, Any]], name: str = "model", theme: str = "light"
    ) -> None:
        super().__init__()
        batches = list(batches)
        self.cost = skip_sensitivity(model, batches, progress=False)
        self.effect = skip_future_effect(model, batches, progress=False)
        self._lock = threading.RLock()
        self.name, self.theme = name, theme
        depth = int(self.cost["layer"].max())
        self.block = widgets.IntSlider(value=1, min=1, max=depth, description="block")
        self.block.observe(lambda _: self.redraw(), names="value")
        self.said = widgets.HTML()
        self.figure = LiveFigure(self._panels(depth), self._lock)
        for trace in self.figure.data:
            trace.on_click(self._clicked)
        self.redraw()
        self.children = [widgets.HBox([self.block, self.said]), self.figure]

    def _panels(self, depth: int) -> go.Figure:
        titles = ["loss added by skipping it", "change of later blocks' updates", "that column"]
        figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.12)
        figure.update_annotations(font=dict(size=13))
        cost = skip_cost({self.name: self.cost}).data[0]
        cost.update(name="cost", mode="markers+lines")
        figure.add_trace(cost, row=1, col=1)
        heat = future_effect(self.effect).data[0]
        heat.update(name="effect", colorbar=dict(x=0.63, len=0.9, title=None))
        figure.add_trace(heat, row=1, col=2)
        accent = look.ink(look.style_of(self.name).color, self.theme)
        figure.add_scatter(name="column", mode="lines+markers", line=dict(color=accent), row=1, col=3)
        figure.add_scatter(
            name="chosen", mode="markers", marker=dict(symbol="circle-open", size=15, color="#d55e00"), row=1, col=1
        )
        for column, text in ((1, "skipped block"), (2, "skipped block"), (3, "later block")):
            figure.update_xaxes(title_text=text, col=column, range=[0.5, depth + 0.5])
        figure.update_yaxes(title_text="nats per token", col=1)
        figure.update_yaxes(title_text="later block", range=[0.5, depth + 0.5], col=2)
        figure.update_yaxes(title_text="relative change", rangemode="tozero", col=3)
        return figure.update_layout(
            template=look.template(self.theme),
            height=440,
            showlegend=False,
            autosize=True,
            margin=dict(t=48, l=66, r=24, b=54),
        )

    def _clicked(self, trace: Any, points: Any, _: Any) -> None:
        """A click in the first two panels chooses the block under it."""
        if points.xs and trace.name in ("cost", "effect"):
            self.block.value = int(points.xs[0])

    def redraw(self) -> None:
        """Show the chosen block's column and mark it."""
        with self.figure.changing() as traces:
            chosen = self.block.value
            column = self.effect[self.effect["skipped"] == chosen].sort_values("layer")
            traces["column"].update(x=[int(v) for v in column["layer"]], y=[float(v) for v in column["value"]])
            cost = self.cost[self.cost["layer"] == chosen].iloc[0]
            traces["chosen"].update(x=[chosen], y=[float(cost["skip_delta_loss"])])
            after = " · no block comes after it" if column.empty else ""
            self.said.value = (
                f"without block {chosen}: {cost['skip_delta_loss']:+.4f} [{cost['low']:+.4f}, {cost['high']:+.4f}] "
                f"nats per token, whole model {cost['loss']:.4f}{after}"
            )

    def static(self) -> go.Figure:
        """What is shown now as a plain figure, for pages without a kernel."""
        with self._lock:
            return go.Figure(self.figure)
