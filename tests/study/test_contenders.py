"""The contenders' table and figure: rates chosen on the validation half, pairs by seed with their own t, no rank of one
seed."""

import numpy as np
import pandas as pd
import pytest
from figures_helpers import one_run
from scipy import stats

from normlab.analysis.selection import choose, summarize
from normlab.errors import NormlabError
from normlab.figures import loss_by_rate
from normlab.study import contenders as module
from normlab.study.contenders import by_rate, contenders

LOSSES = {  # scheme -> rate -> (test, validation), by seed 0
    "pre_rmsnorm": {2e-3: (3.10, 3.00), 4e-3: (3.05, 2.95), 8e-3: (3.30, 3.20)},
    "lns": {2e-3: (3.20, 3.12), 4e-3: (3.07, 2.93), 8e-3: (3.04, 2.94)},
    "dyt": {2e-3: (6.50, 6.50), 4e-3: (6.60, 6.60), 8e-3: (6.40, 6.40)},
}
SHIFTS = {"pre_rmsnorm": [0.0, 0.01, 0.02, 0.03], "lns": [0.0, 0.02, 0.01, 0.05]}  # of seeds, at the best rates


def run(scheme, lr, seed, test, validation):
    table = one_run(scheme, 8, seed, lr)
    end = (table["site"] == "model") & (table["split"] == "eval") & (table["metric"] == "loss")
    table.loc[end & (table["step"] == 20), "value"] = test
    last = table[end & (table["step"] == 20)]
    others = [last.assign(metric="validation_loss", value=validation), last.assign(metric="trigram_loss", value=3.7)]
    return pd.concat([table, *others, last.assign(metric="bigram_loss", value=4.4)], ignore_index=True)


@pytest.fixture(scope="module")
def runs():
    tables = []
    for scheme, rates in LOSSES.items():
        for lr, (test, validation) in rates.items():
            is_best = lr == 4e-3 and scheme in SHIFTS
            for seed, shift in enumerate(SHIFTS[scheme] if is_best else [0.0]):
                tables.append(run(scheme, lr, seed, test + shift, validation + shift))
    return pd.concat(tables, ignore_index=True)


@pytest.fixture(autouse=True)
def costs(monkeypatch):
    """These runs have no experiments on disk."""
    values = module.values_of

    def values_of(chosen, name):
        return chosen.runs.reset_index().assign(value=0.1) if name == "deep_cost" else values(chosen, name)

    monkeypatch.setattr(module, "values_of", values_of)


def test_rates_are_chosen_on_the_validation_half_and_reported_on_the_test_half(runs):
    about = summarize(choose(runs, depth=8).table)
    assert about.groupby("scheme")["lr"].first().to_dict() == {"dyt": 8e-3, "lns": 4e-3, "pre_rmsnorm": 4e-3}
    one_seed = runs[runs["seed"] == 0]
    assert summarize(choose(one_seed, depth=8).table).groupby("scheme")["lr"].first()["lns"] == 4e-3  # not 8e-3
    table = contenders(one_seed).set_index("scheme")
    assert table.loc["lns", ["best", "loss"]].tolist() == [4e-3, 3.07] and not table.loc["lns", "at_edge"]
    assert table.loc["dyt", "at_edge"] and not table.loc["dyt", "learned"]


def test_a_pair_of_four_seeds_is_tested_by_its_own_t_and_others_are_not(runs):
    table = contenders(runs).set_index("scheme")
    gaps = np.array(SHIFTS["lns"]) - np.array(SHIFTS["pre_rmsnorm"]) + 3.07 - 3.05
    interval = stats.t.interval(0.95, 3, gaps.mean(), stats.sem(gaps))
    assert table.loc["lns", ["minus", "low", "high"]].tolist() == pytest.approx([gaps.mean(), *interval])
    assert table.loc["lns", "p_holm"] == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue)  # a family of one
    assert table.loc[["pre_rmsnorm", "dyt"], ["minus", "low", "p_holm"]].isna().all(axis=None)
    assert contenders(runs[runs["seed"] == 0])["minus"].isna().all()


def test_a_pair_with_a_diverged_seed_is_not_tested_and_its_loss_is_infinite(runs):
    lost = (runs["scheme"] == "lns") & (runs["lr"] == 4e-3) & (runs["seed"] == 3)
    runs = runs.assign(status=runs["status"].mask(lost, "diverged"))
    table = contenders(runs).set_index("scheme")
    assert table.loc["lns", "loss"] == np.inf and table.loc["lns", ["minus", "p_holm"]].isna().all()
    with pytest.raises(NormlabError, match="no run of 12 blocks in the table"):
        contenders(runs, 12)


def test_validation_losses_of_some_runs_alone_choose_no_rate(runs):
    some = (runs["metric"] != "validation_loss") | (runs["lr"] == 8e-3) | (runs["scheme"] != "lns")
    about = summarize(runs[some])
    own = about[about["scheme"] == "lns"]
    assert own["validation_loss"].tolist() == own["eval_loss"].tolist()


def test_runs_that_differ_in_something_else_are_not_drawn_as_one(runs):
    twins = runs[runs["lr"] == 2e-3].assign(run=lambda t: t["run"].astype(str) + "-twin")
    assert "keep those of one setting" in str(loss_by_rate(pd.concat([runs, twins])).layout.annotations)
    wider = runs.assign(width=32, run=runs["run"].astype(str) + "-wide", value=runs["value"] + 1)
    lines = {trace.name: trace.y for trace in loss_by_rate(pd.concat([runs, wider[wider["seed"] > 0]])).data}
    assert lines["LNS"][0] == 3.20


def test_every_rate_has_a_row_with_means_over_seeds(runs):
    rates = by_rate(runs, 8).set_index(["scheme", "lr"])
    assert rates["seeds"].to_dict()["lns", 4e-3] == 4 and len(rates) == 9
    assert rates.loc[("lns", 4e-3), "loss"] == pytest.approx(3.07 + np.mean(SHIFTS["lns"]))
    assert rates["learned"].to_dict()["pre_rmsnorm", 8e-3] and not rates["learned"].to_dict()["dyt", 2e-3]
    wide = contenders(runs).set_index("scheme")
    assert wide.loc["pre_rmsnorm", ["loss_at_0.002", "loss_at_0.008"]].tolist() == [3.10, 3.30]


def test_the_figure_has_a_line_per_scheme_and_triangles_for_what_has_not_learned(runs):
    figure = loss_by_rate(runs)
    lines = {trace.name: trace for trace in figure.data if trace.mode == "lines"}
    assert list(lines["LNS"].x) == [2e-3, 4e-3, 8e-3] and lines["LNS"].y[0] == 3.20
    assert list(lines["DyT"].y) == [None] * 3
    triangles = [trace for trace in figure.data if trace.marker.symbol == "triangle-up"]
    assert sorted(trace.x[0] for trace in triangles) == [2e-3, 4e-3, 8e-3]
    assert all("6." in trace.hovertemplate for trace in triangles)
    assert "trigram 3.70" in figure.layout.title.subtitle.text
    empty = loss_by_rate(runs[runs["lr"] == 4e-3])
    assert "was trained at several learning rates" in str(empty.layout.annotations)


def test_runs_that_all_diverged_have_a_figure_that_says_so():
    runs = pd.concat([one_run("lns", 8, 0, lr, status="diverged") for lr in (1e-3, 2e-3)], ignore_index=True)
    runs = runs[runs["metric"] != "unigram_entropy"]
    assert "No run of 8 blocks ended with a finite loss." in str(loss_by_rate(runs).layout.annotations)
