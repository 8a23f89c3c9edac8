"""When a difference may be called one: three words, and the arithmetic behind them.

different     the difference is not zero, after Holm's correction over the family that is shown
equivalent    its interval lies inside a margin that was stated beforehand
undecided     neither: also where an interval holds both zero and a difference that would matter

Values of one depth are a two-way layout, value = scheme + seed + error: a seed fixes the data order and every tensor
that schemes share, so seeds are blocks. Positive sizes enter by their logarithms, so their means are geometric and
their differences ratios. The error's variance is pooled over all schemes of the depth: with three seeds a pair of its
own has two degrees of freedom, twelve schemes together have 22. That holds where seeds move all schemes about equally.
Where Bartlett's test (Bartlett 1937, at 5%) says that they do not, each pair has its own variance: a scheme that swings
far more would widen the intervals of all others and have too narrow a one itself. None is then below a lower quartile:
that a pair's three seeds agree to a thousandth is luck. `df` says which it was.

residual_variance     the pooled variance and its degrees of freedom
unlike                Bartlett's test
lower_quartile        the least that an own variance is taken for
pair_variance         what differences from a reference scatter by: pooled where alike, else each pair's own
differences           a scheme against another, a row a depth, with interval and p-value
judged                Holm's correction over the rows of a table, the margin, and the verdict
in_words              a row's verdict as a sentence
expected_half_width   how wide intervals will be, to be asked before anything is run
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from normlab.errors import NormlabError
from normlab.probes.metrics import Metric, metric_row

__all__ = [
    "differences",
    "expected_half_width",
    "holm",
    "in_words",
    "interval",
    "judged",
    "lower_quartile",
    "pair_variance",
    "residual_variance",
    "unlike",
]

DIFFERENT, EQUIVALENT, UNDECIDED = "different", "equivalent", "undecided"
SIZE_MARGIN, LOSS_MARGIN = 0.10, 0.02  # a share of a size; nats per token
BARTLETT = 0.05  # the level of Bartlett's test
ROUNDING = 1e-6  # a share of the values: seeds that move none by more move all alike


def residual_variance(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variance left when a mean a scheme and a mean a seed are taken out, by least squares, and its degrees of freedom.

    Args:
        values: (schemes, seeds, ...), NaN where there is none; each place of the further axes is a layout of its own.

    Returns:
        Two arrays (...): variance (NaN without a degree of freedom), degrees of freedom.
    """
    schemes, seeds, *rest = values.shape
    if not values.size:
        return np.full(rest, np.nan), np.zeros(rest, dtype=int)
    flat = values.reshape(schemes * seeds, -1)
    whole = np.concatenate([np.repeat(np.eye(schemes), seeds, axis=0), np.tile(np.eye(seeds), (schemes, 1))], axis=1)
    variance, freedom = np.full(flat.shape[1], np.nan), np.zeros(flat.shape[1], dtype=int)
    patterns, which = np.unique(np.isfinite(flat), axis=1, return_inverse=True)
    for number, known in enumerate(patterns.T):
        places = which.ravel() == number
        layout, y = whole[known], flat[known][:, places]
        freedom[places] = left = len(layout) - (np.linalg.matrix_rank(layout) if len(layout) else 0)
        if left:
            error = y - layout @ np.linalg.lstsq(layout, y, rcond=None)[0]
            variance[places] = np.square(error).sum(axis=0) / left
    return variance.reshape(rest), freedom.reshape(rest)


