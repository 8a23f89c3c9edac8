"""What figures say when hovered: no number where there is none."""

import inspect
import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from figures_helpers import one_run, table

from normlab.figures import FIGURES, profile
from normlab.figures.layers import BY_LAYER, BY_PAIR, by_layer, by_pair
from normlab.figures.report import layer_heatmap, recorded_map

OF_RUNS = sorted({inspect.unwrap(row.draw): row.name for row in FIGURES.values() if row.reads == "runs"}.values())
FORMATTED = re.compile(r"%\{customdata(?:\[(\d+)\])?:")


def false_numbers(figure: go.Figure) -> list[str]:
    """Traces that show a number when hovered where the table has none: plotly writes 0 for it."""
    found = []
    for trace in figure.data:
        hover = trace.hovertemplate or ""
        if trace.type == "heatmap":  # what has no z speaks unless it is told not to
            found += [str(trace.name)] if "%{" in hover and trace.hoverongaps is not False else []
            continue
        points = zip(trace.y or (), trace.customdata if trace.customdata is not None else (), strict=False)
        shown = [data for y, data in points if y is not None and np.isfinite(float(y))]
        for place in FORMATTED.findall(hover):
            numbers = [float(data[int(place)] if place else data) for data in shown]
            found += [] if np.isfinite(numbers).all() else [f"{trace.name}: {hover}"]
    return found


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """One seed of one scheme and two of another, as `load_experiments` gives them."""
    rows = []
    for number, (scheme, seed) in enumerate((("pre_rmsnorm", 0), ("lns", 0), ("lns", 1))):
        about = (f"{scheme}-{seed}", scheme, 4, 32, seed, 4e-3)
        for layer in range(1, 5):
            value = 1.0 + number + layer
            rows += [(*about, name, "block", layer, None, value) for name in BY_LAYER]
            rows += [(*about, name, "block", layer, other, value) for name in BY_PAIR for other in range(layer)]
    return pd.DataFrame(rows, columns="run scheme depth width seed lr metric part layer other value".split())


@pytest.mark.parametrize("name", OF_RUNS)
def test_no_figure_of_runs_shows_a_number_where_there_is_none(name):
    few = [one_run("pre_rmsnorm"), one_run("lns"), one_run("lns", lr=3e-3), one_run("dyt", status="diverged")]
    one_seed = pd.concat(few)
    assert false_numbers(FIGURES[name](one_seed)) == []


def test_no_figure_of_experiments_shows_a_number_where_there_is_none(measured):
    for metric in BY_LAYER:
        assert false_numbers(by_layer(measured, metric)) == []
    for metric in BY_PAIR:
        assert false_numbers(by_pair(measured, metric)) == []


def test_one_seed_has_no_interval_when_hovered(measured):
    one, two = (trace for trace in by_layer(measured).data if trace.meta)
    assert one.text == ("",) * 4 and all(text.startswith(" [") for text in two.text)
    assert all("%{text}" in line.hovertemplate for line in (one, two))


def test_a_layer_that_one_seed_has_is_without_an_interval_when_hovered():
    runs = table(("pre_rmsnorm", "lns"), depths=(4,), seeds=(0, 1))
    runs = runs[~(runs["layer"].eq(2) & runs["seed"].eq(1) & runs["scheme"].eq("lns"))]
    figure = profile(runs, reference="pre_rmsnorm")
    assert false_numbers(figure) == []
    (line,) = (trace for trace in figure.data if trace.name == "lns")
    assert [("no interval here" in text) for text in line.text] == [False, False, True, False, False]
    assert "%{text}" in line.hovertemplate and line.text[3].endswith(", 2 seeds")


def test_a_heat_map_is_silent_where_it_is_blank():
    lines = pd.DataFrame({"step": [0, 0, 10], "layer": [1, 2, 1], "value": [1.0, 2.0, np.nan]})
    rows = [("block_out", layer, "rms", "all", value) for layer, value in ((1, 1.0), (2, np.inf))]
    stats = pd.DataFrame(rows, columns=["site", "layer", "metric", "mask", "value"])
    for figure in (recorded_map(lines, "step", "rms", "block_out"), layer_heatmap(stats)):
        assert false_numbers(figure) == []
