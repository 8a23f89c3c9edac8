"""Figures of one model: who writes a logit, what a change does, what its blocks are good for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.attribution import components
from normlab.analysis.selection import NothingToShow
from normlab.figures import theme
from normlab.figures.draw import (
    LEGEND_ABOVE,
    add_line,
    axis_bounds,
    finite,
    interval_bars,
    mark,
    note,
    whole,
)
from normlab.figures.registry import drawing
from normlab.probes.metrics import metric_row

METHODS = {
    "frozen": ("#0072b2", "share of the logit, norm held fixed; the shares add up to it"),
    "jacobian": ("#d55e00", "effect of a small change of the component, to first order"),
}
# The third method is for comparison only. In `shares_and_effects` each method has its symbol.
_LINEAR = (theme.NEUTRAL, "tanh taken for its argument")
_SYMBOLS = {"frozen": "square-open", "jacobian": "circle", "linear": "x-thin-open"}
_NO_SHARES = "Nothing was attributed: pass tables of direct_logit_attribution."
BEFORE, AFTER = "as it is", "intervened"
_TOP = 8  # tokens of the next-token distribution that are shown
# The middle panel of `intervention` shows the first of these that the model has; only the first has a bound.
_SHARES = {"saturation": "share of tanh inputs beyond λ", "saturation_95": "share of tanh inputs with |tanh z| > 0.95"}
BOUND = "saturation_bound"
MEASURED = ("token_l2_mean", BOUND, *_SHARES)


@drawing
def logit_attribution(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Bars by component, one colour per method.

    Args:
        tables: by method ("frozen", "jacobian"), what `normlab.models.lens.direct_logit_attribution` returns;
            `.attrs["name"]` may say what was attributed if it is not a logit but a difference of two.
    """
    if not tables:
        raise NothingToShow(_NO_SHARES)
    figure = go.Figure()
    sums = []
    for method, table in tables.items():
        color, meaning = METHODS[method]
        rows = table[~table["component"].isin(["bias", "remainder"]) | (table["contribution"].abs() > 1e-3)]
        numbered = rows["component"].isin(["attn", "mlp"])
        names = rows["component"] + (" " + rows["layer"].astype(str)).where(numbered, "")
        figure.add_bar(
            name=method,
            x=names.tolist(),
            y=finite(rows["contribution"]),
            marker=dict(color=color),
            hovertemplate=f"<b>{method}</b><br>%{{x}}: %{{y:+.3f}}<br><i>{meaning}</i><extra></extra>",
        )
        shares = table.loc[table["component"] != "remainder", "contribution"].sum()
        sums.append(f"{method} shares add up to {round(shares, 3) + 0.0:.3f}")
    figure.update_xaxes(title_text="component", type="category")
    figure.update_yaxes(title_text="share of the logit (nats)", zeroline=True, zerolinecolor=theme.NEUTRAL)
    figure.update_layout(barmode="group", bargap=0.3, legend=LEGEND_ABOVE, margin=dict(l=72, r=24, t=96, b=64))
    first = next(iter(tables.values())).attrs
    small = " · ".join([f"{first.get('name', 'logit')} {first['logit']:.3f}", *sums])
    theme.titled(figure, theme.in_one("Who writes the logit", small), "", 440)
    return figure.update_layout(autosize=True)


@drawing
def shares_and_effects(tables: Mapping[str, pd.DataFrame], effects: pd.DataFrame) -> go.Figure:
    """Each component's share against the measured effect of a small change of it: on the dotted line they agree.

    Args:
        tables: by method ("frozen", "jacobian", "linear"), what `normlab.models.lens.direct_logit_attribution` returns.
        effects: what `normlab.models.lens.component_effects` returns.
    """
    if not tables:
        raise NothingToShow(_NO_SHARES)
    measured = components(effects)
    figure = go.Figure()
    low, high = axis_bounds(measured["effect"], log=False, pad=0.1) or (0.0, 1.0)
    agree = dict(color=theme.NEUTRAL, dash="dot", width=1.4)
    figure.add_scatter(x=[low, high], y=[low, high], name="as measured", mode="lines", line=agree, hoverinfo="skip")
    for method, table in tables.items():
        color, meaning = METHODS.get(method, _LINEAR)
        rows = components(table).merge(measured[["name", "effect"]], on="name")
        hover = f"measured %{{x:.4f}}, {method} %{{y:.4f}}<br><i>{meaning}</i>"
        figure.add_scatter(
            x=finite(rows["effect"]),
            y=finite(rows["contribution"]),
            name=method,
            text=rows["name"].tolist(),
            mode="markers",
            marker=mark(color, _SYMBOLS[method], 10),
            hovertemplate=f"<b>%{{text}}</b><br>{hover}<extra></extra>",
        )
    figure.update_xaxes(title_text="measured: nats per relative change of the component")
    figure.update_yaxes(title_text="attributed (nats)")
    figure.update_layout(legend=LEGEND_ABOVE)
    name = next(iter(tables.values())).attrs.get("name", "logit")
    about = f"one dot per component · on the dotted line, its share of the {name} is its measured effect"
    return theme.titled(figure, "What a small change of a component does, and what was attributed to it", about, 500)


