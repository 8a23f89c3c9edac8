"""NormExplorer: every scheme, depth, metric and training step of a sweep, one slider away."""

from __future__ import annotations

import re
import threading
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.profiles import Profiles, View, default_view, shown_first
from normlab.analysis.published import load_published
from normlab.errors import NormlabError
from normlab.export import NO_BROWSER, image_bytes
from normlab.figures.profile import drawing, plain
from normlab.figures.theme import ink, message_figure, style_of
from normlab.widgets.pane import Pane, css_class
from normlab.widgets.plot import Plot

_KINDS = {"png": "image/png", "svg": "image/svg+xml", "csv": "text/csv"}


class NormExplorer(widgets.VBox):
    """A metric by layer for all schemes, steered by sliders; two views side by side; export of view, numbers and code.

    Args:
        runs: the table of `normlab.load_runs`.
        schemes: those ticked at the start; default all of up to eight, of more the short list, the rest under it by
            family.
        configs: what the runs were configured with (`normlab.read_configs`): without it theory says nothing of them.
        published: published values to overlay; default those that come with normlab.
        theme: "light" or "dark"; default: as JupyterLab's.
        source: the path the table was loaded from, for the exported code.
        folder: where `export` writes; the buttons give a link that downloads.

    A table with nothing to show gives a widget that says so.
    """

    def __init__(
        self,
        runs: pd.DataFrame,
        *,
        schemes: Sequence[str] | None = None,
        configs: Mapping[str, Mapping[str, Any]] | None = None,
        published: pd.DataFrame | None = None,
        theme: str | None = None,
        source: str = "data/runs",
        folder: str | Path = ".",
    ) -> None:
        super().__init__()
        self.add_class("normlab")
        self.profiles = Profiles(runs, configs)
        self.source, self.folder, self._follow = source, Path(folder), theme is None
        self._theme = theme or "light"
        self._lock = threading.RLock()  # one for all panes: a message of one may change all
        self.panes: list[Pane] = []
        self._second: Pane | None = None
        view = default_view(self.profiles, shown_first(self.profiles.schemes) if schemes is None else schemes)
        if view is None:
            plot = Plot()
            plot.show(self.figure)
            self.children = [plot]
            return
        self._published = _published() if published is None else published
        self.message = widgets.HTML()
        self.compare = _button("compare two views", "columns", self._toggle_compare)
        self.dark = widgets.ToggleButton(value=theme == "dark", description="dark", tooltip="plots for a dark page")
        self.dark.layout.width = "auto"
        self.dark.observe(self._themed, names="value")
        self.exports = [
            _button("PNG", "image", lambda _: self._hand_over("png")),
            _button("SVG", "image", lambda _: self._hand_over("svg")),
            _button("CSV", "table", lambda _: self._hand_over("csv")),
            _button("code", "code", lambda _: self._say(f"<pre>{escape(self.code())}</pre>")),
        ]
        self._side_by_side = widgets.HBox(layout=widgets.Layout(width="100%"))
        self._show([self._pane(view)])
        bar = widgets.HBox([self.compare, self.dark, *self.exports], layout=widgets.Layout(flex_flow="row wrap"))
        self.children = [widgets.HTML(_colors(self.profiles.schemes)), self._side_by_side, bar, self.message]

    @property
    def figure(self) -> go.Figure:
        """The plot of the first view, as a plain figure; what is missing, in words, where there is nothing to show."""
        return self.panes[0].figure if self.panes else message_figure(self.profiles.missing)

    @property
    def view(self) -> View:
        """What the first view shows; NormlabError where there is nothing to show."""
        if not self.panes:
            raise NormlabError(f"no view: {self.profiles.missing}")
        return self.panes[0].view

    def _pane(self, view: View) -> Pane:
        pane = Pane(self.profiles, view, self._published, self._theme, self._lock)
        pane.layout.width = "100%"
        if self._follow:
            pane.plot.observe(self._page_themed, names="dark_page")
        return pane

    def _show(self, panes: list[Pane]) -> None:
        self.panes = panes
        self._side_by_side.children = tuple(panes)
        self.compare.description = "compare two views" if len(panes) == 1 else "one view"

    def _toggle_compare(self, _: object) -> None:
        if len(self.panes) > 1:
            self.panes[1].play.playing = False
            self._show(self.panes[:1])
            return
        self._second = self._second or self._pane(self.view)  # kept when put away: it comes back as it was
        self._second.set_theme(self._theme)
        self._show([*self.panes, self._second])

    def _themed(self, change: dict[str, Any]) -> None:
        self._theme = "dark" if change["new"] else "light"
        for pane in self.panes:
            pane.set_theme(self._theme)

    def _page_themed(self, change: dict[str, Any]) -> None:
        self.dark.value = change["new"]

    def _say(self, html: str) -> None:
        self.message.value = html

    def code(self) -> str:
        """The three lines that make the first view again as a static figure."""
        view, drawn = self.view, self.panes[0].options
        options: dict[str, Any] = {"site": view.site, "mask": view.mask, "depth": view.depth, "step": view.step}
        if list(view.schemes) != self.profiles.schemes:
            options["schemes"] = list(view.schemes)
        options |= {"relative": True} if view.relative else {}
        options |= {"reference": view.reference} if view.reference else {}
        options |= {"band": drawn.band, "log": drawn.log, "theme": drawn.theme}
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        given += f", theory=normlab.read_configs({self.source!r})" if drawn.theory else ""
        given += ", published=normlab.load_published()" if drawn.published is not None else ""
        return (
            "import normlab\n"
            f"runs = normlab.load_runs({self.source!r})\n"
            f"normlab.figures.profile(runs, {view.metric!r}, {given})"
        )

    def table(self) -> pd.DataFrame:
        """The numbers behind the first view, a row a scheme and layer."""
        view = self.view
        rows = [
            (line.scheme, int(layer), value, low, high, line.seeds)
            for line in self.profiles.lines(view)
            for layer, value, low, high in zip(line.layers, line.values, line.low, line.high, strict=True)
        ]
        table = pd.DataFrame(rows, columns=["scheme", "layer", "value", "low", "high", "seeds"])
        about = {"metric": view.metric, "site": view.site, "mask": view.mask, "depth": view.depth, "step": view.step}
        return table.assign(**about, relative=view.relative, reference=view.reference or "")

    def export(self, kind: str) -> Path | None:
        """Write the first view to `folder` as "png", "svg" or "csv"; None where an image needs what is missing."""
        content = self._content(kind)
        if content is None:
            return None
        path = self.folder / self._file_name(kind)
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def _content(self, kind: str) -> bytes | None:
        if kind not in _KINDS:
            raise NormlabError(f"unknown kind {kind!r}: choose {', '.join(_KINDS)}")
        content = self.table().to_csv(index=False).encode() if kind == "csv" else image_bytes(self.static(), kind)
        if content is None:
            self._say(f"<small>{NO_BROWSER}</small>")
        return content

    def _file_name(self, kind: str) -> str:
        view = self.view
        way = f"against-{view.reference}" if view.reference else ""
        way = "relative" if view.relative else way
        mask = "" if view.mask == "all" else view.mask
        parts = [view.metric, view.site, mask, f"depth{view.depth}", f"step{view.step}", way]
        return "-".join(re.sub(r"\W", "-", part) for part in parts if part) + f".{kind}"

    def _hand_over(self, kind: str) -> None:
        """A link that downloads the view to the reader's machine, which need not be the one that the kernel is on."""
        content = self._content(kind)
        if content is not None:
            name, data = self._file_name(kind), b64encode(content).decode()
            where = f"data:{_KINDS[kind]};base64,{data}"
            self._say(f"<a style='text-decoration: underline' download='{name}' href='{where}'>download {name}</a>")

    def static(self) -> go.Figure:
        """The first view as a plain figure, for pages without a kernel; its axis holds the step that is shown."""
        if not self.panes:
            return self.figure
        return plain(drawing(self.profiles, self.view, replace(self.panes[0].options, one_step=True)))


def _published() -> pd.DataFrame | None:
    """The values that come with normlab, or none where they were not installed: the explorer works without."""
    try:
        return load_published()
    except NormlabError:
        return None


def _button(text: str, icon: str, act: Callable[[Any], object]) -> widgets.Button:
    button = widgets.Button(description=text, icon=icon, layout=widgets.Layout(width="auto"))
    button.on_click(act)
    return button


def _colors(schemes: Sequence[str]) -> str:
    """A style sheet that writes each scheme's name in its colour, on a light and on a dark page."""
    pages = {"light": "", "dark": "body[data-jp-theme-light='false'] "}
    rules = (
        f"{where}.{css_class(name)} label {{ color: {ink(style_of(name).color, theme)}; font-weight: 600; }}"
        for theme, where in pages.items()
        for name in schemes
    )
    return f"<style>{' '.join(rules)}</style>"
