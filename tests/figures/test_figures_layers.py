"""Figures of what runs measured after their last step: means over seeds, intervals, one scale for all panels."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from figures_helpers import table, text_of
from scipy import stats

from normlab import NormlabError
from normlab.analysis.claims import depth_use
from normlab.figures import theme
from normlab.figures.layers import BY_PAIR, PARTS, by_layer, by_pair
from normlab.figures.report import layer_heatmap

SCHEMES = ("pre_rmsnorm", "lns")


def lines_of(figure: go.Figure) -> dict[str, go.Scatter]:
    return {trace.name: trace for trace in figure.data if trace.meta}


def band_of(figure: go.Figure, scheme: str) -> np.ndarray:
    """The lower and the upper end of a scheme's interval by layer."""
    (band,) = (trace for trace in figure.data if trace.name == f"{scheme} band")
    low, high = np.array(band.y).reshape(2, -1)
    return np.stack([low, high[::-1]])


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """Three seeds of two schemes at depth 4, one run at depth 8, as `load_experiments` gives them."""
    draw, rows = np.random.default_rng(0), []
    for scheme, depth, seed in [*((s, 4, k) for s in SCHEMES for k in range(3)), ("lns", 8, 0)]:
        about = (f"{scheme}-{depth}-{seed}", scheme, depth, 32, seed, 4e-3)
        for layer in range(1, depth + 1):
            rows += [(*about, "skip_delta_loss", part, layer, None, draw.gamma(2)) for part in ("block", "deleted")]
            rows += [(*about, name, "block", layer, other, draw.random()) for name in BY_PAIR for other in range(layer)]
    return pd.DataFrame(rows, columns="run scheme depth width seed lr metric part layer other value".split())


def test_a_line_is_the_mean_of_its_seeds_with_its_interval(measured):
    figure = by_layer(measured, part="deleted", depth=4)
    rows = measured.query("metric == 'skip_delta_loss' and part == 'deleted' and depth == 4")
    values = rows.pivot_table(index=["scheme", "seed"], columns="layer", values="value")
    for scheme in SCHEMES:
        line = next(trace for trace in figure.data if trace.meta and trace.meta["scheme"] == scheme)
        sd = values.loc[scheme].std(ddof=1)  # the floor of two schemes is the smaller of their variances
        assert list(line.y) == pytest.approx(list(values.loc[scheme].mean()))
        low, high = band_of(figure, scheme)
        half = (high - low) / 2
        assert half == pytest.approx(list(stats.t.ppf(0.975, 2) * sd / np.sqrt(3)))
    dots = [y for trace in figure.data if trace.mode == "markers" for y in trace.y]
    assert sorted(dots) == pytest.approx(sorted(rows["value"]))


def test_every_scheme_has_a_panel_with_the_first_scheme_in_grey(measured):
    figure = by_layer(measured, depth=4)
    first, second = (lines_of(figure)[name] for name in SCHEMES)
    (grey,) = [trace for trace in figure.data if trace.name == "reference"]
    assert first.xaxis != second.xaxis == grey.xaxis and list(grey.y) == list(first.y)
    assert list(second.x) == [1, 2, 3, 4] == list(figure.layout.xaxis.tickvals), "no block 0, and none after the last"
    assert figure.layout.yaxis.range == figure.layout.yaxis2.range, "one axis for all"


def test_the_title_gives_the_mean_of_the_deeper_half_without_the_last_layer(measured):
    rows = measured[measured["metric"].eq("skip_delta_loss") & measured["depth"].eq(4)].assign(value=1.0)
    rows.loc[(rows["layer"] == 3) & (rows["scheme"] == SCHEMES[1]), "value"] = 2.0
    low, high = (theme.style_of(name).title for name in SCHEMES)
    assert by_layer(rows).layout.title.text.endswith(f": block 3, 1 ({low}) to 2 ({high})")
    learned = by_layer(rows.assign(status=np.where(rows["scheme"] == SCHEMES[1], "not_learned", "finished")))
    assert learned.layout.title.text.endswith(f": block 3, 1 ({low})")
    assert f"not learned: {high}" in text_of(learned)
    deeper = [rows, rows.assign(layer=rows["layer"] + 4, value=rows["layer"])]
    title = by_layer(pd.concat(deeper).assign(depth=8)).layout.title.text
    assert title.replace("<br>", " ").endswith(f": mean of blocks 5 to 7, 2 ({high}) to 2 ({low})")


