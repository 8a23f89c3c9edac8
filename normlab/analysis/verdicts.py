"""Intervals and verdicts: how far apart two schemes are, and what may be said of it.

different     the interval excludes zero after Holm's correction over the family
equivalent    the interval lies inside a margin stated beforehand
undecided     neither

`docs/statistics.md` explains the rule, its coverage and its limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from normlab.analysis.quantities import on_scale, quantity_row
from normlab.analysis.selection import in_order, of_one_setting
from normlab.errors import NormlabError
from normlab.probes.metrics import Metric

DIFFERENT, EQUIVALENT, UNDECIDED = "different", "equivalent", "undecided"
LEVEL = 0.95  # of confidence
HAS_LEVEL = "normlab.level"  # in the attrs of `judged`'s table: the level of its intervals
SEEDS = 4  # that a claim needs
SIZE_MARGIN, LOSS_MARGIN = 0.10, 0.02  # a share of a size; nats per token


def differences(values: pd.DataFrame, a: str, b: str, metric: str, level: float = LEVEL) -> pd.DataFrame:
    """Scheme a minus scheme b, or a over b for sizes: the mean over the seeds that both have, one row per depth.

    The interval is estimate +- t(level, seeds - 1) sd / sqrt(seeds), of logarithms for a ratio. sd is the standard
    deviation of the pair's differences.

    Args:
        values: columns `depth scheme seed value`, one row per run (`normlab.analysis.quantities.values_of`).
        metric: its row in the metrics table says whether values are compared as ratios.

    Returns:
        Columns `depth a b metric kind seeds mean_a mean_b estimate low high sd df p unpaired`. Means are geometric for
        ratios, and sd is of logarithms. Interval and p are missing for a single seed. `unpaired` counts seeds for
        which a side has no value.

    Raises:
        NormlabError: a scheme has two runs of one seed, which are no two seeds.
    """
    of_one_setting(values[values["scheme"].isin([a, b])])
    there, undo = on_scale(values["value"].to_numpy(float), quantity_row(metric).is_ratio)
    values = values.assign(y=there)
    rows = []
    for depth in sorted(int(d) for d in values["depth"].unique()):
        here = values[values["depth"] == depth]
        by_seed = here.set_index("seed")
        pairs = pd.DataFrame({side: by_seed.loc[by_seed["scheme"] == name, "y"] for side, name in (("a", a), ("b", b))})
        both = pairs.dropna()
        row = {"depth": depth, "a": a, "b": b, "metric": metric, "kind": quantity_row(metric).compared}
        row |= {"seeds": len(both)}
        row |= {f"mean_{side}": float(undo(both[side].mean())) if len(both) else math.nan for side in ("a", "b")}
        row |= _estimate((both["a"] - both["b"]).to_numpy(), undo, level)
        rows.append(row | {"unpaired": len(pairs) - len(both)})
    return pd.DataFrame(rows)


def means(values: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Each scheme's own mean over its seeds against no effect: 1 for ratios (geometric means), 0 for differences.

    The interval is estimate +- t(0.95, seeds - 1) sd / sqrt(seeds).

    Args:
        values: columns `depth scheme seed value`, one row per run.
        metric: its row in the metrics table says whether values are ratios.

    Returns:
        Columns `depth a metric kind seeds estimate low high sd df p`, for `judged`.

    Raises:
        NormlabError: a scheme has two runs of one seed, which are no two seeds.
    """
    of_one_setting(values)
    there, undo = on_scale(values["value"].to_numpy(float), quantity_row(metric).is_ratio)
    rows = []
    for depth, layout in values.assign(y=there).groupby("depth"):
        groups = layout.groupby("scheme", observed=True)["y"]
        for scheme in in_order(layout["scheme"]):
            numbers = groups.get_group(scheme).dropna().to_numpy()
            row = {"depth": int(depth), "a": scheme, "metric": metric, "kind": quantity_row(metric).compared}
            rows.append(row | {"seeds": len(numbers)} | _estimate(numbers, undo, LEVEL))
    return pd.DataFrame(rows)


