"""Comparisons of the shipped runs once more, from their files by pyarrow, pandas and scipy alone.

Nothing of `normlab` computes the expected values, so a wrong rule in it cannot agree with itself.
"""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from scipy import stats
from shipped_runs import DATA, shipped_runs

from normlab.analysis.compare import compare

ABOUT = ("scheme", "depth", "seed", "lr")
Interval = tuple[float, float, float]


def manifests(folder: str) -> pd.DataFrame:
    """One row per run of a scheme as it is: layer statistics, scheme, depth, seed, rate, and losses of both halves."""
    packed = pyarrow.parquet.read_table(DATA / folder / "packed_runs.parquet")
    rows = [
        [stats, *(m["config"][name] for name in ABOUT), m["eval_loss"], m.get("validation_loss")]
        for stats, m in zip(packed["stats"], map(json.loads, packed["manifest"].to_pylist()), strict=True)
        if not m["config"].get("model")
    ]
    table = pd.DataFrame(rows, columns=["stats", *ABOUT, "loss", "chosen_by"])
    return table.assign(chosen_by=table["chosen_by"].fillna(table["loss"]).astype(float).fillna(np.inf))


def best_rates(table: pd.DataFrame) -> pd.Series:
    """By scheme: the rate with most seeds, of several the one with the lowest loss on the half that chooses."""
    rates = table.groupby(["scheme", "lr"]).agg(seeds=("seed", "size"), loss=("chosen_by", "mean")).reset_index()
    ordered = rates.sort_values(["seeds", "loss"], ascending=[False, True])
    return ordered.drop_duplicates("scheme").set_index("scheme")["lr"]


def shared_rate(table: pd.DataFrame) -> float:
    """Of the rates that all schemes have Pre-LN's best, else the one that is best for most, the least of several."""
    best, own = best_rates(table), table.groupby("scheme")["lr"].apply(set)
    shared = sorted(set.intersection(*own))
    return max(shared, key=lambda rate: (best["pre_rmsnorm"] == rate, (best == rate).sum()))


def cells(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Seeds x schemes."""
    return rows.pivot(index="seed", columns="scheme", values=value).astype(float)


def paired(table: pd.DataFrame, a: str, b: str) -> Interval:
    """Mean and interval of the pair's differences by seed; one seed has no interval."""
    numbers = (table[a] - table[b]).dropna()
    half = stats.t.ppf(0.975, len(numbers) - 1) * numbers.sem() if len(numbers) > 1 else np.nan
    return numbers.mean(), numbers.mean() - half, numbers.mean() + half


def interval_of(row: pd.Series) -> list[float]:
    return row[["estimate", "low", "high"]].astype(float).tolist()


@pytest.mark.parametrize(("folder", "depth"), [("grid", 8), ("gpu", 24)])
def test_differences_of_losses_are_those_of_the_best_rates(folder, depth):
    table = manifests(folder).query("depth == @depth")
    at_best = table[table["lr"] == table["scheme"].map(best_rates(table))]
    runs = shipped_runs(folder).query("site == 'model'")
    for scheme in ("lns", "dyt"):
        row = compare(runs, scheme, "pre_rmsnorm", depth=depth).iloc[0]
        expected = paired(cells(at_best, "loss"), scheme, "pre_rmsnorm")
        assert interval_of(row) == pytest.approx(expected, nan_ok=True)


def test_ratios_of_sizes_are_those_of_one_rate():
    def size(table: pa.ListScalar) -> float:
        rows = pa.Table.from_struct_array(table.values).to_pandas()
        rows = rows.query("site == 'block_out' and metric == 'token_l2_mean'")
        last = rows.query("layer == 8 and mask == 'all' and step == step.max()")
        return float(np.log(last["value"].item()))

    table = manifests("grid").query("depth == 8")
    table = table[np.isclose(table["lr"], shared_rate(table))]
    table = cells(table.assign(size=table["stats"].map(size)), "size")
    runs = shipped_runs("grid")
    for scheme in ("lns", "peri_ln"):
        row = compare(runs, scheme, "pre_rmsnorm", "token_l2_mean", depth=8).iloc[0]
        assert interval_of(row) == pytest.approx(np.exp(paired(table, scheme, "pre_rmsnorm")), nan_ok=True)
