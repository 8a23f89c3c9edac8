"""A plotly figure in a notebook that follows its controls, the widget around it, and pages.

plotly's FigureWidget validates every property in Python and sends each in a message. The browser then reports all
traces' defaults back. `Plot` sends one message a change, and gets no answer.
"""

from __future__ import annotations

import gzip
import json
import threading
from base64 import b64encode
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import plotly.graph_objects as go
import plotly.io as pio
import traitlets
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from normlab.errors import in_one_line
from normlab.files import whole_file


def static_text(*names: str) -> str:
    """The text of files in `static`, one after another."""
    folder = files("normlab.widgets").joinpath("static")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def write_page(path: str | Path, scripts: Sequence[str], data: Any, **parts: str) -> Path:
    """Write one page that needs no kernel; returns its path, whose folder is made.

    Args:
        path: the HTML file.
        scripts: names in `static`.
        data: what `read` of page.js promises.
        parts: the others of page.html: kind, title, about, plotly.
    """
    path = Path(path)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    packed = b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    page = static_text("page.html")
    inside = {"style": static_text("pages.css"), "script": static_text("page.js", *scripts), "data": packed}
    for name, part in (inside | parts).items():
        page = page.replace(f"/*{name}*/", part)
    with whole_file(path) as staged:
        staged.write_text(page, encoding="utf-8")
    return path


def plotly_text() -> traitlets.Unicode:
    """plotly as a trait, and no part of the widget's script: anywidget gives that two seconds to start."""
    return traitlets.Unicode(get_plotlyjs()).tag(sync=True)


_AS_DATA = {"plotly_mimetype", "png"}


def still(figure: go.Figure) -> dict[str, Any]:
    """A widget's drawing beside the widget, for notebooks that become pages: by MIME type.

    Empty where plotly shows figures to a reader, who has the widget.
    """
    names = pio.renderers.default.split("+")
    if not _AS_DATA.issuperset(names):
        return {}
    return {kind: data for name in names for kind, data in pio.renderers[name].to_mimebundle(figure.to_dict()).items()}


class PageWidget(anywidget.AnyWidget):
    """A page in a notebook: its state is the widget's traits, and the kernel answers what it asks."""

    figure: go.Figure

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(self._reply)

    def answer(self, asked: dict[str, Any]) -> Any:
        """The answer to what the page asked."""
        raise NotImplementedError

    def static(self) -> go.Figure:
        """The same as `figure`."""
        return self.figure

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        data, *metadata = super()._repr_mimebundle_(**kwargs) or ({},)
        return (data | still(self.static()), *metadata)

    def _reply(self, _: object, asked: dict[str, Any], __: object) -> None:
        try:
            answer = {"answer": self.answer(asked)}
        except Exception as error:  # of anyone's model; without an answer the page would wait for ever
            answer = {"error": in_one_line(error)}
        self.send({"id": asked["id"], **answer})


class Plot(anywidget.AnyWidget):
    """A plotly figure in a notebook: `show` draws another in its place.

    `figure` is the data and layout that the browser has. `lock` is held while a message of the page is handled.
    Traitlets holds notifications back meanwhile, and an update from another thread could be lost.
    """

    _esm = static_text("plot.js", "page_side.js", "plot_widget.js")
    _plotly = plotly_text()
    figure = traitlets.Dict().tag(sync=True)
    dark_page = traitlets.Bool(False).tag(sync=True)

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__()

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """A message of the page."""
        with self.lock:
            super().set_state(sync_data)

    def show(self, figure: go.Figure) -> None:
        """Draw this."""
        with self.lock:
            self.figure = json.loads(json.dumps(figure, cls=PlotlyJSONEncoder))

    def on_click(self, act: Callable[[str, Any], object]) -> None:
        """Call `act` with the trace's name and x when the reader clicks on a point."""
        self.on_msg(lambda _, content, __: act(content["trace"], content["x"]))


class PlotWidget(widgets.VBox):
    """Rows of controls, a line in words and a plot. Controls call `redraw`, which shows what the present state is.

    JupyterLab may run a control's callback in another thread than the cells, and several at once: state changes under
    `lock`, and so does the plot. Keys pressed on the controls are no commands of JupyterLab, and controls and plot have
    names for who does not see them.

    Args:
        draw: the figure of the state, for a page of that theme, "light" or "dark".
        rows: of controls: a widget, or several side by side.
        describe: the line of the state, HTML.
    """

    def __init__(
        self, draw: Callable[[str], go.Figure], *rows: widgets.Widget, describe: Callable[[], str] = str
    ) -> None:
        super().__init__()
        self.add_class("normlab")
        self.plot, self.message = Plot(), widgets.HTML()
        self.lock = self.plot.lock
        self._draw, self._describe = draw, describe
        self.redraw()
        self.children = [*rows, self.message, self.plot]
        self.plot.observe(self.redraw, names="dark_page")

    @property
    def theme(self) -> str:
        """The page's, "light" or "dark"."""
        return "dark" if self.plot.dark_page else "light"

    def redraw(self, _: object = None) -> None:
        """Show the present state, in one message."""
        with self.lock:
            self.figure = self._draw(self.theme)
            self.plot.show(self.figure)
            self.message.value = self._describe()

    def static(self) -> go.Figure:
        """The present drawing as a plain figure, for pages without a kernel."""
        return self.figure

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return super()._repr_mimebundle_(**kwargs) | still(self.static())
