"""The explorer as one HTML page that needs no kernel and no network: data, plotly and the sliders' code are inside.

The page computes as `normlab.analysis.profiles` does (means, ranges, paired intervals), from the same numbers, seed by
seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from plotly.offline import get_plotlyjs

from normlab.analysis.profiles import Profiles, View, default_view
from normlab.errors import NormlabError
from normlab.figures.theme import ink, style_of
from normlab.probes.metrics import MASKS, metric_row, site_label
from normlab.widgets.plot import script

DEFAULT_SITES = ("block_out", "block_in_grad")
_DIGITS = 4  # significant ones: what a plot can show, at half the size


def explorer_page(
    runs: pd.DataFrame | Profiles, path: str | Path, *, sites: Sequence[str] | None = DEFAULT_SITES
) -> Path:
    """Write the explorer as one page; returns its path.

    Args:
        runs: the table of `normlab.load_runs`, or an index made from it.
        path: the HTML file to write; its folder is made.
        sites: those to include (None: all that were measured; the page grows with each).

    Raises:
        NormlabError: nothing to show in the table, or nothing measured at `sites`.
    """
    profiles = runs if isinstance(runs, Profiles) else Profiles(runs)
    if profiles.missing:
        raise NormlabError(f"no page to write: {profiles.missing}")
    found = page_data(profiles, sites)
    if not found["series"]:
        raise NormlabError(f"no page to write: nothing was measured at {', '.join(sites or ())}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = script("page.html").replace("/*plotter*/", script("plot.js"))
    data = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    page = page.replace("/*data*/", data).replace("/*plotly*/", get_plotlyjs())
    path.write_text(page, encoding="utf-8")
    return path


def page_data(profiles: Profiles, sites: Sequence[str] | None = DEFAULT_SITES) -> dict[str, Any]:
    """What the page needs: series by "site|metric|mask", depth and scheme, and how to call and draw them."""
    series: dict[str, Any] = {}
    by_metric: dict[str, list[list[str]]] = {}
    masks: dict[str, list[list[str]]] = {}
    for metric in profiles.metrics():
        for site in profiles.sites(metric):
            if sites is not None and site not in sites:
                continue
            by_metric.setdefault(metric, []).append([site_label(site), site])
            masks[f"{site}|{metric}"] = [[MASKS.get(mask, mask), mask] for mask in profiles.masks(metric, site)]
            for mask in profiles.masks(metric, site):
                series[f"{site}|{metric}|{mask}"] = _series(profiles, site, metric, mask)
    first = default_view(profiles)
    return {
        "schemes": [_scheme(name) for name in profiles.schemes],
        "depths": profiles.depths,
        "start": first.depth if first else None,
        "rates": {depth: profiles.rate(depth) for depth in profiles.depths},
        "metrics": {name: _metric(name) for name in by_metric},
        "sites": by_metric,
        "masks": masks,
        "series": series,
        "theory": {key: _theory(profiles, *key.split("|")) for key in series},
        "spreads": {key: _spreads(profiles, *key.split("|")) for key in series},
        "remarks": {depth: _remarks(profiles, depth) for depth in profiles.depths},
    }


def _series(profiles: Profiles, site: str, metric: str, mask: str) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for (scheme, depth), cube in profiles.cubes(site, metric, mask).items():
        values = [[[_short(v) for v in layer] for layer in step] for step in cube.values.tolist()]
        about = {"seeds": cube.seeds, "steps": cube.steps, "layers": cube.layers.tolist(), "values": values}
        found.setdefault(depth, {})[scheme] = about
    return found


def _spreads(profiles: Profiles, site: str, metric: str, mask: str) -> dict[int, dict[str, Any]]:
    """Of what intervals are made, by depth, where there are any."""
    views = {depth: View(metric, site, mask, depth, 0, ()) for depth in profiles.depths}
    found = {depth: profiles.spread(view) for depth, view in views.items()}
    return {
        depth: {"steps": spread.steps, "layers": spread.layers, "values": _rounded(spread.values)}
        for depth, spread in found.items()
        if np.isfinite(spread.values).any()
    }


def _rounded(values: np.ndarray) -> list[list[float | None]]:
    return [[_short(value) for value in row] for row in values.tolist()]


def _theory(profiles: Profiles, site: str, metric: str, mask: str) -> dict[int, dict[str, Any]]:
    """What is predicted before training, by depth and scheme; depths of which nothing is are left out."""
    told = {}
    for depth in profiles.depths:
        lines = profiles.predicted(View(metric, site, mask, depth, 0, tuple(profiles.schemes)))
        if lines:
            told[depth] = {
                line.scheme: {"x": line.layers.tolist(), "y": [_short(v) for v in line.values.tolist()]}
                for line in lines
            }
    return told


def _short(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None


def _scheme(name: str) -> dict[str, Any]:
    style = style_of(name)
    look = {"color": style.color, "dark": ink(style.color, "dark"), "dash": style.dash, "control": style.is_control}
    return {"name": name, "title": style.title} | look


def _metric(name: str) -> dict[str, Any]:
    row = metric_row(name)
    label = row.label[0].upper() + row.label[1:]
    return {"label": label, "axis": row.axis, "definition": row.definition, "log": row.log, "ratio": row.is_ratio}


def _remarks(profiles: Profiles, depth: int) -> list[str]:
    assert profiles.chosen is not None
    known = set(profiles.chosen.runs.loc[profiles.chosen.runs["depth"] == depth, "scheme"])
    remark = profiles.chosen.remark
    said = [(name, remark(name, depth) if name in known else "not trained") for name in profiles.schemes]
    return [f"{style_of(name).title}: {text}" for name, text in said if text]
