"""NormExplorer: every scheme, depth, metric and training step of a sweep, one slider away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd
import plotly.graph_objects as go

from normlab.errors import NormlabError
from normlab.export import NO_BROWSER, image_bytes
from normlab.figures.theme import ink, message_figure, style_of
from normlab.profiles import Profiles, View, default_view
from normlab.published import load_published
from normlab.widgets.pane import Pane


class NormExplorer(widgets.VBox):
    """A metric by layer for all schemes, steered by sliders; two views side by side; export of view, numbers and code.

    Args:
        runs: the table of `normlab.load_runs`.
        schemes: those ticked at the start; default all.
        published: published values to overlay; default those that come with normlab.
        theme: "light" or "dark"; default: as JupyterLab's.
        source: the path the table was loaded from, for the exported code.
        folder: where exports are written.

    A table with nothing to show gives a widget that says so.
    """

    def __init__(
        self,
        runs: pd.DataFrame,
        *,
        schemes: Sequence[str] | None = None,
        published: pd.DataFrame | None = None,
        theme: str | None = None,
        source: str = "data/runs",
        folder: str | Path = ".",
    ) -> None:
        super().__init__()
        self.add_class("normlab-explorer")
        self.profiles = Profiles(runs)
        self.source, self.folder, self._follow = source, Path(folder), theme is None
        self._theme = theme or "light"
        self.panes: list[Pane] = []
        view = default_view(self.profiles, schemes)
        if view is None:
            self.children = [go.FigureWidget(message_figure(self.profiles.missing))]
            return
        self._published = _published() if published is None else published
        self.said = widgets.HTML()
        self.compare = _button("compare two views", "columns", self._toggle_compare)
        self.dark = widgets.ToggleButton(value=theme == "dark", description="dark", tooltip="plots for a dark page")
        self.dark.layout.width = "auto"
        self.dark.observe(self._themed, names="value")
        self.exports = [
            _button("PNG", "image", lambda _: self.export("png")),
            _button("SVG", "image", lambda _: self.export("svg")),
            _button("CSV", "table", lambda _: self.export("csv")),
            _button("code", "code", lambda _: self._say(f"<pre>{self.code()}</pre>")),
        ]
        self._side_by_side = widgets.HBox(layout=widgets.Layout(width="100%"))
        self._add_pane(view)
        bar = widgets.HBox([self.compare, self.dark, *self.exports], layout=widgets.Layout(flex_flow="row wrap"))
        self.children = [widgets.HTML(_colors(self.profiles.schemes)), self._side_by_side, bar, self.said]

    @property
    def figure(self) -> go.Figure:
        """The plot of the first view, as a plain figure."""
        return self.panes[0].figure

    @property
    def view(self) -> View:
        """What the first view shows."""
        return self.panes[0].view

    def _add_pane(self, view: View) -> None:
        pane = Pane(self.profiles, view, self._published, self._theme)
        pane.box.layout.width = "100%"
        if self._follow:
            pane.plot.observe(self._page_themed, names="dark_page")
        self.panes.append(pane)
        self._side_by_side.children = tuple(pane.box for pane in self.panes)

    def _toggle_compare(self, _: object) -> None:
        if len(self.panes) == 1:
            self._add_pane(self.view)
            self.compare.description = "one view"
        else:
            closed = self.panes.pop()
            closed.play.playing = False
            self._side_by_side.children = tuple(pane.box for pane in self.panes)
            closed.box.close()
            self.compare.description = "compare two views"

    def _themed(self, change: dict[str, Any]) -> None:
        self._theme = "dark" if change["new"] else "light"
        for pane in self.panes:
            pane.set_theme(self._theme)

    def _page_themed(self, change: dict[str, Any]) -> None:
        self.dark.value = change["new"]

    def _say(self, html: str) -> None:
        self.said.value = html

    def code(self) -> str:
        """The three lines that make the first view again as a static figure."""
        view, dress = self.view, self.panes[0].dress
        options: dict[str, Any] = {"site": view.site, "mask": view.mask, "depth": view.depth, "step": view.step}
        if list(view.schemes) != self.profiles.schemes:
            options["schemes"] = list(view.schemes)
        options |= {"relative": True} if view.relative else {}
        options |= {"reference": view.reference} if view.reference else {}
        options |= {"theory": True} if dress.theory else {}
        options |= {"band": dress.band, "log": dress.log, "theme": dress.theme}
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        papers = dress.overlay and dress.published is not None
        given += ", published=normlab.published.load_published()" if papers else ""
        return (
            f"import normlab{'.published' if papers else ''}\n"
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
        if kind not in ("png", "svg", "csv"):
            raise NormlabError(f"unknown kind {kind!r}: choose png, svg or csv")
        view = self.view
        path = self.folder / f"{view.metric}-{view.site}-depth{view.depth}-step{view.step}.{kind}"
        if kind == "csv":
            content: bytes | None = self.table().to_csv(index=False).encode()
        else:
            content = image_bytes(self.static(), kind)
        if content is None:
            self._say(f"<small>{NO_BROWSER}</small>")
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._say(f"<small>written: {path}</small>")
        return path

    def static(self) -> go.Figure:
        """The first view as a plain figure, for pages without a kernel."""
        return self.figure


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
        f"{where}.normlab-{name} label {{ color: {ink(style_of(name).color, theme)}; font-weight: 600; }}"
        for theme, where in pages.items()
        for name in schemes
    )
    return f"<style>{' '.join(rules)}</style>"
