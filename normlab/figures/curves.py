"""Losses by training step (B2) and by depth (C5), beside those of models that only count: unigram, bigram, trigram."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normlab.analysis.compare import last_values
from normlab.analysis.selection import DIVERGED, FINISHED, NOT_LEARNED, NothingToShow, Selection, choose, in_order
from normlab.analysis.verdicts import differences, in_words, interval, judged
from normlab.figures import theme
from normlab.figures.labels import EndLabel, label_ends, label_inside, label_room
from normlab.figures.registry import register
from normlab.probes.metrics import NGRAM_LOSSES, metric_row

_MARGIN = dict(l=70, r=190, t=112, b=64)
_DEPTH_MARGIN = dict(l=70, r=160, t=132, b=64)
_BETWEEN = 0.26  # of the plot: room for labels between the two panels of `depth_scaling`
_PANEL = ((1000 - _DEPTH_MARGIN["l"] - _DEPTH_MARGIN["r"]) * (1 - _BETWEEN) / 2, 400)  # pixels; of a page of 1000
_LOSS = metric_row("loss")


@register("loss_curves", "B2", "training and held-out loss by step")
def loss_curves(
    runs: pd.DataFrame,
    *,
    depth: int | str | None = "deepest",
    width: int | None = None,
    schemes: Sequence[str] | None = None,
) -> go.Figure:
    """Training and held-out loss by step, one line a scheme (B2).

    Lines are means over seeds, thin ones single seeds. Dotted lines are held-out losses of models that only count: the
    unigram entropy, and the bigram and trigram losses where the runs know them. A scheme whose runs did not come below
    the lowest of them is marked "not learned".
    """
    title = "Loss by training step"
    try:
        chosen = choose(runs, depth, width, schemes)
    except NothingToShow as why:
        return theme.message_figure(str(why), title)
    parts = {split: _by_step(chosen.rows("model", "loss", split=split)) for split in ("train", "eval")}
    if all(part.empty for part in parts.values()):
        return theme.message_figure("No loss was logged in these runs.", title)
    window = max(1, int(parts["train"]["step"].max()) // 30) if len(parts["train"]) else 1
    names = [
        f"training loss, mean of the last {window} steps" if window > 1 else "training loss",
        "held-out loss, enlarged",
    ]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.07, subplot_titles=names)
    figure.update_annotations(font=dict(size=13))
    height = 560
    for column, (split, part) in enumerate(parts.items(), 1):
        for name in chosen.schemes:
            _add_curves(figure, part[part["scheme"] == name], name, split, window if split == "train" else 1, column)
    ends = _ends(chosen, parts["eval"] if len(parts["eval"]) else parts["train"])
    levels = _levels(chosen)
    # Runs differ by hundredths after falling by several nats: the second panel shows the end, from just above the
    # lowest level.
    closer = theme.axis_bounds(
        [*(label.y for label in ends), *_lowest(levels), *_values_of(figure, "eval", largest=False)], False
    )
    ends += _mark_levels(figure, levels, closer, columns=(1, 2))
    if closer is not None:
        figure.update_yaxes(
            range=theme.axis_bounds(
                [*_values_of(figure, "train"), *_values_of(figure, "eval"), *levels.values()], False, 0.03
            ),
            col=1,
        )
        figure.update_yaxes(range=closer, col=2)
        label_ends(figure, ends, closer, height - _MARGIN["t"] - _MARGIN["b"], False, axis="2")
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text=_LOSS.axis, col=1)
    margin = _MARGIN | dict(r=label_room(ends))
    figure.update_layout(showlegend=False, margin=margin, hovermode="closest")
    return theme.titled(figure, title, f"{chosen.describe()} · {_dotted(levels)}", height)


def _by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Finite losses: run, scheme, seed, step, value."""
    finite = rows[np.isfinite(rows["value"].astype(float))]
    return finite[["run", "scheme", "seed", "step", "value"]].sort_values(["run", "step"], kind="stable")


def _add_curves(figure: go.Figure, rows: pd.DataFrame, name: str, split: str, window: int, column: int) -> None:
    if rows.empty:
        return
    style = theme.style_of(name)
    wide = rows.pivot_table(index="step", columns="seed", values="value").rolling(window, min_periods=1).mean()
    where = dict(row=1, col=column)
    if wide.shape[1] > 1 and split == "eval":
        for seed in wide.columns:
            line = dict(color=theme.faded(style.color, 0.3), width=1, dash=style.dash)
            own = wide[seed].dropna()
            figure.add_trace(
                _curve(
                    own,
                    line,
                    f"{name} seed {seed}",
                    hoverinfo="skip",
                    meta=dict(scheme=name, split=split, seed=str(seed)),
                ),
                **where,
            )
    hover = (
        f"<b>{style.title}</b>, {'held-out' if split == 'eval' else 'training'} loss<br>step %{{x:,}}: %{{y:.4f}}"
        f"<br><i>loss: {_LOSS.definition}; mean of {wide.shape[1]} seed(s)</i><extra></extra>"
    )
    line = dict(color=style.color, width=2, dash=style.dash)
    figure.add_trace(
        _curve(wide.mean(axis=1), line, name, hovertemplate=hover, meta=dict(scheme=name, split=split)), **where
    )


