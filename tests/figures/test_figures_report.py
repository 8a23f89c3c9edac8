"""Figures of recordings and differences: what is not finite is said, and drawn above what is."""

import math

import numpy as np
import pandas as pd
import pytest
from figures_helpers import text_of

from normlab.figures.differences import added_figure, difference_figure


def added(*differences: float) -> pd.DataFrame:
    """The `added` of three blocks between the embeddings and the end."""
    rows = [(layer, value, 1e-7, value > 1e-6, 2 * value) for layer, value in enumerate(differences)]
    return pd.DataFrame(rows, columns=["layer", "difference", "noise", "parts", "logits"])


def test_a_block_whose_error_is_not_finite_adds_most_and_stands_above_all_others():
    figure = added_figure(added(0.0, 1e-3, math.inf, math.inf, 0.0))
    assert figure.layout.title.text == "Block 2 adds most error: it is not finite"
    assert "at the upper edge: not finite" in text_of(figure)
    _, own, logits = figure.data
    assert own.y[0] is None and own.y[2] == own.y[3] == logits.y[2] > 2e-3 == logits.y[1]
    assert 10 ** figure.layout.yaxis.range[1] == pytest.approx(own.y[2])
    assert own.text[1:3] == ("0.001", "not finite") and "%{text}" in own.hovertemplate
    plain = added_figure(added(0.0, 1e-3, 1e-2, 0.0, 0.0))
    assert plain.layout.title.text == "Block 2 adds most error" and "not finite" not in text_of(plain)
    alone = added_figure(added(0.0, math.inf, 0.0, 0.0, 0.0).assign(noise=0.0))
    assert np.isfinite(alone.data[1].y[1]) and alone.data[1].y[1] > 0


def test_a_difference_that_is_not_finite_says_so_when_hovered_and_under_the_title():
    table = pd.DataFrame({"layer": [1, 2, 3, 4], "difference": [0.0, 2e-4, math.inf, math.nan]})
    table = table.assign(site="mlp_out", noise=1e-4, parts=[False, False, True, False])
    figure = difference_figure(table)
    _, own = figure.data
    assert own.text[1:3] == ("mlp out, 2: 0.0002", "mlp out, 3: not finite") and "%{text}" in own.hovertemplate
    assert own.y[1] == 2e-4 < own.y[2] < 1e-3 and own.y[3] is None
    assert "at the upper edge: not finite" in text_of(figure)
    assert "not finite" not in text_of(difference_figure(table.iloc[:2]))
