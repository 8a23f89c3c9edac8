"""SkipMap: which blocks a model needs, and what the others do without one; click a block, or move the slider."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import ipywidgets as widgets
import pandas as pd
import plotly.graph_objects as go
from torch import nn

from normlab.analysis.verdicts import bracketed
from normlab.figures import themed
from normlab.figures.one_model import skip_map
from normlab.probes import skip_future_effect, skip_sensitivity
from normlab.widgets.plot import PlotWidget


class SkipMap(PlotWidget):
    """Loss added by skipping each block, a heat map of what later blocks then change, the chosen block's column.

    Measuring takes two forward passes a block and batch, once; moving afterwards costs nothing. What is not finite is
    a gap. A line then says whether the whole model breaks, or the one without the chosen block.

    Args:
        model: a causal language model, ours or another.
        batches: dicts of its arguments (`input_ids`, perhaps `labels`).
        name: scheme of the model, for its colour and title.
    """

    def __init__(self, model: nn.Module, batches: Iterable[dict[str, Any]], name: str = "model") -> None:
        batches = list(batches)
        self.name = name
        self.cost = skip_sensitivity(model, batches, progress=False)
        depth = int(self.cost["layer"].max())
        self.effect = pd.DataFrame(columns=["skipped", "layer", "value"])
        if depth > 1:
            self.effect = skip_future_effect(model, batches, progress=False)
        self.block = widgets.IntSlider(value=1, min=1, max=depth, description="block", disabled=depth == 1)
        super().__init__(self._drawing, self.block, describe=self._sentence)
        self.block.observe(self.redraw, names="value")
        self.plot.on_click(self._clicked)

    def _drawing(self, theme: str) -> go.Figure:
        return themed(skip_map(self.cost, self.effect, self.block.value, self.name), theme)

    def _clicked(self, trace: str, block: float) -> None:
        """A click in the first two panels chooses the block under it."""
        if trace in ("cost", "effect"):
            self.block.value = int(block)

    def _sentence(self) -> str:
        block = self.block.value
        after = "" if (self.effect["skipped"] == block).any() else " · no block comes after it"
        return _cost_in_words(block, self.cost[self.cost["layer"] == block].iloc[0]) + after


def _cost_in_words(block: int, cost: pd.Series) -> str:
    if not math.isfinite(cost["loss"]):
        return "the whole model's loss is not finite: the model is broken, and skipping a block has no cost to measure"
    whole = f"whole model {cost['loss']:.4f}"
    if not math.isfinite(cost["skip_delta_loss"]):
        return f"without block {block} the loss is not finite: the model breaks, {whole}"
    between = bracketed(cost["low"], cost["high"], "{:+.4f}".format)
    return f"without block {block}: {cost['skip_delta_loss']:+.4f}{between} nats per token, {whole}"
