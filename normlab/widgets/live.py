"""What widgets with a figure share: the figure, which any thread may change, and the frame around it.

A page sends what it draws back to its figure. JupyterLab has these messages handled in another thread than the cells,
and a figure in the middle of one is not to be touched: traitlets holds all its notifications back and merges them, so
that an update sent then is lost, and plotly gathers a batch in one place for all threads.

LiveFigure   a FigureWidget with a lock, for a light or a dark page
Frame        the box of controls and figure: the reader's keys, names for screen readers, JupyterLab's theme
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import anywidget
import ipywidgets as widgets
import plotly.graph_objects as go
import traitlets

from normlab.figures import theme as look
from normlab.widgets.plot import script

_COLORED = ("line", "marker", "textfont", "error_y")  # what of a trace has colours of its own


def finite(values: Iterable[float]) -> list[float | None]:
    """Numbers as a page can have them: what is not finite becomes None, a gap."""
    return [float(value) if math.isfinite(value) else None for value in values]


class LiveFigure(go.FigureWidget):
    """A FigureWidget with a lock: `lock` is held while a message of the page is handled and while `changing`.

    Args:
        figure: what to show first.
        lock: the lock of whatever changes it, so that there is one and not two to take in turn.
    """

    def __init__(self, figure: go.Figure, lock: Any = None) -> None:
        object.__setattr__(self, "lock", threading.RLock() if lock is None else lock)
        super().__init__(figure)
        self._config = {"responsive": True, "displaylogo": False}

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """A message of the page."""
        with self.lock:
            super().set_state(sync_data)

    @contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """The traces by name, to be changed; the page gets all changes at once."""
        with self.lock, self.batch_update():
            yield {trace.name: trace for trace in self.data}

    def set_theme(self, theme: str) -> None:
        """The same for a "light" or a "dark" page."""
        with self.lock:
            dressed = look.themed(self.static(), theme)
            with self.batch_update():
                self.layout.template = dressed.layout.template
                for trace, other in zip(self.data, dressed.data, strict=True):
                    colors = other.to_plotly_json()
                    trace.update({part: colors[part] for part in _COLORED if part in colors})

    def static(self) -> go.Figure:
        """What is shown now as a plain figure."""
        with self.lock:
            return go.Figure(self)


class PageSide(anywidget.AnyWidget):
    """The part of a Frame that runs in the page and is not seen. `dark_page`: what the page says of its theme."""

    _esm = script("page_side.js") + script("page_side_widget.js")
    dark_page = traitlets.Bool(False).tag(sync=True)


class Frame(widgets.VBox):
    """A widget made of controls and one LiveFigure, to be filled by `fill`. Keys pressed on its controls are no
    commands of JupyterLab, and its controls and its plot have names for who does not see them.

    Args:
        theme: "light" or "dark"; None: as JupyterLab's.
    """

    figure: LiveFigure

    def __init__(self, theme: str | None) -> None:
        super().__init__()
        self.add_class("normlab")
        self.theme = theme or "light"
        self._lock = threading.RLock()
        self.page = PageSide(layout=widgets.Layout(display="none"))
        self._follow = theme is None

    def fill(self, figure: go.Figure, *rows: widgets.Widget) -> None:
        """Put the figure under the rows of controls, and draw."""
        self.figure = LiveFigure(figure, self._lock)
        self.redraw()
        self.children = [*rows, self.figure, self.page]
        if self._follow:
            self.page.observe(self._page_themed, names="dark_page")

    def redraw(self) -> None:
        """Show what there is to show now: each widget its own."""

    def _page_themed(self, change: dict[str, Any]) -> None:
        with self._lock:
            self.theme = "dark" if change["new"] else "light"
            self.figure.set_theme(self.theme)
            self.redraw()

    def static(self) -> go.Figure:
        """What is shown now as a plain figure, for pages without a kernel."""
        return self.figure.static()
