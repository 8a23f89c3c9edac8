"""The kernels' times beside a copy's. Colours and symbols are peers' here, not schemes'."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.selection import NothingToShow
from normlab.figures import theme
from normlab.figures.draw import interval_bars
from normlab.figures.registry import drawing

# Peers that every device has; others take what is left of the palette, in the order of their names.
_PEERS = {
    "normlab": ("#0072b2", "circle"),
    "eager": ("#d55e00", "square"),
    "compile": ("#009e73", "diamond"),
    "torch": ("#cc79a7", "triangle-up"),
}
_OTHERS = (("#e69f00", "cross"), ("#56b4e9", "x"), ("#000000", "star"), (theme.NEUTRAL, "hexagon"))
_ROW, _GAP = 24, 64  # pixels of a function, and between devices


@drawing
def copy_share(shares: pd.DataFrame) -> go.Figure:
    """Share of the copy rate that each norm reaches: a row per function, a mark per peer, a panel per device.

    Bars go from the least to the most over the shapes that were timed.

    Args:
        shares: what `normlab.analysis.kernels.copy_shares` returns.
    """
    if shares.empty:
        raise NothingToShow("Nothing was timed. On a CUDA machine: make gpu, then run this again.")
    functions = {device: list(dict.fromkeys(own["function"])) for device, own in shares.groupby("device", sort=False)}
    counts = [len(names) for names in functions.values()]
    inner = _ROW * sum(counts) + _GAP * (len(counts) - 1)
    gap = _GAP / inner if len(counts) > 1 else 0.0
    grid = dict(row_heights=counts, vertical_spacing=gap, subplot_titles=list(functions))
    figure = make_subplots(len(counts), 1, shared_xaxes="all", **grid)
    looks, seen = _peer_looks(shares["peer"]), set[str]()
    for place, (device, names) in enumerate(functions.items(), 1):
        for order, (peer, (color, symbol)) in enumerate(looks.items()):
            rows = shares[(shares["device"] == device) & (shares["peer"] == peer)]
            if rows.empty:
                continue
            shift = 0.6 * ((order + 0.5) / len(looks) - 0.5)  # of a row
            figure.add_scatter(
                x=rows["share"].tolist(),
                y=[names.index(name) + shift for name in rows["function"]],
                customdata=rows["function"].tolist(),
                error_x=interval_bars(rows["share"], rows["least"], rows["most"], color=color, width=0),
                name=peer,
                legendgroup=peer,
                showlegend=peer not in seen,
                mode="markers",
                marker=dict(color=color, symbol=symbol, size=9),
                hovertemplate=f"<b>{peer}</b>, %{{customdata}}: %{{x:.1%}}<extra></extra>",
                row=place,
                col=1,
            )
            seen.add(peer)
        ticks = dict(tickvals=list(range(len(names))), ticktext=names, ticks="", showgrid=True)
        figure.update_yaxes(range=[len(names) - 0.4, -0.6], **ticks, row=place, col=1)
    figure.add_vline(x=1.0, line=dict(color=theme.NEUTRAL, width=1.2, dash="dash"))
    most = max(1.0, float(shares["most"].max()))
    figure.update_xaxes(range=[0, 1.06 * most], tickformat=".0%", nticks=6, showticklabels=True)
    figure.update_xaxes(title_text="share of the copy rate", row=len(counts), col=1)
    figure.update_annotations(font=dict(size=13))
    legend = dict(orientation="h", x=0, y=-70 / inner, yanchor="top")
    figure.update_layout(legend=legend, margin=dict(l=110, r=30, t=112, b=112))
    about = "forward and backward · marks: mean over shapes, bars: their range · dashed: a copy of the same bytes"
    return theme.titled(figure, "How near to a copy each norm runs", about, 224 + inner)


def _peer_looks(peers: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and symbol by peer, ours first: the same in every figure for those that every device has."""
    names = set(peers)
    others = sorted(names - set(_PEERS))
    rest = {peer: _OTHERS[index % len(_OTHERS)] for index, peer in enumerate(others)}
    return {peer: look for peer, look in _PEERS.items() if peer in names} | rest
