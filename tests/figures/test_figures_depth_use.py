"""Figures of depth use and of outliers: the numbers of their tables, and what is marked."""

import math

import numpy as np
import pandas as pd
import pytest

from normlab.figures import branch_costs, few_bits, layer_map, outliers, void_shares
from normlab.figures.theme import style_of


def test_a_map_has_rings_at_the_layer_that_predicts_best_and_the_line_of_equal_depth():
    table = pd.DataFrame([[0.0, 0.9, 0.9, 0.9], [0.5, 0.1, 0.4, 0.7], [0.6, 0.3, 0.2, 0.05]])
    figure = layer_map(table, "small", "large")
    heat, line, rings = figure.data
    assert np.array_equal(heat.z, table.to_numpy()) and (heat.zmin, heat.zmax) == (0, 1)
    assert list(line.x) == [0, 3] and list(line.y) == [0, 2]
    assert list(rings.x) == [0, 1, 2, 3] and list(rings.y) == [1, 1, 2, 2]  # embeddings are not among them
    assert figure.layout.xaxis.title.text == "layer of large" and figure.layout.yaxis.title.text == "layer of small"


def test_costs_of_branches_have_a_line_per_model_in_its_schemes_colour():
    rows = dict(dropped=[1, 2], skip_delta_loss=[0.1, 0.3], low=[0.0, 0.2], high=[0.2, 0.4])
    table = pd.concat({"A": pd.DataFrame(rows), "B": pd.DataFrame(rows)}, names=["model"]).reset_index("model")
    first, second = branch_costs(table, "model", {"A": "lns", "B": "bhyt"}).data
    assert [first.line.color, second.line.color] == [style_of("lns").color, style_of("bhyt").color]
    assert list(first.x) == [1, 2] and list(first.y) == [0.1, 0.3] and first.error_y.array == pytest.approx([0.1, 0.1])
    (alone,) = branch_costs(pd.DataFrame(rows)).data
    assert list(alone.y) == [0.1, 0.3]


def test_shares_of_void_tokens_say_the_rules_that_are_shown():
    rules = {"rule": ["void", "small"], "limit": [0.7, 0.2]}
    table = pd.DataFrame(rules | {"layer": [1, 1], "value": [0.5, 0.1], "low": 0.0, "high": 1.0})
    both, one = void_shares(table), void_shares(table[table["rule"] == "small"])
    assert [trace.name for trace in both.data] == ["void", "small"] and len(one.data) == 1
    assert "less than 0.7 of the range" in both.layout.title.subtitle.text.replace("<br>", " ")
    assert "void:" not in one.layout.title.subtitle.text


def test_outliers_are_filled_where_one_token_has_both():
    table = pd.DataFrame(
        [
            {"model": "A", "scheme": "lns", "ratio": 4000.0, "weight": 0.5, "same_token": True},
            {"model": "B", "scheme": "bhyt", "ratio": 20.0, "weight": 0.2, "same_token": False},
        ]
    )
    figure = outliers(table)
    assert [trace.marker.symbol for trace in figure.data] == ["circle", "circle-open"] * 2
    assert [trace.x[0] for trace in figure.data] == [4000, 20, 0.5, 0.2]
    assert 10 ** figure.layout.xaxis.range[1] > 4000  # nothing is outside
    assert {shape.x0 for shape in figure.layout.shapes} == {1000, 0.3}


def test_few_bits_have_a_bar_per_model_and_case():
    cases = [(8, "both"), (8, "weights"), (4, "weights"), (4, "activations"), (4, "both")]
    table = pd.DataFrame([{"model": m, "bits": b, "part": p} for m in "AB" for b, p in cases])
    table["delta_loss"] = np.arange(10) / 10
    table["low"], table["high"] = table["delta_loss"] - 0.01, table["delta_loss"] + 0.01
    figure = few_bits(table)
    assert [list(trace.y) for trace in figure.data] == [[0.0, 0.5], [0.2, 0.7], [0.3, 0.8], [0.4, 0.9]]
    assert figure.data[0].error_y.array == pytest.approx([0.01, 0.01])
    assert not any(math.isnan(value) for trace in figure.data for value in trace.y)