@dataclass(frozen=True)
class Answer:
    """A model's loss (nats per token), next-token probabilities after a token of a row, and layer statistics.

    Row and token count from 0. Loss and statistics are of all rows.
    """

    loss: float
    next_token: np.ndarray
    stats: pd.DataFrame
    row: int
    token: int

    def profile(self, metric: str, site: str) -> pd.Series:
        """The metric by layer."""
        keep = (self.stats["metric"] == metric) & (self.stats["site"] == site) & (self.stats["mask"] == "all")
        return self.stats[keep].set_index("layer")["value"].sort_index()


def intervention(
    before: Answer, now: Answer, word: Callable[[int], str] = "#{}".format, no_share: str = ""
) -> go.Figure:
    """Size of the residual stream by layer; share of flat tanh inputs with its Chebyshev bound; next token.

    Args:
        before, now: the model as it is (grey, dashed, hatched), and changed, asked for the same row and token.
        word: a token's text.
        no_share: said where the model has no share to show.
    """
    share = next((name for name in _SHARES if len(before.profile(name, "attn_norm_in"))), None)
    titles = ["size of the residual stream", _SHARES[share or "saturation"]]
    titles.append(f"next token after token {before.token} of row {before.row}")
    widths = [0.38, 0.34, 0.28]
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.1, column_widths=widths)
    figure.update_annotations(font=dict(size=13))
    accent = "#0072b2"
    top = np.argsort(-np.fmax(before.next_token, now.next_token), kind="stable")[:_TOP]
    words = [word(int(token)) for token in top]
    keys = {}
    for name, answer, color, dash, hatch in (
        (BEFORE, before, theme.NEUTRAL, "dash", "/"),
        (AFTER, now, accent, "solid", ""),
    ):
        keys[name] = line = dict(color=color, width=2.2, dash=dash)
        size, flat = answer.profile("token_l2_mean", "block_out"), answer.profile(share or "saturation", "attn_norm_in")
        _add_profile(figure, f"{name} size", size, line, _hover(name, "token_l2_mean"), 1)
        _add_profile(figure, f"{name} share", flat, line, _hover(name, share or "saturation"), 2, "lines+markers")
        figure.add_bar(
            name=f"{name} token",
            x=finite(answer.next_token[top]),
            y=words,
            marker=dict(color=color, pattern=dict(shape=hatch)),
            orientation="h",
            hovertemplate="%{x:.3f}<extra></extra>",
            row=1,
            col=3,
        )
    bound = dict(color=accent, width=1.2, dash="dot")
    _add_profile(figure, "bound", now.profile(BOUND, "attn_norm_in"), bound, "Chebyshev bound %{y:.4~g}", 2)
    figure.update_traces(showlegend=False)
    keys |= {"Chebyshev bound": bound} if share == "saturation" else {}
    for name, line in keys.items():  # the legend
        figure.add_scatter(name=name, x=[None], y=[None], mode="lines", line=line, row=1, col=1)
    depth = int(before.profile("token_l2_mean", "block_out").index.max())
    figure.update_xaxes(title_text="layer", range=[0, depth], col=1)
    figure.update_xaxes(title_text="layer", range=[0.5, depth + 0.5], col=2)
    figure.update_xaxes(title_text="probability", col=3)
    figure.update_yaxes(rangemode="tozero", title_text=metric_row("token_l2_mean").axis, col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    figure.update_yaxes(autorange="reversed", type="category", col=3)
    if share is None:
        note(figure, no_share, "2")
    legend, margin = dict(orientation="h", x=0, y=1.1, yanchor="bottom"), dict(t=84, l=66, r=24, b=54)
    return figure.update_layout(template=theme.template(), height=460, legend=legend, autosize=True, margin=margin)


def _add_profile(
    figure: go.Figure, name: str, values: pd.Series, line: dict, hover: str, column: int, mode: str = "lines"
) -> None:
    x, y = whole(values.index), finite(values)
    text = f"{hover}<extra></extra>"
    figure.add_scatter(name=name, x=x, y=y, mode=mode, line=line, hovertemplate=text, row=1, col=column)


def _hover(name: str, metric: str) -> str:
    return f"{name}<br>layer %{{x}}: %{{y:.4~g}}<br><i>{metric_row(metric).definition}</i>"


def skip_map(cost: pd.DataFrame, effect: pd.DataFrame, chosen: int, name: str = "model") -> go.Figure:
    """Loss added by skipping each block, a heat map of what later blocks then change, the chosen block's column.

    Args:
        cost: what `normlab.skip_sensitivity` returns.
        effect: what `normlab.probes.skip_future_effect` returns; without rows for a model of one block.
        chosen: the block whose column is shown.
        name: scheme of the model.
    """
    titles = ["loss added by skipping it", "change of later blocks' updates", "that column"]
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.12)
    figure.update_annotations(font=dict(size=13))
    cost, depth = cost[cost["part"] == "block"].sort_values("layer"), int(cost["layer"].max())
    bars = interval_bars(cost["skip_delta_loss"], cost["low"], cost["high"])
    hover = (
        "<br>block %{x} skipped: %{y:+.4f} nats per token"
        "<br><i>skip_delta_loss: loss with the block as identity minus loss of the whole</i>"
    )
    add_line(figure, name, whole(cost["layer"]), cost["skip_delta_loss"], hover, name="cost", mode="lines+markers",
             error_y=bars, row=1, col=1)  # fmt: skip
    wide = effect.pivot(index="layer", columns="skipped", values="value")
    hover = (
        "block %{x} skipped: block %{y}'s update changes by %{z:.3f} of its size"
        "<br><i>skip_future_effect: mean over tokens of ‖u' − u‖/‖u‖</i><extra></extra>"
    )
    z = [finite(row) for row in wide.to_numpy(float)] or None
    most = max(filter(math.isfinite, effect["value"]), default=1.0)
    bar = dict(x=0.63, len=0.9, thickness=10, outlinewidth=0)
    figure.add_heatmap(name="effect", x=whole(wide.columns), y=whole(wide.index), z=z, zmin=0.0, zmax=most,
                       colorbar=bar, colorscale=theme.SEQUENTIAL, hovertemplate=hover, hoverongaps=False,
                       row=1, col=2)  # fmt: skip
    column = effect[effect["skipped"] == chosen].sort_values("layer")
    x, y, line = whole(column["layer"]), finite(column["value"]), dict(color=theme.style_of(name).color)
    figure.add_scatter(name="column", mode="lines+markers", x=x, y=y, line=line, row=1, col=3)
    ring = dict(symbol="circle-open", size=15, color="#d55e00")
    y = finite(cost.loc[cost["layer"] == chosen, "skip_delta_loss"])
    figure.add_scatter(name="chosen", mode="markers", marker=ring, x=[chosen], y=y, row=1, col=1)
    across = dict(range=[0.5, depth + 0.5], dtick=max(1, depth // 6))
    for panel, text in enumerate(("skipped block", "skipped block", "later block"), 1):
        figure.update_xaxes(title_text=text, col=panel, **across)
    figure.update_yaxes(title_text="nats per token", col=1)
    figure.update_yaxes(title_text="later block", col=2, **across)
    figure.update_yaxes(title_text="relative change", rangemode="tozero", col=3)
    if effect.empty:
        note(figure, "one block:<br>none comes after it", "2")
    if not np.isfinite(cost["loss"].iloc[0]):
        note(figure, "the model is broken:<br>its loss is not finite")
    page = dict(height=440, showlegend=False, autosize=True, margin=dict(t=48, l=66, r=24, b=54))
    return figure.update_layout(template=theme.template(), **page)
