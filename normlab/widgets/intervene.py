"""Intervene: change a model's norms or dim its blocks, and see the effect on every layer at once."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
import traitlets
from torch import nn

from normlab.errors import NormlabError
from normlab.figures import themed
from normlab.figures.one_model import Answer, intervention
from normlab.models.pretrained import load_model
from normlab.release import shipped_models
from normlab.report.inputs import token_text
from normlab.widgets.change import Change, ask, ask_row
from normlab.widgets.live import KERNEL, SCRIPTS, describe, model_spec, page_tokenizer, weights_of
from normlab.widgets.plot import PageWidget, static_text

# What a browser is given at most: bytes of weights, tokens of a text. Beyond that a model answers from the kernel.
MOST_BYTES, MOST_TOKENS = 64_000_000, 4096


class Intervene(PageWidget):
    """Sliders by layer on lambda (DyT: alpha), kappa, gamma, the statistic, and dimmers: live answers.

    It is the page of `normlab page` in a notebook: layer sizes, tanh inputs beyond lambda, each block's worth, loss by
    token, the next token. Small models of ours run in the browser, with the weights they have when the widget is made.
    Others answer from the kernel, as do models with hooks, pruned ones and those with adapters, and texts of more than
    4,096 tokens. A text that the reader writes is read up to the model's positions; in the browser also up to 1,024
    tokens, or as many as `text` has where that is more.

    Traits: `change` (JSON of a `Change`; a `Change` can be set), `row` (of the text), `token` (its position; a negative
    one counts from the end).

    Args:
        model: a Hugging Face causal language model, ours or another.
        text: what the model reads: a string (with `tokenizer`), or token ids (batch, length). The reader chooses a row.
        tokenizer: encodes the text and names tokens. Without one, tokens are shown by number.

    Raises:
        NormlabError: a string without a tokenizer, or fewer than two tokens.
    """

    _esm = static_text("page_side.js", *SCRIPTS, "intervene_widget.js")
    _css = static_text("pages.css")
    change = traitlets.Any().tag(sync=True)
    row = traitlets.Int(0).tag(sync=True)
    token = traitlets.Int(None, allow_none=True).tag(sync=True)
    data = traitlets.Dict().tag(sync=True)
    weights = traitlets.Bytes(b"").tag(sync=True)

    def __init__(self, model: nn.Module, text: str | torch.Tensor, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.tokens = _encode(text, tokenizer)
        about = describe(model, type(model).__name__)
        weights = b""
        is_small = sum(parameter.nbytes for parameter in model.parameters()) <= MOST_BYTES
        if is_small and self.tokens.shape[1] <= MOST_TOKENS:
            try:
                about["spec"] = model_spec(model, longest=self.tokens.shape[1])
                weights = weights_of(model)
            except (NormlabError, AttributeError):  # a part that the page does not compute, or not a Llama
                about["spec"] = None
        passages = [{"tokens": row, "name": None} for row in self.tokens.tolist()]
        data = {"models": [about], "pairs": [], "passages": passages, "tour": False, "kernel": KERNEL}
        super().__init__(change={}, data=data | _words(model, tokenizer), weights=weights if about["spec"] else b"")

    def __repr__(self) -> str:
        return f"Intervene({self._shipped_as or type(self.model).__name__})"

    @cached_property
    def _shipped_as(self) -> str:
        """The name of the model that comes with normlab which the browser was given; empty if it is another."""
        name = Path(getattr(self.model.config, "_name_or_path", "") or "").name
        spec = self.data["models"][0]["spec"]
        if spec is None or name not in shipped_models():
            return ""
        kept = load_model(name, dtype=next(self.model.parameters()).dtype)
        return name if model_spec(kept, self.tokens.shape[1]) == spec and weights_of(kept) == self.weights else ""

    @traitlets.validate("change")
    def _check(self, proposal: Any) -> dict[str, Any]:
        value = proposal["value"]
        return (value if isinstance(value, Change) else Change(**value)).to_json()

    def undo(self) -> None:
        """Back to the model as it is."""
        self.change = {}

    @property
    def before(self) -> Answer:
        """The model as it is, over all rows; its next token is that after the chosen one."""
        return ask(self.model, self.tokens, Change(), *self._place())

    @property
    def now(self) -> Answer:
        """The changed model, over all rows; its next token is that after the chosen one."""
        return ask(self.model, self.tokens, Change(**self.change), *self._place())

    def _place(self) -> tuple[int, int]:
        """Row and position of the chosen token. As on the page, what is not there is row 0, and the nearest token."""
        length = self.tokens.shape[1]
        row = self.row if 0 <= self.row < len(self.tokens) else 0
        token = length - 1 if self.token is None else self.token
        return row, max(0, min(length + token if token < 0 else token, length - 1))

    @property
    def figure(self) -> go.Figure:
        """Both as a plain figure, for pages without a kernel."""
        traits = self.data["models"][0]["traits"]
        unknown = "these norms do not tell<br>what enters their tanh"
        no_share = unknown if "slope" in traits else "no λ or α in these norms:<br>no bound to change"
        return themed(intervention(self.before, self.now, self._word, no_share), "light")

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The changed model's answer to a row of tokens."""
        return ask_row(self.model, asked["tokens"], Change(**asked["change"]), asked["at"])

    def _word(self, token: int) -> str:
        # Never a bare number: an axis would take it for one.
        if self.tokenizer is None:
            return f"#{token}"
        text = token_text(self.tokenizer, token)
        return html.escape(f"{text!r} #{token}", quote=False)  # plotly takes tags for markup


def _words(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The page's tokenizer where it has this kind, else the text of each token."""
    if tokenizer is None:
        return {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    known = page_tokenizer(backend.to_str()) if backend is not None else None
    if known is not None:
        return {"tokenizer": known}
    return {"vocabulary": [token_text(tokenizer, token) for token in range(model.config.vocab_size)]}


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
