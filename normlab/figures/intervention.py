"""What a model does when it is changed, beside what it does as it is: layers, saturation, the next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.figures import theme as look
from normlab.probes.metrics import metric_row

HEIGHT = 460
BEFORE, AFTER = "as it is", "intervened"
_TOP = 8  # tokens of the next-token distribution that are shown
# What the middle panel shows, the first that the model has, and its title; only the first has a bound.
_SHARES = {"saturation": "share of tanh inputs beyond λ", "saturation_95": "share of tanh inputs with |tanh z| > 0.95"}
BOUND = "saturation_bound"
MEASURED = ("token_l2_mean", BOUND, *_SHARES)


@dataclass(frozen=True)
class Answer:
    """What the model did: loss in nats a token, next-token probabilities at the last position, and layer statistics."""

    loss: float
    next_token: np.ndarray
    stats: pd.DataFrame

    def profile(self, metric: str, site: str) -> pd.Series:
        rows = self.stats[
            (self.stats["metric"] == metric) & (self.stats["site"] == site) & (self.stats["mask"] == "all")
        ]
        return rows.set_index("layer")["value"].sort_index()


def intervention(
    before: Answer, now: Answer, word: Callable[[int], str] = "#{}".format, no_share: str = "", theme: str = "light"
) -> go.Figure:
    """Size of the residual stream by layer; share of tanh inputs that are flat, beside its Chebyshev bound; the next
    token's distribution.

    Args:
        before, now: the model as it is (grey, dashed, hatched) and as it answers when changed.
        word: what a token is called.
        no_share: said where the model has no share to show.
    """
    share = next((name for name in _SHARES if len(before.profile(name, "attn_norm_in"))), None)
    titles = ["size of the residual stream", _SHARES[share or "saturation"], "next token"]
    figure = make_subplots(
        rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.1, column_widths=[0.38, 0.34, 0.28]
    )
    figure.update_annotations(font=dict(size=13))
    accent = look.ink("#0072b2", theme)
    top = np.argsort(-np.maximum(before.next_token, now.next_token), kind="stable")[:_TOP]
    words = [word(int(token)) for token in top]
    for name, answer, color, dash, hatch in (
        (BEFORE, before, look.NEUTRAL, "dash", "/"),
        (AFTER, now, accent, "solid", ""),
    ):
        line = dict(color=color, width=2.2, dash=dash)
        size, flat = answer.profile("token_l2_mean", "block_out"), answer.profile(share or "saturation", "attn_norm_in")
        figure.add_trace(_line(f"{name} size", size, line, _hover(name, "token_l2_mean")), row=1, col=1)
        flat_hover = _hover(name, share or "saturation")
        figure.add_trace(_line(f"{name} share", flat, line, flat_hover, mode="lines+markers"), row=1, col=2)
        figure.add_bar(
            name=f"{name} token",
            x=look.finite(answer.next_token[top]),
            y=words,
            marker=dict(color=color, pattern=dict(shape=hatch)),
            orientation="h",
            hovertemplate="%{x:.3f}<extra></extra>",
            row=1,
            col=3,
        )
    limit = now.profile(BOUND, "attn_norm_in")
    bound = dict(color=accent, width=1.2, dash="dot")
    figure.add_trace(_line("bound", limit, bound, "Chebyshev bound %{y:.4~g}<extra></extra>"), row=1, col=2)
    figure.update_traces(showlegend=False)
    keys = {BEFORE: figure.data[0].line, AFTER: figure.data[3].line}
    keys |= {"Chebyshev bound": bound} if share == "saturation" else {}
    for name, line in keys.items():  # what the legend shows
        figure.add_scatter(name=name, x=[None], y=[None], mode="lines", line=line, row=1, col=1)
    depth = int(before.profile("token_l2_mean", "block_out").index.max())
    figure.update_xaxes(title_text="layer", range=[0, depth], col=1)
    figure.update_xaxes(title_text="layer", range=[0.5, depth + 0.5], col=2)
    figure.update_xaxes(title_text="probability", col=3)
    figure.update_yaxes(rangemode="tozero", title_text=metric_row("token_l2_mean").axis, col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    figure.update_yaxes(autorange="reversed", type="category", col=3)
    if share is None:
        look.note(figure, no_share, "2")
    return figure.update_layout(
        template=look.template(theme),
        height=HEIGHT,
        legend=dict(orientation="h", x=0, y=1.1, yanchor="bottom"),
        autosize=True,
        margin=dict(t=84, l=66, r=24, b=54),
    )


def _line(name: str, values: pd.Series, line: dict, hover: str, mode: str = "lines") -> go.Scatter:
    layers = [int(layer) for layer in values.index]
    return go.Scatter(name=name, x=layers, y=look.finite(values), mode=mode, line=line, hovertemplate=hover)


def _hover(name: str, metric: str) -> str:
    return f"{name}<br>layer %{{x}}: %{{y:.4~g}}<br><i>{metric_row(metric).definition}</i><extra></extra>"
