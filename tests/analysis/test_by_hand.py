"""Intervals of the shipped runs once more, from their file by pyarrow, pandas and scipy alone.

Nothing of `normlab` computes the expected values, so a wrong rule in it cannot agree with itself.
"""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from scipy import stats

import normlab
from normlab.analysis.compare import compare

RUNS = Path(__file__).resolve().parents[2] / "data" / "runs"
PACKED = pyarrow.parquet.read_table(RUNS / "packed_runs.parquet")
Interval = tuple[float, float, float]


@pytest.fixture(scope="module")
def manifests() -> pd.DataFrame:
    """One row per run: its layer statistics, scheme, depth, seed and held-out loss."""
    rows = [
        [stats, *(m["config"][name] for name in ("scheme", "depth", "seed")), m["eval_loss"]]
        for stats, m in zip(PACKED["stats"], map(json.loads, PACKED["manifest"].to_pylist()), strict=True)
    ]
    return pd.DataFrame(rows, columns=["stats", "scheme", "depth", "seed", "loss"])


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return normlab.load_runs(RUNS)


def cells(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Seeds x schemes."""
    return rows.pivot(index="seed", columns="scheme", values=value)


def student(numbers: pd.Series, variances: list[float]) -> Interval:
    """Mean and interval, the variance at least the lower quartile of `variances`."""
    known = sorted(v for v in variances if np.isfinite(v))
    half = stats.t.ppf(0.975, len(numbers) - 1) * np.sqrt(max(numbers.var(), known[len(known) // 4]) / len(numbers))
    return numbers.mean(), numbers.mean() - half, numbers.mean() + half


def paired(table: pd.DataFrame, a: str, b: str) -> Interval:
    variances = [(table[one] - table[other]).var() for one, other in combinations(table.columns, 2)]
    return student((table[a] - table[b]).dropna(), variances)


def interval_of(row: pd.Series) -> list[float]:
    return row[["estimate", "low", "high"]].astype(float).tolist()


@pytest.mark.parametrize("depth", [4, 16])
def test_differences_of_losses(runs, manifests, depth):
    table = cells(manifests[manifests["depth"] == depth], "loss")
    for scheme in ("lns", "bhyt", "rmsnorm_gain"):
        row = compare(runs, scheme, "pre_rmsnorm", depth=depth).iloc[0]
        assert interval_of(row) == pytest.approx(paired(table, scheme, "pre_rmsnorm"))


def test_ratios_of_sizes(runs, manifests):
    def size(table: pa.ListScalar) -> float:
        rows = pa.Table.from_struct_array(table.values).to_pandas()
        rows = rows.query("site == 'block_out' and metric == 'token_l2_mean'")
        last = rows.query("layer == 16 and mask == 'all' and step == step.max()")
        return float(np.log(last["value"].item()))

    here = manifests[manifests["depth"] == 16]
    table = cells(here.assign(size=here["stats"].map(size)), "size")
    for scheme in ("lns", "bhyt"):
        row = compare(runs, scheme, "pre_rmsnorm", "token_l2_mean", depth=16).iloc[0]
        assert interval_of(row) == pytest.approx(np.exp(paired(table, scheme, "pre_rmsnorm")))
