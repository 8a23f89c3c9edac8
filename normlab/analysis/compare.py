"""Is one scheme better than another? Differences between two schemes, paired by seed, with their confidence interval.

A seed fixes the data order and every tensor that two schemes share, so a seed moves both alike and their difference is
far steadier than either value. The interval is Student's t interval of the mean paired difference; one that holds zero
is called "no difference".

compare            two schemes, a row a depth
compare_variants   the same within each configuration of a sweep with variants (see `normlab.training.presets`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from normlab.analysis.selection import DIVERGED, Selection, checked, choose, in_order, summarize
from normlab.errors import NormlabError
from normlab.probes.metrics import metric_row

NO_DIFFERENCE, ONE_SEED, NONE = "no difference", "one seed: no interval", "nothing to compare"


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
    """Scheme a minus scheme b (a over b for metrics that span decades) after training, one row a depth.

    mean +- t(level, n-1) * s / sqrt(n) over the n seeds that both were trained with; for a ratio, of the logarithms.

    Args:
        runs: the table of `normlab.load_runs`. Losses and speeds are those of each scheme's chosen learning rate,
            magnitudes of layers those of the rate that all schemes share, as in every figure (see
            `normlab.analysis.selection`).
        a, b: schemes; or names of two runs with the same depth, width and seed.
        metric: a name of `METRICS`; "loss" means the held-out loss unless `split` says "train".
        site: default: the one of the metric's row in `METRICS` ("model" for loss and speed, block inputs for gradients
            ...).
        layer: block number; default the last block.
        step: optimizer steps done; default the last, 0 is before training.

    Returns:
        Columns: `depth a b metric kind lr_a lr_b seeds mean_a mean_b estimate low high unpaired verdict`. `kind` is
            "difference" or "ratio"; `lr_a` and `lr_b` are the learning rates: where they differ, so may magnitudes;
        `unpaired` counts seeds lost because a run diverged or only one scheme has them.

    Raises:
        NormlabError: a scheme, run, metric, site, layer, mask, split or step that is not in the table, a level outside
            (0, 1), runs that are no pair: of another depth, width or seed, or of another number of steps where `step`
            is not given.
    """
    if not 0.0 < level < 1.0:
        raise NormlabError(f"level is {level}: choose a confidence level between 0 and 1, such as 0.95")
    site = site or metric_row(metric).default_site
    chosen = _select(runs, (a, b), depth, width, same_rate=site != "model")
    _require_measured(
        runs, {"metric": metric, "site": site, "mask": mask, "split": split, "layer": layer, "step": step}
    )
    if step is None:
        _require_same_length(chosen.runs, a, b)
    values = last_values(chosen, metric, site=site, layer=layer, mask=mask, split=split, step=step)
    found = paired(values, a, b, metric, level)
    found.attrs["about"] = chosen.describe()
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


def paired(values: pd.DataFrame, a: str, b: str, metric: str, level: float = 0.95) -> pd.DataFrame:
    """The comparison itself, on what `last_values` returns; columns as for `compare`."""
    found = []
    for depth in sorted(int(d) for d in values["depth"].unique()):
        pairs = _pairs(values[values["depth"] == depth], a, b)
        whole = pairs.dropna()
        ratio = metric_row(metric).is_ratio
        if ratio:
            whole = whole[(whole > 0).all(axis=1)]
        about = {"depth": depth, "a": a, "b": b, "metric": metric, "kind": metric_row(metric).compared}
        about |= {f"lr_{side}": _rate(values, depth, name) for side, name in (("a", a), ("b", b))}
        found.append(about | _estimate(whole, ratio, level, len(pairs) - len(whole)))
    return pd.DataFrame(found)


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
    """One row a run: `run scheme depth seed lr value`, at the last step and layer or at those given.

    A diverged run's last value is missing: what it reached before it broke says nothing of the scheme.
    """
    site = site or metric_row(metric).default_site
    if site == "model":
        rows = chosen.rows("model", metric, split=split or ("eval" if metric == "loss" else None))
    else:
        rows = chosen.rows(site, metric, mask, split)
        number = rows["layer"].astype("Int64")
        rows = rows[number == (rows["depth"] if layer is None else layer)]
    if step is not None:
        rows = rows[rows["step"] == step]
    rows = rows.sort_values("step", kind="stable").groupby("run", observed=True).tail(1).set_index("run")
    table = chosen.runs[["scheme", "depth", "seed", "lr"]].copy()
    table["value"] = rows["value"].astype(float).replace([np.inf, -np.inf], np.nan)
    if step is None:
        table["value"] = table["value"].mask(chosen.runs["status"] == DIVERGED)
    return table.reset_index()


def _require_measured(runs: pd.DataFrame, wanted: Mapping[str, str | int | None]) -> None:
    """NormlabError where the table holds nothing of that description, naming the first part that is not there and what
    is there instead."""
    rows = checked(runs)
    for column, value in wanted.items():
        if value is None:
            continue
        there = rows[column].dropna().unique()
        if value not in there:
            of = f" of {wanted['metric']}" if column != "metric" else ""
            raise NormlabError(
                f"no {column} {value!r}{of} in the table, which has: {', '.join(map(str, sorted(there)))}"
            )
        rows = rows[rows[column] == value]


def _select(
    runs: pd.DataFrame, names: Sequence[str], depth: int | None, width: int | None, same_rate: bool
) -> Selection:
    about = summarize(runs)
    if all(name in about.index for name in names):
        return _two_runs(runs, about.loc[list(names)])
    known = set(about["scheme"])
    for name in names:
        if name not in known:
            raise NormlabError(
                f"no run of {name!r} in the table, which has: {', '.join(in_order(known)) or 'no run at all'}"
            )
    # Learning rate and width are chosen among all schemes, so that the numbers are those that figures show.
    chosen = choose(runs, depth, width, same_rate=same_rate)
    if isinstance(chosen, str):
        raise NormlabError(chosen)
    own = chosen.runs[chosen.runs["scheme"].isin(names)]
    if own.empty:
        where = f"width {int(chosen.runs['width'].iloc[0])}" + (f" and depth {depth}" if depth is not None else "")
        raise NormlabError(f"no run of {names[0]!r} or {names[1]!r} at {where}")
    return Selection(chosen.table[chosen.table["run"].isin(own.index)], own)


def _two_runs(runs: pd.DataFrame, about: pd.DataFrame) -> Selection:
    """Two runs, each under its own name in place of its scheme's."""
    for field in ("depth", "width", "seed"):
        left, right = about[field]
        if left != right:
            raise NormlabError(f"runs {about.index[0]} and {about.index[1]} have {field} {left} and {right}: no pair")
    return Selection(runs[runs["run"].isin(about.index)], about.assign(scheme=about.index))


