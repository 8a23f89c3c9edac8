"""One view of a table of runs: its controls and the plot that answers them.

JupyterLab may run a control's callback in another thread than the cells, and several at once: every change of the
figure happens under one lock and reads only an index that nothing writes to.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import ipywidgets as widgets
import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.profiles import Profiles, View
from normlab.figures.profile import PlotOptions, drawing, log_remark, published_remark, static, theory_remark
from normlab.figures.theme import style_of
from normlab.probes.metrics import MASKS, metric_row, site_label
from normlab.widgets.plot import Plot

_WIDE = {"description_width": "84px"}
ABSOLUTE = "absolute values"
RELATIVE = "relative to layer 1"


class Pane:
    """Controls and plot of one view; `box` is the widget to show.

    Args:
        profiles: index of the table.
        view: what to show first.
        published: table of `normlab.load_published`, or None for no such switch.
    """

    def __init__(self, profiles: Profiles, view: View, published: pd.DataFrame | None, theme: str) -> None:
        self.profiles, self.published = profiles, published
        self._lock = threading.RLock()
        self._quiet = 0
        self._theme = theme
        self._drawn: dict[str, Any] = {}
        self.plot = Plot()
        self.status = widgets.HTML()
        self._make_controls(view)
        self._listen()
        self._refresh_choices()
        self.redraw()
        self.box = widgets.VBox([*self._rows(), self.plot, self.status])

    def _make_controls(self, view: View) -> None:
        profiles = self.profiles
        label = {name: f"{metric_row(name).label} ({name})" for name in profiles.metrics()}
        self.metric = widgets.Dropdown(
            options=[(text, name) for name, text in label.items()], value=view.metric, description="metric", style=_WIDE
        )
        self.site = widgets.Dropdown(
            options=_sites(profiles, view.metric), value=view.site, description="measured at", style=_WIDE
        )
        self.mask = widgets.Dropdown(
            options=_masks(profiles, view.metric, view.site), value=view.mask, description="tokens", style=_WIDE
        )
        self.depth = widgets.SelectionSlider(
            options=profiles.depths, value=view.depth, description="depth", style=_WIDE, continuous_update=True
        )
        self.step = widgets.SelectionSlider(
            options=[view.step], value=view.step, description="step", style=_WIDE, continuous_update=True
        )
        self.metric.layout.width = self.step.layout.width = "380px"
        self.play = widgets.Play(value=0, min=0, max=0, interval=350, show_repeat=False, tooltip="play training")
        self.play.layout.width = "90px"
        self.put = widgets.Dropdown(options=self._ways(), value=_way(view), description="shown as", style=_WIDE)
        self.band = widgets.Checkbox(value=True, description="seeds / interval", indent=False)
        self.log = widgets.Checkbox(value=metric_row(view.metric).log, description="log axis", indent=False)
        self.papers = widgets.Checkbox(value=False, description="published values", indent=False)
        self.papers.disabled = self.published is None
        self.theory = widgets.Checkbox(value=False, description="theory", indent=False)
        self._switches = (self.band, self.log, self.papers, self.theory)
        self.schemes = {name: _scheme_box(name, name in view.schemes) for name in profiles.schemes}

    def _ways(self) -> list[tuple[str, str]]:
        against = [(f"against {style_of(name).title}", name) for name in self.profiles.schemes]
        return [(ABSOLUTE, ABSOLUTE), (RELATIVE, RELATIVE), *against]

    def _rows(self) -> list[widgets.Widget]:
        flow = widgets.Layout(flex_flow="row wrap", width="100%")
        short = widgets.Layout(width="150px")
        for box in self._switches:
            box.layout = short
        return [
            widgets.HBox([self.metric, self.site, self.mask, self.put], layout=flow),
            widgets.HBox([self.depth, self.step, self.play, *self._switches], layout=flow),
            widgets.HBox(list(self.schemes.values()), layout=flow),
        ]

    def _listen(self) -> None:
        for control in (self.metric, self.site):
            control.observe(self._changed_choice, names="value")
        self.depth.observe(self._changed_choice, names="value")
        for control in (self.mask, self.step, self.put, *self._switches, *self.schemes.values()):
            control.observe(self._changed, names="value")
        self.play.observe(self._played, names="value")

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Several controls change, one redraw follows."""
        with self._lock:
            self._quiet += 1
            try:
                yield
            finally:
                self._quiet -= 1
            if not self._quiet:
                self.redraw()

    def _changed(self, _: object) -> None:
        with self._lock:
            if self.play.value != self.step.index:  # moved by the reader: play stops, and will go on from there
                self.play.playing = False
                self.play.value = self.step.index
            if not self._quiet:
                self.redraw()

    def _changed_choice(self, change: dict[str, Any]) -> None:
        with self.quietly():
            if change["owner"] is self.metric:
                self.log.value = metric_row(self.metric.value).log
            self._refresh_choices()

    def _played(self, change: dict[str, Any]) -> None:
        with self._lock:
            self.step.index = min(change["new"], len(self.step.options) - 1)

    def _refresh_choices(self) -> None:
        """Offer what the table has for the metric, site and depth, and keep each choice that still exists."""
        with self._lock:
            self._quiet += 1
            try:
                _offer(self.site, _sites(self.profiles, self.metric.value))
                _offer(self.mask, _masks(self.profiles, self.metric.value, self.site.value))
                steps = self.profiles.steps(self.metric.value, self.site.value, self.mask.value, self.depth.value)
                _offer(self.step, steps or [self.step.value], last=True)
                self.play.max = len(self.step.options) - 1
                self.play.value = self.step.index
            finally:
                self._quiet -= 1

    @property
    def view(self) -> View:
        """What the controls say."""
        put = self.put.value
        return View(
            metric=self.metric.value,
            site=self.site.value,
            mask=self.mask.value,
            depth=self.depth.value,
            step=self.step.value,
            schemes=tuple(name for name, box in self.schemes.items() if box.value),
            relative=put == RELATIVE,
            reference=None if put in (ABSOLUTE, RELATIVE) else put,
        )

    @property
    def dress(self) -> PlotOptions:
        published = self.published if self.papers.value else None
        return PlotOptions(self.band.value, self.log.value, self._theme, published, self.theory.value)

    @property
    def figure(self) -> go.Figure:
        """The plot as a plain figure."""
        return static(self._drawn)

    def set_theme(self, theme: str) -> None:
        """Redraw for a light or a dark page."""
        with self._lock:
            self._theme = theme
            self.redraw()

    def redraw(self) -> None:
        """Put the present view into the plot, in one message."""
        with self._lock:
            view, dress = self.view, self.dress
            self._drawn = drawing(self.profiles, view, dress)
            self.plot.show(self._drawn)
            remarks = self.profiles.remarks(view)
            remarks += [said] if dress.log and (said := log_remark(self.profiles, view)) else []
            remarks += [published_remark(dress.published, view)] if self.papers.value else []
            remarks += [theory_remark(self.profiles, view)] if dress.theory else []
            self.status.value = f"<small>{escape(' · '.join(remarks))}</small>" if remarks else ""


