"""A plotly figure in a notebook that follows its controls, and the widget around it.

Plot         the figure: one message a change, no answer, and no layout where only numbers change
PlotWidget   controls, state, and a function that draws the state
PageWidget   a page of normlab in a notebook: NormExplorer and Intervene

plotly's FigureWidget validates every property in Python and sends each in a message. The browser then reports all
traces' defaults back. With the two dozen traces of a profile, that is most of the time of a move.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeAlias

import anywidget
import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs

from normlab.errors import NormlabError
from normlab.figures.profile import plain

Drawing: TypeAlias = go.Figure | dict[str, Any]  # a dict: data and layout, with numbers that may be arrays


def script(name: str) -> str:
    """The text of a file in `static`."""
    return files("normlab.widgets").joinpath("static", name).read_text(encoding="utf-8")


def esm(*names: str) -> str:
    """plotly and scripts of `static` as one module; the page evaluates plotly once, however many plots it has."""
    alone = "const module = { exports: {} }, exports = module.exports, define = undefined;"  # no loader of the page's
    library = f"globalThis.normlabPlotly ??= (() => {{ {alone}\n{get_plotlyjs()}\nreturn module.exports; }})()"
    return f"const library = () => {library};\n" + "".join(
        script(f"{name}.js") for name in ("plot", "page_side", *names)
    )


class PageWidget(anywidget.AnyWidget):
    """A page in a notebook: its state is the widget's traits, and the kernel answers what it asks."""

    theme = traitlets.Unicode("").tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(self._reply)

    def answer(self, asked: dict[str, Any]) -> Any:
        """What the page asked for."""
        raise NotImplementedError

    def _reply(self, _: object, asked: dict[str, Any], __: object) -> None:
        try:
            self.send({"id": asked["id"], "answer": self.answer(asked)})
        except NormlabError as error:
            self.send({"id": asked["id"], "error": str(error)})


class Plot(anywidget.AnyWidget):
    """A plotly figure in a notebook: `show` draws another in its place.

    `figure` is what the browser has: data and layout, with arrays as bytes. `dark_page`: the browser says so. `lock` is
    held while a message of the page is handled. Traitlets holds all notifications back meanwhile, and an update from
    another thread could be lost.
    """

    _esm = esm("plot_widget")
    figure = traitlets.Dict().tag(sync=True)
    dark_page = traitlets.Bool(False).tag(sync=True)

    def __init__(self, lock: Any = None) -> None:
        self.lock = lock or threading.RLock()
        super().__init__()

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """A message of the page."""
        with self.lock:
            super().set_state(sync_data)

    def show(self, drawn: Drawing) -> None:
        """Draw this."""
        with self.lock:
            self.figure = packed(drawn.to_plotly_json() if isinstance(drawn, go.Figure) else drawn)

    def on_click(self, act: Callable[[str, Any], object]) -> None:
        """Call `act` with the trace's name and x when the reader clicks on a point."""
        self.on_msg(lambda _, content, __: act(content["trace"], content["x"]))


def packed(value: Any) -> Any:
    """The same with every array as bytes, which a message carries as buffers, not as text."""
    if isinstance(value, np.ndarray):
        columns = value.shape[1] if value.ndim == 2 else None
        return {"floats": value.astype("<f8").tobytes(), "columns": columns}
    if isinstance(value, dict):
        return {key: packed(part) for key, part in value.items()}
    return [packed(part) for part in value] if isinstance(value, list | tuple) else value


class PlotWidget(widgets.VBox):
    """Rows of controls, a line in words and a plot. Controls call `redraw`, which shows what the present state is.

    JupyterLab may run a control's callback in another thread than the cells, and several at once: state changes under
    `lock`, and so does the plot. Keys pressed on the controls are no commands of JupyterLab, and controls and plot have
    names for who does not see them.

    Args:
        draw: the figure of the state, for a page of that theme, "light" or "dark".
        rows: of controls.
        describe: the line of the state, HTML.
        theme: "light" or "dark"; None: as JupyterLab's.
        lock: to be shared with others.
    """

    def __init__(
        self,
        draw: Callable[[str], Drawing],
        *rows: widgets.Widget,
        describe: Callable[[], str] = str,
        theme: str | None = None,
        lock: Any = None,
    ) -> None:
        super().__init__()
        self.add_class("normlab")
        self.theme = theme or "light"
        self.plot, self.message = Plot(lock), widgets.HTML()
        self.lock = self.plot.lock
        self._draw, self._describe = draw, describe
        self.redraw()
        self.children = [*rows, self.message, self.plot]
        if theme is None:
            self.plot.observe(lambda change: self.set_theme("dark" if change["new"] else "light"), names="dark_page")

    def redraw(self, _: object = None) -> None:
        """Show the present state, in one message."""
        with self.lock:
            self._shown = self._draw(self.theme)
            self.plot.show(self._shown)
            self.message.value = self._describe()

    def set_theme(self, theme: str) -> None:
        """The same for a "light" or a "dark" page."""
        with self.lock:
            self.theme = theme
            self.redraw()

    @property
    def figure(self) -> go.Figure:
        """The present drawing as a plain figure."""
        shown = self._shown
        return shown if isinstance(shown, go.Figure) else plain(shown)

    def static(self) -> go.Figure:
        """The same, for pages without a kernel."""
        return self.figure
