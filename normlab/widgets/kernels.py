"""KernelTimes: what a kernel's call must move, how long each peer takes for it, and its floor."""

from __future__ import annotations

import ipywidgets as widgets
import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.kernels import moved
from normlab.errors import NormlabError
from normlab.figures import themed
from normlab.figures.kernels import one_call
from normlab.widgets.plot import PlotWidget

_PASSES = (("forward and backward", "both"), ("forward", "forward"), ("backward", "backward"))


class KernelTimes(PlotWidget):
    """Choose a device, a call, a shape and a pass.

    Left: the bytes that it must move. A call that joins the residual add to the norm is also shown as two kernels.
    Right: the time of each peer. The line is the floor: the bytes at the copy rate that was measured there.

    Args:
        times: what `normlab.analysis.kernels.read_times` returns.
        call: the one to open with; default: the last of the table.

    Raises:
        NormlabError: a table without times, or a call that is not in it.
    """

    def __init__(self, times: pd.DataFrame, call: str | None = None) -> None:
        if times.empty:
            raise NormlabError("the table has no times: make gpu, or kernels/benchmarks/run.py --device cpu")
        self.times = times
        calls = list(dict.fromkeys(times["function"]))
        if call is not None and call not in calls:
            raise NormlabError(f"no call {call!r} in the table, which has: {', '.join(calls)}")
        self.device = widgets.Dropdown(options=sorted(times["device"].unique()), description="device")
        self.call = widgets.Dropdown(options=calls, value=call or calls[-1], description="call")
        self.shape = widgets.Dropdown(description="rows x width")
        self.part = widgets.Dropdown(options=_PASSES, description="pass")
        self._offer()
        self.device.observe(self._offer, names="value")
        controls = [self.device, self.call, self.shape, self.part]
        row = widgets.HBox(controls, layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__(self._drawing, row)
        for control in controls:
            control.observe(self.redraw, names="value")

    def _offer(self, *_: object) -> None:
        """Offer what was timed on the device: its shapes and calls. What was chosen stays, or else it is the last."""
        own = self.times[self.times["device"] == self.device.value]
        for control, column in ((self.shape, "shape"), (self.call, "function")):
            options, chosen = list(dict.fromkeys(own[column])), control.value
            control.options = options
            control.value = chosen if chosen in options else options[-1]

    def _drawing(self, theme: str) -> go.Figure:
        chosen = {"device": self.device, "function": self.call, "shape": self.shape, "pass": self.part}
        rows = self.times
        for column, control in chosen.items():
            rows = rows[rows[column] == control.value]
        where = f"{self.call.value}, {self.part.label}, {self.shape.value} on {self.device.value}"
        return themed(one_call(rows, moved(rows), where), theme)
