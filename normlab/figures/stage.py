"""Runs in training, as they are now: losses by step beside a layer profile that grows. For `normlab.widgets`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.figures import theme as look
from normlab.probes.metrics import NGRAM_LOSSES, metric_row, site_label

HEIGHT = 440
MOST_POINTS = 400  # a curve has no more: a page draws thousands of them slowly, and shows no more
_LEAST_STEPS = 20  # that the axis has room for
_MARGIN = dict(l=66, r=120, t=64, b=54)
_LOSS = metric_row("loss")


@dataclass(frozen=True)
class Scene:
    """What one run has measured so far.

    Args:
        train, held_out: (step, loss) in order of the steps.
        first, last: (layer, value) of the profile before training and of the latest one.
        step: when the latest profile was measured.
        levels: losses of models that only count, by the names in `normlab.probes.metrics.NGRAM_LOSSES`.
    """

    train: Sequence[tuple[int, float]] = ()
    held_out: Sequence[tuple[int, float]] = ()
    first: Sequence[tuple[int, float]] = ()
    last: Sequence[tuple[int, float]] = ()
    step: int = 0
    levels: Mapping[str, float] = field(default_factory=dict)


def blank(schemes: Sequence[str], depth: int, theme: str = "light") -> go.Figure:
    """The figure of those schemes, without data: `redraw` fills it."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.16, subplot_titles=[" ", " "])
    figure.update_annotations(font=dict(size=13))
    for name in schemes:
        style = look.style_of(name)
        color = look.ink(style.color, theme)
        head = f"<b>{style.title}</b>"
        curve = dict(row=1, col=1, meta=dict(scheme=name))
        figure.add_scatter(
            name=f"{name} train",
            mode="lines",
            line=dict(color=look.faded(color, 0.45), width=1.4),
            hovertemplate=f"{head}, training loss<br>step %{{x:,}}: %{{y:.4f}}<extra></extra>",
            **curve,
        )
        figure.add_scatter(
            name=f"{name} held out",
            mode="lines+markers",
            line=dict(color=color, width=2.2, dash=style.dash),
            hovertemplate=f"{head}, held-out loss<br>step %{{x:,}}: %{{y:.4f}}<extra></extra>",
            **curve,
        )
        layers = dict(row=1, col=2, meta=dict(scheme=name))
        figure.add_scatter(
            name=f"{name} first",
            mode="lines",
            line=dict(color=look.faded(color, 0.45), width=1.4, dash="dot"),
            **layers,
        )
        figure.add_scatter(
            name=f"{name} last", mode="lines", line=dict(color=color, width=2.2, dash=style.dash), **layers
        )
    neutral = dict(color=look.NEUTRAL, width=1.4, dash="dot")
    for row in map(metric_row, NGRAM_LOSSES):
        label = row.label
        hover = f"{label} %{{y:.3f}}<br><i>{row.definition}</i><extra></extra>"
        figure.add_scatter(
            name=label,
            mode="lines+text",
            line=neutral,
            text=["", f" {label.split()[0]}"],
            textposition="middle right",
            textfont=dict(color=look.NEUTRAL, size=12),
            cliponaxis=False,
            hovertemplate=hover,
            row=1,
            col=1,
        )
    for column in (1, 2):
        figure.add_scatter(
            name=f"labels {column}",
            mode="text",
            textposition="middle right",
            hoverinfo="skip",
            cliponaxis=False,
            row=1,
            col=column,
        )
    figure.update_xaxes(title_text="training step", range=[0, _LEAST_STEPS], col=1)
    figure.update_xaxes(title_text="layer", range=[0, depth], dtick=max(1, round(depth / 8)), col=2)
    figure.update_yaxes(title_text=_LOSS.axis, col=1)
    return figure.update_layout(
        template=look.template(theme),
        height=HEIGHT,
        margin=_MARGIN,
        showlegend=False,
        autosize=True,
        hovermode="closest",
    )


