"""Draw data/figures, the pictures of README.md and docs/: `python docs/pictures.py`; with names only these."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pandas as pd
import plotly.graph_objects as go
import torch
from papers import LARGE, RATES, SMALL
from tables import ROOT

import normlab
from normlab.analysis.selection import at_rate, choose
from normlab.export import save_images
from normlab.figures import by_layer, growth_before_after, layer_growth, loss_by_rate
from normlab.schemes import tagged


def runs(folder: str) -> pd.DataFrame:
    return normlab.load_runs(ROOT / "data" / folder)


def of_the_findings() -> pd.DataFrame:
    """Runs of the schemes that the findings speak of: the grid has more contenders, which the league shows."""
    grid = runs("grid")
    return grid[grid["scheme"].isin([*tagged("main"), "beam"])]


def recorded() -> go.Figure:
    """What the first lines of README.md draw."""
    model, text = normlab.load_model("pre_rmsnorm-d8"), normlab.load_held_out("pre_rmsnorm-d8")
    with normlab.record(model) as rec, torch.no_grad():
        model(input_ids=text[:16])
    return rec.stats().plot("token_l2_mean")


def before_after() -> go.Figure:
    small = choose(at_rate(of_the_findings(), RATES[SMALL]), 8)
    return growth_before_after(small, published=normlab.load_published())


def stream() -> go.Figure:
    return layer_growth(choose(at_rate(runs("gpu"), RATES[LARGE]), 24), "token_l2_mean")


def skip() -> go.Figure:
    experiments = at_rate(normlab.load_experiments(ROOT / "data" / "gpu"), RATES[LARGE])
    return by_layer(experiments, "skip_delta_loss", depth=24, log=True)


PICTURES: dict[str, Callable[[], go.Figure]] = {
    "recorded": recorded,
    "loss_by_rate": lambda: loss_by_rate(of_the_findings(), 8),
    "loss_by_rate_24": lambda: loss_by_rate(runs("gpu"), 24),
    "growth_before_after": before_after,
    "stream_24": stream,
    "skip_24": skip,
}


def main(names: Sequence[str]) -> None:
    _, missing = save_images({name: PICTURES[name]() for name in names or PICTURES}, ROOT / "data" / "figures")
    if missing:
        sys.exit(missing)


if __name__ == "__main__":
    main(sys.argv[1:])
