"""Different, equivalent, undecided: intervals and p-values that keep what they promise, against scipy and by hand."""

from __future__ import annotations

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
    expected_half_width,
    holm,
    in_words,
    judged,
    lower_quartile,
    pair_variance,
    residual_variance,
    unlike,
)
from normlab.errors import NormlabError


def layout(values: np.ndarray, depth: int = 4) -> pd.DataFrame:
    """(schemes, seeds) as a row a run; schemes are called s0, s1, ...; NaN is a run that is not there."""
    schemes, seeds = np.indices(values.shape)
    names = [f"s{number}" for number in schemes.ravel()]
    rows = pd.DataFrame({"depth": depth, "scheme": names, "seed": seeds.ravel(), "value": values.ravel()})
    return rows[rows["value"].notna()]


def swept_residuals(values: np.ndarray) -> np.ndarray:
    """Least-squares residuals of a two-way layout with holes: row and column means taken out in turn till none is
    left."""
    rest = values.copy()
    for _ in range(500):
        for axis in (1, 0):
            rest = rest - np.nanmean(rest, axis=axis, keepdims=True)
    return rest


def test_two_schemes_alone_give_scipys_paired_t_test():
    values = np.random.default_rng(0).normal(size=(2, 5))
    found = judged(differences(layout(values), "s0", "s1", "loss")).iloc[0]
    expected = stats.ttest_rel(values[0], values[1])
    low, high = expected.confidence_interval(0.95)
    assert (found["low"], found["high"], found["p"]) == pytest.approx((low, high, expected.pvalue))
    assert found["df"] == 4 and found["seeds"] == 5 and found["p_holm"] == found["p"]


def test_the_variance_is_that_of_the_two_way_layout_by_hand():
    values = np.array([[1.0, 2.0, 4.0], [2.0, 2.0, 5.0], [0.0, 3.0, 3.0], [5.0, 7.0, 6.0]])
    error = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    by_hand = (error**2).sum() / (3 * 2)
    variance, freedom = residual_variance(values)
    assert (float(variance), int(freedom)) == (pytest.approx(by_hand), 6)
    found = differences(layout(values), "s3", "s0", "loss").iloc[0]
    half = stats.t.ppf(0.975, 6) * math.sqrt(by_hand * 2 / 3)
    assert (found["estimate"], found["low"], found["high"]) == pytest.approx((11 / 3, 11 / 3 - half, 11 / 3 + half))


def test_missing_runs_cost_degrees_of_freedom_and_nothing_else():
    values = np.random.default_rng(1).normal(size=(6, 4)) + np.arange(4)
    values[0, 0] = values[2, 3] = values[5, 1] = np.nan
    variance, freedom = residual_variance(values)
    assert int(freedom) == 24 - 3 - 6 - 4 + 1
    assert float(variance) == pytest.approx(np.nansum(swept_residuals(values) ** 2) / int(freedom))
    stacked = np.stack([values, 3 * values, np.where(np.arange(4) < 1, np.nan, values)], axis=-1)
    several, freedoms = residual_variance(stacked)
    assert several[:2] == pytest.approx([float(variance), 9 * float(variance)]) and freedoms[2] < freedoms[0]
    lone, none = residual_variance(values[:, 1:2])
    assert np.isnan(lone) and none == 0