def variance_over_seeds(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unbiased variance over the second axis and its degrees of freedom: (n, seeds, ...) -> two of (n, ...).

    NaN counts as missing. The variance is NaN without a degree of freedom.
    """
    known = np.isfinite(values)
    count = known.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(known, values, 0.0).sum(axis=1) / count
        square = np.where(known, np.square(values - mean[:, None]), 0.0).sum(axis=1)
        return square / (count - 1), np.maximum(count - 1, 0)


def judged(rows: pd.DataFrame, level: float = LEVEL) -> pd.DataFrame:
    """The rows with columns `p_holm margin verdict`, the rows being one family.

    *different*: p_holm < 1 - level. *equivalent*: not so, and the row's own interval lies inside the margin. The margin
    is a share of 0.1 for sizes (from 1/1.1 to 1.1) and 0.02 nats for losses. Other metrics have none, and are never
    called equivalent.

    Args:
        rows: of `differences` or `means`, of one call or of several; all intervals are of the same `level`, which the
            result has in its `attrs`.
    """
    rows = rows.copy()
    rows.attrs[HAS_LEVEL] = level
    rows["p_holm"] = holm(rows["p"].to_numpy(float))
    rows["margin"] = [_margin(quantity_row(name)) for name in rows["metric"]]
    rows["verdict"] = [
        DIFFERENT if row.p_holm < 1 - level else EQUIVALENT if _inside_margin(row) else UNDECIDED
        for row in rows.itertuples()
    ]
    return rows


def side_of(estimate: float, metric: Metric) -> int:
    """1 for an estimate above no effect, -1 below, 0 within the margin of `judged`, where the metric has one."""
    effect, margin = (math.log(estimate), math.log1p(SIZE_MARGIN)) if metric.is_ratio else (estimate, _margin(metric))
    return 0 if abs(effect) < margin else int(np.sign(effect))


def interval_in_words(rows: pd.DataFrame) -> str:
    """What the intervals of `judged` are called, "95% interval": of their own level."""
    return f"{100 * rows.attrs.get(HAS_LEVEL, LEVEL):g}% interval"


def require_level(level: float) -> float:
    """The level of confidence. NormlabError: it is none."""
    if not 0.0 < level < 1.0:
        raise NormlabError(f"level is {level}: choose a confidence level between 0 and 1, such as 0.95")
    return level


def holm(p: np.ndarray) -> np.ndarray:
    """p-values adjusted for their number (Holm 1979): below alpha, at most a share alpha of families has a false one.

    Missing values stay missing and are not counted.
    """
    adjusted, known = np.full(len(p), np.nan), np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known], kind="stable")]
    others = len(order) - np.arange(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * others), 1.0)
    return adjusted


def in_words(row: Any) -> str:
    """A row of `judged` as a sentence.

    Examples: "different: lns is lower" (with "within ±10%" if the interval is inside the margin), "equivalent: within
    ±0.02", "undecided"; of a scheme's own mean that differs from no effect, "above 1".
    """
    if row.seeds == 0:
        return "nothing to compare"
    if math.isnan(row.low):
        return f"{UNDECIDED}, {'one seed: ' if row.seeds == 1 else ''}no interval"
    within = "within ±" + (f"{row.margin:.0%}" if row.kind == "ratio" else f"{row.margin:g}")
    if row.verdict == DIFFERENT:
        none = 1 if row.kind == "ratio" else 0
        if not hasattr(row, "b"):
            return f"{'above' if row.estimate > none else 'below'} {none}"
        words = f"{DIFFERENT}: {row.a} is {'lower' if row.estimate < none else 'higher'}"
        return f"{words}, {within}" if _inside_margin(row) else words
    return f"{EQUIVALENT}: {within}" if row.verdict == EQUIVALENT else UNDECIDED


def bracketed(low: float, high: float, written: Callable[[float], str]) -> str:
    """An interval as it stands behind an estimate, " [low, high]"; nothing where there is none, as of one seed."""
    return f" [{written(low)}, {written(high)}]" if math.isfinite(low) and math.isfinite(high) else ""


def t_quantile(level: float, freedom: Any) -> Any:
    """The t with a share `level` of Student's distribution in [-t, t]; NaN without a degree of freedom."""
    from scipy.special import stdtrit

    quantile = stdtrit(np.where(np.asarray(freedom) > 0, freedom, np.nan), (1 + level) / 2)
    return float(quantile) if quantile.ndim == 0 else quantile


def _estimate(numbers: np.ndarray, undo: Callable[..., Any], level: float) -> dict[str, float]:
    """Mean, interval and p-value of independent numbers."""
    from scipy.special import stdtr

    count, freedom = len(numbers), max(len(numbers) - 1, 0)
    mean = float(numbers.mean()) if count else math.nan
    sd = float(numbers.std(ddof=1)) if freedom else math.nan
    error = sd / math.sqrt(count) if count else math.nan
    half = t_quantile(level, freedom) * error
    with np.errstate(over="ignore", divide="ignore"):
        scaled = np.abs(np.float64(mean) / error) if mean else 0.0  # no gap at all, even where nothing varies
        p = float(2 * stdtr(freedom, -scaled)) if freedom else math.nan
        estimate, low, high = (float(undo(end)) for end in (mean, mean - half, mean + half))
    return {"estimate": estimate, "low": low, "high": high, "sd": sd, "df": freedom, "p": p}


def _margin(metric: Metric) -> float:
    if metric.is_ratio:
        return SIZE_MARGIN
    return LOSS_MARGIN if metric.unit == "nats per token" else math.nan


def _inside_margin(row: Any) -> bool:
    low, high = (1 / (1 + row.margin), 1 + row.margin) if row.kind == "ratio" else (-row.margin, row.margin)
    return bool(low <= row.low and row.high <= high)
