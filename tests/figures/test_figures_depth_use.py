"""Figures of what runs measured after their last step: means over seeds, pooled intervals, one scale for all panels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from figures_helpers import table, text_of
from scipy import stats

from normlab import NormlabError
from normlab.analysis.claims import depth_use
from normlab.figures.depth_use import BY_PAIR, by_layer, by_pair

SCHEMES = ("pre_rmsnorm", "lns")


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """Three seeds of two schemes at depth 4, one run at depth 8, as `load_experiments` gives them."""
    draw, rows = np.random.default_rng(0), []
    for scheme, depth, seed in [*((s, 4, k) for s in SCHEMES for k in range(3)), ("lns", 8, 0)]:
        about = (f"{scheme}-{depth}-{seed}", scheme, depth, 32, seed)
        for layer in range(1, depth + 1):
            rows += [(*about, "skip_delta_loss", part, layer, None, draw.gamma(2)) for part in ("block", "deleted")]
            rows += [(*about, name, "block", layer, other, draw.random()) for name in BY_PAIR for other in range(layer)]
    return pd.DataFrame(rows, columns="run scheme depth width seed metric part layer other value".split())


def test_a_line_is_the_mean_of_its_seeds_with_an_interval_of_the_pooled_spread(measured):
    figure = by_layer(measured, part="deleted", depth=4)
    rows = measured.query("metric == 'skip_delta_loss' and part == 'deleted' and depth == 4")
    values = rows.pivot_table(index=["scheme", "seed"], columns="layer", values="value")
    for scheme in SCHEMES:
        line = next(trace for trace in figure.data if trace.meta and trace.meta["scheme"] == scheme)
        sd = np.sqrt(values.groupby("scheme").var(ddof=1).mean())
        assert list(line.y) == pytest.approx(list(values.loc[scheme].mean()))
        assert list(line.error_y.array) == pytest.approx(list(stats.t.ppf(0.975, 4) * sd / np.sqrt(3)))
    dots = [y for trace in figure.data if trace.mode == "markers" for y in trace.y]
    assert sorted(dots) == pytest.approx(sorted(rows["value"]))


def test_the_depth_with_most_runs_is_shown_and_named(measured):
    assert "depth 4 · width 32 · 3 seeds" in text_of(by_layer(measured))
    assert "depth 8 · width 32 · 1 seeds" not in text_of(by_pair(measured))


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
