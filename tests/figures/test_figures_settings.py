"""Settings: a line for every condition, what the axis leaves out, and the label and unit of a quantity."""

import pandas as pd
from figures_helpers import text_of

from normlab.analysis.verdicts import differences, judged
from normlab.figures import saturation, variant_differences


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


def test_differences_under_settings_have_the_label_and_the_unit_of_their_quantity():
    values = pd.DataFrame({"scheme": ["lns", "bhyt"] * 2, "depth": 8, "seed": [0, 0, 1, 1], "value": [1.0, 2, 3, 5]})
    for name, words in (("growth", "ratio of growth of the stream"), ("deep_cost", "cost of a deep block (nats per")):
        rows = judged(differences(values, "lns", "bhyt", name))
        figure = variant_differences(rows.assign(condition="as it is", group=""))
        assert words in figure.layout.xaxis.title.text
