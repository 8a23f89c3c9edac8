"""Is one scheme better than another? Differences between two schemes, paired by seed, with verdicts.

`normlab.analysis.verdicts` has the intervals and verdicts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from normlab.analysis.quantities import QUANTITIES, quantity_row, values_of
from normlab.analysis.selection import (
    DIVERGED,
    NothingToShow,
    Selection,
    checked,
    chosen,
    in_order,
    require_one_text,
    summarize,
)
from normlab.analysis.verdicts import (
    LEVEL,
    bracketed,
    differences,
    in_words,
    interval_in_words,
    judged,
    require_level,
)
from normlab.errors import NormlabError

WHERE: dict[str, Any] = {"site": None, "layer": None, "mask": "all", "split": None, "step": None}  # of `compare`


def compare(
    runs: pd.DataFrame,
    a: str,
    b: str,
    metric: str = "loss",
    *,
    depth: int | None = None,
    width: int | None = None,
    site: str | None = None,
    layer: int | None = None,
    mask: str = "all",
    split: str | None = None,
    step: int | None = None,
    level: float = 0.95,
) -> pd.DataFrame:
    """Scheme a minus scheme b (a over b for positive sizes) after training, one row per depth with its verdict.

    The interval is mean +- t(level, n - 1) sd / sqrt(n) of the pair's differences over the n seeds that both have. For
    a ratio they are differences of logarithms (`normlab.analysis.verdicts.differences`).

    Args:
        runs: the table of `normlab.load_runs`. Losses and speeds are those of each scheme's chosen learning rate.
            Magnitudes of layers are those of the rate that all schemes share (`normlab.analysis.selection`).
        a, b: schemes; or names of two runs with the same depth, width and seed.
        metric: a name of `METRICS` or of `normlab.analysis.quantities.QUANTITIES`, such as "growth" or "deep_cost".
            "loss" means the held-out loss unless `split` says "train".
        site: default: the one of the metric's row in `METRICS`.
        depth, width: only this depth; the width, by default the one with most runs.
        layer: block number; default the last block.
        mask: "all", or "no_first": without each row's first token.
        split: "train", "eval" or "probe".
        step: optimizer steps done; default the last, 0 is before training.
        level: of confidence.

    Returns:
        Columns: `depth a b metric kind lr_a lr_b dtype_a dtype_b seeds mean_a mean_b estimate low high sd df p unpaired
        p_holm margin verdict`. `kind` is "difference" or "ratio", whose means are geometric. `lr_a` and `lr_b` are the
        learning rates; where they differ, so may magnitudes. `dtype_a` and `dtype_b` are the training steps' precision.
        `unpaired` counts seeds that only one scheme has, or whose run diverged. The rows are one family.

    Raises:
        NormlabError: a scheme, run, metric, site, layer, mask, split or step that is not in the table; a level outside
            (0, 1); two runs of another depth, width or seed; another text or tokenizer. Another number of steps where
            `step` is not given.
    """
    require_level(level)
    where: dict[str, Any] = {"site": site, "layer": layer, "mask": mask, "split": split, "step": step}
    own = chosen_pair(runs, a, b, metric, depth, width, where)
    found = judged(pair_rows(values_of(own, metric, **where), a, b, metric, level), level)
    found.attrs["about"] = own.describe()
    return found


def compare_variants(
    runs: pd.DataFrame,
    configs: pd.DataFrame,
    a: str,
    b: str,
    by: Sequence[str],
    metric: str = "loss",
    **where: Any,
) -> pd.DataFrame:
    """`compare` of schemes a and b within each group of runs that share the configuration fields `by`.

    The groups are one family.

    Args:
        runs: the table of `normlab.load_runs`.
        configs: the table of `normlab.load_configs` for the same runs.
        by: columns of `configs`.
        metric, where: as for `compare`.

    Returns:
        One row per group in which both schemes were run: the columns `by`, then those of `compare`. A column of both
        is not repeated. A list is its text, "[1, 2]".

    Raises:
        NormlabError: a field that no run has, no group with both schemes, or a level outside (0, 1).
    """
    if unknown := [name for name in by if name not in configs.columns]:
        raise NormlabError(f"no run sets {', '.join(unknown)}; fields are {', '.join(map(str, configs.columns))}")
    choice = {name: where.pop(name, None) for name in ("depth", "width")}
    level = require_level(where.pop("level", LEVEL))
    where = WHERE | where
    found = []
    lists = [name for name in by if configs[name].map(type).isin([list, dict]).any()]  # groups need a key
    configs = configs.assign(**{name: configs[name].map(_as_text) for name in lists})
    for fields, group in configs.groupby(list(by), dropna=False):
        if not {a, b} <= set(group["scheme"]):
            continue
        own = chosen_pair(runs[runs["run"].isin(group.index)], a, b, metric, **choice, where=where)
        rows = pair_rows(values_of(own, metric, **where), a, b, metric, level)
        place = pd.DataFrame([fields] * len(rows), columns=list(by)).drop(columns=rows.columns, errors="ignore")
        found.append(pd.concat([place, rows], axis=1))
    if not found:
        raise NormlabError(f"no configuration under which both {a} and {b} were run")
    return judged(pd.concat(found, ignore_index=True), level)


def _as_text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def chosen_pair(
    runs: pd.DataFrame,
    a: str,
    b: str,
    metric: str,
    depth: int | None,
    width: int | None,
    where: Mapping[str, Any],
) -> Selection:
    """The runs of a and b that `compare` compares: as figures show them among all schemes."""
    site = where["site"] or quantity_row(metric).default_site
    everyone = _select(runs, (a, b), depth, width, same_rate=site != "model")
    about = everyone.runs[everyone.runs["scheme"].isin([a, b])]
    own = Selection(everyone.table[everyone.table["run"].isin(about.index)], about, everyone.twins)
    if own.runs.empty:
        at = f"width {int(everyone.runs['width'].iloc[0])}" + (f" and depth {depth}" if depth is not None else "")
        raise NormlabError(f"no run of {a!r} or {b!r} at {at}")
    wanted = {"metric": metric, "site": site} | {name: where[name] for name in ("mask", "split", "layer", "step")}
    if metric == "loss" and site == "model" and wanted["split"] is None:
        wanted["split"] = "eval"
    if metric not in QUANTITIES:
        _require_measured(runs, wanted)
    if where["step"] is None:
        _require_same_length(own.runs, a, b)
    for _, here in own.runs.groupby("depth"):
        try:
            require_one_text(here)
        except NothingToShow as error:
            raise NothingToShow(f"{a} and {b}: {error}") from None
    return own


def pair_rows(values: pd.DataFrame, a: str, b: str, metric: str, level: float = LEVEL) -> pd.DataFrame:
    """Differences, with the learning rates and precisions of both sides."""
    rows = differences(values, a, b, metric, level)
    sides = [(side, values[values["scheme"] == name].groupby("depth")) for side, name in (("a", a), ("b", b))]
    for number, (side, own) in enumerate(sides):
        rows.insert(5 + number, f"lr_{side}", rows["depth"].map(own["lr"].first()))
    for number, (side, own) in enumerate(sides):
        kinds = own["dtype"].agg(lambda kinds: ", ".join(sorted(set(kinds))))
        rows.insert(7 + number, f"dtype_{side}", rows["depth"].map(kinds).fillna(""))
    return rows


def _require_measured(runs: pd.DataFrame, wanted: Mapping[str, str | int | None]) -> None:
    """Raise NormlabError if no row has these values. It names the first value that is missing, and those there are."""
    rows = checked(runs)
    for column, value in wanted.items():
        if value is None:
            continue
        there = rows[column].dropna().unique()
        if value not in there:
            of = f" of {wanted['metric']}" if column != "metric" else ""
            had = sorted(there) if column != "metric" else [*sorted(there), *QUANTITIES]
            raise NormlabError(f"no {column} {value!r}{of} in the table, which has: {', '.join(map(str, had))}")
        rows = rows[rows[column] == value]


def _select(
    runs: pd.DataFrame, names: Sequence[str], depth: int | None, width: int | None, same_rate: bool
) -> Selection:
    about = summarize(runs)
    if all(name in about.index for name in names):  # two runs, each under its own name in place of its scheme's
        about = about.loc[list(names)]
        for field in ("depth", "width", "seed"):
            left, right = about[field]
            if left != right:
                raise NormlabError(f"runs {names[0]} and {names[1]} have {field} {left} and {right}: no pair")
        return Selection(runs[runs["run"].isin(about.index)], about.assign(scheme=about.index))
    known = set(about["scheme"])
    for name in names:
        if name not in known:
            raise NormlabError(
                f"no run of {name!r} in the table, which has: {', '.join(in_order(known)) or 'no run at all'}"
            )
    # Among all schemes, so that rates and widths are those that figures show.
    return chosen(runs, depth, width, None, same_rate, about)


def _require_same_length(about: pd.DataFrame, a: str, b: str) -> None:
    """Refuse to compare runs of unequal length."""
    whole = about[about["status"] != DIVERGED]
    for place, group in whole.groupby(["depth", "seed"], observed=True):
        depth, seed = place
        for length, remedy in (("steps", "give the step to compare at"), ("tokens", "train them on equally many")):
            ends = group.groupby("scheme")[length].max()
            if ends.nunique() > 1:
                raise NormlabError(
                    f"at depth {depth}, seed {seed}, {a} was trained for {ends[a]} {length} and {b} for {ends[b]}: "
                    f"{remedy}"
                )


def report(found: pd.DataFrame) -> str:
    """The rows of `compare` as lines to print: what was compared, on which runs, and a line per depth."""
    first = found.iloc[0]
    ratio = first["kind"] == "ratio"
    shown = ("{:.4g}" if ratio else "{:+.4f}").format
    cells = [["depth", "seeds", first["a"], first["b"], first["kind"], interval_in_words(found), ""]]
    for row in found.itertuples():
        numbers = [f"{value:.4g}" for value in (row.mean_a, row.mean_b)]
        interval = bracketed(row.low, row.high, shown).strip()
        cells.append([str(row.depth), str(row.seeds), *numbers, shown(row.estimate), interval, _remark(row)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in cells]
    word = "over" if ratio else "minus"
    return "\n".join(
        [f"{first['metric']}: {first['a']} {word} {first['b']}, paired by seed", found.attrs.get("about", ""), *lines]
    )


def _remark(row: Any) -> str:
    words = in_words(row)
    if row.lr_a != row.lr_b and math.isfinite(row.lr_a - row.lr_b):
        words += f"; learning rates {row.lr_a:g} and {row.lr_b:g}"
    if row.dtype_a != row.dtype_b:
        words += f"; precisions {row.dtype_a} and {row.dtype_b}"
    if row.unpaired:
        words += f"; {row.unpaired} seed{'s' if row.unpaired > 1 else ''} without a pair"
    return words
