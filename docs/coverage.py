"""Simulate how often the intervals and sets of `normlab.analysis.verdicts` hold the truth; write docs/statistics.md.

    python docs/coverage.py   # `make findings` calls it

Intervals: each family has eight schemes of equal means. Seven are compared with the first. Seeds move all schemes
together by ten times the noise. The noise is normal with a standard deviation of 1. The second scheme may differ: it
scatters threefold, or one run in five is worse by ten.

Sets: 4, 8 or 15 schemes of equal means, of which each must stay in the set of the best. The set's size is that of means
which are spread evenly over six standard deviations of the noise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from generate import filled
from scipy import stats
from tables import table

from normlab.analysis.verdicts import (
    holm,
    lower_quartile,
    pair_variances,
    t_quantile,
    variance_over_seeds,
    worse_than_some,
)

SCHEMES, FAMILIES, FAMILIES_OF_SETS = 8, 20_000, 4_000


def noise(kind: str, shape: tuple[int, int, int], random: np.random.Generator) -> np.ndarray:
    """(schemes, seeds, families) of noise."""
    values = random.normal(size=shape)
    if kind == "second scatters threefold":
        values[1] *= 3
    if kind == "half scatter threefold":
        values[len(values) // 2 :] *= 3
    if kind == "second has two groups":
        values[1] += 10 * (random.random(values[1].shape) < 0.2) - 2  # of mean zero, as all others
    return values


def pooled_variance(values: np.ndarray) -> tuple[np.ndarray, int]:
    """The alternative: twice the residual variance of schemes x seeds, and its degrees of freedom."""
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean((0, 1))
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    return 2 * np.square(rest).sum((0, 1)) / freedom, freedom


def rules(values: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By rule: whether each interval holds zero, its half-width, and its p-value, (schemes - 1, families) each."""
    gaps = (values - values[0])[1:]
    own, freedom = variance_over_seeds(gaps)
    pooled, together = pooled_variance(values)
    choices = {
        "ours": (np.maximum(own, lower_quartile(*pair_variances(values))), freedom),
        "no floor": (own, freedom),
        "pooled": (np.broadcast_to(pooled, own.shape), np.full(own.shape, together)),
    }
    result = {}
    for name, (variance, df) in choices.items():
        error = np.sqrt(variance / values.shape[1])
        mean, half = np.abs(gaps.mean(1)), t_quantile(0.95, df) * error
        result[name] = mean < half, half, 2 * stats.t.sf(mean / error, df)
    return result


def sets(values: np.ndarray) -> dict[str, np.ndarray]:
    """By rule: whether each scheme may be the best, (schemes, families)."""
    schemes, seeds = values.shape[:2]
    pairs = values[:, None] - values
    own = pairs.var(axis=2, ddof=1)
    pooled, together = pooled_variance(values)
    result = {"ours": worse_than_some(values) >= 0.05}
    for name, variance, df in (("each pair's own", own, seeds - 1), ("pooled", pooled, together)):
        with np.errstate(divide="ignore", invalid="ignore"):
            p = np.nan_to_num(stats.t.sf(pairs.mean(axis=2) / np.sqrt(variance / seeds), df), nan=1.0)
        result[name] = p.min(axis=1) * (schemes - 1) >= 0.05
    return result


def intervals() -> pd.DataFrame:
    """`seeds noise rule second half others others_half false`: a row per simulated number of seeds, noise and rule."""
    rows = []
    for seeds in (3, 4):
        for kind in ("equal", "second scatters threefold", "second has two groups"):
            random = np.random.default_rng(0)
            values = noise(kind, (SCHEMES, seeds, FAMILIES), random) + 10 * random.normal(size=(seeds, FAMILIES))
            for rule, (holds, half, p) in rules(values).items():
                false = np.mean([(holm(family) < 0.05).any() for family in p.T])
                means = holds[0].mean(), half[0].mean(), holds[1:].mean(), half[1:].mean()
                rows.append((seeds, kind, rule, *means, false))
    return pd.DataFrame(rows, columns=["seeds", "noise", "rule", "second", "half", "others", "others_half", "false"])


def set_sizes() -> pd.DataFrame:
    """`schemes noise rule held size`: how often a set keeps the scheme that it loses most often, and its mean size."""
    rows = []
    for schemes in (4, 8, 15):
        spread = np.linspace(0.0, 6.0, schemes)[:, None, None]
        for kind in ("equal", "second scatters threefold", "half scatter threefold", "second has two groups"):
            values = noise(kind, (schemes, 3, FAMILIES_OF_SETS), np.random.default_rng(0))
            apart = sets(values + spread)
            for rule, held in sets(values).items():
                rows.append((schemes, kind, rule, held.mean(axis=1).min(), apart[rule].sum(axis=0).mean()))
    return pd.DataFrame(rows, columns=["schemes", "noise", "rule", "held", "size"])


def texts() -> dict[str, str]:
    """Every number of the page by the name that marks it."""
    made, kept = intervals(), set_sizes()
    ours, pooled = (made[made["rule"] == rule].set_index(["noise", "seeds"]) for rule in ("ours", "pooled"))
    own, together = (kept[kept["rule"] == rule].set_index(["noise", "schemes"]) for rule in ("ours", "pooled"))
    longer = (ours["half"] / pooled["half"])["equal"]
    alike, grouped = ours.loc["equal", ["second", "others"]].stack(), ours.loc["second has two groups", "second"]
    kept_grouped = own.loc["second has two groups", "held"]
    return {
        "table_of_intervals": table(
            ("seeds", "noise", "rule", "second scheme", "its half-width", "others", "their half-width", "false family"),
            (
                (*place, f"{second:.1%}", f"{half:.2f}", f"{others:.1%}", f"{others_half:.2f}", f"{false:.1%}")
                for *place, second, half, others, others_half, false in made.itertuples(index=False)
            ),
        ),
        "table_of_sets": table(
            ("schemes", "noise", "rule", "least often held", "schemes in the set"),
            ((*place, f"{held:.1%}", f"{size:.1f}") for *place, held, size in kept.itertuples(index=False)),
        ),
        "pooled_holds": f"{pooled.loc['second scatters threefold', 'second'].min():.0%}",
        "alike_hold": f"{alike.min():.0%} to {alike.max():.0%}",
        "longer": f"{longer.min():.1f} to {longer.max():.1f}",
        "grouped_hold": f"{grouped.min():.0%} to {grouped.max():.0%}",
        "set_of_fifteen": f"{own.loc[('equal', 15), 'size']:.0f}",
        "set_grouped_4": f"{kept_grouped[4]:.1%}",
        "set_grouped_8": f"{kept_grouped[8]:.1%}",
        "pooled_loses": f"{1 - together['held'].min():.0%}",
    }


def main() -> None:
    page = Path(__file__).parent / "statistics.md"
    page.write_text(filled(page.read_text(encoding="utf-8"), texts(), page.name), encoding="utf-8")


if __name__ == "__main__":
    main()
