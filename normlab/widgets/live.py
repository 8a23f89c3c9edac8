"""A figure that may be changed from any thread while the page talks to it.

A page sends what it draws back to its figure. JupyterLab has these messages handled in another thread than the cells,
and a figure in the middle of one is not to be touched: traitlets holds all its notifications back and merges them, so
that an update sent then is lost, and plotly gathers a batch in one place for all threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import plotly.graph_objects as go


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
