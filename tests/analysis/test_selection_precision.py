"""Runs of one recipe in two precisions: one group in tables and comparisons, with a remark."""

from __future__ import annotations

import pandas as pd
from figures_helpers import one_run

from normlab.analysis.compare import compare, report
from normlab.analysis.selection import choose, summarize


def in_dtype(dtype: str, scheme: str, seed: int, **changes: object) -> pd.DataFrame:
    run = one_run(scheme, seed=seed)
    return run.assign(run=run["run"] + dtype, dtype=dtype, **changes)


def test_runs_in_two_precisions_are_one_group_with_a_remark():
    there = [in_dtype("bfloat16", scheme, seed) for scheme in ("lns", "pre_rmsnorm") for seed in (0, 1)]
    here = [in_dtype("float32", "pre_rmsnorm", 2), in_dtype("float32", "lns", 2)]
    chosen = choose(pd.concat([*there, *here]))
    assert sorted(chosen.runs["seed"]) == [0, 0, 1, 1, 2, 2]
    assert chosen.describe().endswith("· 4 runs in bfloat16 and 2 runs in float32")
    assert "bfloat16" not in choose(pd.concat(there)).describe()


def test_of_twins_in_two_precisions_the_one_in_the_precision_of_most_runs_is_taken():
    runs = [in_dtype("bfloat16", "lns", seed) for seed in (0, 1)] + [in_dtype("float32", "lns", 0)]
    chosen = choose(pd.concat(runs))
    assert set(chosen.runs["dtype"]) == {"bfloat16"}
    assert chosen.describe().endswith("· without the same runs in another precision")
    assert summarize(pd.concat(runs))["dtype"].tolist() == ["bfloat16", "float32", "bfloat16"]


def test_of_as_many_runs_in_each_precision_all_are_taken_in_one():
    runs = [in_dtype(dtype, scheme, 0) for dtype in ("float32", "bfloat16") for scheme in ("lns", "pre_rmsnorm")]
    for table in (pd.concat(runs), pd.concat(runs[::-1])):
        assert choose(table).runs["dtype"].unique().tolist() == ["bfloat16"]


def test_a_comparison_says_where_its_sides_differ_in_precision():
    runs = pd.concat(
        [in_dtype("bfloat16", "lns", seed) for seed in (0, 1)]
        + [in_dtype("float32", "pre_rmsnorm", seed) for seed in (0, 1)]
    )
    found = compare(runs, "lns", "pre_rmsnorm")
    assert found[["dtype_a", "dtype_b"]].iloc[0].tolist() == ["bfloat16", "float32"]
    assert "precisions bfloat16 and float32" in report(found)
    same = compare(runs.assign(dtype="float32"), "lns", "pre_rmsnorm")
    assert "precision" not in report(same)
    assert found[["estimate", "low", "high"]].equals(same[["estimate", "low", "high"]])
