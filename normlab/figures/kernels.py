"""The kernels' tables: registers by width, times of each call, shares of the copy rate.

Colours and symbols are peers' or calls' here, not schemes'. Tables are those of `normlab.analysis.kernels`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.figures import theme as look
from normlab.figures.labels import EndLabel, label_ends, label_room

MOST_REGISTERS = 255  # of a thread, on every target
# Peers that every device has; others take what is left of the palette, in the order of their names.
_PEERS = {
    "normlab": ("#0072b2", "circle"),
    "eager": ("#d55e00", "square"),
    "compile": ("#009e73", "diamond"),
    "torch": ("#cc79a7", "triangle-up"),
}
_OTHERS = (("#e69f00", "cross"), ("#56b4e9", "x"), ("#000000", "star"), (look.NEUTRAL, "hexagon"))
_PASSES = ("forward", "backward", "both")


def registers_by_width(builds: pd.DataFrame, functions: Sequence[str], target: str, dtype: str = "bf16") -> go.Figure:
    """Registers a thread against width, forward and backward, a line a function; dashed: the most there are. A kernel
    that needs more spills them to memory.

    Args:
        builds: what `normlab.analysis.kernels.read_builds` returns.
        functions: those to draw, at most as many as the palette has colours.
        target: "sm_90" and the like.
    """
    title = "Registers a thread by width"
    rows = builds[(builds["target"] == target) & (builds["dtype"] == dtype) & builds["function"].isin(functions)]
    if rows.empty:
        return look.message_figure(f"Nothing was compiled for {target} in {dtype}.", title)
    sides = ("forward", "backward")
    figure = make_subplots(1, 2, subplot_titles=sides, horizontal_spacing=0.17)
    bounds = (0.0, 1.04 * MOST_REGISTERS)
    labels: list[EndLabel] = []
    for column, side in enumerate(sides, 1):
        labels = []
        for function, (color, symbol) in _looks(functions).items():
            own = rows[(rows["direction"] == side) & (rows["function"] == function)].sort_values("width")
            if own.empty:
                continue
            figure.add_scatter(
                x=own["width"].tolist(),
                y=own["registers"].tolist(),
                name=function,
                mode="lines+markers",
                line=dict(color=color, width=2),
                marker=dict(symbol=symbol, size=7),
                meta=dict(function=function, direction=side),
                customdata=own[["warps", "block", "spilled_bytes", "shared_bytes"]].to_numpy(),
                hovertemplate=f"<b>{function}</b>, width %{{x}}: %{{y}} registers<br>%{{customdata[0]}} warps, "
                "block %{customdata[1]}, %{customdata[2]} bytes spilled, %{customdata[3]} shared<extra></extra>",
                row=1,
                col=column,
            )
            labels.append(EndLabel(float(own["registers"].iloc[-1]), function, color))
        label_ends(figure, labels, bounds, 300, log=False, axis="" if column == 1 else "2")
        there = rows.loc[rows["direction"] == side, "width"]
        figure.update_xaxes(title_text="width", **_widths(there), row=1, col=column)
    figure.add_hline(y=MOST_REGISTERS, line=dict(color=look.NEUTRAL, width=1.2, dash="dash"))
    figure.update_yaxes(range=bounds, title_text="registers a thread")
    figure.update_layout(showlegend=False, margin=dict(l=70, r=label_room(labels), t=112, b=60))
    about = f"compiled ahead of time for {target}, {dtype}; dashed: the most there are, {MOST_REGISTERS}"
    return look.titled(figure, title, about, 460)


def call_times(times: pd.DataFrame) -> go.Figure:
    """Time of each call, forward and backward together, a panel a shape, a mark a peer: further left is faster.

    Args:
        times: what `normlab.analysis.kernels.read_times` returns, of one device.
    """
    rows, title = times[times["pass"] == "both"], "Time of a call, forward and backward"
    if rows.empty:
        return look.message_figure("Nothing was timed forward and backward.", title)
    shapes = list(dict.fromkeys(rows["shape"]))
    calls = list(dict.fromkeys(rows["function"]))
    figure = make_subplots(1, len(shapes), subplot_titles=shapes, shared_yaxes=True, horizontal_spacing=0.04)
    for column, shape in enumerate(shapes, 1):
        own = rows[rows["shape"] == shape]
        _add_peers(figure, own, "microseconds", "%{x:,.0f} us", set(rows["peer"]), 1, column, column == 1)
        bounds = look.axis_bounds(own["microseconds"], log=True)
        figure.update_xaxes(title_text="us", **look.value_axis(bounds, log=True), row=1, col=column)
    figure.update_yaxes(categoryorder="array", categoryarray=calls[::-1], ticks="", showgrid=True)
    device = ", ".join(dict.fromkeys(rows["device"]))
    _legend_below(figure, 140 + 34 * len(calls))
    about = f"{device}, {', '.join(dict.fromkeys(rows['dtype']))} · a panel a shape, rows x width · left is faster"
    return look.titled(figure, title, about, 230 + 34 * len(calls))


def copy_share(times: pd.DataFrame) -> go.Figure:
    """Share of the measured copy rate that each call reaches, a row a shape, a panel a pass, a mark a peer. At 1 a call
    takes as long as a copy of the bytes that it must move: its floor.

    Args:
        times: what `normlab.analysis.kernels.read_times` returns, of any devices.
    """
    title = "How near to its floor each call runs"
    if times.empty:
        return look.message_figure("Nothing was timed. On a CUDA machine: make gpu, then run this again.", title)
    passes = [name for name in _PASSES if name in set(times["pass"])]
    lines = times["function"] + ", " + times["shape"]
    lines = lines if times["device"].nunique() == 1 else lines + ", " + times["device"]
    names = list(dict.fromkeys(lines))
    figure = make_subplots(1, len(passes), subplot_titles=passes, shared_yaxes=True, horizontal_spacing=0.04)
    for column, side in enumerate(passes, 1):
        own = times.assign(line=lines)[times["pass"] == side]
        _add_peers(figure, own, "share_of_copy", "%{x:.1%}", set(times["peer"]), 1, column, column == 1, "line")
    figure.add_vline(x=1.0, line=dict(color=look.NEUTRAL, width=1.2, dash="dash"))
    most = max(1.0, float(times["share_of_copy"].max()))
    figure.update_xaxes(title_text="share of the copy rate", range=[0, 1.06 * most], tickformat=".0%")
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1], ticks="", showgrid=True)
    _legend_below(figure, 140 + 20 * len(names))
    device = ", ".join(dict.fromkeys(times["device"]))
    return look.titled(figure, title, f"{device} · dashed: the floor, a copy of the same bytes", 230 + 20 * len(names))


def one_call(times: pd.DataFrame, moved: Mapping[str, float], where: str, theme: str = "light") -> go.Figure:
    """Left: megabytes that a call must move. Right: each peer's time, and its floor, the bytes at the copy rate.

    Args:
        times: rows of one call, shape and pass (`normlab.analysis.kernels.read_times`).
        moved: megabytes by name (`normlab.analysis.kernels.moved`).
        where: the title, which says what call it is.
        theme: "light" or "dark".
    """
    titles = ["bytes that must move", "time, and its floor"]
    figure = make_subplots(1, 2, subplot_titles=titles, column_widths=[0.35, 0.65], horizontal_spacing=0.12)
    figure.add_bar(
        name="bytes",
        x=list(moved),
        y=list(moved.values()),
        marker=dict(color=look.NEUTRAL),
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
        marker=dict(color=[look.ink(looks[peer][0], theme) for peer in peers]),
        hovertemplate="%{x}: %{y:,.1f} us<extra></extra>",
        row=1,
        col=2,
    )
    figure.add_scatter(
        name="floor",
        x=peers,
        y=(times["floor_bytes"] / times["copy_gigabytes_per_second"] / 1e3).tolist(),
        mode="lines+markers",
        line=dict(color=look.NEUTRAL, dash="dash"),
        marker=dict(symbol="line-ew-open", size=36, line=dict(width=2)),
        hovertemplate="floor %{y:,.1f} us<extra></extra>",
        row=1,
        col=2,
    )
    figure.update_yaxes(title_text="MB", rangemode="tozero", col=1)
    figure.update_yaxes(title_text="us", rangemode="tozero", col=2)
    figure.update_layout(showlegend=False, autosize=True, bargap=0.4, margin=dict(t=104, l=66, r=24, b=54))
    look.titled(figure, where if len(times) else f"not timed: {where}", "", 430)
    return figure.update_layout(template=look.template(theme))


def _add_peers(
    figure: go.Figure,
    rows: pd.DataFrame,
    value: str,
    shown: str,
    peers: Iterable[str],
    row: int,
    col: int,
    legend: bool,
    line: str = "function",
) -> None:
    for peer, (color, symbol) in _peer_looks(peers).items():
        own = rows[rows["peer"] == peer]
        figure.add_scatter(
            x=own[value].tolist(),
            y=own[line].tolist(),
            name=peer,
            legendgroup=peer,
            showlegend=legend,
            mode="markers",
            marker=dict(color=color, symbol=symbol, size=10),
            hovertemplate=f"<b>{peer}</b>, %{{y}}: {shown}<extra></extra>",
            row=row,
            col=col,
        )


def _looks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a symbol each, in the given order."""
    return dict(zip(names, [*_PEERS.values(), *_OTHERS], strict=False))


def _peer_looks(peers: Iterable[str]) -> dict[str, tuple[str, str]]:
    """By peer, ours first: the same in every figure for those that every device has."""
    there = set(peers)
    others = sorted(there - set(_PEERS))
    rest = {peer: _OTHERS[place % len(_OTHERS)] for place, peer in enumerate(others)}
    return {peer: style for peer, style in _PEERS.items() if peer in there} | rest


def _widths(widths: pd.Series) -> dict[str, object]:
    """A logarithmic axis with a tick at each width."""
    shown = sorted({int(width) for width in widths})
    bounds = look.axis_bounds(shown, log=True)
    return dict(type="log", range=bounds, tickmode="array", tickvals=shown, ticktext=[f"{width:,}" for width in shown])


def _legend_below(figure: go.Figure, pixels: int) -> None:
    legend = dict(orientation="h", x=0, y=-76 / pixels, yanchor="top")
    figure.update_layout(legend=legend, margin=dict(l=60, r=30, t=112, b=104))
