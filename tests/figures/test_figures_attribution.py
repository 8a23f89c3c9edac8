"""Shares against measured effects, one stream by two tools, conditions under headings, titles inside the page."""

from __future__ import annotations

import pandas as pd
import pytest

from normlab.analysis.notebook_tables import gain_or_bound as gain
from normlab.analysis.notebook_tables.attribution import judged_methods
from normlab.figures import by_tool, condition_differences, shares_and_effects
from normlab.figures.theme import LINES_PAD, in_one, template, titled

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
    assert shares_and_effects(TABLES, EFFECTS, "dark").layout.template == template("dark")
    assert "Nothing was attributed" in shares_and_effects({}, EFFECTS).layout.annotations[0].text


def test_the_first_tool_is_a_line_and_the_second_rings():
    rows = [("one", 0, 0.1), ("one", 1, 10.0), ("two", 0, 0.1), ("two", 1, 10.0)]
    table = pd.DataFrame(rows, columns=["tool", "layer", "value"])
    one, two = by_tool(table, "token_l2_mean").data
    assert (one.mode, two.mode) == ("lines", "markers") and list(one.y) == list(two.y) == [0.1, 10.0]
    assert "No tool" in by_tool(table.iloc[:0], "token_l2_mean").layout.annotations[0].text


def test_a_title_of_several_lines_stays_inside_the_page():
    """plotly sets it higher than a title of one line."""
    import plotly.graph_objects as go

    assert titled(go.Figure(), in_one("a", "b"), "", 300).layout.title.pad.t == LINES_PAD
    assert titled(go.Figure(), "a", "b", 300).layout.title.pad.t is None  # the template's


def grid(g: float, gamma0: float, outliers: int, width: int) -> list[dict[str, object]]:
    """Both schemes under one condition; the bounded one's stream is g times as small."""
    setting = {"lam_input": 10 * g, "gamma0": gamma0, "outlier_channels": outliers, "width": width, "steps": 2}
    return [
        setting | {"scheme": scheme, "seed": seed, "depth": 1, "lr": 0.1, "eval_loss": 5.0 + 0.01 * seed, "size": size}
        for scheme, size in (("bhyt", 1.0), ("bhyt_linear", g * 5))
        for seed in (0, 1, 2)
    ]


@pytest.fixture(scope="module")
def sweep() -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = [*grid(0.2, 1.0, 0, 16), *grid(1.0, 0.2, 0, 16), *grid(1.0, 1.0, 0, 16), *grid(0.2, 1.0, 2, 16)]
    rows += grid(0.2, 1.0, 0, 32)
    configs = pd.DataFrame(rows, index=[f"run{number}" for number in range(len(rows))])
    long = []
    for name, row in configs.iterrows():
        about = {"run": name, "status": "finished", "step": 2, "tokens": 2, "mask": "all"}
        about |= {key: row[key] for key in ("scheme", "depth", "width", "seed", "lr")}
        noise = 1 + 0.01 * row["seed"] * (row["scheme"] == "bhyt")
        for site, metric, split, layer, value in (
            ("block_out", "token_l2_mean", "probe", 1, row["size"] * noise),
            ("attn_norm_in", "tanh_input_max", "probe", 1, row["lam_input"]),
            ("attn_norm_in", "saturation_95", "probe", 1, 0.0),
            ("model", "loss", "eval", None, row["eval_loss"]),
        ):
            long.append(about | {"site": site, "metric": metric, "split": split, "layer": layer, "value": value})
    return pd.DataFrame(long), gain.with_gain(configs, kappa=10.0)


def test_conditions_are_named_grouped_and_judged_together(sweep):
    size = gain.conditions(*sweep, "bhyt", "bhyt_linear", "token_l2_mean")
    assert size["group"].tolist() == [gain.GROUPS[0], gain.GROUPS[0], gain.GROUPS[1], gain.GROUPS[2], gain.GROUPS[3]]
    assert size["condition"].tolist()[0] == "g = 0.2, γ₀ = 1" and size["condition"].tolist()[-1].endswith(", width 32")
    assert size["verdict"].tolist()[1] == "different" and size["estimate"][1] == pytest.approx(0.2, rel=0.02)
    figure = condition_differences(size)
    heads = [note.text for note in figure.layout.annotations if note.text.startswith("<b>")]
    assert heads == [f"<b>{group}</b>" for group in gain.GROUPS] and len(figure.data) == len(size)
    loss = gain.conditions(*sweep, "bhyt", "bhyt_linear")
    table = gain.verdicts([loss, size])
    assert table.shape == (5, 6) and table.iloc[1, 5].startswith("different")


def test_along_the_gain_are_the_runs_that_start_alike(sweep):
    values = gain.along_gain(*sweep, ["bhyt"])
    assert sorted(values["setting"].unique()) == [0.2, 1.0] and set(values["panel"]) == set(gain.PANELS)
    assert (values["panel"].value_counts() == 6).all()  # three seeds at each of the two
    z = values[values["panel"] == "largest |z|"].set_index("setting")["value"]
    assert set(z[1.0]) == {10.0}
    assert set(values[values["panel"] == "share of |tanh z| > 0.95"]["value"]) == {gain.LEAST}


def test_a_run_that_sets_kappa_keeps_its_own():
    configs = pd.DataFrame({"lam_input": [2.0, 2.0], "kappa": [None, 4.0]})
    assert gain.with_gain(configs, kappa=10.0)["g"].tolist() == [0.2, 0.5]
