"""All widgets around a plot share this: the page's theme, one plot that takes turns, a static twin."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from training_helpers import TINY
from widget_helpers import TOKENS, model_of

from normlab.figures import theme as look
from normlab.figures.draw import finite
from normlab.widgets import Intervene, LogitAttribution, NormExplorer, PlotWidget, SkipMap, TrainTheatre
from normlab.widgets.plot import Plot

BLUE, BLUE_ON_DARK, PAPER, DARK_PAPER = "#0072b2", "#3b9ddd", "#ffffff", "#14171b"


# Each has something in the first blue of the palette, which a dark page has brighter.
WIDGETS: dict[str, Callable[[Path], PlotWidget]] = {
    "SkipMap": lambda path: SkipMap(model_of("bhyt", 2), [{"input_ids": TOKENS}], name="bhyt"),
    "LogitAttribution": lambda path: LogitAttribution(_bridge(), TOKENS, TOKENS[:, 0]),
    "TrainTheatre": lambda path: TrainTheatre(["bhyt"], path, TINY),
    "PlotWidget": lambda path: PlotWidget(line_in_blue),
}


def _bridge() -> Any:
    pytest.importorskip("transformer_lens")
    from normlab.models.lens import to_bridge

    return to_bridge(model_of("dyt", 2))


def line_in_blue(theme: str) -> go.Figure:
    """A reader's own figure, for their own widget."""
    figure = go.Figure(go.Scatter(name="mine", y=[1.0, 2.0], line=dict(color=look.ink(BLUE, theme))))
    return figure.update_layout(template=look.template(theme), height=300)


def colors(figure: go.Figure) -> tuple[str, bool, bool]:
    traces = "".join(trace.to_json() for trace in map(go.Figure, figure.data))
    return figure.layout.template.layout.paper_bgcolor, BLUE in traces, BLUE_ON_DARK in traces


@pytest.mark.parametrize("name", WIDGETS)
def test_it_is_one_plot_that_follows_the_page_and_has_a_plain_twin(name, tmp_path):
    widget = WIDGETS[name](tmp_path)
    light = colors(widget.figure)
    assert light == (PAPER, True, False)
    values = [trace.to_plotly_json().get("y") for trace in widget.figure.data]
    widget.plot.dark_page = True
    assert colors(widget.figure) == colors(widget.static()) == (DARK_PAPER, False, True)
    widget.redraw()
    assert colors(widget.figure) == (DARK_PAPER, False, True)
    widget.plot.dark_page = False
    assert colors(widget.figure) == light
    assert str([trace.to_plotly_json().get("y") for trace in widget.figure.data]) == str(values)
    assert "normlab" in widget._dom_classes and isinstance(widget.children[-1], Plot)
    assert [trace["name"] for trace in widget.plot.figure["data"]] == [trace.name for trace in widget.static().data]
    assert widget.figure.layout.height  # or what is below it would move when the plot comes


def test_there_is_one_technology():
    for file in Path(look.__file__).parents[1].rglob("*.py"):
        assert "FigureWidget(" not in file.read_text(encoding="utf-8")


def test_scripts_are_small_enough_to_start_within_the_two_seconds_of_anywidget():
    for widget in (Plot, NormExplorer, Intervene):
        assert len(str(widget._esm)) < 100_000  # plotly has five million


def test_what_is_not_finite_is_a_gap():
    assert finite([1, float("nan"), float("inf"), torch.tensor(2.0)]) == [1.0, None, None, 2.0]


def test_a_message_of_the_page_and_a_change_from_another_thread_take_turns(monkeypatch):
    """In the middle of a message traitlets holds notifications back: an update sent then could be lost."""
    plot = Plot()
    sent: list[Any] = []
    monkeypatch.setattr(Plot, "send_state", lambda self, key=None: sent.append((key, self.dark_page)))
    inside, held = threading.Event(), threading.Event()
    plain = Plot.set_trait

    def slowly(self: Plot, name: str, value: Any) -> None:
        plain(self, name, value)
        inside.set()
        time.sleep(0.3)
        held.set()

    monkeypatch.setattr(Plot, "set_trait", slowly)
    page = threading.Thread(target=plot.set_state, args=({"dark_page": True},))
    page.start()
    assert inside.wait(5)
    plot.show(go.Figure(layout={"height": 11}))
    assert held.is_set()  # it waited
    page.join()
    assert plot.figure["layout"]["height"] == 11 and ("figure", True) in sent
