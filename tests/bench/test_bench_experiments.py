"""The loops that the experiments are timed against."""

import argparse

import pytest

from benchmarks import experiments

TINY = argparse.Namespace(width=64, depth=3, batches=2, rows=3, length=16, vocabulary=64, threads=1, rounds=1)


@pytest.mark.slow
def test_experiments_are_timed_against_loops_that_compute_the_same_and_no_others(monkeypatch):
    table = experiments.bench(TINY)
    assert list(table["experiment"]) == list(experiments.sides(TINY))
    assert (table[["cpu_ratio", "wall_ratio"]] > 0).all(axis=None)
    monkeypatch.setattr(experiments, "without", lambda part, layer, h, handed: 1.1 * h)
    with pytest.raises(experiments.NormlabError, match="skip_sensitivity, blocks and the loop beside it"):
        experiments.bench(TINY)
