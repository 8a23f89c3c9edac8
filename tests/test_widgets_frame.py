"""What all widgets around a figure share: JupyterLab's theme, the page's side, a static twin that is a plain figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch
from training_helpers import TINY

from normlab import NormlabConfig, NormlabForCausalLM
from normlab.widgets import Intervene, LogitAttribution, SkipMap, TrainTheatre
from normlab.widgets.live import Frame, LiveFigure, PageSide, finite
from normlab.widgets.plot import script

TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
BLUE, BLUE_ON_DARK, PAPER, DARK_PAPER = "#0072b2", "#3b9ddd", "#ffffff", "#14171b"


def model_of(scheme: str) -> NormlabForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}
    return NormlabForCausalLM(
        NormlabConfig(scheme=scheme, num_hidden_layers=2, max_position_embeddings=12, **sizes)
    ).eval()


def attribution(**theme: str) -> LogitAttribution:
    pytest.importorskip("transformer_lens")
    from normlab.models.lens import to_bridge

    return LogitAttribution(to_bridge(model_of("dyt")), TOKENS, TOKENS[:, 0], **theme)


# Each has something in the first blue of the palette, which a dark page has brighter.
WIDGETS: dict[str, Callable[..., Frame]] = {
    "Intervene": lambda path, **theme: Intervene(model_of("dyt"), TOKENS, **theme),
    "SkipMap": lambda path, **theme: SkipMap(model_of("bhyt"), [{"input_ids": TOKENS}], name="bhyt", **theme),
    "LogitAttribution": lambda path, **theme: attribution(**theme),
    "TrainTheatre": lambda path, **theme: TrainTheatre(["bhyt"], path, TINY, **theme),
}


def colors(figure: go.Figure) -> tuple[str, bool, bool]:
    traces = "".join(trace.to_json() for trace in map(go.Figure, figure.data))
    return figure.layout.template.layout.paper_bgcolor, BLUE in traces, BLUE_ON_DARK in traces


@pytest.mark.parametrize("name", WIDGETS)
def test_it_follows_the_page_unless_it_was_given_a_theme(name: str, tmp_path: Path):
    widget = WIDGETS[name](tmp_path)
    light = colors(widget.figure)
    assert light == (PAPER, True, False)
    values = [trace.to_plotly_json().get("y") for trace in widget.figure.data]
    widget.page.dark_page = True
    assert colors(widget.figure) == colors(widget.static()) == (DARK_PAPER, False, True)
    widget.redraw()
    assert colors(widget.figure) == (DARK_PAPER, False, True)
    widget.page.dark_page = False
    assert colors(widget.figure) == light
    assert str([trace.to_plotly_json().get("y") for trace in widget.figure.data]) == str(values)
    fixed = WIDGETS[name](tmp_path, theme="dark")
    assert colors(fixed.figure) == (DARK_PAPER, False, True)
    fixed.page.dark_page = True
    fixed.page.dark_page = False
    assert colors(fixed.figure) == (DARK_PAPER, False, True)


@pytest.mark.parametrize("name", WIDGETS)
def test_it_has_its_side_in_the_page_and_a_plain_twin(name: str, tmp_path: Path):
    widget = WIDGETS[name](tmp_path)
    assert "normlab" in widget._dom_classes
    *_, figure, page = widget.children
    assert isinstance(figure, LiveFigure) and isinstance(page, PageSide)
    assert widget.static().data and not isinstance(widget.static(), go.FigureWidget)


def test_the_side_in_the_page_brings_its_scripts():
    for name in ("page_side.js", "page_side_widget.js"):
        assert script(name) in PageSide._esm


def test_what_is_not_finite_is_a_gap():
    assert finite([1, float("nan"), float("inf"), torch.tensor(2.0)]) == [1.0, None, None, 2.0]
