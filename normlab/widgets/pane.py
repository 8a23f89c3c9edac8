"""One view of a table of runs: its controls and the plot that answers them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import ipywidgets as widgets
import pandas as pd

from normlab.analysis.profiles import Profiles, View, by_family, shown_first
from normlab.figures.profile import PlotOptions, drawing, log_axis, log_remark, published_remark, theory_remark
from normlab.figures.theme import style_of
from normlab.probes.metrics import MASKS, metric_row, site_label
from normlab.widgets.plot import PlotWidget

_WIDE = {"description_width": "84px"}
ABSOLUTE = "absolute values"
RELATIVE = "relative to layer 1"


class Pane(PlotWidget):
    """Controls and plot of one view.

    Args:
        profiles: index of the table.
        view: what to show first.
        published: table of `normlab.load_published`, or None for no such switch.
        theme: "light" or "dark".
        lock: held while anything changes.
    """

    def __init__(
        self, profiles: Profiles, view: View, published: pd.DataFrame | None, theme: str, lock: Any = None
    ) -> None:
        self.profiles, self.published = profiles, published
        self._quiet = 0
        self._make_controls(view)
        self._refresh_choices()
        rows = self._rows()
        super().__init__(self._drawing, *rows, describe=self._remarks, theme=theme, lock=lock)
        self.children = [*rows, self.plot, self.message]  # remarks come and go, and the plot stays where it is
        self._listen()

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
        self.shown_as = widgets.Dropdown(options=self._ways(), value=_way(view), description="shown as", style=_WIDE)
        self.band = widgets.Checkbox(value=True, description="seeds / interval", indent=False)
        self.log_axis = widgets.Checkbox(value=False, description="log axis", indent=False)
        self.papers = widgets.Checkbox(value=False, description="published values", indent=False)
        self.papers.disabled = self.published is None
        self.theory = widgets.Checkbox(value=False, description="theory", indent=False)
        self._switches = (self.band, self.log_axis, self.papers, self.theory)
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
            widgets.HBox([self.metric, self.site, self.mask, self.shown_as], layout=flow),
            widgets.HBox([self.depth, self.step, self.play, *self._switches], layout=flow),
            *self._scheme_rows(flow),
        ]

    def _scheme_rows(self, flow: widgets.Layout) -> list[widgets.Widget]:
        """The schemes that it opens with, and the others by family in a part that unfolds."""
        first = shown_first(list(self.schemes))
        rows: list[widgets.Widget] = [widgets.HBox([self.schemes[name] for name in first], layout=flow)]
        if rest := [name for name in self.schemes if name not in first]:
            families = [
                widgets.HBox([widgets.Label(f"{family}:"), *(self.schemes[name] for name in names)], layout=flow)
                for family, names in by_family(rest).items()
            ]
            further = widgets.Accordion([widgets.VBox(families)], titles=(f"{len(rest)} further schemes",))
            rows.append(further)
        return rows

    def _listen(self) -> None:
        for control in (self.metric, self.site):
            control.observe(self._changed_choice, names="value")
        self.depth.observe(self._changed_choice, names="value")
        for control in (self.mask, self.step, self.shown_as, *self._switches, *self.schemes.values()):
            control.observe(self._changed, names="value")
        self.play.observe(self._played, names="value")

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Several controls change, one redraw follows."""
        with self.lock:
            self._quiet += 1
            try:
                yield
            finally:
                self._quiet -= 1
            if not self._quiet:
                self.redraw()

    def _changed(self, _: object) -> None:
        with self.lock:
            if self.play.value != self.step.index:  # moved by the reader: play stops, and will go on from there
                self.play.playing = False
                self.play.value = self.step.index
            if not self._quiet:
                self.redraw()

    def _changed_choice(self, _: object) -> None:
        with self.quietly():
            self._refresh_choices()

    def _played(self, change: dict[str, Any]) -> None:
        with self.lock:
            self.step.index = min(change["new"], len(self.step.options) - 1)

    def _refresh_choices(self) -> None:
        """Offer what the table has for the metric, site and depth, and keep each choice that still exists."""
        _offer(self.site, _sites(self.profiles, self.metric.value))
        _offer(self.mask, _masks(self.profiles, self.metric.value, self.site.value))
        steps = self.profiles.steps(self.metric.value, self.site.value, self.mask.value, self.depth.value)
        _offer(self.step, steps or [self.step.value], last=True)
        self.play.max = len(self.step.options) - 1
        self.play.value = self.step.index

    @property
    def view(self) -> View:
        """What the controls say."""
        way = self.shown_as.value
        return View(
            metric=self.metric.value,
            site=self.site.value,
            mask=self.mask.value,
            depth=self.depth.value,
            step=self.step.value,
            schemes=tuple(name for name, box in self.schemes.items() if box.value),
            relative=way == RELATIVE,
            reference=None if way in (ABSOLUTE, RELATIVE) else way,
        )

    @property
    def options(self) -> PlotOptions:
        """How the controls say to draw it."""
        published = self.published if self.papers.value else None
        return PlotOptions(self.band.value, self.log_axis.value, self.theme, published, self.theory.value)

    def _drawing(self, _: str) -> dict[str, Any]:
        self.log_axis.disabled = log_axis(self.view, False)  # such a view has one in any case
        return drawing(self.profiles, self.view, self.options)

    def _remarks(self) -> str:
        view, options = self.view, self.options
        remarks = self.profiles.remarks(view)
        remarks += [remark] if log_axis(view, options.log) and (remark := log_remark(self.profiles, view)) else []
        remarks += [published_remark(options.published, view)] if self.papers.value else []
        remarks += [theory_remark(self.profiles, view)] if options.theory else []
        return f"<small>{escape(' · '.join(remarks))}</small>" if remarks else ""


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
