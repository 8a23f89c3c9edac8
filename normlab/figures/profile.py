"""A metric by layer at one training step, all schemes in one panel: the figure that the explorer moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from normlab.analysis.profiles import BEST, LEVEL, Profile, Profiles, View, default_view
from normlab.analysis.selection import separator
from normlab.errors import NormlabError
from normlab.figures import theme as look
from normlab.figures.draw import EndLabel, axis_bounds, label_trace, value_axis
from normlab.figures.published import published_points, published_trace
from normlab.probes.metrics import mask_label, metric_row, site_label

HEIGHT = 520
_MARGIN = dict(l=72, r=170, t=104, b=58)
_PANEL = HEIGHT - _MARGIN["t"] - _MARGIN["b"]
_LINE = 92  # characters of a definition that fit above a plot of half a page
LINEAR = "values that are not above 0 keep the axis linear"


@dataclass(frozen=True)
class PlotOptions:
    """Options of a drawing: bands, log axis, page theme, published values, theory.

    With `one_step` the value axis fits the view's step, and the title says what the runs differ in, which schemes have
    no line there and why, or one that a log axis does not show. Else the axis fits all steps and does not move between
    them, and a page says these under the plot.
    """

    band: bool = True
    log: bool = False
    theme: str = "light"
    published: pd.DataFrame | None = field(default=None, compare=False)
    theory: bool = False
    one_step: bool = False


def profile(
    runs: pd.DataFrame,
    metric: str | None = None,
    *,
    site: str | None = None,
    mask: str = "all",
    depth: int | None = None,
    step: int | None = None,
    schemes: Sequence[str] | None = None,
    relative: bool = False,
    reference: str | None = None,
    rate: float | Literal["best"] | None = None,
    band: bool = True,
    log: bool = False,
    theme: str = "light",
    published: pd.DataFrame | None = None,
    theory: Mapping[str, Mapping[str, Any]] | None = None,
) -> go.Figure:
    """A metric by layer at one training step, one line per scheme; with `reference`, ratios or differences by pairs.

    Args:
        runs: the table of `normlab.load_runs`.
        metric, site, mask, depth, step: default: block outputs after training, at the depth where most of the schemes
            were run (`normlab.analysis.profiles.default_view`).
        relative: each profile divided by its value at layer 1. With `reference`, such profiles are compared.
        reference: scheme against which all are shown, with 95% intervals.
        rate: the runs' learning rate, or "best": each scheme's best one. Default: one that all schemes of the depth
            share, else "best". The title says what else the runs differ in.
        band: shade from the smallest to the largest seed, or the interval; the line under the title says which.
        theme: "light" or "dark".
        published: table of `normlab.load_published`, drawn where it has the same metric.
        log: logarithmic value axis; ratios to a reference have one in any case.
        theory: the runs' configurations (`normlab.read_configs`): a thin line with rings per scheme is then what
            theory predicts before training, where it says anything.
    """
    profiles = Profiles(runs, theory)
    view = default_view(profiles, schemes)
    if view is None:
        return look.message_figure(profiles.missing)
    metric = metric or view.metric
    site = site or next(iter(profiles.sites(metric)), "block_out")
    depth = view.depth if depth is None else depth
    if rate not in (None, BEST, *profiles.rates(depth)):
        had = ", ".join(f"{other:g}" for other in profiles.rates(depth))
        raise NormlabError(f"no run of depth {depth} at learning rate {rate} in the table, which has: {had}")
    at = profiles.opening_rate(depth) if rate is None else None if rate == BEST else float(rate)
    steps = profiles.steps(metric, site, mask, depth, at)
    if not steps:
        where = f"{site_label(site)}, {mask_label(mask)}, depth {depth}"
        return look.message_figure(f"{metric} was not measured at: {where}.", metric_row(metric).label)
    step = steps[-1] if step is None else step
    if reference is not None and reference not in profiles.schemes:
        raise NormlabError(f"no run of {reference!r} in the table, which has: {', '.join(profiles.schemes)}")
    view = View(metric, site, mask, depth, step, view.schemes, relative, reference, at)
    options = PlotOptions(band, log, theme, published, theory=theory is not None, one_step=True)
    return go.Figure(plain(drawing(profiles, view, options)))


def plain(part: Any, digits: int | None = None) -> Any:
    """Arrays in a drawing as lists, None where there is no value; with `digits`, numbers of so many."""
    if isinstance(part, dict):
        return {key: plain(value, digits) for key, value in part.items()}
    if isinstance(part, np.ndarray | list | tuple):
        return [plain(value, digits) for value in (part.tolist() if isinstance(part, np.ndarray) else part)]
    if isinstance(part, float):
        return (part if digits is None else float(f"{part:.{digits}g}")) if np.isfinite(part) else None
    return part


def drawing(profiles: Profiles, view: View, options: PlotOptions) -> dict[str, Any]:
    """A view as plain data and layout of a plotly figure: numbers are arrays, so that a move of a slider is cheap.

    Traces are named for what they show: "<scheme> band", "<scheme> theory", "<scheme>", "published", "labels"; one that
    has nothing to show is left out.
    """
    row = metric_row(view.metric)
    lines = profiles.lines(view)
    predicted = profiles.predicted(view) if options.theory else []
    printed = published_values(options.published, view)
    bands = [line for line in lines if options.band and np.isfinite(line.low).any()]
    span = _span(lines, bands) if options.one_step else profiles.span(view)
    span += [*printed["value"]]
    span += [float(value) for line in predicted for value in line.values if np.isfinite(value)]
    asked = log_axis(view, options.log)
    log = asked and (row.log or min(span, default=1.0) > 0)  # of sizes, zeros are left out
    bounds = axis_bounds(span, log)
    shown = {*view.schemes, *map(str, printed["scheme"])}
    styles, sheet = {name: look.style_of(name, options.theme) for name in shown}, look.plain_template(options.theme)
    traces = [_band(line, styles[line.scheme]) for line in bands]
    traces += [_line(line, view, styles[line.scheme], is_theory=True) for line in predicted]
    traces += [_line(line, view, styles[line.scheme]) for line in lines]
    if len(printed):
        colors = [styles[str(scheme)].color for scheme in printed["scheme"]]
        traces.append(published_trace(printed, row.name, colors))
    labels = label_trace([_end(line, styles[line.scheme]) for line in lines], bounds, _PANEL, log)
    traces += [] if labels is None else [labels]
    deepest = int(max([view.depth, *printed["layer"]]))
    about: list[str] = []
    if options.one_step:
        about += [*profiles.unlike(view), *profiles.left_out(view)]
        about += log_remarks(profiles, view) if log else [LINEAR] if asked else []
    said = wrap(" · ".join(about), _LINE) if lines else []
    words = _title(view, profiles.rate(view), bool(bands), said)
    title = dict(text=words, y=1, yref="container", yanchor="top", pad=dict(t=look.LINES_PAD))
    layout = _layout(view, deepest, bounds, log, look.TITLE_LINE * len(said)) | {"title": title, "template": sheet}
    return {"data": traces, "layout": layout if lines else layout | {"annotations": [_nothing(profiles, view)]}}


def log_axis(view: View, asked: bool) -> bool:
    """True if the value axis is logarithmic: where the reader asks for it, and for ratios to a reference.

    The intervals of ratios are symmetric on a log axis only.
    """
    return asked or (view.reference is not None and metric_row(view.metric).is_ratio)


def log_remarks(profiles: Profiles, view: View) -> list[str]:
    """Remarks on the lines that a log axis cannot show at a view's step, one a scheme."""
    unseen = [line for line in profiles.lines(view) if np.isfinite(line.values).any() and not (line.values > 0).any()]
    return [f"{look.style_of(line.scheme).title}: zero, below a log axis" for line in unseen]


