"""The league's figures, on a table small enough to be read."""

import math

import pandas as pd
import plotly.graph_objects as go
import pytest

from normlab.schemes import SCHEMES
from normlab.study.league_figures import FIGURES

NAN, INF = math.nan, math.inf
NAMES = ("pre_rmsnorm", "lns", "peri_ln", "dyt", "none")


@pytest.fixture
def table() -> pd.DataFrame:
    """DyT has not learned, and the model without norms diverged."""
    table = pd.DataFrame({"scheme": NAMES, "title": [SCHEMES[name].title for name in NAMES]})
    table["loss"], table["learned"] = [3.05, 3.06, 3.1, 6.5, INF], [True, True, True, False, False]
    table["growth"], table["deep_cost"] = [2.5, 2.3, 2.6, 3.0, NAN], [0.15, 0.14, 0.31, 0.01, NAN]
    table = table.assign(step=[1.0, 1.0, 1.05, 1.02, NAN], depth=8, unlike="", seeds=1, at=4e-3, of_seed=0)
    return table.assign(low=NAN, high=NAN)


def drawn(figure: go.Figure, column: str) -> dict[str, tuple[float, str]]:
    """Scheme -> its place on the axis, and its symbol."""
    marks = [trace for trace in figure.data if trace.meta["column"] == column]
    return {trace.meta["scheme"]: (trace.x[0], trace.marker.symbol) for trace in marks}


def test_losses_stand_next_to_the_time_of_a_step_and_are_no_rank(table):
    figure = FIGURES["league_losses"](table)
    losses, steps = drawn(figure, "loss"), drawn(figure, "step")
    assert losses["lns"] == (3.06, "circle") and steps["peri_ln"] == (1.05, "circle") and len(steps) == 4
    edge = figure.layout.xaxis.range[1]
    assert losses["dyt"] == losses["none"] == (edge, "triangle-right") and 3.1 < edge < 3.2
    assert figure.layout.title.text == "Held-out loss: 3.05 (Pre-LN) to 3.1 (Peri-LN)"
    assert "triangle: not learned, further right" in figure.layout.title.subtitle.text
    assert "1 seed" in figure.layout.title.subtitle.text and "no rank" in figure.layout.title.subtitle.text
    tested = FIGURES["league_losses"](table.assign(low=-0.1, learned=True, loss=3.1)).layout.title.subtitle.text
    assert "no rank" not in tested and "triangle" not in tested
    assert [line.x0 for line in figure.layout.shapes] == [3.05, 1.0]
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1], "the lowest loss on top"


def test_sizes_are_of_one_rate_and_a_panel_without_values_is_left_out(table):
    figure = FIGURES["league_depth"](table)
    assert drawn(figure, "growth")["lns"] == (2.3, "circle") and "none" not in drawn(figure, "deep_cost")
    assert "8 blocks · all at rate 0.004, seed 0 · dotted" in figure.layout.title.subtitle.text
    assert {trace.meta["column"] for trace in FIGURES["league_depth"](table.assign(deep_cost=NAN)).data} == {"growth"}
    empty = FIGURES["league_depth"](table.assign(deep_cost=NAN, growth=NAN))
    assert "has a growth of the stream or a cost of leaving out" in empty.layout.annotations[0].text


def test_a_table_in_which_nothing_has_learned_shows_its_losses(table):
    figure = FIGURES["league_losses"](table.assign(learned=False, loss=[4.3, 4.4, 4.5, 4.6, INF]))
    losses = drawn(figure, "loss")
    assert losses["dyt"] == (4.6, "circle") and losses["none"][1] == "triangle-right"
    assert figure.layout.title.text.endswith("4.3 (Pre-LN) to 4.6 (DyT)")
    said = figure.layout.title.subtitle.text
    assert "no scheme has learned" in said and "triangle: diverged, further right" in said
    discs = FIGURES["league_losses"](table.assign(learned=False, loss=4.3)).layout.title.subtitle.text
    assert "no scheme has learned" in discs and "triangle" not in discs
