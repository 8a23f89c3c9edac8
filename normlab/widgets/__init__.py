"""Widgets: figures with controls, for JupyterLab and Voila. Each is a state, controls that change it, and a function of
`normlab.figures` that draws it.

NormExplorer(runs)   choose schemes, depth, metric and training step; two views side by side; export
Intervene(model, text)   sliders on a model's lambda, kappa and gamma, blocks to skip: loss and layers answer live
SkipMap(model, batches)   which blocks a model needs, and what the others do without one
LogitAttribution(bridge, tokens, answers)   who writes a logit, while a tanh is made steeper (TransformerLens)
KernelTimes(times)   a kernel's call, shape and pass: what it must move, how long it takes, and its floor
TrainTheatre(schemes, out, recipe)   schemes train side by side in the background; curves and layers grow
Change(kappa=0.5, layers={3: {"block": 0}})   a change to a model by layer; `with changed(model, change):` makes it
PlotWidget(draw, controls)   a widget of your own: `draw(theme)` makes the figure of what the controls say
explorer_page(runs, path)   the explorer as one HTML page that needs no kernel
live_page(models, folder)   a page that runs trained models and changes their normalization
"""

from __future__ import annotations

import importlib
from typing import Any

try:
    import anywidget  # noqa: F401
    import ipywidgets  # noqa: F401
except ImportError as error:  # pragma: no cover - needs an environment without them
    raise ImportError("widgets need ipywidgets, anywidget and plotly: pip install 'normlab[notebooks]'") from error

# Resolved at first use: one that trains or measures imports torch, which the explorer does without.
_PUBLIC = {
    "NormExplorer": "normlab.widgets.explorer",
    "Intervene": "normlab.widgets.intervene",
    "Change": "normlab.widgets.change",
    "changed": "normlab.widgets.change",
    "SkipMap": "normlab.widgets.skip_map",
    "LogitAttribution": "normlab.widgets.attribution",
    "KernelTimes": "normlab.widgets.kernels",
    "TrainTheatre": "normlab.widgets.live_training",
    "PlotWidget": "normlab.widgets.plot",
    "explorer_page": "normlab.widgets.explorer",
    "live_page": "normlab.widgets.live",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'normlab.widgets' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
