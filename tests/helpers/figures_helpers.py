"""Small tables of runs for the tests of figures, comparisons and widgets; values follow a formula."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from normlab.training.config import TrainConfig

COLUMNS = "run scheme depth width seed lr status step tokens split site layer metric mask value".split()
SCHEMES = ("pre_rmsnorm", "lns", "bhyt", "bhyt_linear", "rmsnorm_gain")
# Growth with depth, so that schemes are told apart: the last layer's value is 1 + growth * depth * (1 + step).
GROWTH = {"pre_rmsnorm": 1.0, "lns": 0.5, "bhyt": 0.1, "bhyt_linear": 0.11, "rmsnorm_gain": 0.12}
UNIGRAM = 6.0
# Seeds 0, 1 and 2 add 0, 1 and 2 per cent to a size; means of sizes are geometric.
MEAN_OF_SEEDS = (1.00 * 1.01 * 1.02) ** (1 / 3)
LAYER_METRICS = {"block_out": ("token_l2_mean", "feature_var_mean"), "block_in_grad": ("grad_l2_mean", "grad_l2_total")}


def activation(scheme: str, layer: int, step: int) -> float:
    return 1.0 + GROWTH.get(scheme, 0.7) * layer * (1 + step / 10)


def profile(scheme: str, depth: int, step: int) -> list[float]:
    """By layer, the mean over the seeds of `table`, as the explorer shows it."""
    return [MEAN_OF_SEEDS * activation(scheme, layer, step) for layer in range(depth + 1)]


def final_loss(scheme: str, seed: int) -> float:
    return 4.0 + 0.1 * list(GROWTH).index(scheme) + 0.3 * seed if scheme in GROWTH else 5.0


def one_run(
    scheme: str,
    depth: int = 4,
    seed: int = 0,
    lr: float = 1e-3,
    steps: Sequence[int] = (0, 10, 20),
    status: str = "finished",
) -> pd.DataFrame:
    """All rows of one run; a diverged run's losses are NaN from the middle on."""
    return _one_run(scheme, depth, seed, lr, tuple(steps), status).copy()


@cache
def _one_run(scheme: str, depth: int, seed: int, lr: float, steps: tuple[int, ...], status: str) -> pd.DataFrame:
    about = {
        "run": f"{scheme}-{depth}-{seed}-{lr}",
        "scheme": scheme,
        "depth": depth,
        "width": 16,
        "seed": seed,
        "lr": lr,
    }
    rows: list[tuple] = []
    loss = UNIGRAM + 1 if status == "not_learned" else final_loss(scheme, seed)
    for step in steps:
        broken = status == "diverged" and step >= steps[len(steps) // 2]
        for site, metrics in LAYER_METRICS.items():
            for metric in metrics:
                for layer in range(site == "block_in_grad", depth + 1):
                    value = activation(scheme, layer, step) * (1 + 0.01 * seed)
                    rows.append((step, "probe", site, layer, metric, np.nan if broken else value))
        for split in ("train", "eval"):
            value = np.nan if broken else 8.0 + (loss - 8.0) * step / max(steps[-1], 1)
            rows.append((step, split, "model", None, "loss", value))
    rows.append((steps[-1], "eval", "model", None, "unigram_entropy", UNIGRAM))
    table = pd.DataFrame(rows, columns=["step", "split", "site", "layer", "metric", "value"])
    table = table.assign(**about, status=status, tokens=table["step"] * 100, mask="all")[COLUMNS]
    return table.astype({"layer": "Int64", "value": "float64"})


def table(
    schemes: Sequence[str] = SCHEMES,
    depths: Sequence[int] = (2, 4),
    seeds: Sequence[int] = (0, 1, 2),
    statuses: Mapping[tuple[str, int], str] | None = None,
    lr: float = 1e-3,
) -> pd.DataFrame:
    """Runs of all schemes, depths and seeds at one rate; `statuses` by (scheme, depth)."""
    return _table(tuple(schemes), tuple(depths), tuple(seeds), tuple((statuses or {}).items()), lr).copy()


@cache
def _table(schemes: tuple, depths: tuple, seeds: tuple, statuses: tuple, lr: float) -> pd.DataFrame:
    runs = [
        one_run(scheme, depth, seed, lr, status=dict(statuses).get((scheme, depth), "finished"))
        for scheme in schemes
        for depth in depths
        for seed in seeds
    ]
    return pd.concat(runs, ignore_index=True)


def two_rates() -> pd.DataFrame:
    """All schemes at one rate, and two of them, in models of depth 4, at a higher one that doubles what is measured."""
    higher = table(("lns", "bhyt"), depths=(4,), lr=3e-3)
    size = higher["metric"].eq("token_l2_mean")
    return pd.concat([table(), higher.assign(value=higher["value"].mask(size, 2 * higher["value"]))], ignore_index=True)


def configs_of(runs: pd.DataFrame, **changes: Any) -> dict[str, dict[str, Any]]:
    """The result of `read_configs` for them: models of these changes to `normlab train`'s defaults at width 32."""
    names = runs[["run", "scheme", "depth"]].drop_duplicates().itertuples(index=False)
    return {
        run: TrainConfig(scheme=scheme, depth=int(depth), **{"width": 32} | changes).to_dict()
        for run, scheme, depth in names
    }


def empty() -> pd.DataFrame:
    return one_run("bhyt").iloc[:0]


def lines(figure: go.Figure, **meta: object) -> list[go.Scatter]:
    """Traces whose meta has these entries."""
    return [t for t in figure.data if t.meta and all(t.meta.get(key) == value for key, value in meta.items())]


def text_of(figure: go.Figure) -> str:
    """All annotations and the title, as one string."""
    layout = figure.layout
    return " ".join([layout.title.text or "", layout.title.subtitle.text or "", *(a.text for a in layout.annotations)])
