"""A metric by layer at one training step, all schemes in one panel: the static twin of the explorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from normlab.errors import NormlabError
from normlab.figures import theme as look
from normlab.labels import MASKS, SITES, metric_row
from normlab.profiles import Profile, Profiles, View, default_view

HEIGHT = 520
_MARGIN = dict(l=72, r=170, t=88, b=58)


@dataclass(frozen=True)
class Dress:
    """How a view is drawn: bands, log axis (None: as the metric's row says), page theme, published values."""

    band: bool = True
    log: bool | None = None
    theme: str = "light"
    published: pd.DataFrame | None = field(default=None, compare=False)
    overlay: bool = True


def profile(
    runs: pd.DataFrame | Profiles,
    metric: str | None = None,
    *,
    site: str | None = None,
    mask: str = "all",
    depth: int | None = None,
    step: int | None = None,
    schemes: Sequence[str] | None = None,
    relative: bool = False,
    reference: str | None = None,
    band: bool = True,
    log: bool | None = None,
    theme: str = "light",
    published: pd.DataFrame | None = None,
) -> go.Figure:
    """A metric by layer at one training step, a line a scheme; with `reference`, its ratio or difference by pairs.

    Args:
        runs: the table of `normlab.load_runs`, or an index made from it.
        metric, site, mask, depth, step: default: block outputs of the deepest model after training.
        relative: each profile divided by its value at layer 1.
        reference: scheme against which all are shown, with 95% intervals.
        band: shade from the smallest to the largest seed, or the interval.
        theme: "light" or "dark".
        published: table of `normlab.load_published`, drawn where it has the same metric.
    """
    profiles = runs if isinstance(runs, Profiles) else Profiles(runs)
    view = default_view(profiles, schemes)
    if view is None:
        return look.message_figure(profiles.missing)
    metric = metric or view.metric
    site = site or next(iter(profiles.sites(metric)), "block_out")
    depth = view.depth if depth is None else depth
    steps = profiles.steps(metric, site, mask, depth)
    if not steps:
        where = f"{SITES.get(site, site)}, {MASKS.get(mask, mask)}, depth {depth}"
        return look.message_figure(f"{metric} was not measured at: {where}.", metric_row(metric).label)
    step = steps[-1] if step is None else step
    if reference is not None and reference not in profiles.schemes:
        raise NormlabError(f"no run of {reference!r} in the table, which has: {', '.join(profiles.schemes)}")
    view = replace(
        view, metric=metric, site=site, mask=mask, depth=depth, step=step, relative=relative, reference=reference
    )
    figure = blank(view.schemes)
    redraw(figure, profiles, view, Dress(band, log, theme, published))
    return figure


def blank(schemes: Sequence[str]) -> go.Figure:
    """The traces of a profile figure, without data: a band and a line a scheme, published values, labels."""
    figure = go.Figure()
    for name in schemes:
        band = go.Scatter(mode="lines", fill="toself", hoverinfo="skip", line=dict(width=0), name=f"{name} band")
        figure.add_trace(band)
        figure.add_trace(go.Scatter(mode="lines", name=name, meta=dict(scheme=name)))
    figure.add_trace(go.Scatter(mode="markers", name="published", meta=dict(published=True)))
    figure.add_trace(
        go.Scatter(mode="text", name="labels", textposition="middle right", hoverinfo="skip", cliponaxis=False)
    )
    return figure.update_layout(
        showlegend=False,
        autosize=True,
        height=HEIGHT,
        margin=_MARGIN,
        hovermode="closest",
        xaxis=dict(title=dict(text="layer")),
    )


def redraw(figure: go.Figure, profiles: Profiles, view: View, dress: Dress, only_step: bool = False) -> None:
    """Put a view into a figure made by `blank` for the same or more schemes, changing its traces in place.

    Args:
        only_step: nothing but the training step has changed since the last call: axes, colours and hover texts stay.
    """
    row = metric_row(view.metric)
    log = row.log if dress.log is None else dress.log
    lines = {line.scheme: line for line in profiles.lines(view)}
    told = _published(dress.published if dress.overlay else None, view)
    span = profiles.span(view) + ([] if told is None else [*told["value"]])
    if log and span and min(span) <= 0:
        log = False
    bounds = look.axis_bounds(span, log)
    traces = {trace.name: trace for trace in figure.data}
    for name, trace in traces.items():
        if trace.meta and "scheme" in trace.meta:
            _draw_line(trace, traces[f"{name} band"], lines.get(name), view, dress, only_step)
    _draw_labels(traces["labels"], list(lines.values()), bounds, log, dress.theme)
    if not only_step:
        _draw_published(traces["published"], told, row.name)
        _lay_out(figure, view, bounds, log, dress.theme)
    figure.layout.title.text = _title(view)
    notes = [] if lines else [_nothing(profiles, view)]
    if notes or figure.layout.annotations:
        figure.layout.annotations = notes


def _draw_line(
    trace: go.Scatter, band: go.Scatter, line: Profile | None, view: View, dress: Dress, only_step: bool
) -> None:
    if line is None:
        trace.visible = band.visible = False
        return
    x = line.layers.tolist()
    style = look.style_of(line.scheme)
    color = look.ink(style.color, dress.theme)
    if not only_step or not trace.visible:
        trace.update(x=x, line=dict(color=color, dash=style.dash, width=2.2), hovertemplate=_hover(view, style.title))
    trace.update(y=_listed(line.values), text=_spread_texts(line), visible=True)
    known = np.isfinite(line.low) & np.isfinite(line.high)
    if dress.band and known.any():
        around = np.concatenate([line.layers[known], line.layers[known][::-1]])
        edge = np.concatenate([line.low[known], line.high[known][::-1]])
        band.update(x=around.tolist(), y=_listed(edge), visible=True)
        if not only_step or not band.fillcolor:
            band.fillcolor = look.faded(color, 0.16)
    else:
        band.visible = False


def _hover(view: View, title: str) -> str:
    row = metric_row(view.metric)
    what = row.definition if view.reference is None else f"{_against(view)}; {row.definition}"
    return f"<b>{title}</b><br>layer %{{x}}: %{{y:.4~g}}%{{text}}<br><i>{row.name}: {what}</i><extra></extra>"


def _spread_texts(line: Profile) -> list[str]:
    """What the hover says of the seeds, a text a layer."""
    if line.seeds == 1:
        return ["<br>1 seed"] * len(line.layers)
    pairs = zip(line.low, line.high, strict=True)
    return [f"<br>{low:.4g} to {high:.4g}, {line.seeds} seeds" for low, high in pairs]


def _published(published: pd.DataFrame | None, view: View) -> pd.DataFrame | None:
    """Published values that can stand beside an absolute view of block outputs."""
    if published is None or view.relative or view.reference is not None or view.site != "block_out":
        return None
    keep = (published["metric"] == view.metric) & published["scheme"].isin(view.schemes) & published["layer"].notna()
    return published[keep] if keep.any() else None


def _draw_published(trace: go.Scatter, told: pd.DataFrame | None, metric: str) -> None:
    if told is None:
        trace.visible = False
        return
    rows = list(told.itertuples())
    trace.update(
        x=[int(row.layer) for row in rows],
        y=[float(row.value) for row in rows],
        error_y=dict(type="data", array=[float(row.value) * float(row.relative_error) for row in rows], thickness=1.2),
        marker=dict(symbol="diamond-open", size=8, color=[look.style_of(str(row.scheme)).color for row in rows]),
        text=[f"{row.paper} (arXiv {row.arxiv}), {row.where}<br>{row.model}, {row.method}: {row.note}" for row in rows],
        hovertemplate=f"published {metric}: %{{y}}<br>%{{text}}<extra></extra>",
        visible=True,
    )


def _draw_labels(
    trace: go.Scatter, lines: Sequence[Profile], bounds: tuple[float, float] | None, log: bool, theme: str
) -> None:
    """A label at the end of every line, moved apart; one trace, so that it moves with the lines at no cost."""
    ends = [(line, _end(line)) for line in lines]
    ends = [(line, end) for line, end in ends if np.isfinite(end) and (end > 0 or not log)]
    if not ends or bounds is None:
        trace.visible = False
        return
    places = [float(np.log10(end)) if log else end for _, end in ends]
    unit = (bounds[1] - bounds[0]) / (HEIGHT - _MARGIN["t"] - _MARGIN["b"])
    placed = look.spread(places, 15 * unit, *bounds)
    styles = [look.style_of(line.scheme) for line, _ in ends]
    trace.update(
        x=[int(line.layers[-1]) for line, _ in ends],
        y=[float(10**place) if log else place for place in placed],
        text=[f" {style.title}" for style in styles],
        textfont=dict(color=[look.ink(style.color, theme) for style in styles], size=12),
        visible=True,
    )


def _end(line: Profile) -> float:
    finite = line.values[np.isfinite(line.values)]
    return float(finite[-1]) if finite.size else float("nan")


def _title(view: View) -> str:
    row = metric_row(view.metric)
    when = "before training" if view.step == 0 else f"step {view.step:,}"
    where = f"{SITES.get(view.site, view.site)}, {MASKS.get(view.mask, view.mask)} · depth {view.depth}"
    # One text for both lines: a widget that is resized moves a separate subtitle into the title.
    small = f"<span style='font-size:12px;color:{look.NEUTRAL}'>{where} · {row.definition}</span>"
    return f"{row.label[0].upper()}{row.label[1:]} by layer, {when}<br>{small}"


def _lay_out(figure: go.Figure, view: View, bounds: tuple[float, float] | None, log: bool, theme: str) -> None:
    row = metric_row(view.metric)
    put = _against(view) if view.reference is not None else "relative to layer 1" if view.relative else row.axis
    neutral = 1.0 if row.log else 0.0
    neutral_line = dict(color=look.NEUTRAL, dash="dot")
    line = dict(type="line", xref="x domain", x0=0, x1=1, y0=neutral, y1=neutral, line=neutral_line)
    figure.update_layout(
        template=look.template(theme),
        xaxis=dict(range=[0, view.depth], dtick=max(1, round(view.depth / 8))),
        yaxis=dict(title=dict(text=put)) | look.value_axis(bounds, log),
        shapes=[line] if view.reference is not None else [],
    )


def _nothing(profiles: Profiles, view: View) -> dict[str, object]:
    text = "<br>".join(profiles.remarks(view)) or "No scheme is selected."
    font = dict(size=14, color=look.NEUTRAL)
    return dict(text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font=font)


def _against(view: View) -> str:
    assert view.reference is not None
    title = look.style_of(view.reference).title
    return f"ratio to {title}, paired by seed" if metric_row(view.metric).log else f"minus {title}, paired by seed"


def _listed(values: np.ndarray) -> list[float | None]:
    """Plain numbers; None where there is none, which leaves a gap in the line."""
    return [float(v) if np.isfinite(v) else None for v in values]