def _require_same_length(about: pd.DataFrame, a: str, b: str) -> None:
    """What was trained longer is not compared with what was not."""
    whole = about[about["status"] != DIVERGED]
    for place, group in whole.groupby(["depth", "seed"], observed=True):
        steps = group.groupby("scheme")["steps"].max()
        if steps.nunique() > 1:
            depth, seed = place
            raise NormlabError(
                f"at depth {depth}, seed {seed}, {a} was trained for {steps[a]} steps and {b} for {steps[b]}: "
                "give the step to compare at"
            )


def _rate(values: pd.DataFrame, depth: int, scheme: str) -> float:
    """The learning rate of a scheme's runs of a depth, NaN where there are none."""
    rates = values.loc[(values["depth"] == depth) & (values["scheme"] == scheme), "lr"]
    return float(rates.iloc[0]) if len(rates) else math.nan


def _pairs(values: pd.DataFrame, a: str, b: str) -> pd.DataFrame:
    """Seeds as rows, columns a and b."""
    sides = {
        side: values[values["scheme"] == name].drop_duplicates("seed").set_index("seed")["value"]
        for side, name in (("a", a), ("b", b))
    }
    return pd.DataFrame(sides)


def _estimate(whole: pd.DataFrame, ratio: bool, level: float, unpaired: int) -> dict[str, object]:
    a, b = whole["a"].to_numpy(float), whole["b"].to_numpy(float)
    gaps = np.log(a) - np.log(b) if ratio else a - b
    mean, low, high = (float(number) for number in interval(gaps, level))
    if ratio:
        with np.errstate(over="ignore"):
            mean, low, high = (float(np.exp(number)) for number in (mean, low, high))
    neutral = 1.0 if ratio else 0.0
    if len(gaps) == 0:
        verdict = NONE
    elif len(gaps) == 1:
        verdict = ONE_SEED
    elif low <= neutral <= high:
        verdict = NO_DIFFERENCE
    else:
        verdict = "a is lower" if high < neutral else "a is higher"
    means = (float(a.mean()), float(b.mean())) if len(gaps) else (math.nan, math.nan)
    return {
        "seeds": len(gaps),
        "mean_a": means[0],
        "mean_b": means[1],
        "estimate": mean,
        "low": low,
        "high": high,
        "unpaired": unpaired,
        "verdict": verdict,
    }


def interval(values: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over the first axis and Student's t interval, (n, ...) -> three of (...); no bounds for one value, and
    nothing for none."""
    count = len(values)
    mean = values.mean(axis=0) if count else np.full(values.shape[1:], np.nan)
    half = np.full_like(mean, np.nan)
    if count > 1:
        half = t_quantile(level, count - 1) * values.std(axis=0, ddof=1) / math.sqrt(count)
    return mean, mean - half, mean + half


def t_quantile(level: float, freedom: int) -> float:
    """The t for which a share `level` of Student's distribution with that many degrees of freedom lies in [-t, t]."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + level) / 2))


def in_words(found: pd.DataFrame, level: float = 0.95) -> str:
    """What `compare` found, as lines to print: what was compared, on which runs, and a row a depth."""
    first = found.iloc[0]
    ratio = first["kind"] == "ratio"
    shown = "{:.4g}" if ratio else "{:+.4f}"
    cells = [["depth", "seeds", first["a"], first["b"], first["kind"], f"{100 * level:g}% interval", ""]]
    for row in found.itertuples():
        numbers = [f"{value:.4g}" for value in (row.mean_a, row.mean_b)]
        interval = "" if math.isnan(row.low) else f"[{shown.format(row.low)}, {shown.format(row.high)}]"
        cells.append([str(row.depth), str(row.seeds), *numbers, shown.format(row.estimate), interval, _verdict(row)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in cells]
    word = "over" if ratio else "minus"
    return "\n".join(
        [f"{first['metric']}: {first['a']} {word} {first['b']}, paired by seed", found.attrs.get("about", ""), *lines]
    )


def _verdict(row: Any) -> str:
    neutral = 1 if row.kind == "ratio" else 0
    words = {NO_DIFFERENCE: f"none: the interval holds {neutral}"}.get(
        row.verdict, row.verdict.replace("a is", f"{row.a} is")
    )
    if row.lr_a != row.lr_b and math.isfinite(row.lr_a - row.lr_b):
        words += f"; learning rates {row.lr_a:g} and {row.lr_b:g}"
    lost = f"; {row.unpaired} seed{'s' if row.unpaired > 1 else ''} without a pair" if row.unpaired else ""
    return words + lost
