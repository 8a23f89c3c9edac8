"""Saturation against kappa: a line for every condition, and the subtitle says which values the axis leaves out."""

import pandas as pd
from figures_helpers import text_of

from normlab.figures import saturation


def test_shares_of_zero_are_said_not_to_be_drawn():
    shares = pd.DataFrame({"condition": "trained", "kappa": [1.0, 2.0, 4.0], "share": [0.3, 0.1, 0.01]})
    assert "not drawn" not in text_of(saturation(shares, 64))
    figure = saturation(shares.assign(share=[0.3, 0.1, 0.0]), 64)
    assert "shares of zero are not drawn" in text_of(figure)
    (line,) = [trace for trace in figure.data if trace.name == "trained"]
    assert [y is None for y in line.y] == [False, False, True]


def test_every_condition_has_a_line_however_many_there_are():
    rows = [(f"condition {n}", kappa, 0.1 / kappa) for n in range(6) for kappa in (1.0, 2.0)]
    figure = saturation(pd.DataFrame(rows, columns=["condition", "kappa", "share"]), 64)
    assert sum(str(trace.name).startswith("condition") for trace in figure.data) == 6
