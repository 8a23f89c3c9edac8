"""Two Ray workers against one: what the table divides by what."""

from __future__ import annotations

import pytest
from training_helpers import write_text

from benchmarks import clusters


@pytest.mark.slow
def test_the_same_runs_are_timed_on_one_worker_and_on_two(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")  # a busy machine starts a node slowly
    names: list[list[str]] = []
    sweep = clusters.sweep

    def watched(configs, *args, **options):
        result = sweep(configs, *args, **options)
        names.append([run.name for run in result.runs])
        return result

    monkeypatch.setattr(clusters, "sweep", watched)
    fields = dict(corpus=str(write_text(tmp_path / "text.txt")), block_length=16, vocab_size=300, batch_size=2)
    table = clusters.bench(2, str(tmp_path / "cache"), depth=1, width=32, steps=3, **fields)
    assert names[0] == names[1] and len(set(names[0])) == 2
    assert table["workers"].tolist() == [1, 2] and table["runs"].tolist() == [2, 2]
    assert table["runs_a_minute"].tolist() == pytest.approx((120 / table["wall_s"]).tolist())
    assert table["ratio"].tolist() == pytest.approx([1.0, table["wall_s"][0] / table["wall_s"][1]])
    trained = 2 * table["run_s"]  # of two runs the median is the mean
    assert table["not_training"].tolist() == pytest.approx(
        (1 - trained / (table["workers"] * table["wall_s"])).tolist()
    )
    assert table["not_training"].between(0, 1).all()
