"""Draw data/figures, the pictures of README.md and docs/: `python docs/pictures.py`. All are of the shipped runs.

PICTURES   each picture's name and what draws it
forest     estimates with intervals, one row each
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import equal_rates
import findings
import pandas as pd
import papers
import plotly.graph_objects as go
import torch
from findings import (
    LNS,
    PRE_LN,
    ROOT,
    UNIFORM,
    arm_of_gains,
    entropy,
    experiments,
    fit_values,
    league_minus,
    pair,
    runs,
)
from plotly.subplots import make_subplots
from questions import decided

import normlab
from normlab.analysis import claims
from normlab.analysis.selection import choose, in_order, title_of
from normlab.analysis.verdicts import DIFFERENT
from normlab.export import save_images
from normlab.figures import by_layer, growth_before_after, theme
from normlab.figures.draw import axis_bounds, interval_bars, mark, value_axis

YES, NO, OPEN = "#009E73", "#D55E00", theme.NEUTRAL
COLORS = {"agrees": YES, "contradicts": NO, DIFFERENT: theme.style_of("bhyt").color}
ROW = 36  # pixels of a row


@dataclass(frozen=True)
class Line:
    """A row of a forest. estimate: with `estimate low high`. words: its verdict. theirs: numbers of a paper."""

    label: str
    estimate: pd.Series
    words: str
    theirs: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    axis: str
    lines: Sequence[Line]
    is_ratio: bool = False


def forest(title: str, about: str, *panels: Panel) -> go.Figure:
    """Estimates with 95% intervals, one panel below the other. A vertical line is at no effect."""
    counts = [len(panel.lines) for panel in panels]
    height = ROW * sum(counts) + 92 * len(panels)
    gap = 92 / height if len(panels) > 1 else 0.0
    figure = make_subplots(len(panels), 1, row_heights=counts, vertical_spacing=gap)
    for place, panel in enumerate(panels, 1):
        cell, held = dict(row=place, col=1), []
        for line in panel.lines:
            middle, low, high = line.estimate[["estimate", "low", "high"]].astype(float)
            color = COLORS.get(line.words, OPEN)
            point = dict(x=[middle], y=[line.label], error_x=interval_bars(middle, low, high, color=color))
            figure.add_scatter(**point, mode="markers", marker=mark(color, "circle"), **cell)
            places = dict(x=[*line.theirs], y=[line.label] * len(line.theirs))
            figure.add_scatter(**places, mode="markers", marker=mark("black", "diamond-open", 8), **cell)
            at = dict(xref="paper", x=1.0, xanchor="left", xshift=8, yref=f"y{place}".removesuffix("1"), y=line.label)
            figure.add_annotation(text=line.words, showarrow=False, font=dict(size=13, color=color), **at)
            held += [middle, low, high, *line.theirs]
        none = 1.0 if panel.is_ratio else 0.0
        figure.add_vline(none, line=dict(color="black", width=1), **cell)
        bounds = axis_bounds([none, *held], panel.is_ratio)
        figure.update_xaxes(value_axis(bounds, panel.is_ratio), title_text=panel.axis, **cell)
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    figure.update_layout(showlegend=False, margin=dict(l=330, r=110, t=96, b=60))
    return theme.titled(figure, title, about, height + 156)


def of_papers() -> go.Figure:
    """The rows of docs/papers.md with a number of the paper and an interval of ours."""
    rows = papers.with_numbers()
    words = {papers.AGREES: "agrees", papers.CONTRADICTS: "contradicts", papers.UNDECIDED: "undecided"}
    agree, contradict, open_ = (sum(verdict == each for _, _, verdict in rows) for each in words)
    lines = {
        kind: [Line(label, row.ours, words[v], row.published) for label, row, v in rows if row.ours["kind"] == kind]
        for kind in ("ratio", "difference")
    }
    verdicts = f"agree with {agree} and contradict {contradict}; {open_} are undecided"
    return forest(
        f"Of the papers' {len(rows)} numbers ours {verdicts}",
        "◇ the paper's models, the smallest and the largest of its table · "
        "● ours with 95% interval, far smaller; BHyT's has 8 blocks",
        Panel("size over Pre-LN's", lines["ratio"], is_ratio=True),
        Panel("loss minus Pre-LN's, nats", lines["difference"]),
    )


def depth() -> go.Figure:
    gains = claims.depth_gain(runs(), 4, 16).query("seeds > 1").set_index("a")
    equal = equal_rates.deepened().loc[equal_rates.LOW]
    rows = [("both at 0.004", name, equal.loc[name]) for name in (PRE_LN, LNS)]
    rows += [("older runs", name, gains.loc[name]) for name in in_order(gains.index)]
    lines = [Line(f"{where}: {title_of(name)}", row, row["verdict"]) for where, name, row in rows]
    pays = sum(line.words == DIFFERENT for line in lines)
    return forest(
        f"Sixteen blocks end lower than four: different in {pays} of {len(lines)} comparisons",
        "held-out loss of 4 blocks minus that of 16 · 95% intervals, 4 seeds at 0.004, else 3 at each scheme's rate",
        Panel("nats per token", lines),
    )


def fit() -> go.Figure:
    values = fit_values(16)
    lines = [
        Line(f"older runs, 16 blocks: {words}", row, row["verdict"])
        for words, name in (("held-out", "held_out"), ("training", "training"), ("their gap", "gap"))
        for row in (pair(values, LNS, PRE_LN, name),)
    ]
    lines += [
        Line(f"league, 8 blocks: {words}", row, row["verdict"])
        for words, name in (("held-out", "loss"), ("training", "seen_loss"), ("their gap", "gap"))
        for row in (league_minus(name).loc[LNS],)
    ]
    for rate in equal_rates.RATES:
        row = equal_rates.compared().loc[("loss", rate)]
        lines.append(Line(f"16 blocks, both at {rate:g}: held-out", row, row["verdict"]))
    return forest(
        "LNS minus Pre-LN at equal rates: higher at 0.001, lower at 0.008, where Pre-LN fails",
        "3 seeds, at equal rates 4 · 95% intervals · LNS at 0.008 in older runs (Pre-LN 0.004) and league (0.002)",
        Panel("nats per token", lines),
    )


def attention() -> go.Figure:
    """A row per scheme, a column per block: how many seeds end with a uniform attention."""
    about = choose(runs(), depth=16).runs
    uniform = (entropy(runs()).loc[about.index, list(range(1, 17))] > UNIFORM).groupby(about["scheme"]).sum()
    names = [name for name in in_order(uniform.index) if (about["scheme"] == name).sum() > 1]
    counts = uniform.loc[names]
    rates = about.groupby("scheme")["lr"].first()
    figure = go.Figure()
    figure.add_heatmap(
        x=[str(block) for block in counts],
        y=[f"{title_of(name)}, rate {rates[name]:g}" for name in names],
        z=counts.to_numpy().tolist(),
        text=[[str(count) if count else "" for count in row] for row in counts.to_numpy()],
        texttemplate="%{text}",
        colorscale=theme.SEQUENTIAL,
        zmin=0,
        zmax=3,
        showscale=False,
        xgap=2,
        ygap=2,
    )
    figure.update_xaxes(type="category", title_text="block", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    figure.update_layout(margin=dict(l=230, r=30, t=96, b=60))
    words = findings.attention()
    title = f"Uniform attention beyond block 1: {words['dead_models']} models with small gains, "
    title += f"{words['dead_models_other']} of Pre-LN and LNS"
    return theme.titled(figure, title, "seeds, of 3, in which the attention of that block is uniform", 380)


def gains() -> go.Figure:
    arm = arm_of_gains()
    changed = arm[arm["change"] != "as it is"]
    panels = []
    for name, axis in (("loss", "loss minus the unchanged models', nats"), ("copy", "the same on copied text, nats")):
        lines = [
            Line(
                f"{title_of(row['scheme'])}: {row['change']}",
                pd.Series({"estimate": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}),
                row[f"{name}_verdict"],
            )
            for _, row in changed.iterrows()
        ]
        panels.append(Panel(axis, lines))
    title = "Normalized queries and keys lower the loss; whether slower gains do is undecided"
    return forest(title, "4 blocks, 6 seeds, 95% intervals", *panels)


def tanh() -> go.Figure:
    made = decided("C")
    panels = []
    for is_ratio, axis in (
        (False, "loss with the tanh minus without, nats"),
        (True, "L2 norm after the last block, with over without"),
    ):
        own = made[made["quantity"].eq("L2 norm of a token") == is_ratio]
        lines = [Line(f"λ/κ = {row['g']:g}, {row['seeds']} seeds", row, row["verdict"]) for _, row in own.iterrows()]
        panels.append(Panel(axis, lines, is_ratio))
    title = "The more BHyT*'s tanh bends, the smaller the stream and the higher the loss"
    return forest(title, "with the tanh against without · 8 blocks, rate 0.008, 95% intervals", *panels)


def skip() -> go.Figure:
    own = experiments(equal_rates.FOLDER)
    figure = by_layer(own[own["lr"] == equal_rates.LOW], "skip_delta_loss", depth=16, log=True)
    words = f"Loss added by leaving out one block: at rate {equal_rates.LOW:g} LNS's deep blocks add less"
    return figure.update_layout(title_text=words)


def before_after() -> go.Figure:
    return growth_before_after(choose(runs(), depth=16), published=normlab.load_published())


def recorded() -> go.Figure:
    """What the first lines of README.md draw."""
    model, text = normlab.load_model("pre_rmsnorm-d8"), normlab.load_held_out("pre_rmsnorm-d8")
    with normlab.record(model) as rec, torch.no_grad():
        model(input_ids=text[:16])
    return rec.stats().plot("token_l2_mean")


PICTURES: dict[str, Callable[[], go.Figure]] = {
    "recorded": recorded,
    "growth_before_after": before_after,
    "papers": of_papers,
    "depth": depth,
    "fit": fit,
    "skip_at_equal_rates": skip,
    "uniform_attention": attention,
    "slower_gains": gains,
    "tanh": tanh,
}


def main(names: Sequence[str]) -> None:
    _, missing = save_images({name: PICTURES[name]() for name in names or PICTURES}, ROOT / "data" / "figures")
    if missing:
        sys.exit(missing)


if __name__ == "__main__":
    main(sys.argv[1:])