def families_of(spreads: list[float], families: int = 4000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Equal schemes of three seeds, seeds moving each by its own spread, and all by far more: values, and of each
    against the first in each family whether the interval holds zero, and its p-value."""
    random = np.random.default_rng(2)
    noise = random.normal(size=(len(spreads), 3, families)) * np.array(spreads)[:, None, None]
    values = noise + 10 * max(spreads) * random.normal(size=(3, families))
    variance, freedom = pair_variance(values, 0)
    error = np.sqrt(variance * 2 / 3)[1:]
    gaps = np.abs((values[1:] - values[0]).mean(axis=1))
    return values, gaps < stats.t.ppf(0.975, freedom[1:]) * error, 2 * stats.t.sf(gaps / error, freedom[1:])


def share_of_false(p: np.ndarray) -> float:
    """Families in which at least one scheme is called different."""
    return float(np.mean([(holm(own) < 0.05).any() for own in p.T]))


def test_intervals_cover_and_families_hold_a_false_difference_as_seldom_as_they_say():
    """Twelve equal schemes of three seeds, eleven comparisons a family; blocks far larger than the error."""
    values, covered, p = families_of([1.0] * 12)
    for family in range(3):  # what the table has is what was counted
        rows = layout(values[..., family])
        found = pd.concat([differences(rows, f"s{number}", "s0", "loss") for number in range(1, 12)])
        assert found["p"].tolist() == pytest.approx(p[:, family].tolist())
        assert ((found["low"] < 0) & (found["high"] > 0)).tolist() == covered[:, family].tolist()
    share = share_of_false(p)
    assert covered.mean() == pytest.approx(0.95, abs=0.01) and 0.02 < share < 0.05 + 3 * math.sqrt(0.05 / 4000)


def test_schemes_that_seeds_move_far_more_neither_widen_the_others_intervals_nor_have_too_narrow_ones():
    _, covered, p = families_of([1.0, 1.0, 1.0, 4.0, 20.0, 20.0])
    assert covered[:3].mean() > 0.95 and covered[3:].mean() == pytest.approx(0.95, abs=0.025)
    assert share_of_false(p) < 0.05 + 3 * math.sqrt(0.05 / 4000)
    _, covered, p = families_of([20.0, 1.0, 1.0, 1.0, 4.0, 20.0])  # the reference is one of them
    assert covered.mean() == pytest.approx(0.95, abs=0.025) and share_of_false(p) < 0.05
    _, alike, _ = families_of([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert alike.mean() == pytest.approx(0.95, abs=0.015)


def test_variances_that_bartletts_test_tells_apart():
    random = np.random.default_rng(4)
    outcomes = []
    for spreads in ([1, 1, 1, 1], [1, 1, 3, 3], [1, 1, 10, 10], [1, 1, 30, 30]):
        values = random.normal(size=(4, 5)) * np.array(spreads)[:, None]
        outcomes.append(bool(unlike(values.var(axis=1, ddof=1), np.full(4, 4))))
        assert outcomes[-1] == (stats.bartlett(*values).pvalue < 0.05)
    assert set(outcomes) == {True, False}
    values[0, 1:] = np.nan  # a single value says nothing of a spread
    own, left = np.array([np.nan, *values[1:].var(axis=1, ddof=1)]), np.array([0, 4, 4, 4])
    assert unlike(own, left) and stats.bartlett(*values[1:]).pvalue < 0.05
    assert not unlike(own[:2], left[:2]) and lower_quartile(own[:1], left[:1]) == math.inf
    rounding = 1e-16 * np.array([1.0, 3.0, 900.0])  # seeds that move nothing move all alike
    assert unlike(rounding, np.full(3, 2)) and not unlike(rounding, np.full(3, 2), 1e-6)


def test_a_against_b_is_what_b_against_a_is():
    """Also where one of the two swings far more than all others, so that its differences from them look alike."""
    random = np.random.default_rng(5)
    for spreads, apart in (([1, 1, 1, 1, 20, 20], True), ([1, 1, 1, 1, 1, 1], False)):
        values = random.normal(size=(6, 3)) * np.array(spreads)[:, None] + 5 * random.normal(size=3)
        rows = layout(values)
        for a, b in ((0, 1), (0, 4), (5, 2), (4, 5)):
            there, back = (differences(rows, f"s{x}", f"s{y}", "loss").iloc[0] for x, y in ((a, b), (b, a)))
            assert (back["estimate"], back["low"], back["high"]) == pytest.approx(
                (-there["estimate"], -there["high"], -there["low"])
            )
            assert there["p"] == pytest.approx(back["p"]) and there["df"] == back["df"] == (2 if apart else 10)


def test_a_pairs_own_variance_and_the_least_that_it_is_taken_for():
    random = np.random.default_rng(6)
    values = random.normal(size=(6, 4)) * np.array([1, 1, 1, 1, 30, 30])[:, None]
    values[1] = values[0] + 1e-3 * random.normal(size=4)  # agree by luck
    variance, freedom = pair_variance(values, 0)
    own = [np.var(values[number] - values[0], ddof=1) / 2 for number in range(6)]
    of_one = [np.var(values[number] - values[1], ddof=1) / 2 for number in range(6)]
    floor = sorted(own[1:] + [of_one[0]] + of_one[2:])[10 // 4]
    assert freedom[1:].tolist() == [3] * 5 and own[1] < 1e-5
    assert variance[1] == pytest.approx(floor) and variance[4:] == pytest.approx(own[4:])


def test_holm_multiplies_the_smallest_by_the_number_and_never_falls():
    assert holm(np.array([0.01, 0.04, 0.03, np.nan])) == pytest.approx([0.03, 0.06, 0.06, np.nan], nan_ok=True)
    assert holm(np.array([0.6, 0.5])) == pytest.approx([1.0, 1.0]) and len(holm(np.array([]))) == 0


def rows_of(*intervals: tuple[float, float], metric: str = "loss", p: float = 0.5) -> pd.DataFrame:
    kind = "ratio" if metric != "loss" else "difference"
    return pd.DataFrame(
        {"a": "lns", "metric": metric, "kind": kind, "seeds": 3, "low": low, "high": high, "p": p}
        for low, high in intervals
    ).assign(estimate=lambda found: found[["low", "high"]].mean(axis=1))


def test_the_three_words():
    found = judged(rows_of((-0.01, 0.015), (-0.01, 0.03)))
    assert found["verdict"].tolist() == [EQUIVALENT, UNDECIDED]
    assert [in_words(row) for row in found.itertuples()] == ["equivalent: within ±0.02", "undecided"]
    assert judged(rows_of((-0.01, 0.03)), margin=0.05)["verdict"].tolist() == [EQUIVALENT]
    sizes = judged(rows_of((0.92, 1.08), (0.90, 1.05), metric="rms"))
    assert sizes["verdict"].tolist() == [EQUIVALENT, UNDECIDED]  # 1/1.1 is 0.909: b over a has the same verdict
    assert in_words(next(sizes.itertuples())) == "equivalent: within ±10%"
    low = judged(rows_of((-0.4, -0.1), p=0.01))
    assert low["verdict"].tolist() == [DIFFERENT] and in_words(next(low.itertuples())) == "different: lns is lower"
    slight = judged(rows_of((0.95, 0.98), p=0.01, metric="rms"))
    assert in_words(next(slight.itertuples())) == "different: lns is lower, within ±10%"
    family = judged(rows_of(*[(-0.4, -0.1)] * 6, p=0.01))
    assert set(family["verdict"]) == {UNDECIDED}  # each excludes zero by itself; six together do not
    with pytest.raises(NormlabError, match="margin is -1"):
        judged(rows_of((0, 1)), margin=-1)


def test_what_has_no_margin_is_never_equivalent():
    same = table(depths=(4,)).replace({"metric": {"token_l2_mean": "update_cosine"}, "site": {"block_out": "block"}})
    same["value"] = same["value"].mask(same["metric"].eq("update_cosine"), 0.5)
    found = compare(same, "bhyt", "lns", "update_cosine").iloc[0]
    assert found["estimate"] == 0 and found["verdict"] == UNDECIDED and np.isnan(found["margin"])
    assert compare(same, "bhyt", "lns", "update_cosine", margin=0.01).iloc[0]["verdict"] == EQUIVALENT


def losses_moved(noise: dict[tuple[str, int], float]) -> pd.DataFrame:
    """Runs whose losses differ from the formula's by so much, by scheme and seed."""
    runs = table(depths=(4,))
    loss = runs["metric"].eq("loss") & runs["split"].eq("eval")
    for (scheme, seed), extra in noise.items():
        runs.loc[loss & runs["scheme"].eq(scheme) & runs["seed"].eq(seed), "value"] += extra
    return runs


def test_a_comparison_uses_what_all_schemes_say_of_the_seeds():
    """A pair that agrees by luck, among schemes that seeds move apart by a lot, is no difference found."""
    noise = {("bhyt", 0): 0.3, ("bhyt", 1): -0.36, ("bhyt_linear", 2): 0.24, ("rmsnorm_gain", 1): 0.42}
    runs = losses_moved(noise | {("lns", 0): 0.03, ("lns", 1): -0.03})
    found = compare(runs, "lns", "pre_rmsnorm").iloc[0]
    assert found["estimate"] == pytest.approx(0.1) and found["df"] == 8 and found["verdict"] == UNDECIDED
    alone = runs[runs["scheme"].isin(["lns", "pre_rmsnorm"])]
    assert compare(alone, "lns", "pre_rmsnorm").iloc[0]["verdict"] == DIFFERENT


def test_beside_a_scheme_that_seeds_move_far_more_the_others_keep_their_spread_and_it_its_own():
    noise = {("lns", 0): 0.03, ("lns", 1): -0.03, ("bhyt_linear", 2): 0.03, ("rmsnorm_gain", 1): 0.02}
    runs = losses_moved(noise | {("bhyt", 0): 3.0, ("bhyt", 1): -3.6})
    quiet, wild = (compare(runs, name, "pre_rmsnorm").iloc[0] for name in ("lns", "bhyt"))
    assert quiet["df"] == wild["df"] == 2 and quiet["verdict"] == DIFFERENT and wild["verdict"] == UNDECIDED
    for name, found in (("lns", quiet), ("bhyt", wild)):  # as if they were alone
        pair = compare(runs[runs["scheme"].isin([name, "pre_rmsnorm"])], name, "pre_rmsnorm").iloc[0]
        assert found[["low", "high", "p"]].tolist() == pytest.approx(pair[["low", "high", "p"]].tolist())


def test_rows_shown_together_are_one_family():
    runs = table(depths=(2, 4, 8))
    found = compare(runs, "lns", "pre_rmsnorm")
    assert found["p_holm"].tolist() == pytest.approx(holm(found["p"].to_numpy()))
    assert len(compare(runs, "lns", "pre_rmsnorm", depth=4)) == 1


def test_means_of_sizes_are_geometric_so_that_their_quotient_is_the_ratio():
    found = compare(table(), "bhyt", "lns", "token_l2_mean", depth=4).iloc[0]
    assert found["estimate"] == pytest.approx(found["mean_a"] / found["mean_b"])
    sizes = pd.Series([1.0, 100.0])
    assert mean_of(sizes, "rms") == pytest.approx(10.0) and mean_of(sizes, "loss") == pytest.approx(50.5)


def test_the_expected_half_width_is_the_mean_of_what_is_then_found():
    random = np.random.default_rng(3)
    widths = []
    for _ in range(1500):
        variance, freedom = residual_variance(0.02 * random.normal(size=(4, 3)))
        widths.append(stats.t.ppf(0.975, freedom) * math.sqrt(float(variance) * 2 / 3))
    assert expected_half_width(0.02, seeds=3, schemes=4) == pytest.approx(np.mean(widths), rel=0.03)
    assert expected_half_width(0.01, 3, 12) < 0.02 < expected_half_width(0.01, 3, 2)
    assert expected_half_width(0.01, 3, 12, comparisons=11) > expected_half_width(0.01, 3, 12)
    with pytest.raises(NormlabError, match="no degree of freedom"):
        expected_half_width(0.02, seeds=1, schemes=12)
