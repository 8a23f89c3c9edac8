"""The kernels' tables: registers by width, times of each call, shares of the copy rate.

Colours and symbols are peers' or calls' here, not schemes'. Tables: `normlab.analysis.kernels`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.selection import NothingToShow
from normlab.figures import theme
from normlab.figures.draw import EndLabel, axis_bounds, label_ends, label_room, value_axis, whole
from normlab.figures.registry import drawing

MOST_REGISTERS = 255  # of a thread, on every target
# Peers that every device has; others take what is left of the palette, in the order of their names.
_PEERS = {
    "normlab": ("#0072b2", "circle"),
    "eager": ("#d55e00", "square"),
    "compile": ("#009e73", "diamond"),
    "torch": ("#cc79a7", "triangle-up"),
}
_OTHERS = (("#e69f00", "cross"), ("#56b4e9", "x"), ("#000000", "star"), (theme.NEUTRAL, "hexagon"))
_PASSES = ("forward", "backward", "both")
_DASHED = dict(color=theme.NEUTRAL, width=1.2, dash="dash")


@drawing
def registers_by_width(builds: pd.DataFrame, functions: Sequence[str], target: str) -> go.Figure:
    """Registers per thread in bf16 by width, forward and backward, one line per function; dashed: the most there are.

    A kernel that needs more spills them to memory.

    Args:
        builds: what `normlab.analysis.kernels.read_builds` returns.
        functions: those to draw, at most as many as the palette has colours.
        target: "sm_90" and the like.
    """
    rows = builds[(builds["target"] == target) & (builds["dtype"] == "bf16") & builds["function"].isin(functions)]
    if rows.empty:
        raise NothingToShow(f"Nothing was compiled for {target} in bf16.")
    sides = ("forward", "backward")
    figure = make_subplots(1, 2, subplot_titles=sides, horizontal_spacing=0.17)
    bounds = (0.0, 1.04 * MOST_REGISTERS)
    looks = dict(zip(functions, [*_PEERS.values(), *_OTHERS], strict=False))
    labels: list[EndLabel] = []
    for column, side in enumerate(sides, 1):
        labels, panel = [], rows[rows["direction"] == side]
        for function, (color, symbol) in looks.items():
            builds_of = panel[panel["function"] == function].sort_values("width")
            if builds_of.empty:
                continue
            figure.add_scatter(
                x=builds_of["width"].tolist(),
                y=builds_of["registers"].tolist(),
                name=function,
                mode="lines+markers",
                line=dict(color=color, width=2),
                marker=dict(symbol=symbol, size=7),
                meta=dict(function=function, direction=side),
                customdata=builds_of[["warps", "block", "spilled_bytes", "shared_bytes"]].to_numpy(),
                hovertemplate=f"<b>{function}</b>, width %{{x}}: %{{y}} registers<br>%{{customdata[0]}} warps, "
                "block %{customdata[1]}, %{customdata[2]} bytes spilled, %{customdata[3]} shared<extra></extra>",
                row=1,
                col=column,
            )
            labels.append(EndLabel(float(builds_of["registers"].iloc[-1]), function, color))
        label_ends(figure, labels, bounds, 300, log=False, axis="" if column == 1 else "2")
        widths = sorted(set(whole(panel["width"])))
        ticks = dict(tickmode="array", tickvals=widths, ticktext=[f"{width:,}" for width in widths])
        reach = axis_bounds(widths, log=True)
        figure.update_xaxes(title_text="width", type="log", range=reach, **ticks, row=1, col=column)
    figure.add_hline(y=MOST_REGISTERS, line=_DASHED)
    figure.update_yaxes(range=bounds, title_text="registers per thread")
    figure.update_layout(showlegend=False, margin=dict(l=70, r=label_room(labels), t=112, b=60))
    about = f"compiled ahead of time for {target}, bf16; dashed: the most there are, {MOST_REGISTERS}"
    return theme.titled(figure, "Registers per thread by width", about, 460)


@drawing
def call_times(times: pd.DataFrame) -> go.Figure:
    """Time of each call, forward and backward together, one panel per shape, one mark per peer: left is faster.

    Args:
        times: what `normlab.analysis.kernels.read_times` returns, of one device.
    """
    rows = times[times["pass"] == "both"]
    if rows.empty:
        raise NothingToShow("Nothing was timed forward and backward.")
    shapes = list(dict.fromkeys(rows["shape"]))
    calls = list(dict.fromkeys(rows["function"]))
    figure = make_subplots(1, len(shapes), subplot_titles=shapes, shared_yaxes=True, horizontal_spacing=0.04)
    for column, shape in enumerate(shapes, 1):
        panel = rows[rows["shape"] == shape]
        _add_peers(figure, panel, "microseconds", "function", "%{x:,.0f} us", set(rows["peer"]), column)
        bounds = axis_bounds(panel["microseconds"], log=True)
        figure.update_xaxes(title_text="us", **value_axis(bounds, log=True), row=1, col=column)
    about = ", ".join([*dict.fromkeys(rows["device"]), *dict.fromkeys(rows["dtype"])])
    about += " · one panel per shape, rows x width · left is faster"
    return _dots(figure, calls, 34, "Time of a call, forward and backward", about)


@drawing
def copy_share(times: pd.DataFrame) -> go.Figure:
    """Share of the measured copy rate that each call reaches: one row per shape, one panel per pass.

    At 1 a call takes as long as a copy of the bytes that it must move: its floor.

    Args:
        times: what `normlab.analysis.kernels.read_times` returns, of any devices.
    """
    if times.empty:
        raise NothingToShow("Nothing was timed. On a CUDA machine: make gpu, then run this again.")
    passes = [name for name in _PASSES if name in set(times["pass"])]
    lines = times["function"] + ", " + times["shape"]
    times = times.assign(line=lines if times["device"].nunique() == 1 else lines + ", " + times["device"])
    figure = make_subplots(1, len(passes), subplot_titles=passes, shared_yaxes=True, horizontal_spacing=0.04)
    for column, side in enumerate(passes, 1):
        panel = times[times["pass"] == side]
        _add_peers(figure, panel, "share_of_copy", "line", "%{x:.1%}", set(times["peer"]), column)
    figure.add_vline(x=1.0, line=_DASHED)
    most = max(1.0, float(times["share_of_copy"].max()))
    figure.update_xaxes(title_text="share of the copy rate", range=[0, 1.06 * most], tickformat=".0%")
    about = f"{', '.join(dict.fromkeys(times['device']))} · dashed: the floor, a copy of the same bytes"
    return _dots(figure, list(dict.fromkeys(times["line"])), 20, "How near to its floor each call runs", about)


@drawing
def one_call(times: pd.DataFrame, moved: Mapping[str, float], title: str) -> go.Figure:
    """Left: megabytes that a call must move. Right: each peer's time, and its floor, the bytes at the copy rate.

    Args:
        times: rows of one call, shape and pass (`normlab.analysis.kernels.read_times`).
        moved: megabytes by name (`normlab.analysis.kernels.moved`).
        title: which call it is.
    """
    titles = ["bytes that must move", "time, and its floor"]
    figure = make_subplots(1, 2, subplot_titles=titles, column_widths=[0.35, 0.65], horizontal_spacing=0.12)
    figure.add_bar(
        name="bytes",
        x=list(moved),
        y=list(moved.values()),
        marker=dict(color=theme.NEUTRAL),
        hovertemplate="%{x}: %{y:.2f} MB<extra></extra>",
        row=1,
        col=1,
    )
    peers = [str(peer) for peer in times["peer"]]
    looks = _peer_looks(peers)
    figure.add_bar(
        name="time",
        x=peers,
        y=times["microseconds"].tolist(),
        text=[f"{row.microseconds:,.0f} us, {row.share_of_copy:.0%} of copy" for row in times.itertuples()],
        marker=dict(color=[looks[peer][0] for peer in peers]),
        hovertemplate="%{x}: %{y:,.1f} us<extra></extra>",
        row=1,
        col=2,
    )
    figure.add_scatter(
        name="floor",
        x=peers,
        y=(times["floor_bytes"] / times["copy_gigabytes_per_second"] / 1e3).tolist(),
        mode="lines+markers",
        line=dict(color=theme.NEUTRAL, dash="dash"),
        marker=dict(symbol="line-ew-open", size=36, line=dict(width=2)),
        hovertemplate="floor %{y:,.1f} us<extra></extra>",
        row=1,
        col=2,
    )
    figure.update_yaxes(title_text="MB", rangemode="tozero", col=1)
    figure.update_yaxes(title_text="us", rangemode="tozero", col=2)
    figure.update_layout(showlegend=False, autosize=True, bargap=0.4, margin=dict(t=104, l=66, r=24, b=54))
    return theme.titled(figure, title if len(times) else f"not timed: {title}", "", 430)


def _add_peers(
    figure: go.Figure, rows: pd.DataFrame, x: str, y: str, shown: str, peers: Iterable[str], column: int
) -> None:
    """Draw one panel: a mark per peer and row, at its columns `x` and `y`."""
    for peer, (color, symbol) in _peer_looks(peers).items():
        mine = rows[rows["peer"] == peer]
        figure.add_scatter(
            x=mine[x].tolist(),
            y=mine[y].tolist(),
            name=peer,
            legendgroup=peer,
            showlegend=column == 1,
            mode="markers",
            marker=dict(color=color, symbol=symbol, size=10),
            hovertemplate=f"<b>{peer}</b>, %{{y}}: {shown}<extra></extra>",
            row=1,
            col=column,
        )


def _peer_looks(peers: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and symbol by peer, ours first: the same in every figure for those that every device has."""
    names = set(peers)
    others = sorted(names - set(_PEERS))
    rest = {peer: _OTHERS[index % len(_OTHERS)] for index, peer in enumerate(others)}
    return {peer: look for peer, look in _PEERS.items() if peer in names} | rest


def _dots(figure: go.Figure, lines: list[str], pixels: int, title: str, about: str) -> go.Figure:
    """Finish a figure with one line per name, `pixels` apart, and its legend below."""
    figure.update_yaxes(categoryorder="array", categoryarray=lines[::-1], ticks="", showgrid=True)
    inner = 140 + pixels * len(lines)
    legend = dict(orientation="h", x=0, y=-76 / inner, yanchor="top")
    figure.update_layout(legend=legend, margin=dict(l=60, r=30, t=112, b=104))
    return theme.titled(figure, title, about, 90 + inner)