def test_runs_that_were_trained_unlike_are_named_or_refused(measured):
    rows = measured[measured["depth"] == 4]
    is_lns = rows["scheme"].eq("lns")
    for draw in (by_layer, by_pair):
        warm = rows.assign(recipe="steps=20 warmup=" + is_lns.map({True: "0.3", False: "0.1"}))
        assert " · trained differently: warmup 0.1 and 0.3 (LNS)" in text_of(draw(warm))
        longer = rows.assign(recipe="steps=" + is_lns.map({True: "60", False: "20"}))
        assert "were trained for 20 to 60 steps" in text_of(draw(longer))
        assert "widths 16, 32: keep those of one" in text_of(draw(rows.assign(width=rows["width"].mask(is_lns, 16))))


def test_an_interval_that_a_log_axis_cannot_hold_is_cut_at_the_axis_and_said_to_be(measured):
    rows = measured[(measured["depth"] == 4) & (measured["part"] == "block")].copy()
    rows = rows[rows["metric"] == "skip_delta_loss"]
    rows["value"] = 1.0 + 0.01 * rows["seed"]
    assert "are cut" not in text_of(by_layer(rows, log=True)) and "lie below" not in text_of(by_layer(rows, log=True))
    wide = (rows["scheme"] == "lns") & (rows["layer"] == 2)
    rows.loc[wide, "value"] = rows.loc[wide, "seed"].map({0: 0.1, 1: 8.0, 2: -0.01})
    figure = by_layer(rows, log=True)
    bottom = 10 ** figure.layout.yaxis.range[0]
    lows, highs = band_of(figure, "lns")
    assert lines_of(figure)["lns"].text[0] == f" [{lows[0]:.4g}, {highs[0]:.4g}]"
    assert lows[1] == pytest.approx(bottom) and min(lows[0], *lows[2:]) > bottom
    assert "intervals are cut at the axis" in text_of(figure)
    assert "2 of 24 dots lie below the axis" in text_of(figure) and bottom > 0.2
    assert "are cut" not in text_of(by_layer(rows)), "a linear axis holds it"


def test_a_value_that_is_not_finite_does_not_lie_below_a_log_axis(measured):
    rows = measured.query("depth == 4 and metric == 'skip_delta_loss' and part == 'block'").copy()
    rows["value"] = rows["value"].mask(rows["scheme"].eq("lns") & rows["layer"].eq(2) & rows["seed"].eq(1), np.nan)
    for log in (True, False):
        figure = by_layer(rows.assign(value=1.0 + rows["value"]), log=log)
        assert "1 of 24 values not finite" in text_of(figure) and "lie below" not in text_of(figure)
        assert sum(len(trace.y) for trace in figure.data if trace.mode == "markers") == 23


def test_the_title_names_what_is_left_out(measured):
    titles = {
        part: by_layer(measured[measured["part"] == "block"].assign(part=part), part=part).layout.title.text
        for part in PARTS
    }
    assert titles["block"].startswith("Loss added by leaving out one block:")
    assert len(set(titles.values())) == len(PARTS)
    assert "attention" in titles["attention"] and "MLP" in titles["mlp"] and "deleting" in titles["deleted"]


def test_every_panel_has_numbers_below_it_and_the_lowest_of_a_column_a_title(measured):
    four = pd.concat([measured, measured.replace({"scheme": {"lns": "bhyt", "pre_rmsnorm": "dyt"}})])
    axes = [axis for axis in by_pair(four, depth=4).select_xaxes() if axis.anchor]
    assert [bool(axis.title.text) for axis in axes[:4]] == [False, True, True, True]
    assert all(axis.showticklabels for axis in axes[:4])


