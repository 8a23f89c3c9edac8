"""Different, equivalent, undecided: intervals and p-values that keep what they promise, against scipy and by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from figures_helpers import table
from scipy import stats

from normlab.analysis.compare import compare
from normlab.analysis.selection import mean_of
from normlab.analysis.verdicts import (
    DIFFERENT,
    EQUIVALENT,
    UNDECIDED,
    differences,
    fisher,
    holm,
    in_words,
    judged,
    lower_quartile,
    means,
    pair_variances,
    variance_over_seeds,
    worse_than_some,
)
from normlab.errors import NormlabError


def layout(values: np.ndarray, depth: int = 4) -> pd.DataFrame:
    """One row per run from (schemes, seeds). Schemes are called s0, s1, ...; NaN is a run that is not there."""
    schemes, seeds = np.indices(values.shape)
    names = [f"s{number}" for number in schemes.ravel()]
    rows = pd.DataFrame({"depth": depth, "scheme": names, "seed": seeds.ravel(), "value": values.ravel()})
    return rows[rows["value"].notna()]


def test_two_schemes_alone_give_scipys_paired_t_test():
    values = np.random.default_rng(0).normal(size=(2, 5))
    found = judged(differences(layout(values), "s0", "s1", "loss")).iloc[0]
    expected = stats.ttest_rel(values[0], values[1])
    low, high = expected.confidence_interval(0.95)
    assert (found["low"], found["high"], found["p"]) == pytest.approx((low, high, expected.pvalue))
    assert found["df"] == 4 and found["seeds"] == 5 and found["p_holm"] == found["p"]


def own_variance(values: np.ndarray, a: int, b: int) -> float:
    return float(np.nanvar(values[a] - values[b], ddof=1))


def test_a_pairs_variance_is_its_own_and_no_less_than_the_lower_quartile_of_all_pairs():
    random = np.random.default_rng(6)
    values = random.normal(size=(6, 4)) * np.array([1, 1, 1, 1, 30, 30])[:, None] + 5 * random.normal(size=4)
    values[1] = values[0] + 1e-3 * random.normal(size=4)  # agree by luck
    floor = sorted(own_variance(values, a, b) for a in range(6) for b in range(a))[15 // 4]
    for other in range(1, 6):
        row = differences(layout(values), f"s{other}", "s0", "loss").iloc[0]
        half = stats.t.ppf(0.975, 3) * math.sqrt(max(floor, own_variance(values, 0, other)) / 4)
        mean = (values[other] - values[0]).mean()
        assert row["df"] == 3 and (row["low"], row["high"]) == pytest.approx((mean - half, mean + half))
    assert own_variance(values, 0, 1) < 1e-5 < floor < own_variance(values, 0, 5)


def test_a_missing_run_costs_its_seed_and_nothing_else():
    values = np.random.default_rng(1).normal(size=(2, 4))
    values[0, 0] = np.nan
    row = differences(layout(values), "s0", "s1", "loss").iloc[0]
    expected = stats.ttest_rel(values[0, 1:], values[1, 1:])
    assert (row["seeds"], row["df"], row["unpaired"]) == (3, 2, 1) and row["p"] == pytest.approx(expected.pvalue)
    lone = differences(layout(values[:, :2]), "s0", "s1", "loss").iloc[0]
    assert lone["seeds"] == 1 and np.isnan(lone["low"]) and np.isnan(lone["p"])


def test_the_floor_counts_pairs_with_a_spread_only():
    variances, freedom = np.array([np.nan, 4.0, 1.0, 2.0, 3.0]), np.array([0, 2, 2, 2, 2])
    assert lower_quartile(variances, freedom) == 2.0
    assert lower_quartile(variances[:1], freedom[:1]) == 0.0 == lower_quartile(variances[:0], freedom[:0])
    several = np.stack([variances, 10 * variances], axis=1)
    assert lower_quartile(several, np.stack([freedom, freedom], axis=1)).tolist() == [2.0, 20.0]


def test_a_schemes_own_mean_has_the_same_rule():
    values = np.random.default_rng(7).normal(2.0, 1.0, size=(5, 4)) * np.array([1e-3, 1, 1, 1, 1])[:, None]
    rows = means(layout(values), "loss").set_index("a")
    floor = sorted(values.var(axis=1, ddof=1))[1]
    for scheme in range(5):
        half = stats.t.ppf(0.975, 3) * math.sqrt(max(values[scheme].var(ddof=1), floor) / 4)
        assert rows.loc[f"s{scheme}", "high"] == pytest.approx(values[scheme].mean() + half)
    sizes = means(layout(np.exp(values)), "rms").set_index("a")
    assert sizes["estimate"].to_numpy() == pytest.approx(np.exp(rows["estimate"])) and (sizes["kind"] == "ratio").all()


def test_two_runs_of_one_seed_are_no_two_seeds():
    twice = pd.concat([layout(np.array([[1.0, 1.2], [2.0, 2.1]]))] * 2)
    for compared in (lambda: means(twice, "loss"), lambda: differences(twice, "s0", "s1", "loss")):
        with pytest.raises(NormlabError, match="Several runs of s0 at depth 4, seed 0"):
            compared()


def families_of(spreads: list[float], seeds: int = 3, families: int = 4000) -> tuple[np.ndarray, ...]:
    """Equal schemes, each with its own spread over seeds, and seeds that move all by far more.

    Returns the values, and of each scheme against the first whether the interval holds zero, and the p-value.
    """
    random = np.random.default_rng(2)
    noise = random.normal(size=(len(spreads), seeds, families)) * np.array(spreads)[:, None, None]
    values = noise + 10 * max(spreads) * random.normal(size=(seeds, families))
    gaps = (values - values[0])[1:]
    own, freedom = variance_over_seeds(gaps)
    error = np.sqrt(np.maximum(own, lower_quartile(*pair_variances(values))) / seeds)
    size = np.abs(gaps.mean(axis=1))
    return values, size < stats.t.ppf(0.975, freedom) * error, 2 * stats.t.sf(size / error, freedom)


@pytest.mark.parametrize("seeds", [3, 4])
@pytest.mark.parametrize("spreads", [[1.0] * 8, [1.0, 3.0, *[1.0] * 6], [20.0, 1.0, 1.0, 1.0, 4.0, 20.0]])
def test_intervals_hold_the_truth_and_families_a_false_difference_as_they_say(spreads, seeds):
    values, covered, p = families_of(spreads, seeds)
    for family in range(2):  # what a table has is what was counted
        rows = layout(values[..., family])
        found = pd.concat([differences(rows, f"s{number}", "s0", "loss") for number in range(1, len(spreads))])
        assert found["p"].tolist() == pytest.approx(p[:, family].tolist())
        assert ((found["low"] < 0) & (found["high"] > 0)).tolist() == covered[:, family].tolist()
    assert (covered.mean(axis=1) > 0.95 - 3 * math.sqrt(0.95 * 0.05 / 4000)).all()
    assert np.mean([(holm(own) < 0.05).any() for own in p.T]) < 0.05


def test_of_two_schemes_the_worse_one_has_the_paired_t_tests_p():
    values = np.random.default_rng(0).normal(size=(2, 4)) + np.array([[0.3], [0.0]])
    lower, higher = stats.ttest_rel(*values, alternative="less"), stats.ttest_rel(*values, alternative="greater")
    assert worse_than_some(values) == pytest.approx([higher.pvalue, lower.pvalue])


def test_seeds_that_agree_to_the_last_bit_are_no_obstacle():
    assert worse_than_some(np.array([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]])).tolist() == [1.0, 1.0, 0.0]


def test_a_scheme_that_scatters_takes_no_other_out_of_the_set():
    """Among fifteen of three seeds, the best stays in as often as it says, and one that is clearly worse goes."""
    random = np.random.default_rng(1)
    values = random.normal(size=(15, 3, 2000)) + 10 * random.normal(size=(3, 2000))
    values[1] += random.normal(size=(3, 2000)) * 3
    values[2] += 12
    inside = (worse_than_some(values) >= 0.05).mean(axis=1)
    assert inside[0] > 0.95 and inside[3:].min() > 0.95 and inside[2] < 0.5


def test_a_missing_run_leaves_the_seeds_effect_out_of_the_differences():
    """Schemes and seeds add up; the scheme that lacks the bad seed is no better for it."""
    values = np.array([[0.0], [0.1], [0.2], [0.3]]) + np.array([0.0, 0.5, 4.0])
    values += np.random.default_rng(2).normal(scale=0.01, size=values.shape)
    values[3, 2] = np.nan
    rows, columns = np.nonzero(np.isfinite(values))
    design = np.hstack([rows[:, None] == np.arange(4), columns[:, None] == np.arange(1, 3)]).astype(float)
    solution, *_ = np.linalg.lstsq(design, values[rows, columns])
    rest = np.square(values[rows, columns] - design @ solution)
    count = np.array([3, 3, 3, 2])
    freedom = (count - 1) * 3 / 4
    squares = np.bincount(rows, rest) / freedom / count

    def p_value(i: int, j: int) -> float:
        own = squares[[i, j]]
        return stats.t.sf(
            (solution[i] - solution[j]) / own.sum() ** 0.5, own.sum() ** 2 / (own**2 / freedom[[i, j]]).sum()
        )

    expected = [min(1.0, 3 * min(p_value(i, j) for j in range(4) if j != i)) for i in range(4)]
    assert worse_than_some(values) == pytest.approx(expected) and expected[3] < 0.05


def test_counts_are_compared_by_fishers_exact_test():
    assert fisher(6, 6, 1, 6) == pytest.approx(2 * 6 / 792)  # both tails of 12 choose 6
    assert fisher(6, 6, 6, 6) == 1.0


def test_holm_multiplies_the_smallest_by_the_number_and_never_falls():
    assert holm(np.array([0.01, 0.04, 0.03, np.nan])) == pytest.approx([0.03, 0.06, 0.06, np.nan], nan_ok=True)
    assert holm(np.array([0.6, 0.5])) == pytest.approx([1.0, 1.0]) and len(holm(np.array([]))) == 0
    assert holm(np.array([0.01, 0.02, np.nan]), family=4) == pytest.approx([0.04, 0.06, np.nan], nan_ok=True)
    assert holm(np.array([0.01, 0.02]), family=1) == pytest.approx([0.02, 0.02]), "no family is smaller than its rows"


def rows_of(*intervals: tuple[float, float], metric: str = "loss", p: float = 0.5) -> pd.DataFrame:
    kind = "ratio" if metric != "loss" else "difference"
    return pd.DataFrame(
        {"a": "lns", "b": "bhyt", "metric": metric, "kind": kind, "seeds": 3, "low": low, "high": high, "p": p}
        for low, high in intervals
    ).assign(estimate=lambda found: found[["low", "high"]].mean(axis=1))


def test_the_three_words():
    found = judged(rows_of((-0.01, 0.015), (-0.01, 0.03)))
    assert found["verdict"].tolist() == [EQUIVALENT, UNDECIDED]
    assert [in_words(row) for row in found.itertuples()] == ["equivalent: within ±0.02", "undecided"]
    sizes = judged(rows_of((0.92, 1.08), (0.90, 1.05), metric="rms"))
    assert sizes["verdict"].tolist() == [EQUIVALENT, UNDECIDED]  # 1/1.1 is 0.909: b over a has the same verdict
    assert in_words(next(sizes.itertuples())) == "equivalent: within ±10%"
    low = judged(rows_of((-0.4, -0.1), p=0.01))
    assert low["verdict"].tolist() == [DIFFERENT] and in_words(next(low.itertuples())) == "different: lns is lower"
    assert in_words(next(low.drop(columns="b").itertuples())) == "below 0"  # of a scheme's own mean
    slight = judged(rows_of((0.95, 0.98), p=0.01, metric="rms"))
    assert in_words(next(slight.itertuples())) == "different: lns is lower, within ±10%"
    family = judged(rows_of(*[(-0.4, -0.1)] * 6, p=0.01))
    assert set(family["verdict"]) == {UNDECIDED}  # each excludes zero by itself; six together do not


def test_what_has_no_margin_is_never_equivalent():
    same = table(depths=(4,)).replace({"metric": {"token_l2_mean": "update_cosine"}, "site": {"block_out": "block"}})
    same["value"] = same["value"].mask(same["metric"].eq("update_cosine"), 0.5)
    found = compare(same, "bhyt", "lns", "update_cosine").iloc[0]
    assert found["estimate"] == 0 and found["verdict"] == UNDECIDED and np.isnan(found["margin"])


def losses_moved(noise: dict[tuple[str, int], float]) -> pd.DataFrame:
    """Runs whose losses differ from the formula's by so much, by scheme and seed."""
    runs = table(depths=(4,))
    loss = runs["metric"].eq("loss") & runs["split"].eq("eval")
    for (scheme, seed), extra in noise.items():
        runs.loc[loss & runs["scheme"].eq(scheme) & runs["seed"].eq(seed), "value"] += extra
    return runs


def test_a_pair_that_agrees_by_luck_among_schemes_that_do_not_is_no_difference():
    noise = {("bhyt", 0): 0.3, ("bhyt", 1): -0.36, ("bhyt_linear", 2): 0.24, ("rmsnorm_gain", 1): 0.42}
    runs = losses_moved(noise | {("lns", 0): 0.03, ("lns", 1): -0.03})
    found = compare(runs, "lns", "pre_rmsnorm").iloc[0]
    assert found["estimate"] == pytest.approx(0.1) and found["df"] == 2 and found["verdict"] == UNDECIDED
    alone = runs[runs["scheme"].isin(["lns", "pre_rmsnorm"])]
    assert compare(alone, "lns", "pre_rmsnorm").iloc[0]["verdict"] == DIFFERENT


def test_means_of_sizes_are_geometric_so_that_their_quotient_is_the_ratio():
    found = compare(table(), "bhyt", "lns", "token_l2_mean", depth=4).iloc[0]
    assert found["estimate"] == pytest.approx(found["mean_a"] / found["mean_b"])
    sizes = pd.Series([1.0, 100.0])
    assert mean_of(sizes, "rms") == pytest.approx(10.0) and mean_of(sizes, "loss") == pytest.approx(50.5)
