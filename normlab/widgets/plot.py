"""Plot: a plotly figure that follows a slider: one message a move, no answer, and no layout where only numbers change.

plotly's own FigureWidget validates every property in Python, sends each on its own and has the browser report all
traces' defaults back after every change; with the two dozen traces of a profile that is most of the time of a move.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import anywidget
import numpy as np
import traitlets
from plotly.offline import get_plotlyjs


def script(name: str) -> str:
    """The text of a script that lies beside this file."""
    return files("normlab.widgets").joinpath(name).read_text(encoding="utf-8")


def _module() -> str:
    """plotly and the view as one module; the page evaluates plotly once, however many plots it has."""
    alone = "const module = { exports: {} }, exports = module.exports, define = undefined;"  # no loader of the page's
    library = f"globalThis.normlabPlotly ??= (() => {{ {alone}\n{get_plotlyjs()}\nreturn module.exports; }})()"
    return f"const library = () => {library};\n" + "".join(
        script(f"{name}.js") for name in ("plot", "page_side", "plot_widget")
    )


class Plot(anywidget.AnyWidget):
    """A plotly figure in a notebook: `show` draws another in its place.

    `figure` is what the browser has: data and layout, with arrays as bytes. `dark_page`: the browser says so.
    """

    _esm = _module()
    figure = traitlets.Dict().tag(sync=True)
    dark_page = traitlets.Bool(False).tag(sync=True)

    def show(self, drawn: dict[str, Any]) -> None:
        """Draw plain data and layout; the numbers of traces may be arrays, of one or two dimensions."""
        self.figure = packed(drawn)


def packed(value: Any) -> Any:
    """The same with every array as its bytes, which travel beside the message and are not written out as text."""
    if isinstance(value, np.ndarray):
        columns = value.shape[1] if value.ndim == 2 else None
        return {"floats": value.astype("<f8").tobytes(), "columns": columns}
    if isinstance(value, dict):
        return {key: packed(part) for key, part in value.items()}
    return [packed(part) for part in value] if isinstance(value, list | tuple) else value
