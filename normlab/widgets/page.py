"""The explorer as one HTML page that needs no kernel and no network: plotly, drawings and the sliders' code are inside.

Everything is drawn here, by the function that draws the explorer: each view at its first step, and what differs at the
others. The page puts one step's numbers in place of another's, and leaves out what the reader does not want to see.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from plotly.offline import get_plotlyjs

from normlab.analysis.profiles import Profiles, View, by_family, default_view, shown_first
from normlab.errors import NormlabError
from normlab.figures.draw import axis_bounds
from normlab.figures.profile import PlotOptions, drawing, log_axis, log_remark, theory_remark
from normlab.figures.theme import on_dark, style_of, template
from normlab.probes.metrics import MASKS, metric_row, site_label
from normlab.widgets.plot import script

DEFAULT_SITES = ("block_out", "block_in_grad")
ABSOLUTE, RELATIVE = "absolute", "relative"
_DIGITS = 4  # significant ones: what a plot can show, at half the size


def explorer_page(
    runs: pd.DataFrame | Profiles,
    path: str | Path,
    *,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    sites: Sequence[str] | None = DEFAULT_SITES,
    references: Sequence[str] | None = None,
) -> Path:
    """Write the explorer as one page; returns its path.

    Args:
        runs: the table of `normlab.load_runs`, or an index made from it.
        path: the HTML file to write; its folder is made.
        configs: what the runs were configured with (`normlab.read_configs`): without it theory says nothing of them.
        sites: those to include (None: all that were measured; the page grows with each).
        references: schemes against which all can be shown (default: the first; the page grows with each).

    Raises:
        NormlabError: nothing to show in the table, nothing measured at `sites`, or a reference that the table lacks.
    """
    profiles = runs if isinstance(runs, Profiles) else Profiles(runs, configs)
    if profiles.missing:
        raise NormlabError(f"no page to write: {profiles.missing}")
    found = page_data(profiles, sites, references)
    if not found["views"]:
        raise NormlabError(f"no page to write: nothing was measured at {', '.join(sites or ())}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    page = script("page.html").replace("/*plotter*/", script("plot.js")).replace("/*plotly*/", get_plotlyjs())
    page = page.replace("/*data*/", b64encode(gzip.compress(text.encode(), mtime=0)).decode())
    path.write_text(page, encoding="utf-8")
    return path


def page_data(
    profiles: Profiles, sites: Sequence[str] | None = DEFAULT_SITES, references: Sequence[str] | None = None
) -> dict[str, Any]:
    """What the page needs: drawings by "site|metric|mask|depth|way", and the choices that lead to them."""
    references = profiles.schemes[:1] if references is None else references
    if unknown := [name for name in references if name not in profiles.schemes]:
        raise NormlabError(f"no run of {unknown[0]!r} in the table, which has: {', '.join(profiles.schemes)}")
    by_metric: dict[str, list[list[str]]] = {}
    masks: dict[str, list[list[str]]] = {}
    views: dict[str, Any] = {}
    for metric in profiles.metrics():
        for site in profiles.sites(metric):
            if sites is not None and site not in sites:
                continue
            by_metric.setdefault(metric, []).append([site_label(site), site])
            masks[f"{site}|{metric}"] = [[MASKS.get(mask, mask), mask] for mask in profiles.masks(metric, site)]
            for mask in profiles.masks(metric, site):
                for key, view in _ways(profiles, metric, site, mask, references):
                    views[f"{site}|{metric}|{mask}|{key}"] = _drawings(profiles, view)
    first = default_view(profiles)
    titles = {name: style_of(name).title for name in profiles.schemes}
    ways = [["absolute values", ABSOLUTE], ["relative to layer 1", RELATIVE]]
    return {
        "schemes": [_scheme(name) for name in profiles.schemes],
        "families": by_family([name for name in profiles.schemes if name not in shown_first(profiles.schemes)]),
        "depths": profiles.depths,
        "start": first.depth if first else None,
        "metrics": [[_capital(metric_row(name).label) + f" ({name})", name] for name in by_metric],
        "sites": by_metric,
        "masks": masks,
        "ways": ways + [[f"against {titles[name]}", name] for name in references],
        "templates": {theme: template(theme).to_plotly_json() for theme in ("light", "dark")},
        "on_dark": on_dark(),
        "views": views,
    }


def _ways(
    profiles: Profiles, metric: str, site: str, mask: str, references: Sequence[str]
) -> Iterator[tuple[str, View]]:
    """The views of a metric, each depth absolute, relative and against each reference, without a step."""
    for depth in profiles.depths:
        view = View(metric, site, mask, depth, 0, tuple(profiles.schemes))
        yield f"{depth}|{ABSOLUTE}", view
        yield f"{depth}|{RELATIVE}", replace(view, relative=True)
        for name in references:
            yield f"{depth}|{name}", replace(view, reference=name)


def _drawings(profiles: Profiles, view: View) -> dict[str, Any]:
    """A view with everything in it: `traces` and `layout` of its first step, and `frames`, what differs at each step;
    `axes`, logarithmic and not (ratios have no other); of each scheme the range of the latter that shows it alone."""
    steps = profiles.steps(view.metric, view.site, view.mask, view.depth)
    traces: dict[str, dict[str, Any]] = {}
    layout: dict[str, Any] = {}
    axes: dict[str, Any] = {}
    frames = []
    ratios = log_axis(view, asked=False)
    for step in steps:
        at = replace(view, step=step)
        drawn = {kind: drawing(profiles, at, PlotOptions(log=kind == "log", theory=True)) for kind in ("linear", "log")}
        axes = {kind: one["layout"].pop("yaxis") for kind, one in drawn.items()}
        now = _plain(drawn["linear"]["layout"])
        now.pop("template")
        lines = {trace["name"]: _plain(trace) for trace in drawn["linear"]["data"] if trace["name"] != "labels"}
        layout = layout or now
        labels = {k: [_plain(t) for t in one["data"] if t["name"] == "labels"] for k, one in drawn.items()}
        frames.append(
            {
                "layout": _differing(now, layout),
                "data": {name: _differing(trace, traces.setdefault(name, trace)) for name, trace in lines.items()},
                "labels": labels,
                "remarks": [*profiles.remarks(at), *([log_remark(profiles, at)] if ratios else [])],
            }
        )
    on_log = axes.get("linear", {}).get("type") == "log"
    return {
        "steps": steps,
        "traces": list(traces.values()),
        "layout": layout,
        "frames": frames,
        "axes": _plain(axes),
        "ranges": {name: axis_bounds(profiles.span(replace(view, schemes=(name,))), on_log) for name in view.schemes},
        "remarks": {"theory": theory_remark(profiles, view), "log": "" if ratios else log_remark(profiles, view)},
    }


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in now.items() if key not in before or before[key] != part}


def _plain(part: Any) -> Any:
    """Arrays as lists of short numbers, None where there is none."""
    if isinstance(part, dict):
        return {key: _plain(value) for key, value in part.items()}
    if isinstance(part, np.ndarray | list | tuple):
        return [_plain(value) for value in (part.tolist() if isinstance(part, np.ndarray) else part)]
    if isinstance(part, float):
        return float(f"{part:.{_DIGITS}g}") if np.isfinite(part) else None
    return part


def _scheme(name: str) -> dict[str, Any]:
    style = style_of(name)
    title = f"{style.title} (control)" if style.is_control else style.title
    return {"name": name, "title": style.title, "label": title, "color": style.color}


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
