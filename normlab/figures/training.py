"""Losses by training step (B2), of finished runs and of runs in training, next to those of n-gram models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.quantities import last_values
from normlab.analysis.selection import NothingToShow, Selection
from normlab.figures import theme
from normlab.figures.draw import (
    Bounds,
    EndLabel,
    add_line,
    axis_bounds,
    label_ends,
    label_room,
    label_trace,
    least_and_most,
    note,
    selected,
    value_axis,
)
from normlab.figures.registry import register
from normlab.probes.metrics import NGRAM_LOSSES, metric_row, site_label

LOSS = metric_row("loss")
DOTTED = dict(color=theme.NEUTRAL, width=1.4, dash="dot")
PROGRESS_HEIGHT = 440
MOST_POINTS = 400  # of a curve: a page draws thousands of them slowly, and shows no more
_HEIGHT = 560
_MARGIN = dict(l=70, r=190, t=128, b=64)
_PROGRESS_MARGIN = dict(l=66, r=120, t=64, b=54)
_LEAST_STEPS = 20  # that the axis of runs in training has room for
Pairs = Sequence[tuple[int, float]]


@register("loss_curves", "B2", "training and held-out loss by step")
def loss_curves(runs: pd.DataFrame | Selection) -> go.Figure:
    """Training and held-out loss by step, one line per scheme (B2).

    Lines are means over seeds, thin ones single seeds. Dotted lines are held-out losses of models that only count: the
    unigram entropy, and the bigram and trigram losses where the runs have them. A scheme whose runs did not end below
    the lowest of them is marked "not learned".
    """
    shown = selected(runs)
    train, held_out = (_by_step(shown, split) for split in ("train", "eval"))
    if train.empty and held_out.empty:
        raise NothingToShow("No loss was logged in these runs.")
    window = max(1, int(train["step"].max()) // 30) if len(train) else 1  # steps
    average = f", mean of the last {window} steps" if window > 1 else ""
    names = [f"training loss{average}", "held-out loss, enlarged"]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.07, subplot_titles=names)
    figure.update_annotations(font=dict(size=13))
    for name in shown.schemes:
        _add_curves(figure, train[train["scheme"] == name], name, "train", window, 1)
        _add_curves(figure, held_out[held_out["scheme"] == name], name, "eval", 1, 2)
    split, drawn = ("eval", held_out) if len(held_out) else ("train", train)
    after = last_values(shown, "loss", split=split).groupby("scheme", observed=True)["value"].mean()
    ends = _ends(shown, after, drawn)
    levels = ngram_levels(shown)
    # Runs differ by hundredths after falling by several nats: the second panel shows the end, from just above the
    # lowest level.
    lowest = [min(levels.values())] if levels else []
    curves = [([y for y in trace.y if y is not None], trace.meta["split"]) for trace in figure.data]
    least = [min(values) for values, split in curves if values and split == "eval"]
    closer = axis_bounds([*(label.y for label in ends), *lowest, *least], False)
    ends += mark_levels(figure, levels, closer, columns=(1, 2))
    if closer is not None:
        everything = [value for values, _ in curves for value in values]
        figure.update_yaxes(range=axis_bounds([*everything, *levels.values()], False, 0.03), col=1)
        figure.update_yaxes(range=closer, col=2)
        label_ends(figure, ends, closer, _HEIGHT - _MARGIN["t"] - _MARGIN["b"], False, axis="2")
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text=LOSS.axis, col=1)
    figure.update_layout(showlegend=False, margin=_MARGIN | dict(r=label_room(ends)), hovermode="closest")
    about = "<br>".join(filter(None, [shown.describe(), levels_in_words(levels)]))
    title = "Loss by training step"
    if split == "eval" and after.count() > 1:
        title += f": held-out loss ends at {least_and_most(after, '{:.3f}'.format)}"
    return theme.titled(figure, title, about, _HEIGHT)


def _by_step(shown: Selection, split: str) -> pd.DataFrame:
    """Finite losses: run, scheme, seed, step, value."""
    rows = shown.rows("model", "loss", split=split)
    finite = rows[np.isfinite(rows["value"].astype(float))]
    return finite[["run", "scheme", "seed", "step", "value"]].sort_values(["run", "step"], kind="stable")


def _add_curves(figure: go.Figure, rows: pd.DataFrame, name: str, split: str, window: int, column: int) -> None:
    """A scheme's mean over seeds; of held-out losses each seed too."""
    if rows.empty:
        return
    wide = rows.pivot_table(index="step", columns="seed", values="value")
    as_times = wide.set_axis(pd.to_timedelta(wide.index.to_numpy(np.int64)))  # a window is then of steps, not of rows
    means = as_times.rolling(pd.Timedelta(window), min_periods=1).mean().set_axis(wide.index)
    wide = means.where(wide.notna())
    thin = dict(color=theme.faded(theme.style_of(name).color, 0.3), width=1)
    for seed in wide.columns if wide.shape[1] > 1 and split == "eval" else ():
        values, meta = wide[seed].dropna(), dict(scheme=name, split=split, seed=str(seed))
        add_line(figure, name, values.index.tolist(), values, "", line=thin, row=1, col=column, meta=meta,
                 name=f"{name} seed {seed}", hoverinfo="skip")  # fmt: skip
    hover = (
        f", {'held-out' if split == 'eval' else 'training'} loss<br>step %{{x:,}}: %{{y:.4f}}"
        f"<br><i>loss: {LOSS.definition}; mean of %{{customdata}} seed(s)</i>"
    )
    mean, seeds = wide.mean(axis=1), wide.notna().sum(axis=1).tolist()
    add_line(figure, name, mean.index.tolist(), mean, hover, row=1, col=column, customdata=seeds,
             meta=dict(scheme=name, split=split))  # fmt: skip


