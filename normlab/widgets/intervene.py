"""Intervene: change a model's norms, skip its blocks, and see at once what every layer does about it."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import torch
from torch import nn

from normlab.errors import NormlabError
from normlab.figures import themed
from normlab.figures.one_model import intervention
from normlab.probes import sites
from normlab.widgets.change import SLOPES, Change, ask, slope_of
from normlab.widgets.plot import PlotWidget


class Intervene(PlotWidget):
    """Sliders on lambda (DyT: alpha), kappa and gamma of all norms, the exact statistic, blocks to skip: live answers.

    Left: size of the residual stream by layer. Middle: share of tanh inputs beyond lambda, beside its Chebyshev bound
    (DyT: of those where tanh is flat, which nothing bounds). Right: the next token's distribution. Grey, dashed and
    hatched: the model as it is.

    Args:
        model: a Hugging Face causal language model, ours or another.
        text: what the model reads: a string (with `tokenizer`), or token ids (batch, length).
        tokenizer: encodes the text and names tokens; without one, tokens are shown by number.
        theme: "light" or "dark"; default: as JupyterLab's.

    Raises:
        NormlabError: a string without a tokenizer, or fewer than two tokens.
    """

    def __init__(
        self, model: nn.Module, text: str | torch.Tensor, tokenizer: Any = None, theme: str | None = None
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.tokens = _encode(text, tokenizer)
        self.before = self.now = ask(model, self.tokens, Change())
        self._make_controls(len(sites(model).blocks))
        sliders, others = [self.lam, self.kappa, self.gain], [self.exact, self.skip, self.reset]
        rows = widgets.HBox(sliders), widgets.HBox(others)
        super().__init__(self._drawing, *rows, describe=self._sentence, theme=theme)
        for control in (*sliders, self.exact, self.skip):
            control.observe(self._changed, names="value")

    def _make_controls(self, depth: int) -> None:
        def factor(name: str, on: bool) -> widgets.FloatLogSlider:
            return widgets.FloatLogSlider(
                value=1.0,
                base=2,
                min=-4,
                max=4,
                step=0.25,
                description=f"{name} ×",
                readout_format=".3g",
                disabled=not on,
            )

        blocks = sites(self.model).blocks
        norms = [norm for block in blocks for norm in block.norms]
        slopes = {SLOPES[name]: None for name in map(slope_of, norms) if name}
        self.lam = factor("/".join(slopes) or "λ", bool(slopes))
        self.kappa = factor("κ", any(isinstance(getattr(norm, "kappa", None), float) for norm in norms))
        self.gain = factor("γ", True)
        carries = any(getattr(block.module, "carried", None) for block in blocks)
        self.exact = widgets.Checkbox(value=False, description="exact statistic", indent=False, disabled=not carries)
        self.skip = widgets.SelectMultiple(options=range(1, depth + 1), rows=4, description="skip blocks")
        self.reset = widgets.Button(description="as it is", icon="undo")
        self.reset.on_click(lambda _: self.undo())
        self._quiet = False

    @property
    def change(self) -> Change:
        """What the controls say."""
        factors = {"lam": self.lam.value, "kappa": self.kappa.value, "gain": self.gain.value}
        skipped = {layer: {"block": 0} for layer in self.skip.value}
        return Change(**factors, exact=self.exact.value, layers=skipped)

    def _changed(self, _: object) -> None:
        with self.lock:
            if not self._quiet:
                self.now = ask(self.model, self.tokens, self.change)
                self.redraw()

    def undo(self) -> None:
        """All controls back to the model as it is."""
        with self.lock:
            self._quiet = True
            try:
                for slider in (self.lam, self.kappa, self.gain):
                    slider.value = 1.0
                self.exact.value, self.skip.value = False, ()
            finally:
                self._quiet = False
            self._changed(None)

    def _drawing(self, theme: str) -> go.Figure:
        unknown = "these norms do not tell<br>what enters their tanh"
        no_share = "no λ or α in these norms:<br>no bound to change" if self.lam.disabled else unknown
        return themed(intervention(self.before, self.now, self._word, no_share), theme)

    def _sentence(self) -> str:
        before, now = self.before.loss, self.now.loss
        over = f"nats per token, over {self.tokens.numel()} tokens"
        if not math.isfinite(before):
            then = f", now <b>{now:.4f}</b> {over}" if math.isfinite(now) else ""
            return f"<b>the loss of the model as it is is not finite</b>: it is broken before any change{then}"
        if not math.isfinite(now):
            return f"loss as it is <b>{before:.4f}</b> {over}, now <b>not finite</b>: this change breaks the model"
        return f"loss as it is <b>{before:.4f}</b>, now <b>{now:.4f} ({now - before:+.4f})</b> {over}"

    def _word(self, token: int) -> str:
        # Never a bare number: an axis would take it for one.
        if self.tokenizer is None:
            return f"#{token}"
        return html.escape(f"{self.tokenizer.decode([token])!r} #{token}", quote=False)  # plotly takes tags for markup


def _encode(text: str | torch.Tensor | Sequence[Sequence[int]], tokenizer: Any) -> torch.Tensor:
    if isinstance(text, str):
        if tokenizer is None:
            raise NormlabError("a text needs a tokenizer: pass tokenizer=..., or token ids instead of the text")
        text = [tokenizer.encode(text)]
    tokens = torch.as_tensor(text)
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise NormlabError(
            f"tokens have the shape {tuple(tokens.shape)}: pass (batch, length) with at least 2 tokens a row"
        )
    return tokens
