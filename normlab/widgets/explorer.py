"""The explorer: every scheme, depth, metric and training step of a sweep, one slider away.

`static/explorer.js` has the controls and draws. Python draws each view at its first step, and what differs at the
others. The page has all views inside; the widget asks for each when it is first shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs

from normlab.analysis.profiles import BEST, Profiles, View, by_family, default_view, shown_first
from normlab.analysis.published import load_published
from normlab.errors import NormlabError
from normlab.figures.draw import axis_bounds
from normlab.figures.profile import (
    LINEAR,
    PlotOptions,
    about_lines,
    drawing,
    log_axis,
    log_remarks,
    plain,
    published_remark,
    published_values,
    theory_remark,
)
from normlab.figures.theme import message_figure, on_dark, style_of, template
from normlab.probes.metrics import mask_label, metric_row, site_label
from normlab.widgets.plot import PageWidget, plotly_text, static_text, write_page

_ABOUT = """Small language models that differ in their normalization and, at the rate best, in their learning rate. What
else they differ in, chosen or not, stands under a plot. Choose what was measured, move the sliders, and hover over a
line for its value. Nothing is fetched: the data are in this page, and its address keeps the view you chose."""
DEFAULT_SITES = ("block_out", "block_in_grad")
ABSOLUTE, RELATIVE = "absolute", "relative"
_DIGITS = 4  # significant ones: what a plot can show, at half the size
_KINDS = ("linear", "log")  # of value axes
_CHOICES = ("metric", "site", "mask", "depth", "step", "rate", "way", "schemes")


class NormExplorer(PageWidget):
    """A metric by layer for all schemes, with controls and two views side by side.

    Images, numbers and code can be saved. Traits of the first view are `metric site mask depth step schemes`, `rate`
    (None: each scheme's best; it opens at one that all schemes share), `way` ("absolute", "relative" to layer 1, or
    the scheme to compare with) and the switches `band log theory published`. The browser follows a trait that is set in
    Python. An observer of a trait is called when the reader changes it.

    Args:
        runs: the table of `normlab.load_runs`.
        schemes: those shown at the start. Default: all of up to eight, of more the short list.
        configs: what the runs were configured with (`normlab.read_configs`); theory needs them.
        published: published values to overlay. Default: those that come with normlab.
        source: the path the table was loaded from, for the code that it gives.

    A table with nothing to show gives a widget that says so.
    """

    _esm = static_text("plot.js", "page_side.js", "explorer.js", "explorer_widget.js")
    _css = static_text("pages.css")
    _plotly = plotly_text()
    metric = traitlets.Unicode().tag(sync=True)
    site = traitlets.Unicode().tag(sync=True)
    mask = traitlets.Unicode("all").tag(sync=True)
    depth = traitlets.Int(0).tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    rate = traitlets.Float(None, allow_none=True).tag(sync=True)
    way = traitlets.Unicode(ABSOLUTE).tag(sync=True)
    schemes = traitlets.List(traitlets.Unicode()).tag(sync=True)
    band = traitlets.Bool(True).tag(sync=True)
    log = traitlets.Bool(False).tag(sync=True)
    theory = traitlets.Bool(False).tag(sync=True)
    published = traitlets.Bool(False).tag(sync=True)
    choices = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        runs: pd.DataFrame,
        *,
        schemes: Sequence[str] | None = None,
        configs: Mapping[str, Mapping[str, Any]] | None = None,
        published: pd.DataFrame | None = None,
        source: str = "runs",
    ) -> None:
        self.profiles = Profiles(runs, configs)
        self._published = _shipped_values() if published is None else published
        view = default_view(self.profiles, shown_first(self.profiles.schemes) if schemes is None else schemes)
        if view is None:
            super().__init__(choices={"missing": self.profiles.missing})
            return
        start = {name: value for name, value in asdict(view).items() if name in _CHOICES}
        start["schemes"] = list(view.schemes)
        choices = _choices(self.profiles, None, self.profiles.schemes)
        choices |= {"source": source, "published": self._published is not None}
        start["log"] = _opens_on_log(self.profiles, view)
        super().__init__(**start, choices=choices)
        self.observe(self._settle, names=["metric", "site", "depth", "rate"])

    def __repr__(self) -> str:
        return f"NormExplorer({len(self.profiles.schemes)} schemes)"

    @property
    def view(self) -> View:
        """The view of the traits. NormlabError where there is nothing to show."""
        if self.profiles.missing:
            raise NormlabError(f"no view: {self.profiles.missing}")
        chosen = {name: getattr(self, name) for name in ("metric", "site", "mask", "depth", "step", "rate")}
        return _shown_as(View(**chosen, schemes=tuple(self.schemes)), self.way)

    @property
    def figure(self) -> go.Figure:
        """The view as a plain figure, for pages without a kernel; what is missing, in words, where there is nothing."""
        if self.profiles.missing:
            return message_figure(self.profiles.missing)
        published = self._published if self.published else None
        options = PlotOptions(self.band, self.log, "light", published, self.theory, one_step=True)
        return go.Figure(plain(drawing(self.profiles, self.view, options)))

    def _settle(self, _: object) -> None:
        """Keep each choice that still exists, as the browser does."""
        profiles = self.profiles
        if self.metric not in profiles.metrics():
            raise NormlabError(f"no metric {self.metric!r} in the table, which has: {', '.join(profiles.metrics())}")
        with self.hold_trait_notifications():
            self.site = _among(self.site, profiles.sites(self.metric))
            self.mask = _among(self.mask, profiles.masks(self.metric, self.site))
            self.depth = self.depth if self.depth in profiles.depths else self.choices["start"]
            self.rate = self.rate if self.rate in profiles.rates(self.depth) else None
            steps = profiles.steps(self.metric, self.site, self.mask, self.depth, self.rate)
            self.step = _among(self.step, steps[::-1] or [self.step])

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The drawings of a view, by its key."""
        site, metric, mask, depth, rate, way = asked["view"].split("|")
        at = None if rate == BEST else float(rate)
        view = View(metric, site, mask, int(depth), 0, tuple(self.profiles.schemes), rate=at)
        return _drawings(self.profiles, _shown_as(view, way), asked["theory"], self._published)


