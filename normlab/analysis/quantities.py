"""What is compared between runs: one number per run, and one definition of each.

A quantity is a row of `QUANTITIES`, or a metric of `normlab.probes` at one place and step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from normlab.analysis.selection import DIVERGED, NothingToShow, Selection, experiments_of, require_one_length
from normlab.errors import NormlabError
from normlab.probes.metrics import Metric, metric_row
from normlab.runs import SOURCE, load_experiments

SIZE = "token_l2_mean"  # of the stream
DEEP = 0.5  # the deep blocks are of the last half

Values = Callable[[Selection, int | None], pd.DataFrame]


@dataclass(frozen=True)
class Quantity(Metric):
    """A number that is made of several values of a run.

    Args:
        of: the runs, and optimizer steps done (None: the last), to a table of `last_values`.
        measured_after: it is of experiments, which are made after training only.
        least: the fewest blocks of a model that has it.
    """

    of: Values = field(default=lambda chosen, step: pd.DataFrame(), repr=False)
    measured_after: bool = False
    least: int = 1


def quantity_row(name: str) -> Metric:
    """The row of a quantity or of a metric."""
    return QUANTITIES.get(name) or metric_row(name)


def on_scale(values: np.ndarray, is_ratio: bool) -> tuple[np.ndarray, Callable[[Any], Any]]:
    """Values on the scale on which they are averaged and compared, and the inverse: logarithms of sizes.

    What has no place there is missing: what is not finite, and a size that is not positive. So a seed whose size is 0
    does not count.
    """
    known = np.isfinite(values) & (values > 0 if is_ratio else True)
    there = np.where(known, values, np.nan)
    return (np.log(there), np.exp) if is_ratio else (there, np.asarray)


def mean_over(values: np.ndarray, is_ratio: bool, axis: int = 0) -> np.ndarray:
    """The mean over an axis of what is there (`on_scale`): geometric for sizes, NaN for none, of zeros alone 0."""
    there, undo = on_scale(values, is_ratio)
    known = np.isfinite(there)
    with np.errstate(invalid="ignore"):
        mean = undo(np.where(known, there, 0.0).sum(axis) / known.sum(axis))
    return np.where(np.isnan(mean) & (values == 0).any(axis), 0.0, mean)


def mean_of(values: pd.Series, metric: str) -> float:
    """`mean_over` of a quantity's or a metric's values."""
    return float(mean_over(values.to_numpy(float), quantity_row(metric).is_ratio))


def values_of(chosen: Selection, name: str, **where: Any) -> pd.DataFrame:
    """One row per run: `run scheme depth width seed lr dtype value`, of a quantity, or of a metric by `last_values`.

    Args:
        where: keywords of `last_values`.

    Raises:
        NormlabError: a quantity has its own places and blocks, so no site, layer, mask or split can be chosen. One that
            is measured after training has no other step, and needs the runs' experiments. Or all models are too shallow
            to have it.
    """
    row = QUANTITIES.get(name)
    if row is None:
        return last_values(chosen, name, **where)
    given = {key: value for key, value in where.items() if value is not None and (key, value) != ("mask", "all")}
    step = None if row.measured_after else given.pop("step", None)
    if given:
        raise NormlabError(f"{name} is {row.definition}: leave out {', '.join(given)}")
    deepest = max(chosen.depths, default=row.least)
    if deepest < row.least:
        raise NothingToShow(f"{name} needs a model of {row.least} blocks or more: these have at most {deepest}")
    return row.of(chosen, step)


def last_values(
    chosen: Selection,
    metric: str,
    *,
    site: str | None = None,
    layer: int | None = None,
    mask: str = "all",
    split: str | None = None,
    step: int | None = None,
) -> pd.DataFrame:
    """One row per run: `run scheme depth width seed lr dtype value`, at the last step and layer or at those given.

    A diverged run's last value is missing. Its value before it diverged says nothing of the scheme. At a site without
    layers there is one value.

    Raises:
        NothingToShow: no step is given, and runs of one depth were not trained equally long.
    """
    if step is None:
        require_one_length(chosen.runs)
    site = site or metric_row(metric).default_site
    if site == "model":
        rows = chosen.rows("model", metric, split=split or ("eval" if metric == "loss" else None))
    else:
        rows = chosen.rows(site, metric, mask, split)
    if layer is not None or (site != "model" and rows["layer"].notna().any()):
        number = rows["layer"].astype("Int64")
        rows = rows[number == (rows["depth"] if layer is None else layer)]
    if step is not None:
        rows = rows[rows["step"] == step]
    rows = rows.sort_values("step", kind="stable").groupby("run", observed=True).tail(1).set_index("run")
    return _by_run(chosen, rows["value"].astype(float).replace([np.inf, -np.inf], np.nan), step)


def _by_run(chosen: Selection, values: pd.Series, step: int | None = None) -> pd.DataFrame:
    """A value per run, missing for runs that lack it and at the end of diverged ones."""
    table = chosen.runs[["scheme", "depth", "width", "seed", "lr", "dtype"]].copy()
    table["value"] = values
    if step is None:
        table["value"] = table["value"].mask(chosen.runs["status"] == DIVERGED)
    return table.reset_index()


def _growth_from(first: int) -> Values:
    def growth(chosen: Selection, step: int | None) -> pd.DataFrame:
        last, start = (last_values(chosen, SIZE, layer=layer, step=step) for layer in (None, first))
        return last.assign(value=last["value"] / start["value"])

    return growth


def is_deep(layer: pd.Series, depth: pd.Series | int) -> pd.Series:
    """Blocks (1 is the first) of the second half, without the last."""
    return (layer > depth * DEEP) & (layer < depth)


def is_early(layer: pd.Series, depth: pd.Series | int) -> pd.Series:
    """Blocks (1 is the first) of the first half, without the first."""
    return (layer > 1) & (layer <= depth * DEEP)


def _skip_cost(which: Callable[[pd.Series, pd.Series], pd.Series], part: str = "block") -> Values:
    def cost(chosen: Selection, step: int | None) -> pd.DataFrame:
        rows = experiments_of(experiments(chosen), "skip_delta_loss", part)
        rows = rows[which(rows["layer"].astype(int), rows["depth"])]
        return _by_run(chosen, rows.groupby("run", observed=True)["value"].mean())

    return cost


def experiments(chosen: Selection) -> pd.DataFrame:
    """The rows of `normlab.load_experiments` that are of the chosen runs.

    Raises:
        NormlabError: the table does not say where its runs are, or none of them was measured after training.
    """
    if SOURCE not in chosen.table.attrs:
        raise NormlabError(
            "this is of experiments after training, and the table does not say where its runs are: give the table of "
            "normlab.load_runs"
        )
    table = load_experiments(chosen.table.attrs[SOURCE])
    return table[table["run"].isin(chosen.runs.index)]


def _uniform_attentions(chosen: Selection, step: int | None) -> pd.DataFrame:
    rows = chosen.rows("model", "uniform_attention")
    at = rows.groupby("run", observed=True)["step"].transform("max") if step is None else step
    rows = rows[rows["step"].eq(at) & rows["layer"].gt(1)].drop_duplicates(["run", "layer"])
    return _by_run(chosen, rows.groupby("run", observed=True)["value"].sum(), step)


QUANTITIES = {
    row.name: row
    for row in (
        Quantity("growth", "the L2 norm of a token after the last block over that after block 1",
                 "growth of the stream", "last block over block 1", "log", "ratio", of=_growth_from(1)),
        Quantity("growth_2", "the L2 norm of a token after the last block over that after block 2",
                 "growth of the stream", "last block over block 2", "log", "ratio", of=_growth_from(2), least=2),
        Quantity("deep_cost", "the mean loss added by leaving out one block of the second half, without the last",
                 "cost of a deep block", "nats per token", measured_after=True, least=3,
                 of=_skip_cost(is_deep)),
        Quantity("early_cost", "the mean loss added by leaving out one block of the first half, without the first",
                 "cost of an early block", "nats per token", measured_after=True, least=4,
                 of=_skip_cost(is_early)),
        Quantity("deep_span_cost", "the loss added by leaving out a quarter of the blocks at once, from the first of "
                 "the second half on", "cost of a quarter of the blocks, deep ones", "nats per token",
                 measured_after=True, least=8,
                 of=_skip_cost(lambda layer, depth: layer == depth * DEEP // 1 + 1, "span")),
        Quantity("uniform_attentions", "the number of blocks after the first whose attention is uniform: its entropy "
                 "is above 98% of the largest", "uniform attentions", "blocks", of=_uniform_attentions, least=2),
    )
}  # fmt: skip
