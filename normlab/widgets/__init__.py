"""Widgets: figures with controls, for JupyterLab and Voila. Built on `normlab.figures` and tables only.

NormExplorer(runs)   choose schemes, depth, metric and training step; two views side by side; export
Intervene(model, text)   sliders on a model's lambda, kappa and gamma, blocks to skip: loss and layers answer live
SkipMap(model, batches)   which blocks a model needs, and what the others do without one
explorer_page(runs, path)   the explorer as one HTML page that needs no kernel
"""

from __future__ import annotations

try:
    import anywidget  # noqa: F401  # what plotly's FigureWidget is made of
    import ipywidgets  # noqa: F401
except ImportError as error:  # pragma: no cover - needs an environment without them
    raise ImportError("widgets need ipywidgets, anywidget and plotly: pip install 'normlab[notebooks]'") from error

from normlab.widgets.explorer import NormExplorer
from normlab.widgets.intervene import Intervene
from normlab.widgets.page import explorer_page
from normlab.widgets.skipmap import SkipMap

__all__ = ["Intervene", "NormExplorer", "SkipMap", "explorer_page"]
