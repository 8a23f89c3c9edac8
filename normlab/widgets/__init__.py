"""Widgets: figures with controls, for JupyterLab and Voila. Built on `normlab.figures` and tables only.

NormExplorer(runs)   choose schemes, depth, metric and training step; two views side by side; export
"""

from __future__ import annotations

try:
    import anywidget  # noqa: F401  # what plotly's FigureWidget is made of
    import ipywidgets  # noqa: F401
except ImportError as error:  # pragma: no cover - needs an environment without them
    raise ImportError("widgets need ipywidgets, anywidget and plotly: pip install 'normlab[notebooks]'") from error

from normlab.widgets.explorer import NormExplorer

__all__ = ["NormExplorer"]