def _way(view: View) -> str:
    return view.reference or (RELATIVE if view.relative else ABSOLUTE)


def _sites(profiles: Profiles, metric: str) -> list[tuple[str, str]]:
    return [(site_label(site), site) for site in profiles.sites(metric)]


def _masks(profiles: Profiles, metric: str, site: str) -> list[tuple[str, str]]:
    return [(MASKS.get(mask, mask), mask) for mask in profiles.masks(metric, site)]


def _offer(control: Any, options: list[Any], last: bool = False) -> None:
    """Give a control other options and keep its value if it is among them; else the last (or first) of them."""
    if list(control.options) == options:
        return
    values = [option[1] if isinstance(option, tuple) else option for option in options]
    keep = control.value if control.value in values else values[-1 if last else 0]
    control.options = options
    control.value = keep


def _scheme_box(name: str, chosen: bool) -> widgets.Checkbox:
    style = style_of(name)
    title = f"{style.title} (control)" if style.is_control else style.title
    box = widgets.Checkbox(
        value=chosen, description=title, indent=False, layout=widgets.Layout(width="auto", margin="0 14px 0 0")
    )
    box.add_class(css_class(name))
    return box


def css_class(scheme: str) -> str:
    """The class of a scheme's name; a table from elsewhere may call a scheme anything."""
    return "normlab-scheme-" + re.sub(r"\W", "-", scheme)