def _among(value: Any, options: Sequence[Any]) -> Any:
    return value if value in options else options[0]


@cache
def _shipped_values() -> pd.DataFrame | None:
    """The published values that come with normlab; None where they were not installed."""
    try:
        return load_published()
    except NormlabError:
        return None


def explorer_page(
    runs: pd.DataFrame | Profiles,
    path: str | Path,
    *,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    source: str = "runs",
) -> Path:
    """Write the explorer as one page; returns its path. It has the sites of DEFAULT_SITES.

    Args:
        runs: the table of `normlab.load_runs`, or an index made from it.
        path: the HTML file to write; its folder is made.
        configs: what the runs were configured with (`normlab.read_configs`): without it theory says nothing of them.
        source: the path the table was loaded from, for the code that the page gives.

    Raises:
        NormlabError: nothing to show in the table.
    """
    profiles = runs if isinstance(runs, Profiles) else Profiles(runs, configs)
    if profiles.missing:
        raise NormlabError(f"no page to write: {profiles.missing}")
    found = page_data(profiles) | {"source": source}
    if not found["views"]:
        raise NormlabError(f"no page to write: nothing was measured at {', '.join(DEFAULT_SITES)}")
    return write_page(
        path,
        ["plot.js", "explorer.js", "explorer_page.js"],
        found,
        kind="explorer",
        title="What normalization does, layer by layer",
        about=_ABOUT,
        plotly=get_plotlyjs(),
    )


def page_data(profiles: Profiles) -> dict[str, Any]:
    """The page's data: the reader's choices, and drawings by "site|metric|mask|depth|rate|way".

    All can be shown against the first scheme: each further reference would make the page a third larger.
    """
    references, published = profiles.schemes[:1], _shipped_values()
    choices = _choices(profiles, DEFAULT_SITES, references)
    views = {}
    for metric, labelled in choices["sites"].items():
        for _, site in labelled:
            for mask in profiles.masks(metric, site):
                for depth, rates in choices["rates"].items():
                    for (name, rate), (_, way) in product(rates, choices["ways"]):
                        view = View(metric, site, mask, depth, 0, tuple(profiles.schemes), rate=rate)
                        key = f"{site}|{metric}|{mask}|{depth}|{name}|{way}"
                        views[key] = _drawings(profiles, _shown_as(view, way), published=published)
    return {**choices, "views": views, "published": published is not None}


def _shown_as(view: View, way: str) -> View:
    """The view in absolute values, relative to layer 1, or against a scheme."""
    return replace(view, relative=way == RELATIVE, reference=None if way in (ABSOLUTE, RELATIVE) else way)


def _choices(profiles: Profiles, sites: Sequence[str] | None, references: Sequence[str]) -> dict[str, Any]:
    """The reader's choices with their labels, and the plots' templates."""
    by_metric: dict[str, list[list[str]]] = {}
    masks: dict[str, list[list[str]]] = {}
    for metric in profiles.metrics():
        for site in profiles.sites(metric):
            if sites is None or site in sites:
                by_metric.setdefault(metric, []).append([site_label(site), site])
                labelled = [[mask_label(mask), mask] for mask in profiles.masks(metric, site)]
                masks[f"{site}|{metric}"] = labelled
    shown = shown_first(profiles.schemes)
    first = default_view(profiles, shown)
    titles = {name: style_of(name).title for name in profiles.schemes}
    labels = {name: metric_row(name).label for name in by_metric}
    ways = [["absolute values", ABSOLUTE], ["relative to layer 1", RELATIVE]]
    return {
        "schemes": [_scheme(name) for name in profiles.schemes],
        "shown": shown,
        "families": by_family([name for name in profiles.schemes if name not in shown]),
        "depths": profiles.depths,
        "rates": {depth: _rates(profiles, depth) for depth in profiles.depths},
        "start": first.depth if first else None,
        "rate": first.rate if first else None,
        "log": first is not None and _opens_on_log(profiles, first),
        "metrics": [[f"{label[0].upper()}{label[1:]}", name] for name, label in labels.items()],
        "sites": by_metric,
        "masks": masks,
        "ways": ways + [[f"against {titles[name]}", name] for name in references],
        "templates": {theme: template(theme).to_plotly_json() for theme in ("light", "dark")},
        "on_dark": on_dark(),
    }


