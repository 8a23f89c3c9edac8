"""Shares against measured effects, titles inside the page."""

import pandas as pd
import pytest

from normlab.analysis.attribution import judged_methods
from normlab.figures import shares_and_effects, themed
from normlab.figures.theme import LETTERS, LINES_PAD, TITLE_LINE, in_one, template, titled

PLACES = [("embed", 0), ("attn", 1), ("mlp", 1)]


def shares(values: list[float], remainder: float) -> pd.DataFrame:
    rows = [(*place, value) for place, value in zip(PLACES, values, strict=True)]
    rows += [("bias", 1, 0.0), ("remainder", 1, remainder)]
    table = pd.DataFrame(rows, columns=["component", "layer", "contribution"])
    table.attrs |= {"logit": sum(values) + remainder, "name": "logit"}
    return table


EFFECTS = pd.DataFrame([(*place, effect) for place, effect in zip(PLACES, (0.1, 0.2, -0.4), strict=True)])
EFFECTS.columns = ["component", "layer", "effect"]
TABLES = {"frozen": shares([1.0, 2.0, 3.0], 0.0), "jacobian": shares([0.1, 0.2, -0.39], 6.09)}


def test_a_method_adds_up_or_predicts_changes():
    frozen, jacobian = judged_methods(TABLES, EFFECTS).to_dict("records")
    assert frozen["adds_up"] and not frozen["predicts"] and frozen["total"] == 6.0
    assert jacobian["predicts"] and not jacobian["adds_up"] and jacobian["error"] == pytest.approx(0.01 / 0.4)


def test_shares_stand_against_the_effects_of_the_same_components():
    line, frozen, jacobian = shares_and_effects(TABLES, EFFECTS).data
    assert list(line.x) == list(line.y) and list(frozen.text) == ["embed", "attn 1", "mlp 1"]
    assert list(frozen.x) == list(jacobian.x) == [0.1, 0.2, -0.4] and list(frozen.y) == [1.0, 2.0, 3.0]
    assert themed(shares_and_effects(TABLES, EFFECTS), "dark").layout.template == template("dark")
    assert "Nothing was attributed" in shares_and_effects({}, EFFECTS).layout.annotations[0].text


def test_a_title_of_several_lines_stays_inside_the_page():
    """plotly sets it higher than a title of one line."""
    import plotly.graph_objects as go

    assert titled(go.Figure(), in_one("a", "b"), "", 300).layout.title.pad.t == LINES_PAD
    assert titled(go.Figure(), "a", "b", 300).layout.title.pad.t is None  # the template's


def test_a_long_title_takes_a_second_line_and_the_figure_grows_by_it():
    """In JupyterLab on a screen of 1280 pixels a title of one line would end outside the page."""
    import plotly.graph_objects as go

    short, long = (titled(go.Figure(), "word " * count, "b", 300).layout for count in (10, 30))
    lines = [len(line) for line in long.title.text.split("<br>")]
    assert len(lines) == 2 and max(lines) <= LETTERS and max(lines) - min(lines) <= 24
    assert long.title.text.replace("<br>", " ") == "word " * 29 + "word"
    assert long.title.pad.t == LINES_PAD and long.title.xref is None and template().layout.title.xref == "container"
    assert long.height - short.height == long.margin.t - short.margin.t == TITLE_LINE and short.height == 300


def test_a_line_under_the_title_that_would_leave_the_page_takes_a_second_one_and_the_figure_grows_by_it():
    import plotly.graph_objects as go

    short, long = (titled(go.Figure(), "a", f"one<br>{'word ' * count}", 300).layout for count in (10, 40))
    lines = long.title.subtitle.text.split("<br>")
    assert lines[0] == "one" and len(lines) == 3 and max(map(len, lines)) <= 175
    assert long.height - short.height == long.margin.t - short.margin.t > 0 and short.height == 300