def _ends(shown: Selection, after: pd.Series, losses: pd.DataFrame) -> list[EndLabel]:
    """A label per scheme: its loss after training, mean over the seeds that did not diverge, and what went wrong."""
    labels = []
    for name in shown.schemes:
        drawn = losses[losses["scheme"] == name].groupby("run", observed=True)["value"].last()
        if len(drawn):
            end, remark = float(after[name]), shown.remark(name)
            number = f" {end:.3f}" if math.isfinite(end) else ""
            text = theme.style_of(name).title + number + (f" ({remark})" if remark else "")
            labels.append(EndLabel(end if number else float(drawn.mean()), text, theme.style_of(name).color))
    return labels


def ngram_levels(shown: Selection) -> dict[str, float]:
    """Held-out losses of the n-gram models that the runs know, by their label."""
    known = {metric_row(name).label: shown.runs[name].dropna() for name in NGRAM_LOSSES}
    return {label: float(values.mean()) for label, values in known.items() if len(values)}


def mark_levels(
    figure: go.Figure, levels: dict[str, float], bounds: Bounds | None, columns: Sequence[int]
) -> list[EndLabel]:
    """Draw levels as dotted lines in those panels; labels for those that a panel of these bounds shows."""
    for level in levels.values():
        for column in columns:
            figure.add_hline(y=level, line=DOTTED, row=1, col=column)
    return [
        EndLabel(level, f"{label} {level:.2f}", theme.NEUTRAL)
        for label, level in levels.items()
        if bounds is None or bounds[0] <= level <= bounds[1]
    ]


def levels_in_words(levels: dict[str, float]) -> str:
    """The dotted lines and their values: some may lie outside the panel that has labels. Empty where there is none."""
    if len(levels) < 2:
        return "".join(f"dotted: held-out {label}" for label in levels)
    return "dotted: held-out " + ", ".join(f"{label} {level:.2f}" for label, level in levels.items())