def _curve(values: pd.Series, line: dict, name: str, **more: object) -> go.Scatter:
    return go.Scatter(
        x=[int(s) for s in values.index], y=[float(v) for v in values], mode="lines", line=line, name=name, **more
    )


def _ends(chosen: Selection, part: pd.DataFrame) -> list[EndLabel]:
    labels = []
    for name in chosen.schemes:
        last = part[part["scheme"] == name].groupby("run", observed=True)["value"].last()
        if last.empty:
            continue
        remark = chosen.remark(name)
        text = f"{theme.style_of(name).title} {last.mean():.3f}" + (f" ({remark})" if remark else "")
        labels.append(EndLabel(float(last.mean()), text, theme.style_of(name).color))
    return labels


def _levels(chosen: Selection) -> dict[str, float]:
    """Losses of models that only count, by name: those that the runs know."""
    known = {metric_row(name).label: chosen.runs[name].dropna() for name in NGRAM_LOSSES}
    return {label: float(values.mean()) for label, values in known.items() if len(values)}


def _lowest(levels: dict[str, float]) -> list[float]:
    return [min(levels.values())] if levels else []


def _mark_levels(
    figure: go.Figure, levels: dict[str, float], bounds: tuple[float, float] | None, columns: Sequence[int]
) -> list[EndLabel]:
    """Dotted lines in those panels, and labels for the ends of those that a panel of these bounds shows."""
    for level in levels.values():
        for column in columns:
            figure.add_hline(y=level, line=dict(color=theme.NEUTRAL, width=1.4, dash="dot"), row=1, col=column)
    return [
        EndLabel(level, f"{label} {level:.2f}", theme.NEUTRAL)
        for label, level in levels.items()
        if bounds is None or bounds[0] <= level <= bounds[1]
    ]


def _dotted(levels: dict[str, float]) -> str:
    """The dotted lines in words, and where they are: some may lie outside the panel that has labels."""
    if len(levels) < 2:
        return "dotted: held-out unigram entropy"
    return "dotted: held-out " + ", ".join(f"{label} {level:.2f}" for label, level in levels.items())


def _values_of(figure: go.Figure, split: str, largest: bool = True) -> list[float]:
    """Every value drawn for that split, or each curve's smallest."""
    curves = [[float(v) for v in trace.y if math.isfinite(v)] for trace in figure.data if trace.meta["split"] == split]
    return [v for curve in curves if curve for v in (curve if largest else [min(curve)])]


@register("depth_scaling", "C5", "held-out loss against depth")
def depth_scaling(
    runs: pd.DataFrame,
    *,
    width: int | None = None,
    schemes: Sequence[str] | None = None,
    reference: str | None = None,
    level: float = 0.95,
) -> go.Figure:
    """Held-out loss after training against depth (C5), and differences from a reference, paired by seed.

    Error bars of losses are Student's t intervals over seeds; a point with one seed has none. All
    differences shown are one family (`normlab.analysis.verdicts`).
    Losses: open markers are not learned, crosses on the upper edge diverged. Differences, drawn where both schemes
    learned: discs are different, squares equivalent, rings undecided. A line that stops before the deepest depth has
    its label where it stops.

    Args:
        reference: scheme to subtract; default the first of the registry that the table has.
        level: confidence level of the intervals.
    """
    title = "Held-out loss against depth"
    try:
        chosen = choose(runs, None, width, schemes)
    except NothingToShow as why:
        return theme.message_figure(str(why), title)
    points = _depth_points(chosen, level)
    if points["mean"].notna().sum() == 0 and not (points["status"] == DIVERGED).any():
        return theme.message_figure("No held-out loss was logged in these runs.", title)
    base = reference or in_order(runs["scheme"].unique())[0]
    names = ["after training", f"difference from {theme.style_of(base).title}, paired by seed"]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=_BETWEEN, subplot_titles=names)
    figure.update_annotations(font=dict(size=13))
    levels = _levels(chosen)
    drawn = [*points["low"], *points["high"], *points["mean"], *_lowest(levels)]
    bounds = theme.axis_bounds(drawn, False) or (0.0, 1.0)
    for name in chosen.schemes:
        shift = _sideways(chosen.schemes, name)
        _add_depth_line(figure, points[points["scheme"] == name], name, bounds[1], shift)
    figure.update_yaxes(range=bounds, title_text=_LOSS.axis, col=1)
    named = _mark_levels(figure, levels, bounds, columns=(1,))
    _label_lines(figure, chosen, points.dropna(subset="mean").rename(columns={"mean": "y"}), bounds, named)
    family = _add_differences(figure, chosen, base, level)
    depths = chosen.depths
    figure.update_xaxes(
        type="log", tickvals=depths, ticktext=[str(d) for d in depths], title_text="depth (blocks)", range=_span(depths)
    )
    figure.update_layout(showlegend=False, margin=_DEPTH_MARGIN)
    right = f"right, Holm over {family}: {theme.VERDICT_KEY}"
    marks = f"bars: {level:.0%} interval over seeds · left: ○ not learned, × diverged · {right}"
    height = _PANEL[1] + _DEPTH_MARGIN["t"] + _DEPTH_MARGIN["b"]
    return theme.titled(figure, title, f"{chosen.describe()}<br>{marks}<br>{_dotted(levels)}", height)


