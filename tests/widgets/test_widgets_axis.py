"""The explorer's value axis: of all steps while they go by, of one step where nothing moves, logarithmic for ratios."""

from __future__ import annotations

import pytest
from figures_helpers import SCHEMES, table

import normlab
from normlab.widgets import NormExplorer
from normlab.widgets.pane import ABSOLUTE


@pytest.fixture
def explorer() -> NormExplorer:
    return NormExplorer(table())


def test_what_stands_still_has_the_axis_of_its_own_step(explorer: NormExplorer):
    pane = explorer.panes[0]
    pane.step.value = 0
    (_, high), (_, still) = (one.layout.yaxis.range for one in (explorer.figure, explorer.static()))
    top = max(max(trace.y) for trace in explorer.figure.data if trace.name in SCHEMES)
    assert top <= still < 1.2 * top < high
    assert normlab.figures.profile(table(), step=0).layout.yaxis.range == explorer.static().layout.yaxis.range


def test_ratios_have_a_log_axis_and_what_is_shaded_is_said(explorer: NormExplorer):
    pane = explorer.panes[0]
    assert "shaded: smallest to largest seed" in explorer.figure.layout.title.text and not pane.log_axis.disabled
    pane.shown_as.value = "pre_rmsnorm"
    assert explorer.figure.layout.yaxis.type == "log" and pane.log_axis.disabled
    assert "shaded: 95% interval" in explorer.figure.layout.title.text
    pane.band.value = False
    assert "shaded" not in explorer.figure.layout.title.text
    pane.shown_as.value = ABSOLUTE
    assert explorer.figure.layout.yaxis.type == "linear" and not pane.log_axis.disabled
