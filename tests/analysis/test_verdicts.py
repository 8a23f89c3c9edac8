"""Different, equivalent, undecided: intervals and p-values that keep what they promise, against scipy and by hand."""

import numpy as np
import pandas as pd
import pytest
from figures_helpers import one_run, table
from scipy import stats

from normlab.analysis.claims import extremes
from normlab.analysis.compare import compare
from normlab.analysis.profiles import Profiles, View
from normlab.analysis.quantities import last_values, mean_of
from normlab.analysis.selection import choose
from normlab.analysis.verdicts import (
    DIFFERENT,
    EQUIVALENT,
    UNDECIDED,
    differences,
    holm,
    in_words,
    judged,
    means,
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


def test_a_missing_run_costs_its_seed_and_nothing_else():
    values = np.random.default_rng(1).normal(size=(2, 4))
    values[0, 0] = np.nan
    row = differences(layout(values), "s0", "s1", "loss").iloc[0]
    expected = stats.ttest_rel(values[0, 1:], values[1, 1:])
    assert (row["seeds"], row["df"], row["unpaired"]) == (3, 2, 1) and row["p"] == pytest.approx(expected.pvalue)
    lone = differences(layout(values[:, :2]), "s0", "s1", "loss").iloc[0]
    assert lone["seeds"] == 1 and np.isnan(lone["low"]) and np.isnan(lone["p"])


def test_a_schemes_own_mean_has_students_interval():
    values = np.random.default_rng(7).normal(2.0, 1.0, size=(5, 4))
    rows = means(layout(values), "loss").set_index("a")
    for scheme in range(5):
        low, high = stats.ttest_1samp(values[scheme], 0.0).confidence_interval(0.95)
        assert (rows.loc[f"s{scheme}", "low"], rows.loc[f"s{scheme}", "high"]) == pytest.approx((low, high))
    sizes = means(layout(np.exp(values)), "rms").set_index("a")
    assert sizes["estimate"].to_numpy() == pytest.approx(np.exp(rows["estimate"])) and (sizes["kind"] == "ratio").all()


def test_two_runs_of_one_seed_are_no_two_seeds():
    twice = pd.concat([layout(np.array([[1.0, 1.2], [2.0, 2.1]]))] * 2)
    for compared in (lambda: means(twice, "loss"), lambda: differences(twice, "s0", "s1", "loss")):
        with pytest.raises(NormlabError, match="Several runs of s0 at depth 4, seed 0"):
            compared()


def test_holm_multiplies_the_smallest_by_the_number_and_never_falls():
    assert holm(np.array([0.01, 0.04, 0.03, np.nan])) == pytest.approx([0.03, 0.06, 0.06, np.nan], nan_ok=True)
    assert holm(np.array([0.6, 0.5])) == pytest.approx([1.0, 1.0]) and len(holm(np.array([]))) == 0


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


def test_a_pair_s_interval_does_not_depend_on_the_other_schemes_in_the_table():
    noise = {("bhyt", 0): 0.3, ("bhyt", 1): -0.36, ("bhyt_linear", 2): 0.24, ("rmsnorm_gain", 1): 0.42}
    runs = losses_moved(noise | {("lns", 0): 0.03, ("lns", 1): -0.03})
    alone = runs[runs["scheme"].isin(["lns", "pre_rmsnorm"])]
    among, own = (compare(table, "lns", "pre_rmsnorm").iloc[0] for table in (runs, alone))
    assert own["estimate"] == pytest.approx(0.1) and own["df"] == 2 and own["verdict"] == DIFFERENT
    assert among[["estimate", "low", "high", "p"]].tolist() == own[["estimate", "low", "high", "p"]].tolist()


def test_means_of_sizes_are_geometric_so_that_their_quotient_is_the_ratio():
    found = compare(table(), "bhyt", "lns", "token_l2_mean", depth=4).iloc[0]
    assert found["estimate"] == pytest.approx(found["mean_a"] / found["mean_b"])
    sizes = pd.Series([1.0, 100.0])
    assert mean_of(sizes, "rms") == pytest.approx(10.0) and mean_of(sizes, "loss") == pytest.approx(50.5)


def test_a_seed_whose_size_is_zero_does_not_count_beside_others():
    runs = pd.concat([one_run("lns", seed=seed) for seed in range(3)])
    is_size = runs["metric"].isin(["grad_l2_total", "token_l2_mean"])
    runs["value"] = runs["value"].mask(is_size, runs["seed"].map({0: 0.0, 1: 2.0, 2: 8.0}))
    last = last_values(choose(runs), "grad_l2_total", site="block_in_grad")
    assert mean_of(last["value"], "grad_l2_total") == pytest.approx(4.0)
    assert means(last, "grad_l2_total")[["estimate", "seeds"]].iloc[0].tolist() == pytest.approx([4.0, 2])
    view = View("grad_l2_total", "block_in_grad", "all", 4, 20, ("lns",))
    (line,) = Profiles(runs).lines(view)
    assert line.values.tolist() == pytest.approx([4.0] * 4) and set(line.low) == {0.0} and set(line.high) == {8.0}
    assert "LNS 4" in extremes(pd.concat([runs, one_run("bhyt")])).iloc[-1].to_string()
    (alone,) = Profiles(runs.query("seed == 0")).lines(view)
    assert mean_of(last["value"][:1], "grad_l2_total") == 0.0 and set(alone.values) == {0.0}, "of zeros alone"
    missing = pd.Series([np.nan, 3.0])
    assert mean_of(missing, "loss") == 3.0 and np.isnan(mean_of(missing[:1], "grad_l2_total"))