def _rates(profiles: Profiles, depth: int) -> list[list[Any]]:
    """The learning rates to choose from at a depth, with their keys: each scheme's best, and then each."""
    rates = profiles.rates(depth)
    return [[BEST, None], *([str(rate), rate] for rate in rates if len(rates) > 1)]


def _opens_on_log(profiles: Profiles, view: View) -> bool:
    """True if a linear axis, which fits all steps, would leave more than two thirds of it empty at the view's step."""
    span = profiles.span(view)
    if not span or span[0] <= 0:
        return False
    shown = [line.values for line in profiles.lines(view) if line.scheme in view.schemes]
    return bool(shown) and bool(span[-1] > 3 * np.nanmax(np.concatenate(shown)))


def _drawings(
    profiles: Profiles, view: View, theory: bool = True, published: pd.DataFrame | None = None
) -> dict[str, Any]:
    """A view with all its steps.

    `traces` and `layout` are those of the first step, `frames` what differs at each, with what a log axis does not show
    as `unseen`. `axes` has a logarithmic one and the usual one (for ratios the same). `ranges` has the range of the
    usual one that shows a scheme alone, `predicted` the one that shows what theory predicts of it. `about` is a part of
    the title, and what stands in its place where a band is drawn.
    """
    steps = profiles.steps(view.metric, view.site, view.mask, view.depth, view.rate)
    traces: dict[str, dict[str, Any]] = {}
    layout: dict[str, Any] = {}
    axes: dict[str, Any] = {}
    frames = []
    ratios = log_axis(view, asked=False)
    about = ["<br>".join(about_lines(view, band)) for band in (False, True)]
    for step in steps:
        at = replace(view, step=step)
        drawn = {kind: drawing(profiles, at, PlotOptions(log=kind == "log", theory=theory)) for kind in _KINDS}
        axes = {kind: one["layout"].pop("yaxis") for kind, one in drawn.items()}
        drawn["linear"]["layout"].pop("template")
        now = plain(drawn["linear"]["layout"], _DIGITS)
        now["title"]["text"] = now["title"]["text"].replace(about[1], about[0])  # a reader may see no band
        unseen = log_remarks(profiles, at) if axes["log"].get("type") == "log" else []
        lines = {trace["name"]: plain(trace, _DIGITS) for trace in drawn["linear"]["data"] if trace["name"] != "labels"}
        layout = layout or now
        labels = {k: [plain(t, _DIGITS) for t in one["data"] if t["name"] == "labels"] for k, one in drawn.items()}
        frames.append(
            {
                "layout": _differing(now, layout),
                "data": {name: _differing(trace, traces.setdefault(name, trace)) for name, trace in lines.items()},
                "labels": labels,
                "remarks": [*profiles.remarks(at), *(unseen if ratios else [])],
                "unseen": [] if ratios else unseen,
            }
        )
    on_log = axes.get("linear", {}).get("type") == "log"
    predicted = profiles.predicted(view) if theory else []
    return {
        "steps": steps,
        "traces": list(traces.values()),
        "layout": layout,
        "frames": frames,
        "axes": plain(axes, _DIGITS),
        "ranges": {name: axis_bounds(profiles.span(replace(view, schemes=(name,))), on_log) for name in view.schemes},
        "predicted": {line.scheme: axis_bounds(line.values, on_log) for line in predicted},
        "published": _printed(profiles, view, published),
        "remarks": {
            "unlike": " · ".join(profiles.unlike(view)),
            "theory": theory_remark(profiles, view) if theory else "",
            "log": LINEAR if steps and axes["log"].get("type") != "log" else "",
        },
        "about": about,
    }


def _printed(profiles: Profiles, view: View, published: pd.DataFrame | None) -> dict[str, Any] | None:
    """Trace of the published values that match a view, the scheme of each, and the axes' ranges that show a scheme's.

    None without any.
    """
    points = published_values(published, view)
    if points.empty:
        return None
    drawn = drawing(profiles, view, PlotOptions(published=published))["data"]
    (trace,) = (trace for trace in drawn if trace["name"] == "published")
    schemes = [*map(str, points["scheme"])]
    values = {name: points["value"][points["scheme"] == name] for name in schemes}
    ranges = {kind: {name: axis_bounds(own, kind == "log") for name, own in values.items()} for kind in _KINDS}
    about = {"schemes": schemes, "ranges": ranges, "remark": published_remark(published, view)}
    return {"trace": plain(trace, _DIGITS), **about}


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Keys whose part is other than before; None for those that are gone."""
    gone = dict.fromkeys(before.keys() - now.keys())
    return gone | {key: part for key, part in now.items() if key not in before or before[key] != part}


def _scheme(name: str) -> dict[str, Any]:
    style = style_of(name)
    return {"name": name, "title": style.title, "control": style.is_control, "color": style.color}
