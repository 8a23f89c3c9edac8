"""Simulate how often the intervals and sets of `normlab.analysis.verdicts` hold the truth, as two Markdown tables.

    python docs/coverage.py

Intervals: each family has eight schemes of equal means. Seven are compared with the first. Seeds move all schemes
together by ten times the noise. The noise is normal with a standard deviation of 1. The second scheme may differ: it
scatters threefold, or one run in five is worse by ten.

Sets: 4, 8 or 15 schemes of equal means, of which each must stay in the set of the best. The set's size is that of means
which are spread evenly over six standard deviations of the noise.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

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
    """By rule: whether each scheme is not told from the best, (schemes, families)."""
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


def table_of_sets() -> None:
    head = ("schemes", "noise", "rule", "least often held", "schemes in the set")
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for schemes in (4, 8, 15):
        spread = np.linspace(0.0, 6.0, schemes)[:, None, None]
        for kind in ("equal", "second scatters threefold", "half scatter threefold", "second has two groups"):
            values = noise(kind, (schemes, 3, FAMILIES_OF_SETS), np.random.default_rng(0))
            apart = sets(values + spread)
            for rule, held in sets(values).items():
                size = apart[rule].sum(axis=0).mean()
                print(f"| {schemes} | {kind} | {rule} | {held.mean(axis=1).min():.1%} | {size:.1f} |")


def main() -> None:
    head = ("seeds", "noise", "rule", "second scheme", "its half-width", "others", "their half-width", "false family")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for seeds in (3, 4):
        for kind in ("equal", "second scatters threefold", "second has two groups"):
            random = np.random.default_rng(0)
            values = noise(kind, (SCHEMES, seeds, FAMILIES), random) + 10 * random.normal(size=(seeds, FAMILIES))
            for rule, (holds, half, p) in rules(values).items():
                false = np.mean([(holm(family) < 0.05).any() for family in p.T])
                cells = [f"{holds[0].mean():.1%}", f"{half[0].mean():.2f}"]
                cells += [f"{holds[1:].mean():.1%}", f"{half[1:].mean():.2f}", f"{false:.1%}"]
                print("| " + " | ".join([str(seeds), kind, rule, *cells]) + " |")
    table_of_sets()


if __name__ == "__main__":
    main()