def test_the_depth_with_most_runs_is_shown_and_named(measured):
    assert "depth 4 · width 32 · 3 seeds · learning rate 0.004" in text_of(by_layer(measured))
    assert "depth 8 · width 32 · 1 seeds" not in text_of(by_pair(measured))


def test_the_title_says_what_the_pairs_show(measured):
    """Block 2 of 4 turns the stream more than blocks 3 and 4 under one of two schemes; block 1 does not count."""
    turn = {"pre_rmsnorm": (0.1, 0.5, 0.3, 0.4), "lns": (0.9, 0.2, 0.3, 0.3)}
    rows = [
        (f"{scheme}-{seed}", scheme, 4, 32, seed, 4e-3, "angular_distance", "block", layer, layer + 1, angle)
        for scheme, angles in turn.items()
        for seed in range(2)
        for layer, angle in enumerate(angles)
    ]
    angles = pd.DataFrame(rows, columns=measured.columns)
    title = by_pair(angles).layout.title.text.replace("<br>", " ")
    assert title.endswith("the deeper half turns it less under 1 of 2 schemes")
    skipped = measured[measured["metric"] == "skip_future_effect"]
    skipped = skipped.assign(value=skipped["value"].mask(skipped["other"] == 2, 9.0))
    assert by_pair(skipped, "skip_future_effect", depth=4).layout.title.text.endswith("block 2 under 2 of 2 schemes")


@pytest.mark.parametrize("metric", BY_PAIR)
def test_a_panel_a_scheme_holds_means_over_seeds_on_one_scale(measured, metric):
    figure = by_pair(measured, metric, depth=4)
    panels = [trace for trace in figure.data if trace.type == "heatmap"]
    assert len(panels) == 2 and all(panel.coloraxis == "coloraxis" for panel in panels)
    rows = measured[(measured["metric"] == metric) & (measured["depth"] == 4) & (measured["scheme"] == SCHEMES[0])]
    mean = rows.groupby(["layer", "other"])["value"].mean()
    shown = {(y, x): z for y, row in zip(panels[0].y, panels[0].z, strict=True)
             for x, z in zip(panels[0].x, row, strict=True) if z is not None}  # fmt: skip
    assert shown == pytest.approx(mean.to_dict())


def test_what_was_not_measured_is_said_and_what_does_not_exist_is_refused(measured):
    assert "No run measured jacobian_identity" in text_of(by_layer(measured, "jacobian_identity"))
    assert "No run measured" in text_of(by_pair(measured, depth=64))
    with pytest.raises(NormlabError, match="metrics skip_delta_loss"):
        by_layer(measured, "loss")
    with pytest.raises(NormlabError, match="by pairs of layers"):
        by_pair(measured, "loss")


def test_a_table_of_runs_is_refused_with_what_to_pass():
    for function in (by_layer, by_pair, depth_use):
        with pytest.raises(NormlabError, match=r"lacks the columns part: pass what normlab\.load_experiments"):
            function(table())


def test_values_of_which_none_is_finite_or_positive_are_no_figure(measured):
    rows = measured[measured["metric"].eq("skip_delta_loss") & measured["depth"].eq(4)]
    for values, log in ((np.nan, False), (-1.0, True)):
        assert "is finite" in by_layer(rows.assign(value=values), log=log).layout.annotations[0].text


def test_a_heat_map_of_a_metric_without_a_finite_value_has_empty_rows():
    rows = [("block_out", layer, "grad_l2_mean", "all", float("nan")) for layer in (1, 2)]
    table = pd.DataFrame(rows, columns=["site", "layer", "metric", "mask", "value"])
    (row,) = layer_heatmap(table, "grad_l2_mean").data[0].z
    assert np.isnan(np.asarray(row, dtype=float)).all()
