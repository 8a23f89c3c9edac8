"""Widgets: figures with controls, for JupyterLab and Voila. Each is a state, controls that change it, and a function of
`normlab.figures` that draws it.

NormExplorer(runs)   choose schemes, depth, metric and training step; two views side by side; export
Intervene(model, text)   sliders on a model's lambda, kappa and gamma, blocks to skip: loss and layers answer live
SkipMap(model, batches)   which blocks a model needs, and what the others do without one
LogitAttribution(bridge, tokens, answers)   who writes a logit, while a tanh is made steeper (TransformerLens)
TrainTheatre(schemes, out, recipe)   schemes train side by side in the background; curves and layers grow
Change(kappa=0.5, layers={3: {"block": 0}})   a change to a model by layer; `with changed(model, change):` makes it
PlotWidget(draw, controls)   a widget of your own: `draw(theme)` makes the figure of what the controls say
explorer_page(runs, path)   the explorer as one HTML page that needs no kernel
live_page(models, folder)   a page that runs trained models and changes their normalization
"""

from __future__ import annotations

import lazy_loader

try:
    import anywidget  # noqa: F401
    import ipywidgets  # noqa: F401
except ImportError as error:  # pragma: no cover - needs an environment without them
    raise ImportError("widgets need ipywidgets, anywidget and plotly: pip install 'normlab[notebooks]'") from error

# Resolved at first use: one that trains or measures imports torch, which the explorer does without.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "attribution": ["LogitAttribution"],
        "change": ["Change", "changed"],
        "explorer": ["NormExplorer", "explorer_page"],
        "intervene": ["Intervene"],
        "live": ["live_page"],
        "live_training": ["TrainTheatre"],
        "plot": ["PlotWidget"],
        "skip_map": ["SkipMap"],
    },
)
