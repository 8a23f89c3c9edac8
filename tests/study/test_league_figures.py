"""The league's figures, on a table small enough to be read."""

import math

import pandas as pd
import plotly.graph_objects as go
import pytest

from normlab.study.league_figures import FIGURES

SAYS = {
    "pre_rmsnorm": "may be the best",
    "peri_ln": "not the best",
    "lns": "may be the best",
    "dyt": "below at 2M tokens",
    "none": "diverged",
    "mhc": "not run",
}
TITLES = {"pre_rmsnorm": "Pre-LN", "peri_ln": "Peri-LN", "lns": "LNS", "dyt": "DyT", "none": "No norm", "mhc": "mHC"}
NAN, INF = math.nan, math.inf


@pytest.fixture
def table() -> pd.DataFrame:
    """LNS has a higher mean than Peri-LN and may be the best, as its seeds scatter."""
    table = pd.DataFrame({"scheme": list(SAYS), "title": list(TITLES.values()), "says": list(SAYS.values())})
    table["in_set"] = table["says"] == "may be the best"
    table["loss"], table["seeds"] = [3.4, 3.5, 3.6, NAN, NAN, NAN], [3, 3, 3, NAN, NAN, NAN]
    table["loss_low"], table["loss_high"] = table["loss"] - 0.1, table["loss"] + 0.1
    table["search_loss"] = [3.9, 4.0, 4.1, 4.4, INF, NAN]
    table["loss_at_0.002"], table["loss_at_0.008"] = [3.9, 4.0, 4.14, 4.4, INF, NAN], [3.94, INF, 4.1, 5.2, INF, NAN]
    table["loss_at_0.004"] = [3.92, *[NAN] * 5]
    table["growth_at_0.002"], table["growth_at_0.004"] = [4.0, 2.0, 3.0, 1.5, NAN, NAN], [4.4, 2.2, 3.3, *[NAN] * 3]
    table["growth"] = table["growth_low"] = table["growth_high"] = [5.0, 2.5, 3.5, NAN, NAN, NAN]
    table["valley"], table["equal_compute"] = [4.0, 1.0, 4.0, 1.0, NAN, NAN], [NAN, -0.1, 0.02, NAN, NAN, NAN]
    table["equal_low"], table["equal_high"] = table["equal_compute"] - 0.01, table["equal_compute"] + 0.01
    for name, value in (("step_cost", 1.1), ("step_low", 1.0), ("step_high", 1.2)):
        table[name] = [NAN, value, value, NAN, NAN, NAN]
    return table.assign(tokens=6.1e6, search_tokens=2.05e6, trigram_loss=3.7, search_trigram_loss=3.7)


def drawn(figure: go.Figure) -> list[tuple[str, str, str]]:
    """Scheme, column and symbol of each mark, from top to bottom."""
    marks = sorted(figure.data, key=lambda trace: trace.y[0])
    return [(trace.meta["scheme"], trace.meta["column"], trace.marker.symbol) for trace in marks]


def words(figure: go.Figure) -> str:
    return " ".join(annotation.text for annotation in figure.layout.annotations)


def test_losses_stand_in_sets_and_not_in_ranks(table):
    figure = FIGURES["league_losses"](table)
    final = [mark for mark in drawn(figure) if mark[1] == "loss"]
    assert final == [
        ("pre_rmsnorm", "loss", "circle"),
        ("lns", "loss", "circle"),
        ("peri_ln", "loss", "circle-open"),
    ]
    assert figure.layout.title.text.endswith("2 of 3 schemes may be the best")
    assert ("dyt", "search_loss", "circle-open") in drawn(figure) and "none" not in {mark[0] for mark in drawn(figure)}
    assert "Diverged: No norm<br>Not run: mHC" in words(figure) and "<b>below at 2M tokens</b>" in words(figure)
    (low,) = (trace.error_x.arrayminus[0] for trace in figure.data if trace.meta == final_meta("lns"))
    assert low == pytest.approx(0.1)