@dataclass(frozen=True)
class Progress:
    """The measurements of one run so far.

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


def training_progress(runs: Mapping[str, Progress], metric: str, site: str, depth: int) -> go.Figure:
    """Training and held-out loss by step, and a metric by layer before training (dotted) and at the latest step.

    Args:
        runs: by scheme.
        metric, site: of the layer profiles.
        depth: number of blocks.
    """
    steps = sorted({run.step for run in runs.values() if run.last})
    when = f", step {' and '.join(f'{step:,}' for step in steps)}; dotted: before" if steps else ""
    titles = ["loss: training thin, held out thick; dotted: n-gram models", site_label(site) + when]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.16, subplot_titles=titles)
    figure.update_annotations(font=dict(size=13))
    thinned_losses = {name: thinned(run.train) for name, run in runs.items()}
    for name, run in runs.items():
        _add_run(figure, name, run, thinned_losses[name], metric)
    measured = [step for run in runs.values() for step, _ in (*run.train[-1:], *run.held_out[-1:])]
    reach = [0, max([*measured, _LEAST_STEPS])]
    levels = {name: level for run in runs.values() for name, level in run.levels.items()}
    for name in NGRAM_LOSSES:
        row, level = metric_row(name), levels.get(name)
        hover = f"{row.label} %{{y:.3f}}<br><i>{row.definition}</i><extra></extra>"
        ends = dict(x=[], y=[]) if level is None else dict(x=reach, y=[level] * 2)
        figure.add_scatter(**ends, name=row.label, mode="lines", line=DOTTED, hovertemplate=hover, row=1, col=1)
    labels = [*_line_ends({name: run.held_out or thinned_losses[name] for name, run in runs.items()})]
    words = {name: metric_row(name).label.split()[0] for name in levels}
    labels += [EndLabel(level, words[name], theme.NEUTRAL, x=reach[1]) for name, level in levels.items()]
    drawn = [value for name, run in runs.items() for _, value in (*thinned_losses[name], *run.held_out)]
    _fit(figure, 1, [*drawn, *levels.values()], labels)
    profiles = [value for run in runs.values() for _, value in (*run.first, *run.last)]
    _fit(figure, 2, profiles, [*_line_ends({name: run.last for name, run in runs.items()})])
    if not measured:
        note(figure, "begins with start")
    figure.update_xaxes(title_text="training step", range=reach, col=1)
    figure.update_xaxes(title_text="layer", range=[0, depth], dtick=max(1, round(depth / 8)), col=2)
    figure.update_yaxes(title_text=LOSS.axis, col=1)
    figure.update_yaxes(title_text=metric_row(metric).axis, col=2)
    page = dict(height=PROGRESS_HEIGHT, margin=_PROGRESS_MARGIN, showlegend=False, autosize=True, hovermode="closest")
    return figure.update_layout(template=theme.template(), **page)


def thinned(pairs: Pairs, most: int = MOST_POINTS) -> Pairs:
    """At most about `most` points: means of neighbours, at their last step."""
    every = -(-len(pairs) // most)
    if every <= 1:
        return list(pairs)
    groups = [pairs[start : start + every] for start in range(0, len(pairs), every)]
    return [(group[-1][0], float(np.mean([value for _, value in group]))) for group in groups]


def _add_run(figure: go.Figure, name: str, run: Progress, losses: Pairs, metric: str) -> None:
    row, thick = metric_row(metric), dict(width=2.2)
    thin = dict(color=theme.faded(theme.style_of(name).color, 0.45), width=1.4, dash="solid")
    loss = "<br>step %{x:,}: %{y:.4f}"
    layer = f"<br>layer %{{x}}: %{{y:.4~g}}<br><i>{row.name}: {row.definition}</i>"
    for part, pairs, mode, line, hover, column in (
        ("train", losses, "lines", thin, f", training loss{loss}", 1),
        ("held out", run.held_out, "lines+markers", thick, f", held-out loss{loss}", 1),
        ("first", run.first, "lines", thin | dict(dash="dot"), f", before training{layer}", 2),
        ("last", run.last, "lines", thick, f", step {run.step:,}{layer}", 2),
    ):
        x, y = [step for step, _ in pairs], [value for _, value in pairs]
        add_line(figure, name, x, y, hover, line=line, mode=mode, name=f"{name} {part}", row=1, col=column)


def _line_ends(lines: Mapping[str, Pairs]) -> Iterator[EndLabel]:
    """Each scheme's title, for the end of its line."""
    for name, pairs in lines.items():
        known = [(x, y) for x, y in pairs if math.isfinite(y)]
        if known:
            x, y = known[-1]
            yield EndLabel(y, theme.style_of(name).title, theme.style_of(name).color, x=x)


def _fit(figure: go.Figure, column: int, values: Sequence[float], labels: Sequence[EndLabel]) -> None:
    """Fit a panel's axis to its values, and write the labels at the ends of its lines."""
    bounds = axis_bounds(values, False)
    figure.update_yaxes(**value_axis(bounds, False), col=column)
    pixels = PROGRESS_HEIGHT - _PROGRESS_MARGIN["t"] - _PROGRESS_MARGIN["b"]
    if trace := label_trace(labels, bounds, pixels, False):
        figure.add_trace(trace, row=1, col=column)
