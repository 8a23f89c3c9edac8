"""Every figure as a row of data, in the order in which a report shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from normlab.figures.curves import depth_scaling, loss_curves
from normlab.figures.endpoints import growth_before_after
from normlab.figures.growth import gradient_growth, layer_growth
from normlab.figures.published import published_ratios


@dataclass(frozen=True)
class FigureRow:
    """One figure of a report. Call it with a table to draw it.

    Args:
        paper_figure: the published figure it reproduces (B: BHyT, C: The Curse of Depth), or N for one of our own.
        shows: what it shows, in a sentence.
        options: arguments of `draw` that make it this figure.
        overlays: whether published values can be drawn over it.
    """

    name: str
    paper_figure: str
    shows: str
    draw: Callable[..., go.Figure]
    options: Mapping[str, Any] = field(default_factory=dict)
    overlays: bool = False

    def __call__(self, runs: pd.DataFrame, published: pd.DataFrame | None = None, **options: Any) -> go.Figure:
        """Draw it from a table of runs; `options` override the row's own."""
        overlay = {"published": published} if self.overlays else {}
        return self.draw(runs, **{**overlay, **self.options, **options})


_ROWS = (
    FigureRow(
        "token_l2_growth",
        "B1",
        "L2 norm of a token by layer and training step",
        layer_growth,
        {"metric": "token_l2_mean"},
        True,
    ),
    FigureRow(
        "variance_growth",
        "B1, C1",
        "variance over features by layer and training step",
        layer_growth,
        {"metric": "feature_var_mean"},
        True,
    ),
    FigureRow(
        "growth_before_after",
        "N1",
        "last layer before and after training, with both controls",
        growth_before_after,
        overlays=True,
    ),
    FigureRow("loss_curves", "B2", "training and held-out loss by step", loss_curves),
    FigureRow(
        "gradient_total_growth",
        "B3",
        "gradient norm of the batch by layer and training step",
        gradient_growth,
        {"metric": "grad_l2_total"},
    ),
    FigureRow(
        "gradient_token_growth",
        "B3",
        "gradient norm of a token by layer and training step",
        gradient_growth,
        {"metric": "grad_l2_mean"},
    ),
    FigureRow("depth_scaling", "C5", "held-out loss against depth", depth_scaling),
    FigureRow(
        "published_ratios", "N1", "ratios to the base scheme, the papers' and ours", published_ratios, overlays=True
    ),
)

FIGURES: dict[str, FigureRow] = {row.name: row for row in _ROWS}
