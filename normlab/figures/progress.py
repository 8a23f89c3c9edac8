"""Runs in training, as they are now: losses by step beside a layer profile that grows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.figures import theme as look
from normlab.figures.labels import EndLabel, label_trace
from normlab.probes.metrics import NGRAM_LOSSES, metric_row, site_label

HEIGHT = 440
MOST_POINTS = 400  # a curve has no more: a page draws thousands of them slowly, and shows no more
_LEAST_STEPS = 20  # that the axis has room for
_MARGIN = dict(l=66, r=120, t=64, b=54)
_PANEL = HEIGHT - _MARGIN["t"] - _MARGIN["b"]
Pairs = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Progress:
    """What one run has measured so far.

    Args:
        train, held_out: (step, loss) in order of the steps.
        first, last: (layer, value) of the profile before training and of the latest one.
        step: when the latest profile was measured.
        levels: losses of models that only count, by the names in `normlab.probes.metrics.NGRAM_LOSSES`.
    """

    train: Pairs = ()
    held_out: Pairs = ()
    first: Pairs = ()
    last: Pairs = ()
    step: int = 0
    levels: Mapping[str, float] = field(default_factory=dict)


def training_progress(
    runs: Mapping[str, Progress], metric: str, site: str, depth: int, theme: str = "light"
) -> go.Figure:
    """Training and held-out loss by step, and a metric by layer before training (dotted) and at the latest step.

    Args:
        runs: by scheme.
        metric, site: what the layer profiles are of.
        depth: number of blocks.
    """
    steps = sorted({run.step for run in runs.values() if run.last})
    when = f", step {' and '.join(f'{step:,}' for step in steps)}; dotted: before" if steps else ""
    titles = ["loss: training thin, held out thick; dotted: n-gram models", site_label(site) + when]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.16, subplot_titles=titles)
    figure.update_annotations(font=dict(size=13))
    for name, run in runs.items():
        _add_run(figure, name, run, metric, theme)
    measured = [step for run in runs.values() for step, _ in (*run.train[-1:], *run.held_out[-1:])]
    reach = [0, max([*measured, _LEAST_STEPS])]
    levels = {name: level for run in runs.values() for name, level in run.levels.items()}
    for name in NGRAM_LOSSES:
        _add_level(figure, name, levels.get(name), reach)
    ends = _ends({name: run.held_out or thinned(run.train) for name, run in runs.items()}, theme)
    words = {name: metric_row(name).label.split()[0] for name in levels}
    ends += [EndLabel(level, words[name], look.NEUTRAL, x=reach[1]) for name, level in levels.items()]
    drawn = [value for run in runs.values() for _, value in (*thinned(run.train), *run.held_out)]
    _fit(figure, 1, [*drawn, *levels.values()], ends)
    shown = [value for run in runs.values() for _, value in (*run.first, *run.last)]
    _fit(figure, 2, shown, _ends({name: run.last for name, run in runs.items()}, theme))
    figure.update_xaxes(title_text="training step", range=reach, col=1)
    figure.update_xaxes(title_text="layer", range=[0, depth], dtick=max(1, round(depth / 8)), col=2)
    figure.update_yaxes(title_text=metric_row("loss").axis, col=1)
    figure.update_yaxes(title_text=metric_row(metric).axis, col=2)
    about = dict(height=HEIGHT, margin=_MARGIN, showlegend=False, autosize=True, hovermode="closest")
    return figure.update_layout(template=look.template(theme), **about)


def thinned(pairs: Pairs, most: int = MOST_POINTS) -> Pairs:
    """At most about `most` points: means of neighbours, at their last step."""
    every = -(-len(pairs) // most)
    if every <= 1:
        return list(pairs)
    groups = [pairs[start : start + every] for start in range(0, len(pairs), every)]
    return [(group[-1][0], float(np.mean([value for _, value in group]))) for group in groups]


def _add_run(figure: go.Figure, name: str, run: Progress, metric: str, theme: str) -> None:
    style, row = look.style_of(name), metric_row(metric)
    color = look.ink(style.color, theme)
    thin, thick = dict(color=look.faded(color, 0.45), width=1.4), dict(color=color, width=2.2, dash=style.dash)
    loss = "<br>step %{x:,}: %{y:.4f}<extra></extra>"
    layer = f"<br>layer %{{x}}: %{{y:.4~g}}<br><i>{row.name}: {row.definition}</i><extra></extra>"
    for part, pairs, mode, line, about, column in (
        ("train", thinned(run.train), "lines", thin, "training loss" + loss, 1),
        ("held out", run.held_out, "lines+markers", thick, "held-out loss" + loss, 1),
        ("first", run.first, "lines", thin | dict(dash="dot"), "before training" + layer, 2),
        ("last", run.last, "lines", thick, f"step {run.step:,}" + layer, 2),
    ):
        figure.add_scatter(
            name=f"{name} {part}",
            x=[x for x, _ in pairs],
            y=look.finite(y for _, y in pairs),
            mode=mode,
            line=line,
            meta=dict(scheme=name),
            hovertemplate=f"<b>{style.title}</b>, {about}",
            row=1,
            col=column,
        )


def _add_level(figure: go.Figure, name: str, level: float | None, reach: list[int]) -> None:
    """The loss of a model that only counts; without points where it is not known."""
    row = metric_row(name)
    figure.add_scatter(
        name=row.label,
        x=[] if level is None else reach,
        y=[] if level is None else [level] * 2,
        mode="lines",
        line=dict(color=look.NEUTRAL, width=1.4, dash="dot"),
        hovertemplate=f"{row.label} %{{y:.3f}}<br><i>{row.definition}</i><extra></extra>",
        row=1,
        col=1,
    )


def _ends(lines: Mapping[str, Pairs], theme: str) -> list[EndLabel]:
    """Each line's name, for its end."""
    labels = []
    for name, pairs in lines.items():
        known = [(x, y) for x, y in pairs if math.isfinite(y)]
        if known:
            style = look.style_of(name)
            labels.append(EndLabel(known[-1][1], style.title, look.ink(style.color, theme), x=known[-1][0]))
    return labels


def _fit(figure: go.Figure, column: int, values: Sequence[float], labels: Sequence[EndLabel]) -> None:
    """Fit a panel's axis to its values, and write the labels at the ends of its lines."""
    bounds = look.axis_bounds(values, False)
    figure.update_yaxes(**look.value_axis(bounds, False), col=column)
    if trace := label_trace(labels, bounds, _PANEL, False):
        figure.add_trace(trace, row=1, col=column)
