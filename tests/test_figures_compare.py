"""Comparisons between schemes: paired by seed, with intervals that are right, and no claim where there is none."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from figures_helpers import empty, one_run, table

from normlab.compare import NO_DIFFERENCE, NONE, ONE_SEED, compare, interval, t_quantile
from normlab.errors import NormlabError
from normlab.selection import choose, summarize

# Student's t, two-sided, from printed tables.
PRINTED = {(0.95, 1): 12.706, (0.95, 2): 4.303, (0.95, 3): 3.182, (0.95, 4): 2.776, (0.95, 9): 2.262, (0.95, 30): 2.042}
PRINTED |= {(0.99, 1): 63.657, (0.99, 2): 9.925, (0.99, 5): 4.032, (0.90, 7): 1.895, (0.50, 3): 0.765}


@pytest.mark.parametrize(("level", "freedom"), PRINTED)
def test_the_t_quantile_is_the_one_in_printed_tables(level: float, freedom: int):
    assert t_quantile(level, freedom) == pytest.approx(PRINTED[level, freedom], abs=6e-4)


def test_an_interval_covers_the_mean_as_often_as_it_says():
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        _, low, high = interval(random.normal(1.0, 3.0, size=3), 0.9)
        covered += low <= 1.0 <= high
    assert 0.88 < covered / 2000 < 0.92


def test_pairing_by_seed_sees_a_difference_that_the_spread_of_seeds_hides():
    found = compare(table(), "lns", "pre_rmsnorm").iloc[-1]
    # Seeds move both by 0.3, the schemes differ by 0.1 exactly.
    assert found["estimate"] == pytest.approx(0.1)
    assert found["low"] == pytest.approx(0.1, abs=1e-6) and found["verdict"] == "a is higher"
    assert found["seeds"] == 3 and found["kind"] == "difference"


def test_an_interval_that_holds_zero_is_called_no_difference():
    runs = table(schemes=("pre_rmsnorm", "lns"), depths=(4,))
    noise = {0: 0.3, 1: -0.25, 2: 0.0}
    mine = (runs["scheme"] == "lns") & (runs["metric"] == "loss") & (runs["split"] == "eval")
    runs.loc[mine, "value"] = runs.loc[mine, "value"] - 0.1 + runs.loc[mine, "seed"].map(noise)
    found = compare(runs, "lns", "pre_rmsnorm").iloc[0]
    assert found["low"] < 0 < found["high"] and found["verdict"] == NO_DIFFERENCE


def test_a_metric_that_spans_decades_is_compared_as_a_ratio_at_the_last_layer():
    found = compare(table(), "bhyt", "pre_rmsnorm", "token_l2_mean", depth=4).iloc[0]
    assert found["kind"] == "ratio"
    assert found["estimate"] == pytest.approx((1 + 0.1 * 4 * 3) / (1 + 4 * 3))
    before = compare(table(), "bhyt", "pre_rmsnorm", "token_l2_mean", depth=4, step=0).iloc[0]
    assert before["estimate"] == pytest.approx((1 + 0.1 * 4) / (1 + 4))


def test_one_seed_gives_no_interval_and_says_so():
    found = compare(table(seeds=(0,)), "lns", "pre_rmsnorm").iloc[0]
    assert math.isnan(found["low"]) and found["verdict"] == ONE_SEED


def test_a_diverged_seed_is_counted_out_loud_and_never_compared():
    runs = pd.concat([one_run("pre_rmsnorm", seed=0), one_run("lns", seed=0, status="diverged")], ignore_index=True)
    found = compare(runs, "lns", "pre_rmsnorm").iloc[0]
    assert found["seeds"] == 0 and found["unpaired"] == 1 and found["verdict"] == NONE


def test_what_cannot_be_compared_is_one_sentence():
    with pytest.raises(NormlabError, match="no run of 'dyt' in the table"):
        compare(table(), "dyt", "bhyt")
    with pytest.raises(NormlabError, match="between 0 and 1"):
        compare(table(), "lns", "bhyt", level=95)
    with pytest.raises(NormlabError, match="no run"):
        compare(empty(), "lns", "bhyt")


def test_the_learning_rate_is_the_one_with_most_seeds_then_the_lowest_loss():
    searched = [one_run("bhyt", lr=lr, seed=0) for lr in (1e-3, 3e-3)]
    lower = searched[1]["metric"] == "loss"
    searched[1].loc[lower, "value"] -= 1.0
    chosen = choose(pd.concat(searched, ignore_index=True))
    assert not isinstance(chosen, str) and set(chosen.runs["lr"]) == {3e-3}
    more = choose(pd.concat([*searched, one_run("bhyt", lr=1e-3, seed=1)], ignore_index=True))
    assert not isinstance(more, str) and set(more.runs["lr"]) == {1e-3}


def test_a_diverged_learning_rate_is_chosen_only_when_there_is_no_other():
    runs = pd.concat([one_run("bhyt", lr=1e-2, status="diverged"), one_run("bhyt", lr=1e-3)], ignore_index=True)
    chosen = choose(runs)
    assert not isinstance(chosen, str) and set(chosen.runs["lr"]) == {1e-3}


def test_controls_come_along_whatever_schemes_are_asked_for():
    chosen = choose(table(), schemes=["bhyt"])
    assert not isinstance(chosen, str) and set(chosen.schemes) == {"bhyt", "bhyt_linear", "rmsnorm_gain"}


def test_a_summary_has_a_row_a_run_with_its_last_losses():
    about = summarize(table(schemes=("lns",), depths=(4,), seeds=(0, 1)))
    assert len(about) == 2 and about["eval_loss"].tolist() == pytest.approx([4.1, 4.4])
    assert about["unigram_entropy"].tolist() == [6.0, 6.0] and about["steps"].tolist() == [20, 20]
    with pytest.raises(NormlabError, match="lacks the columns"):
        summarize(about)
