"""Every figure by name. A figure registers itself: `@register(...)` above the function that draws it.

@register("depth_scaling", "C5", "held-out loss against depth")
def depth_scaling(runs: pd.DataFrame) -> go.Figure: ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec

import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.selection import NothingToShow
from normlab.figures.theme import message_figure

Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class FigureRow:
    """One figure of a report. Call it with a table to draw it.

    Args:
        paper_figure: the published figure it reproduces (B: BHyT, C: The Curse of Depth), or N for one of our own.
        shows: one phrase.
        options: arguments of `draw` that make it this figure.
        reads: the table it takes: "runs" (`normlab.load_runs`), "experiments" (`normlab.load_experiments`) or "league"
            (`normlab.study.league.standings`).
        overlays: whether published values can be drawn over it.
    """

    name: str
    paper_figure: str
    shows: str
    draw: Callable[..., go.Figure]
    options: Mapping[str, Any] = field(default_factory=dict)
    reads: Literal["runs", "experiments", "league"] = "runs"
    overlays: bool = False

    def __call__(self, table: Any, published: pd.DataFrame | None = None, **options: Any) -> go.Figure:
        """Draw it from the table that it reads; `options` override the row's own."""
        overlay = {"published": published} if self.overlays else {}
        return self.draw(table, **{**overlay, **self.options, **options})


FIGURES: dict[str, FigureRow] = {}


def drawing(draw: Callable[Arguments, go.Figure]) -> Callable[Arguments, go.Figure]:
    """Let a function raise `NothingToShow`: the figure is then that sentence."""

    @functools.wraps(draw)
    def figure(*args: Arguments.args, **options: Arguments.kwargs) -> go.Figure:
        try:
            return draw(*args, **options)
        except NothingToShow as why:
            return message_figure(str(why), draw.__name__.replace("_", " ").capitalize())

    return figure


def register(
    name: str,
    paper_figure: str,
    shows: str,
    *,
    reads: Literal["runs", "experiments", "league"] = "runs",
    overlays: bool = False,
    **options: Any,
) -> Callable[[Callable[Arguments, go.Figure]], Callable[Arguments, go.Figure]]:
    """Register a function as a figure, with these `options`; several figures may share a function.

    Where the function raises `NothingToShow`, the figure is that sentence.

    Raises:
        ValueError: another figure has that name.
    """

    def row(draw: Callable[Arguments, go.Figure]) -> Callable[Arguments, go.Figure]:
        if name in FIGURES:
            raise ValueError(f"there is a figure {name} already: {FIGURES[name].draw.__module__}")
        FIGURES[name] = FigureRow(name, paper_figure, shows, drawing(draw), options, reads, overlays)
        return FIGURES[name].draw

    return row


def draw_all(
    tables: Mapping[str, pd.DataFrame], published: pd.DataFrame | None = None
) -> Iterator[tuple[str, go.Figure]]:
    """Name and picture of every figure that reads one of `tables`: "runs", "experiments", "league"."""
    for row in FIGURES.values():
        if row.reads in tables:
            yield row.name, row(tables[row.reads], published)