def theory_remark(profiles: Profiles, view: View) -> str:
    """Explain the lines with rings, or why there are none."""
    schemes = [line.scheme for line in profiles.predicted(view)]
    if not schemes:
        what = f"the {metric_row(view.metric).label}, {site_label(view.site)}"
        return f"theory says nothing here of {what}"
    silent = [look.style_of(name).title for name in view.schemes if name not in schemes]
    return "thin, with rings: theory, before training" + (
        f" (nothing of {separator(silent).join(silent)})" if silent else ""
    )


def published_remark(published: pd.DataFrame | None, view: View) -> str:
    """Explain the diamonds, or say that there are none."""
    if len(published_values(published, view)):
        return "diamonds: published values, of larger models"
    return f"no paper's value is at hand for this view of the {metric_row(view.metric).label}"


def _span(lines: Sequence[Profile], bands: Sequence[Profile]) -> list[float]:
    """All values of these lines and ends of these bands."""
    parts = [*(line.values for line in lines), *(end for line in bands for end in (line.low, line.high))]
    return [float(value) for part in parts for value in part if np.isfinite(value)]


def _band(line: Profile, style: look.Style) -> dict[str, Any]:
    known = np.isfinite(line.low) & np.isfinite(line.high)
    return dict(
        type="scatter",
        mode="lines",
        fill="toself",
        hoverinfo="skip",
        line=dict(width=0),
        name=f"{line.scheme} band",
        fillcolor=look.faded(style.color, 0.16),
        x=np.concatenate([line.layers[known], line.layers[known][::-1]]),
        y=np.concatenate([line.low[known], line.high[known][::-1]]),
    )


