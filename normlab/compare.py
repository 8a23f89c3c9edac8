"""Is one scheme better than another? Differences between two schemes, paired by seed, with their confidence interval.

A seed fixes the data order and every tensor that two schemes share, so a seed moves both alike and their difference is
far steadier than either value. The interval is Student's t interval of the mean paired difference; one that holds zero
is called "no difference".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from normlab.errors import NormlabError
from normlab.labels import OF_THE_MODEL, metric_row
from normlab.selection import DIVERGED, Selection, choose, summarize

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
        runs: the table of `normlab.load_runs`; each scheme enters with its chosen learning rate (see
            `normlab.selection`).
        metric: a name of `METRICS`; "loss" means the held-out loss unless `split` says "train".
        site: default "model" for loss and speed, else "block_out".
        layer: block number; default the last block.
        step: optimizer steps done; default the last, 0 is before training.

    Returns:
        Columns: `depth a b metric kind seeds mean_a mean_b estimate low high unpaired verdict`. `kind` is "difference"
            or "ratio";
        `unpaired` counts seeds lost because a run diverged or only one scheme has them.

    Raises:
        NormlabError: a scheme that is not in the table, or a level outside (0, 1).
    """
    if not 0.0 < level < 1.0:
        raise NormlabError(f"level is {level}: choose a confidence level between 0 and 1, such as 0.95")
    chosen = _select(runs, (a, b), depth, width)
    values = last_values(chosen, metric, site=site, layer=layer, mask=mask, split=split, step=step)
    return paired(values, a, b, metric, level)


def paired(values: pd.DataFrame, a: str, b: str, metric: str, level: float = 0.95) -> pd.DataFrame:
    """The comparison itself, on what `last_values` returns; columns as for `compare`."""
    found = []
    for depth in sorted(int(d) for d in values["depth"].unique()):
        pairs = _pairs(values[values["depth"] == depth], a, b)
        whole = pairs.dropna()
        log = metric_row(metric).log
        if log:
            whole = whole[(whole > 0).all(axis=1)]
        about = {"depth": depth, "a": a, "b": b, "metric": metric}
        found.append(about | _estimate(whole, log, level, len(pairs) - len(whole)))
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
    """One row a run: `run scheme depth seed value`, at the last step and layer or at those given.

    A diverged run's last value is missing: what it reached before it broke says nothing of the scheme.
    """
    at_model = site == "model" or (site is None and metric in OF_THE_MODEL)
    if at_model:
        rows = chosen.rows("model", metric, split=split or ("eval" if metric == "loss" else None))
    else:
        rows = chosen.rows(site or "block_out", metric, mask, split)
        number = rows["layer"].astype("Int64")
        rows = rows[number == (rows["depth"] if layer is None else layer)]
    if step is not None:
        rows = rows[rows["step"] == step]
    rows = rows.sort_values("step", kind="stable").groupby("run", observed=True).tail(1).set_index("run")
    table = chosen.runs[["scheme", "depth", "seed"]].copy()
    table["value"] = rows["value"].astype(float).replace([np.inf, -np.inf], np.nan)
    if step is None:
        table["value"] = table["value"].mask(chosen.runs["status"] == DIVERGED)
    return table.reset_index()


def _select(runs: pd.DataFrame, names: Sequence[str], depth: int | None, width: int | None) -> Selection:
    known = set(summarize(runs)["scheme"])
    for name in names:
        if name not in known:
            raise NormlabError(
                f"no run of {name!r} in the table, which has: {', '.join(sorted(known)) or 'no run at all'}"
            )
    chosen = choose(runs, depth, width, list(names))
    if isinstance(chosen, str):
        raise NormlabError(chosen)
    return chosen


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
    mean, low, high = interval(gaps, level)
    if ratio:
        mean, low, high = math.exp(mean), math.exp(low), math.exp(high)
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
        "kind": "ratio" if ratio else "difference",
        "seeds": len(gaps),
        "mean_a": means[0],
        "mean_b": means[1],
        "estimate": mean,
        "low": low,
        "high": high,
        "unpaired": unpaired,
        "verdict": verdict,
    }


def interval(values: Sequence[float] | np.ndarray, level: float = 0.95) -> tuple[float, float, float]:
    """Mean and Student's t interval; the interval is NaN for one value, and all three are for none."""
    numbers = np.asarray(values, dtype=float)
    count = numbers.size
    if count == 0:
        return math.nan, math.nan, math.nan
    mean = float(numbers.mean())
    if count == 1:
        return mean, math.nan, math.nan
    half = t_quantile(level, count - 1) * float(numbers.std(ddof=1)) / math.sqrt(count)
    return mean, mean - half, mean + half


def t_quantile(level: float, freedom: int) -> float:
    """The t for which a share `level` of Student's distribution with that many degrees of freedom lies in [-t, t].

    By bisection on the closed form of that share (Abramowitz and Stegun 26.7.3 and 26.7.4), so no statistics package is
    needed.
    """
    low, high = 0.0, 1.0
    while _share_within(high, freedom) < level:
        high *= 2.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _share_within(t: float, freedom: int) -> float:
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    even = freedom % 2 == 0
    term = total = 1.0 if even else cosine
    for k in range(2 if even else 3, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if even:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))
