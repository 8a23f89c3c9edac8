"""Figures of what bounds BHyT: what a logarithmic axis cannot show is said."""

from __future__ import annotations

import pandas as pd
from figures_helpers import text_of

from normlab.figures import saturation


def test_shares_of_zero_are_said_not_to_be_drawn():
    shares = pd.DataFrame({"condition": "trained", "kappa": [1.0, 2.0, 4.0], "share": [0.3, 0.1, 0.01]})
    assert "not drawn" not in text_of(saturation(shares, 64))
    figure = saturation(shares.assign(share=[0.3, 0.1, 0.0]), 64)
    assert "shares of zero are not drawn" in text_of(figure)
    (line,) = [trace for trace in figure.data if trace.name == "trained"]
    assert [y == y for y in line.y] == [True, True, False]
