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


class LogitAttribution(PlotWidget):
    """Direct logit attribution by both methods, and a slider that multiplies the slope inside the final norm's tanh.

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
        if self.steepness.disabled:
            return "the final norm has no tanh"
        with torch.no_grad():
            stream = self.bridge.ln_final.hook_in
            _, cache = self.bridge.run_with_cache(self.tokens, names_filter=stream.name)
            z = self._norm.tanh_input(cache[stream.name][:, -1])
        return f"{float((z.tanh().abs() > 0.95).float().mean()):.1%} of the final norm's features are saturated"