def test_a_scheme_whose_search_is_unfinished_stands_last_or_is_named_as_diverged(table):
    unfinished = table.assign(says=table["says"].mask(table["scheme"].isin(["dyt", "none"]), "search unfinished"))
    figure = FIGURES["league_losses"](unfinished)
    assert drawn(figure)[-1][0] == "dyt" and "<b>search unfinished</b>" in words(figure)
    assert "Diverged: No norm<br>Not run: mHC" in words(figure)


def final_meta(scheme: str) -> dict[str, str]:
    return {"scheme": scheme, "column": "loss"}


def test_too_few_final_runs_make_no_set(table):
    one = table.assign(in_set=False, seeds=[2, 1, 1, NAN, NAN, NAN])
    one["says"] = ["too few final runs"] * 3 + [*SAYS.values()][3:]
    figure = FIGURES["league_losses"](one)
    assert figure.layout.title.text.endswith("3 with too few final runs to compare, 3.40 to 3.60 nats")
    assert "final runs: 6.10M tokens, 1 to 2 seeds" in words(figure)
    costs = FIGURES["league_costs"](one.assign(equal_low=NAN, equal_high=NAN))
    assert costs.layout.title.text.replace("<br>", " ").endswith("2 schemes with too few final runs to compare")


def test_a_search_alone_says_so_and_draws_no_final_runs(table):
    none = dict.fromkeys(("loss", "loss_low", "loss_high", "growth", "equal_compute", "tokens", "seeds"), NAN)
    searched = table.assign(**none, in_set=False, says=[*["only searched"] * 4, "diverged", "not run"])
    figure = FIGURES["league_losses"](searched)
    assert figure.layout.title.text.endswith("4 only searched, 3.90 to 4.40 nats")
    assert {column for _, column, _ in drawn(figure)} == {"search_loss"}
    assert "No final run" in words(FIGURES["league_costs"](searched))
    assert "No final run" in words(FIGURES["league_deep_cost"](searched))


def test_growth_is_shown_at_rates_that_nearly_all_schemes_share(table):
    figure = FIGURES["league_growth"](table)
    assert {column for _, column, _ in drawn(figure)} == {"growth", "growth_at_0.002"}
    assert figure.layout.title.text.endswith("2.5 (Peri-LN) to 5 (Pre-LN), final runs")


def test_rates_show_what_was_tried_and_what_happened(table):
    figure = FIGURES["league_rates"](table)
    (cells,) = figure.data
    text = dict(zip(cells.y, cells.text, strict=True))
    assert list(cells.x) == ["0.002", "0.004", "0.008"] and text["Peri-LN"] == ["4.00", "", "diverged"]
    colours = dict(zip(cells.y, cells.z, strict=True))
    assert colours["Pre-LN"] == pytest.approx([0.0, 0.02, 0.04]) and colours["DyT"] == [0.0, None, 0.5]
    assert "2 of 5 schemes have a second one" in figure.layout.title.text


def test_the_gain_in_the_same_time_stands_with_the_time_of_a_step(table):
    figure = FIGURES["league_costs"](table)
    assert [(trace.name, trace.x[0]) for trace in figure.data] == [("LNS", 0.02), ("Peri-LN", -0.1)]
    assert [note.text for note in figure.layout.annotations].count("x 1.10") == 2
    assert "above zero under 1 of 2 schemes" in figure.layout.title.text.replace("<br>", " ")
    unsure = FIGURES["league_costs"](table.assign(equal_low=-0.1)).layout.title.text
    assert "under none of 2 schemes" in unsure.replace("<br>", " ")


@pytest.mark.parametrize("name", ["league_losses", "league_rates"])
def test_many_schemes_without_a_run_make_the_figure_higher_not_wider(table, name):
    many = pd.concat([table, *[table.iloc[-1:].assign(title=f"Another scheme {n}") for n in range(30)]])
    few, figure = FIGURES[name](table), FIGURES[name](many)
    missing = next(note.text for note in figure.layout.annotations if "Not run" in note.text)
    assert missing.count("<br>") >= 5 and max(map(len, missing.split("<br>"))) <= 95
    higher = figure.layout.height - few.layout.height
    assert higher == figure.layout.margin.b - few.layout.margin.b > 0
