"""What a change of configuration does to the difference between two schemes.

A sweep with variants (see `normlab.training.presets`) trains the same schemes under several configurations. Each
configuration is a comparison of its own, paired by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from normlab.compare import compare
from normlab.errors import NormlabError


def compare_variants(
    runs: pd.DataFrame,
    configs: pd.DataFrame,
    a: str,
    b: str,
    by: Sequence[str],
    metric: str = "loss",
    **where: Any,
) -> pd.DataFrame:
    """`normlab.compare.compare` of schemes a and b within each group of runs that share the configuration fields `by`.

    Args:
        runs: the table of `normlab.load_runs`.
        configs: the table of `normlab.load_configs` for the same runs.
        by: columns of `configs`.
        metric, where: as for `compare`.

    Returns:
        One row a group in which both schemes were run: the columns `by`, then those of `compare`.

    Raises:
        NormlabError: a field that no run has, or no group with both schemes.
    """
    if unknown := [name for name in by if name not in configs.columns]:
        raise NormlabError(f"no run sets {', '.join(unknown)}; fields are {', '.join(map(str, configs.columns))}")
    found = []
    for values, group in configs.groupby(list(by), dropna=False):
        if not {a, b} <= set(group["scheme"]):
            continue
        rows = compare(runs[runs["run"].isin(group.index)], a, b, metric, **where)
        found.append(pd.concat([pd.DataFrame([values] * len(rows), columns=list(by)), rows], axis=1))
    if not found:
        raise NormlabError(f"no configuration under which both {a} and {b} were run")
    return pd.concat(found, ignore_index=True)
