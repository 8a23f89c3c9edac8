"""Every recipe of docs/loops.md measures what the plain loop in one process does, in every cell."""

from pathlib import Path

import loop_recipes
import pandas
import pytest
from loop_recipes import PLAIN, RECIPES, loss_of, trained_by_adam
from probe_toys import Numbered, X
from probe_zoo import near, tiny_llama, token_batch
from probe_zoo import values as recorded_values
from training_helpers import FORKS

from normlab.probes import METRICS, LayerStats, record
from normlab.probes.updates import METRICS as UPDATES


def values(table: pandas.DataFrame) -> dict:
    layers = table[table["layer"].notna()].astype({"layer": "Int64"})  # the Trainer's update ratios have none
    return layers.set_index(loop_recipes.KEYS)["value"].to_dict()


def same(table: pandas.DataFrame, expected: dict) -> None:
    measured = values(table)
    assert measured.keys() == expected.keys()
    for key, value in expected.items():
        assert measured[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


@pytest.fixture(scope="module")
def one_process() -> dict:
    found = values(loop_recipes.run(PLAIN))
    assert {step for step, *_ in found} == {0, 5} and {"grad_l2_mean", "rms"} <= {key[3] for key in found}
    return found


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in (PLAIN, "Tensor parallelism")])
def test_a_recipe_of_the_page_measures_what_the_plain_loop_does(name, one_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    same(loop_recipes.run(name), one_process)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """The tables of two forked ranks, which give up by themselves where they wait for ever."""
    folder = tmp_path_factory.mktemp("ranks")
    process = FORKS.Process(target=_both_ranks, args=(str(folder),))
    process.start()
    process.join()
    assert process.exitcode == 0, (folder / "errors").read_text()[-2000:]
    return folder


def _both_ranks(folder: str) -> None:
    import observe_ranks  # of many modules, which no other test needs

    observe_ranks.both_ranks(folder)


def test_two_ranks_under_ddp_fsdp2_and_tensor_parallelism_equal_one_process(one_process, two_ranks):
    for name in ("ddp", "fsdp", "tp"):
        same(pandas.read_csv(two_ranks / f"{name}.csv"), one_process)


def test_two_stages_of_a_pipeline_are_one_table_with_their_weights_and_updates(two_ranks):
    model = Numbered(0, 1, 2, 3)

    def step():
        for row in X.split(1):
            loss_of(model(row), 0 * row).backward()

    tables = trained_by_adam(model, step), pandas.read_csv(two_ranks / "piped.csv")
    whole, piped = (values(table[table["mask"] == "all"]) for table in tables)
    assert {"update_ratio", "parameter_rms", "grad_l2_mean"} <= {metric for *_, metric, _ in whole}
    assert piped == pytest.approx(whole, rel=1e-5)


def test_updates_are_read_where_fsdp2_has_left_the_parameters_whole(two_ranks):
    model = Numbered(0, 1, 2, 3)
    expected = trained_by_adam(model, lambda: (loss_of(model(X), 0 * X) / 2).backward())
    tables = [table[table["metric"].isin(UPDATES)] for table in (pandas.read_csv(two_ranks / "whole.csv"), expected)]
    assert len(tables[1]) == 2 * 4 * len(UPDATES) and values(tables[0]) == pytest.approx(values(tables[1]), rel=1e-5)


def test_recordings_of_two_ranks_merge_to_that_of_all_rows(two_ranks):
    merged = LayerStats.load(two_ranks / "recorded.parquet")
    with record(tiny_llama(), list(METRICS)) as rec:
        rec.sites.model(**token_batch(6)).loss.backward()
    whole = rec.stats()
    assert recorded_values(merged) == near(recorded_values(whole))
    assert merged.manifest["forward_passes"] == 2 and merged.manifest["loss_tokens"] == whole.manifest["loss_tokens"]


def test_a_recipe_has_at_most_ten_lines():
    for name, code in RECIPES.items():
        assert sum(bool(line) for line in code.splitlines()) <= 10, name