def _span(depths: Sequence[int]) -> list[float]:
    """The logarithmic axis of depths, in decades."""
    edge = 0.12 * max(1.0, math.log2(depths[-1] / depths[0]) / 4)
    return [math.log10(depths[0]) - edge, math.log10(depths[-1]) + edge]


def _sideways(schemes: Sequence[str], name: str) -> float:
    """Factor on a depth that keeps the intervals of schemes at the same depth apart on a logarithmic axis."""
    step = min(1.035, 1.25 ** (1 / len(schemes)))
    return step ** (schemes.index(name) - (len(schemes) - 1) / 2)


def _depth_points(chosen: Selection, level: float) -> pd.DataFrame:
    values = last_values(chosen, "loss")
    rows = []
    for place, group in values.groupby(["scheme", "depth"], observed=True):
        scheme, depth = str(place[0]), int(group["depth"].iloc[0])
        statuses = set(chosen.runs.loc[group["run"], "status"])
        mean, low, high = interval(group["value"].dropna().to_numpy(float), level)
        status = next((s for s in (DIVERGED, NOT_LEARNED) if s in statuses), FINISHED)
        rows.append((scheme, depth, mean, low, high, int(group["value"].notna().sum()), status))
    columns = ["scheme", "depth", "mean", "low", "high", "seeds", "status"]
    return pd.DataFrame(rows, columns=columns).sort_values("depth")


def _add_depth_line(figure: go.Figure, points: pd.DataFrame, name: str, top: float, shift: float) -> None:
    style = theme.style_of(name)
    drawn = points[points["mean"].notna()]
    half = [0.0 if not math.isfinite(h) else h - m for h, m in zip(drawn["high"], drawn["mean"], strict=True)]
    symbols = ["circle-open" if status == NOT_LEARNED else "circle" for status in drawn["status"]]
    figure.add_trace(
        go.Scatter(
            x=[float(d) * shift for d in drawn["depth"]],
            customdata=[int(d) for d in drawn["depth"]],
            y=[float(v) for v in drawn["mean"]],
            error_y=dict(type="data", array=half, thickness=1, width=3, color=theme.faded(style.color, 0.55)),
            mode="lines+markers",
            name=name,
            meta=dict(scheme=name, panel="loss"),
            text=[
                f"{seeds} seed(s)" + ("" if status == FINISHED else f", {status.replace('_', ' ')}")
                for seeds, status in zip(drawn["seeds"], drawn["status"], strict=True)
            ],
            line=dict(color=style.color, dash=style.dash, width=2),
            marker=dict(color=style.color, size=7, symbol=symbols),
            hovertemplate=f"<b>{style.title}</b><br>depth %{{customdata}}: %{{y:.4f}}, %{{text}}"
            f"<br><i>loss: {_LOSS.definition}</i><extra></extra>",
        ),
        row=1,
        col=1,
    )
    broken = points[points["status"] == DIVERGED]
    if len(broken):
        figure.add_trace(
            go.Scatter(
                x=[float(d) * shift for d in broken["depth"]],
                customdata=[int(d) for d in broken["depth"]],
                y=[top] * len(broken),
                mode="markers",
                name=f"{name} diverged",
                meta=dict(scheme=name, panel="loss", diverged=True),
                cliponaxis=False,
                marker=dict(symbol="x", size=9, color=style.color),
                hovertemplate=f"<b>{style.title}</b><br>depth %{{customdata}}: diverged<extra></extra>",
            ),
            row=1,
            col=1,
        )