def redraw(figure: go.Figure, scenes: Mapping[str, Scene], metric: str, site: str, theme: str = "light") -> None:
    """Put the scenes, by scheme, into a figure made by `blank` for these schemes."""
    traces = {trace.name: trace for trace in figure.data}
    for name, scene in scenes.items():
        for part, pairs in (("train", thinned(scene.train)), ("held out", scene.held_out)):
            _put(traces[f"{name} {part}"], pairs)
        for part, pairs, when in (
            ("first", scene.first, "before training"),
            ("last", scene.last, f"step {scene.step:,}"),
        ):
            _put(traces[f"{name} {part}"], pairs)
            traces[f"{name} {part}"].hovertemplate = _hover(name, metric, when)
    done = max([step for scene in scenes.values() for step, _ in (*scene.train[-1:], *scene.held_out[-1:])], default=0)
    figure.layout.xaxis.range = [0, max(done, _LEAST_STEPS)]
    levels = {name: level for scene in scenes.values() for name, level in scene.levels.items()}
    for name in NGRAM_LOSSES:
        known = name in levels
        ends = [0, figure.layout.xaxis.range[1]] if known else []
        traces[metric_row(name).label].update(x=ends, y=[levels[name]] * 2 if known else [])
    losses = {name: scene.held_out or thinned(scene.train) for name, scene in scenes.items()}
    drawn = [value for scene in scenes.values() for _, value in (*thinned(scene.train), *scene.held_out)]
    _scale(figure.layout.yaxis, traces["labels 1"], [*drawn, *levels.values()], losses, False, theme)
    row = metric_row(metric)
    profiles = {name: scene.last for name, scene in scenes.items()}
    shown = [value for scene in scenes.values() for _, value in (*scene.first, *scene.last)]
    log = row.log and all(value > 0 for value in shown)
    _scale(figure.layout.yaxis2, traces["labels 2"], shown, profiles, log, theme)
    figure.layout.yaxis2.title.text = row.axis
    steps = sorted({scene.step for scene in scenes.values() if scene.last})
    when = " and ".join(f"{step:,}" for step in steps)
    figure.layout.annotations[0].text = "loss: training thin, held out thick; dotted: n-gram models"
    figure.layout.annotations[1].text = f"{site_label(site)}" + (f", step {when}; dotted: before" if steps else "")


def thinned(pairs: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most about `most` points: means of neighbours, at their last step."""
    every = -(-len(pairs) // most)
    if every <= 1:
        return list(pairs)
    groups = [pairs[start : start + every] for start in range(0, len(pairs), every)]
    return [(group[-1][0], float(np.mean([value for _, value in group]))) for group in groups]


def _put(trace: go.Scatter, pairs: Sequence[tuple[int, float]]) -> None:
    trace.update(x=[x for x, _ in pairs], y=[float(y) if math.isfinite(y) else None for _, y in pairs])


def _hover(name: str, metric: str, when: str) -> str:
    row, style = metric_row(metric), look.style_of(name)
    head = f"<b>{style.title}</b>, {when}<br>layer %{{x}}: %{{y:.4~g}}"
    return f"{head}<br><i>{row.name}: {row.definition}</i><extra></extra>"


def _scale(
    axis: go.layout.YAxis,
    labels: go.Scatter,
    values: Sequence[float],
    lines: Mapping[str, Sequence[tuple[int, float]]],
    log: bool,
    theme: str,
) -> None:
    """Fit an axis to its values, and write each line's name at its end."""
    bounds = look.axis_bounds(values, log)
    ends = {}
    for name, pairs in lines.items():
        finite = [(x, y) for x, y in pairs if math.isfinite(y)]
        if finite:
            ends[name] = finite[-1]
    if bounds is None or not ends:
        labels.update(x=[], y=[], text=[])
        return
    axis.update(look.value_axis(bounds, log))
    unit = (bounds[1] - bounds[0]) / (HEIGHT - _MARGIN["t"] - _MARGIN["b"])
    places = look.spread([math.log10(y) if log else y for _, y in ends.values()], 15 * unit, *bounds)
    styles = [look.style_of(name) for name in ends]
    labels.update(
        x=[x for x, _ in ends.values()],
        y=[10**place if log else place for place in places],
        text=[f" {style.title}" for style in styles],
        textfont=dict(color=[look.ink(style.color, theme) for style in styles], size=12),
    )
