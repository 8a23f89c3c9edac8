"""Figures: a selection of runs or a table in, a plotly Figure out. No file access here, and no widgets.

shown = normlab.choose(runs, depth=16)
normlab.figures.layer_growth(shown, "token_l2_mean").show()

A table of `normlab.load_runs` is accepted in place of a selection. A table without what a figure needs gives a figure
that says what is missing; a wrong argument raises NormlabError. The module of each figure says what it draws:

registry, theme   every figure by name, and how to add one; colours, light and dark pages
training, rates, growth, depth, layers, published, settings   of runs
profile           one training step, all schemes in one panel: the explorer's figure
one_model, report, outliers   of one model, of recordings, of several models
differences       of what `normlab.diff` found
kernels           of the kernels' times
METRICS           label, unit and definition of every metric
"""

from __future__ import annotations

import importlib
import pkgutil

try:
    import plotly  # noqa: F401
except ImportError as error:  # pragma: no cover - needs an environment without plotly
    raise ImportError("figures need plotly: pip install 'normlab[figures]'") from error

from normlab.figures.depth import depth_scaling, trains_at_depth
from normlab.figures.growth import growth_before_after, layer_growth
from normlab.figures.kernels import copy_share
from normlab.figures.layers import by_layer, by_pair
from normlab.figures.one_model import logit_attribution, shares_and_effects
from normlab.figures.outliers import few_bits, outliers
from normlab.figures.profile import profile
from normlab.figures.published import published_ratios
from normlab.figures.rates import loss_by_rate, quantity_by_rate
from normlab.figures.registry import FIGURES, FigureRow, draw_all, register
from normlab.figures.report import branch_costs, layer_figure, layer_map, void_shares
from normlab.figures.settings import saturation, variant_differences
from normlab.figures.theme import message_figure, themed
from normlab.figures.training import loss_curves
from normlab.probes.metrics import ALL_METRICS as METRICS

__all__ = [
    "FIGURES",
    "METRICS",
    "FigureRow",
    "branch_costs",
    "by_layer",
    "by_pair",
    "copy_share",
    "depth_scaling",
    "draw_all",
    "few_bits",
    "growth_before_after",
    "layer_figure",
    "layer_growth",
    "layer_map",
    "logit_attribution",
    "loss_by_rate",
    "loss_curves",
    "message_figure",
    "outliers",
    "profile",
    "published_ratios",
    "quantity_by_rate",
    "register",
    "saturation",
    "shares_and_effects",
    "themed",
    "trains_at_depth",
    "variant_differences",
    "void_shares",
]

# Figures in other files of this folder register themselves, too. The order is that of the papers' figures.
for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
_in_order = sorted(FIGURES.items(), key=lambda item: item[1].paper_figure)
FIGURES.clear()
FIGURES.update(_in_order)
