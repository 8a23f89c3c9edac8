"""LogitAttribution: who writes a logit, while the final norm's tanh is made steeper or flatter."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import ipywidgets as widgets
import pandas as pd
import plotly.graph_objects as go
import torch

from normlab.figures import themed
from normlab.figures.one_model import METHODS, logit_attribution
from normlab.widgets.change import Change, change_norm, slope_of
from normlab.widgets.plot import PlotWidget

_FUNCTIONS = {"tanh": torch.tanh, "erf": torch.erf}  # a norm's method tanh_input or erf_input gives what enters


class LogitAttribution(PlotWidget):
    """Direct logit attribution by both methods, and a slider on the slope inside the final norm's tanh or erf.

    A flat tanh is linear, and without a divisor both methods agree. A steep one is saturated. Most features then make
    up the logit and respond to no small change; the slope is that of the few features near zero. Each answer leaves
    the model bit for bit as it was.

    Args:
        bridge: from `normlab.models.lens.to_bridge`.
        tokens: (batch, length).
        answers: (batch,) token ids whose logits are attributed.
        against: (batch,) token ids whose logits are subtracted: softmax ignores a constant, so only differences mean
            something.

    Raises:
        NormlabError: TransformerLens is not installed, or what `direct_logit_attribution` refuses.
    """

    def __init__(
        self, bridge: Any, tokens: torch.Tensor, answers: torch.Tensor, against: torch.Tensor | None = None
    ) -> None:
        from normlab.models.lens import direct_logit_attribution

        self._attribute = direct_logit_attribution
        self.bridge, self.tokens, self.answers, self.against = bridge, tokens, answers, against
        self._norm: Any = bridge.ln_final.original_component
        self.steepness = widgets.FloatLogSlider(
            value=1.0, base=2, min=-4, max=6, step=0.25, description="slope ×", readout_format=".3g"
        )
        self.steepness.disabled = slope_of(self._norm) is None
        self.tables, self._saturated = self.ask()
        super().__init__(self._drawing, self.steepness, describe=lambda: self._saturated)
        self.steepness.observe(self._moved, names="value")

    def _drawing(self, theme: str) -> go.Figure:
        return themed(logit_attribution(self.tables), theme)

    def ask(self) -> tuple[dict[str, pd.DataFrame], str]:
        """By method, the attribution with the slope that the slider says; and how saturated the final norm is then."""
        with ExitStack() as undo:
            change_norm(self._norm, Change(lam=self.steepness.value), undo)
            asked = self.bridge, self.tokens, self.answers
            tables = {name: self._attribute(*asked, against=self.against, method=name) for name in METHODS}
            return tables, self._sentence()

    def _moved(self, _: object) -> None:
        with self.lock:
            self.tables, self._saturated = self.ask()
            self.redraw()

    def _sentence(self) -> str:
        """How saturated the final norm is; empty where it does not tell what enters its tanh or erf."""
        if self.steepness.disabled or not getattr(self._norm, "bounded", True):
            return "no feature passes a tanh in the final norm"
        name = next((name for name in _FUNCTIONS if hasattr(self._norm, f"{name}_input")), None)
        if name is None:
            return ""
        with torch.no_grad():
            stream = self.bridge.ln_final.hook_in
            _, cache = self.bridge.run_with_cache(self.tokens, names_filter=stream.name)
            z = getattr(self._norm, f"{name}_input")(cache[stream.name][:, -1])
        share = float((_FUNCTIONS[name](z).abs() > 0.95).float().mean())
        return f"{share:.1%} of the final norm's features are saturated: |{name} z| > 0.95"
