"""Draw data/figures, the pictures of README.md and docs/: `python docs/pictures.py`; with names only these."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import plotly.graph_objects as go
import torch

import normlab
from normlab.analysis.selection import at_rate, choose
from normlab.export import save_images
from normlab.figures import by_layer, growth_before_after, layer_growth, loss_by_rate

ROOT = Path(__file__).resolve().parents[1]
RATE, LARGE_RATE = 4e-3, 1e-3  # Pre-LN's best of `grid` and of `gpu`, at which sizes and costs are compared


def recorded() -> go.Figure:
    """What the first lines of README.md draw."""
    model, text = normlab.load_model("pre_rmsnorm-d8"), normlab.load_held_out("pre_rmsnorm-d8")
    with normlab.record(model) as rec, torch.no_grad():
        model(input_ids=text[:16])
    return rec.stats().plot("token_l2_mean")


def rates() -> go.Figure:
    return loss_by_rate(normlab.load_runs(ROOT / "data" / "grid"), 8)


def rates_at_24_blocks() -> go.Figure:
    return loss_by_rate(normlab.load_runs(ROOT / "data" / "gpu"), 24)


def before_after() -> go.Figure:
    runs = at_rate(normlab.load_runs(ROOT / "data" / "grid"), RATE)
    return growth_before_after(choose(runs, 8), published=normlab.load_published())


def stream() -> go.Figure:
    return layer_growth(choose(at_rate(normlab.load_runs(ROOT / "data" / "gpu"), LARGE_RATE), 24), "token_l2_mean")


def skip() -> go.Figure:
    experiments = at_rate(normlab.load_experiments(ROOT / "data" / "gpu"), LARGE_RATE)
    return by_layer(experiments, "skip_delta_loss", depth=24, log=True)


PICTURES: dict[str, Callable[[], go.Figure]] = {
    "recorded": recorded,
    "loss_by_rate": rates,
    "loss_by_rate_24": rates_at_24_blocks,
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