def unlike(variances: np.ndarray, freedom: np.ndarray, rounding: float = 0.0) -> np.ndarray:
    """Whether Bartlett's test tells variances apart.

    With S2 their mean, weighted by their degrees of freedom f_i, and F = sum f_i, k of them:

        T = (F log S2 - sum f_i log s2_i) / (1 + (sum 1/f_i - 1/F) / (3 (k - 1))),  chi2 of k - 1 degrees if alike

    Args:
        variances, freedom: (k, ...); those without a degree of freedom do not count.
        rounding: variances below its square count as that.

    Returns:
        Array (...) of bool; False where fewer than two count.
    """
    from scipy.special import chdtrc

    known = freedom > 0
    weight, count = np.where(known, freedom, 0.0), known.sum(axis=0)
    floored = np.where(known, np.maximum(variances, max(rounding**2, np.finfo(float).tiny)), 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = weight.sum(axis=0)
        gap = whole * np.log((weight * floored).sum(axis=0) / whole) - (weight * np.log(floored)).sum(axis=0)
        inverse = np.where(known, 1.0 / np.where(known, freedom, 1.0), 0.0).sum(axis=0)
        scaled = gap / (1.0 + (inverse - 1.0 / whole) / (3.0 * (count - 1)))
        return (count > 1) & (chdtrc(count - 1, scaled) < BARTLETT)


def lower_quartile(variances: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Of (k, ...) those with a degree of freedom: the smallest that has a quarter of them below it, infinite for
    none."""
    known = freedom > 0
    ordered = np.sort(np.where(known, variances, np.inf), axis=0)
    return np.take_along_axis(ordered, known.sum(axis=0)[None] // 4, axis=0)[0]


def pair_variance(values: np.ndarray, reference: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """Of each scheme's differences from its reference, paired by seed: half their variance, so that a mean over n
    seeds has the standard error sqrt(2 variance / n).

    Pooled over all schemes, unless the differences from some one of them have unlike variances (`unlike`; asked of
    every scheme, so that a against b is what b against a is): then the pair's own, and none below the lower quartile of
    all that one of its two schemes is part of.

    Args:
        values: (schemes, seeds, ...), NaN where there is none.
        reference: which scheme each is compared with, (schemes,) or one for all.

    Returns:
        Two arrays (schemes, ...): variance (NaN without a degree of freedom), degrees of freedom.
    """
    number = len(values)
    reference = np.broadcast_to(reference, number)
    between = [_half_variance(values - one) for one in values]
    own, freedom = (np.stack(part) for part in zip(*between, strict=True))
    freedom[np.arange(number), np.arange(number)] = 0  # no scheme differs from itself
    rounding = ROUNDING * np.abs(values[np.isfinite(values)]).max(initial=0.0)
    apart = np.any([unlike(*pairs, rounding) for pairs in zip(own, freedom, strict=True)], axis=0)
    pooled, together = residual_variance(values)
    variance, left = [], []
    for scheme, other in enumerate(reference):
        sides = [scheme, other]
        floor = lower_quartile(np.concatenate(own[sides]), np.concatenate(freedom[sides]))
        variance.append(np.where(apart, np.maximum(own[scheme, other], floor), pooled))
        left.append(np.where(apart, freedom[scheme, other], together))
    return np.stack(variance), np.stack(left)


def _half_variance(gaps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Over the seeds, (schemes, seeds, ...) -> variance / 2 and its degrees of freedom, (schemes, ...)."""
    known = np.isfinite(gaps)
    count = known.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(known, gaps, 0.0).sum(axis=1) / count
        square = np.where(known, np.square(gaps - mean[:, None]), 0.0).sum(axis=1)
        return square / (count - 1) / 2, np.maximum(count - 1, 0)


def differences(
    values: pd.DataFrame, a: str, b: str, metric: str, level: float = 0.95, pool: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Scheme a minus scheme b, or a over b for sizes: the mean over the seeds that both have, a row a depth.

    estimate +- t(level, df) * sd * sqrt(2 / seeds), of the logarithms for a ratio; sd is pooled where seeds move the
    schemes about equally, and the pair's own where not (see the module).

    Args:
        values: columns `depth scheme seed value`, one row a run (`normlab.analysis.compare.last_values`).
        metric: its row in the metrics table says whether values are compared as ratios.
        pool: the runs that the variance is pooled over, in the same columns; default: `values`. With a column `group`
            in both, each scheme of the pool stands beside the b of its own group; the rows of `values` are of one.

    Returns:
        Columns `depth a b metric kind seeds mean_a mean_b estimate low high sd df p unpaired`: means are geometric for
        ratios, sd of logarithms; interval and p are missing without a degree of freedom; `unpaired` counts seeds that
        only one side has a value for.
    """
    ratio = metric_row(metric).is_ratio
    values, pool = (_on_scale(rows, ratio) for rows in (values, values if pool is None else pool))
    found = []
    for depth in sorted(int(d) for d in values["depth"].unique()):
        here = values[values["depth"] == depth]
        pairs = _pairs(here, a, b)
        whole = pairs.dropna()
        variance, freedom = _variance(pool[pool["depth"] == depth], a, b, here["group"].iloc[0])
        row = {"depth": depth, "a": a, "b": b, "metric": metric, "kind": metric_row(metric).compared}
        found.append(
            row | _estimate(whole, ratio, math.sqrt(variance), freedom, level) | {"unpaired": len(pairs) - len(whole)}
        )
    return pd.DataFrame(found)


def judged(rows: pd.DataFrame, level: float = 0.95, margin: float | None = None) -> pd.DataFrame:
    """The rows with what they amount to: columns `p_holm margin verdict` are added, or made anew.

    The rows are the family: what is shown together is judged together. *different*: p_holm < 1 - level; *equivalent*:
    not so, and the row's own interval lies inside the margin.

    Args:
        rows: of `differences`, also of several calls one below the other; their intervals are of the same `level`.
        margin: what does not matter, stated before the values are seen: a share for ratios (0.1: from 1/1.1 to 1.1), in
            the metric's unit for differences. Default: 0.1 for sizes, 0.02 nats for losses, and none for the rest,
            which then are never called equivalent.

    Raises:
        NormlabError: a margin that is not positive.
    """
    if margin is not None and not margin > 0:
        raise NormlabError(f"margin is {margin}: state how large a difference still does not matter, above 0")
    rows = rows.copy()
    rows["p_holm"] = holm(rows["p"].to_numpy(float))
    rows["margin"] = [_margin(metric_row(name)) if margin is None else margin for name in rows["metric"]]
    rows["verdict"] = [_verdict(row, level) for row in rows.itertuples()]
    return rows


def holm(p: np.ndarray) -> np.ndarray:
    """p-values adjusted for their number (Holm 1979): below alpha, at most a share alpha of families has a false one.
    Missing ones stay missing and are not counted."""
    adjusted, known = np.full(len(p), np.nan), np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known], kind="stable")]
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return adjusted


def in_words(row: Any) -> str:
    """A row of `judged` as a sentence: "different: lns is lower" (and "within ±10%" where that is no more than the
    margin), "equivalent: within ±0.02", "undecided", and why nothing can be said."""
    if row.seeds == 0:
        return "nothing to compare"
    if math.isnan(row.low):
        return f"{UNDECIDED}, {'one seed: ' if row.seeds == 1 else ''}no interval"
    within = "within ±" + (f"{row.margin:.0%}" if row.kind == "ratio" else f"{row.margin:g}")
    if row.verdict == DIFFERENT:
        words = f"{DIFFERENT}: {row.a} is {'lower' if row.estimate < _neutral(row.kind) else 'higher'}"
        return f"{words}, {within}" if _inside_margin(row) else words
    return f"{EQUIVALENT}: {within}" if row.verdict == EQUIVALENT else UNDECIDED


def expected_half_width(sd: float, seeds: int, schemes: int, level: float = 0.95, comparisons: int = 1) -> float:
    """How far an interval will reach to either side, on average: what a sweep can tell apart, before it is run.

    t(level, (schemes - 1)(seeds - 1)) * E[pooled sd] * sqrt(2 / seeds), seeds moving all schemes alike. For a ratio
    `sd` is of logarithms, and so is the result.

    Args:
        sd: a guess of what a seed moves a scheme by, beside what it moves all schemes by.
        comparisons: size of the family; its smallest p-value is held against (1 - level) / comparisons (Holm).

    Raises:
        NormlabError: fewer than two seeds or schemes.
    """
    if seeds < 2 or schemes < 2:
        raise NormlabError(f"{schemes} schemes and {seeds} seeds leave no degree of freedom: take two of each or more")
    freedom = (schemes - 1) * (seeds - 1)
    shrunk = math.sqrt(2 / freedom) * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    return t_quantile(1 - (1 - level) / comparisons, freedom) * sd * shrunk * math.sqrt(2 / seeds)


def interval(values: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over the first axis and Student's t interval, (n, ...) -> three of (...); no bounds for one value, and
    nothing for none."""
    count = len(values)
    mean = values.mean(axis=0) if count else np.full(values.shape[1:], np.nan)
    half = np.full_like(mean, np.nan)
    if count > 1:
        half = t_quantile(level, count - 1) * values.std(axis=0, ddof=1) / math.sqrt(count)
    return mean, mean - half, mean + half


def t_quantile(level: float, freedom: Any) -> Any:
    """The t for which a share `level` of Student's distribution with that many degrees of freedom lies in [-t, t]; NaN
    for none."""
    from scipy.special import stdtrit

    found = stdtrit(np.where(np.asarray(freedom) > 0, freedom, np.nan), (1 + level) / 2)
    return float(found) if found.ndim == 0 else found


def _on_scale(values: pd.DataFrame, ratio: bool) -> pd.DataFrame:
    """With columns `group`, 0 where there is none, and `y`, the values as they are compared: logarithms of positive
    sizes, missing where there is none."""
    y = values["value"].astype(float)
    if ratio:
        y = np.log(y.where(y > 0))
    return values.assign(y=y.where(np.isfinite(y)), group=values.get("group", 0))


def _variance(pool: pd.DataFrame, a: str, b: str, group: int) -> tuple[float, int]:
    """`pair_variance` of a against b in a group, each scheme of the pool being compared with its own group's b."""
    layout = pool.pivot_table(index=["group", "scheme"], columns="seed", values="y", observed=True)
    places = {place: number for number, place in enumerate(layout.index)}
    if (group, a) not in places:
        return math.nan, 0
    reference = np.array([places.get((own, b), number) for (own, _), number in places.items()])
    variance, freedom = pair_variance(layout.to_numpy(float), reference)
    return float(variance[places[group, a]]), int(freedom[places[group, a]])


def _pairs(values: pd.DataFrame, a: str, b: str) -> pd.DataFrame:
    """Seeds as rows, columns a and b."""
    sides = {
        side: values[values["scheme"] == name].drop_duplicates("seed").set_index("seed")["y"]
        for side, name in (("a", a), ("b", b))
    }
    return pd.DataFrame(sides)


def _estimate(whole: pd.DataFrame, ratio: bool, sd: float, freedom: int, level: float) -> dict[str, Any]:
    from scipy.stats import t

    undo = np.exp if ratio else float
    seeds = len(whole)
    mean_a, mean_b = (float(undo(whole[side].mean())) if seeds else math.nan for side in ("a", "b"))
    gap = float((whole["a"] - whole["b"]).mean()) if seeds else math.nan
    error = sd * math.sqrt(2 / seeds) if seeds else math.nan
    half = t_quantile(level, freedom) * error
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = np.abs(np.float64(gap) / error) if gap else 0.0  # no gap at all, even where nothing varies
        p = float(2 * t.sf(scaled, freedom)) if freedom else math.nan
        estimate, low, high = (float(undo(end)) for end in (gap, gap - half, gap + half))
    about = {"seeds": seeds, "mean_a": mean_a, "mean_b": mean_b, "estimate": estimate, "low": low, "high": high}
    return about | {"sd": sd, "df": freedom, "p": p}


def _margin(metric: Metric) -> float:
    if metric.is_ratio:
        return SIZE_MARGIN
    return LOSS_MARGIN if metric.unit == "nats per token" else math.nan


def _neutral(kind: str) -> float:
    return 1.0 if kind == "ratio" else 0.0


def _verdict(row: Any, level: float) -> str:
    if row.p_holm < 1 - level:
        return DIFFERENT
    return EQUIVALENT if _inside_margin(row) else UNDECIDED


def _inside_margin(row: Any) -> bool:
    low, high = (1 / (1 + row.margin), 1 + row.margin) if row.kind == "ratio" else (-row.margin, row.margin)
    return bool(low <= row.low and row.high <= high)