def _label_lines(
    figure: go.Figure,
    chosen: Selection,
    points: pd.DataFrame,
    bounds: tuple[float, float],
    levels: Sequence[EndLabel] = (),
    axis: str = "",
) -> None:
    """A label at the end of each line of a panel, right of the panel for those that reach the deepest depth.

    Args:
        points: columns `scheme depth y`, by depth.
        levels: labels of horizontal lines.
    """
    last = points.drop_duplicates("scheme", keep="last")
    whole: list[EndLabel] = list(levels)
    short: list[EndLabel] = []
    for name, depth, y in last[["scheme", "depth", "y"]].itertuples(index=False):
        style, reaches = theme.style_of(name), depth == chosen.depths[-1]
        x, clear = (math.log10(depth * _sideways(chosen.schemes, one)) for one in (name, chosen.schemes[-1]))
        (whole if reaches else short).append(EndLabel(float(y), style.title, style.color, x, clear))
    label_ends(figure, whole, bounds, _PANEL[1], False, axis)
    low, high = _span(chosen.depths)
    lines = [
        (np.log10(trace.x), trace.y)
        for trace in figure.data
        if trace.xaxis == f"x{axis}" and trace.mode == "lines+markers"
    ]
    lines += [([low, high], [level] * 2) for level in [0.0, *(label.y for label in levels)]]
    label_inside(figure, short, lines, bounds, _PANEL, high - low, axis)


def _add_differences(figure: go.Figure, chosen: Selection, base: str, level: float) -> int:
    """Draw them, and return how many are in the family that Holm's correction is over."""
    values = last_values(chosen, "loss")
    learned = values[values["run"].isin(chosen.runs.index[chosen.runs["status"] == FINISHED])]
    present = set(learned["scheme"])
    others = [name for name in chosen.schemes if name != base and name in present]
    found = [differences(learned, name, base, "loss", level) for name in others if base in present]
    family = judged(pd.concat(found, ignore_index=True), level) if found else pd.DataFrame(columns=["a", "seeds"])
    known = family[family["seeds"] > 0]
    for name, gaps in known.groupby("a", sort=False):
        figure.add_trace(_difference(gaps, name, _sideways(chosen.schemes, name)), row=1, col=2)
    figure.add_hline(y=0, line=dict(color=theme.NEUTRAL, width=1.4, dash="dot"), row=1, col=2)
    figure.update_yaxes(title_text=f"loss difference ({_LOSS.unit})", col=2)
    if known.empty:
        theme.note(figure, f"no scheme to compare with {theme.style_of(base).title}", "2")
        return 0
    bounds = theme.axis_bounds([0.0, *known["estimate"], *known["low"], *known["high"]], False) or (-1.0, 1.0)
    figure.update_yaxes(range=bounds, col=2)
    ends = known.sort_values("depth").rename(columns={"a": "scheme", "estimate": "y"})
    _label_lines(figure, chosen, ends, bounds, axis="2")
    return int(known["p"].notna().sum())


def _difference(gaps: pd.DataFrame, name: str, shift: float) -> go.Scatter:
    style = theme.style_of(name)
    half = [
        0.0 if not math.isfinite(high) else high - middle
        for high, middle in zip(gaps["high"], gaps["estimate"], strict=True)
    ]
    return go.Scatter(
        x=[float(depth) * shift for depth in gaps["depth"]],
        y=[float(value) for value in gaps["estimate"]],
        error_y=dict(type="data", array=half, thickness=1.2, width=2, color=style.color),
        customdata=[[int(g.depth), in_words(g), int(g.seeds), g.low, g.high] for g in gaps.itertuples()],
        mode="lines+markers",
        name=name,
        meta=dict(scheme=name, panel="difference"),
        line=dict(color=theme.faded(style.color, 0.45), width=1, dash=style.dash),
        marker=dict(
            color=style.color,
            size=8,
            symbol=[theme.VERDICT_MARKS[verdict] for verdict in gaps["verdict"]],
            line=dict(width=2, color=style.color),
        ),
        hovertemplate=(
            f"<b>{style.title}</b><br>depth %{{customdata[0]}}: %{{y:+.4f}}"
            " [%{customdata[3]:+.4f}, %{customdata[4]:+.4f}]"
            "<br>%{customdata[1]}, %{customdata[2]} seed(s)<extra></extra>"
        ),
    )