def _line(line: Profile, view: View, style: look.Style, is_theory: bool = False) -> dict[str, Any]:
    """A scheme's line; a thin one with rings for what theory predicts."""
    ends = np.stack([line.low, line.high], axis=1)
    spread = f"%{{customdata[0]:.4~g}} to %{{customdata[1]:.4~g}}, {line.seeds} seeds" if line.seeds > 1 else "1 seed"
    trace = dict(type="scatter", name=line.scheme, x=line.layers, y=line.values)
    if line.seeds > 1 and not np.isfinite(ends[np.isfinite(line.values)]).all():  # as where one seed has the layer
        spread = "%{text}"
        trace |= dict(text=[_ends_in_words(low, high, line.seeds) for low, high in ends])
    if is_theory:
        trace |= dict(name=f"{line.scheme} theory", mode="lines+markers", line=dict(color=style.color, width=1))
        hover = _hover(view, style.title, "theory, before training")
        return trace | dict(marker=dict(symbol="circle-open", size=5), hovertemplate=hover)
    drawn = dict(color=style.color, dash=style.dash, width=2.2)
    trace |= dict(mode="lines", meta=dict(scheme=line.scheme), line=drawn)
    trace |= dict(hovertemplate=_hover(view, style.title, spread))
    return trace if line.seeds == 1 else trace | dict(customdata=ends)


def _ends_in_words(low: float, high: float, seeds: int) -> str:
    known = np.isfinite(low) and np.isfinite(high)
    return f"{low:.4g} to {high:.4g}, {seeds} seeds" if known else f"no interval here, {seeds} seeds"


def _hover(view: View, title: str, about: str) -> str:
    row = metric_row(view.metric)
    what = "; ".join(filter(None, (_compared(view), row.definition)))
    where = "<br>layer %{x}: %{y:.4~g}"
    return f"<b>{title}</b>{where}<br>{about}<br><i>{row.name}: {what}</i><extra></extra>"


def published_values(published: pd.DataFrame | None, view: View) -> pd.DataFrame:
    """Published values that are comparable with an absolute view."""
    is_absolute = not view.relative and view.reference is None
    return published_points(published if is_absolute else None, view.metric, view.schemes, view.site)


def _end(line: Profile, style: look.Style) -> EndLabel:
    known = line.values[np.isfinite(line.values)]
    last = float(known[-1]) if known.size else float("nan")
    return EndLabel(last, style.title, style.color, x=int(line.layers[-1]))


def _title(view: View, rate: str, band: bool, said: Sequence[str]) -> str:
    row = metric_row(view.metric)
    when = "before training" if view.step == 0 else f"step {view.step:,}"
    where = f"{site_label(view.site)}, {mask_label(view.mask)} · depth {view.depth} · {rate}"
    by_layer = "by layer, relative to layer 1" if view.relative else "by layer"
    title = f"{row.label[0].upper()}{row.label[1:]} {by_layer}, {when}"
    return look.in_one(title, where, *about_lines(view, band), *said)


def about_lines(view: View, band: bool) -> list[str]:
    """The metric's definition and, with a band, what is shaded: lines under the title."""
    shaded = "smallest to largest seed" if view.reference is None else f"{LEVEL:.0%} interval"
    return wrap(metric_row(view.metric).definition + (f" · shaded: {shaded}" if band else ""), _LINE)


def _layout(view: View, deepest: int, bounds: tuple[float, float] | None, log: bool, room: int) -> dict[str, Any]:
    """Axes and size; `room` is pixels of more lines in the title."""
    row = metric_row(view.metric)
    neutral = 1.0 if row.is_ratio else 0.0
    neutral_line = dict(color=look.NEUTRAL, dash="dot")
    line = dict(type="line", xref="x domain", x0=0, x1=1, y0=neutral, y1=neutral, line=neutral_line)
    return dict(
        showlegend=False,
        autosize=True,
        height=HEIGHT + room,
        margin=_MARGIN | {"t": _MARGIN["t"] + room},
        hovermode="closest",
        xaxis=dict(title=dict(text="layer"), range=[0, deepest], dtick=max(1, round(deepest / 8))),
        yaxis=dict(title=dict(text=_compared(view) or row.axis)) | value_axis(bounds, log),
        shapes=[line] if view.reference is not None else [],
    )


def _nothing(profiles: Profiles, view: View) -> dict[str, object]:
    text = "<br>".join(profiles.remarks(view)) or "No scheme is selected."
    font = dict(size=14, color=look.NEUTRAL)
    return dict(text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font=font)


def _compared(view: View) -> str:
    """What the values of a view are taken relative to, in words; empty for absolute values."""
    words = ["relative to layer 1"] if view.relative else []
    if view.reference is not None:
        sign = "ratio to" if metric_row(view.metric).is_ratio else "minus"
        words.append(f"{sign} {look.style_of(view.reference).title}, paired by seed")
    return ", ".join(words)
