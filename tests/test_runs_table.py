"""Runs on disk: one table of all that can be read, a name for what cannot, and nothing half-written."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from training_helpers import CONFIG, make_run

from normlab import NormlabError, choose, load_runs, runs, store
from normlab.training.config import TrainConfig


def test_the_table_has_the_agreed_columns_and_types(tmp_path):
    make_run(tmp_path)
    table = load_runs(tmp_path)
    assert list(table.columns) == (
        "run scheme depth width seed lr status dtype recipe step tokens split site layer metric mask value".split()
    )
    assert set(table.dtype) == {"float32"}, "what a manifest without the field means"
    types = {column: str(kind) for column, kind in table.dtypes.items()}
    assert {types[c] for c in ("depth", "width", "seed", "step", "tokens")} == {"int64"}
    assert types["layer"] == "Int64" and types["lr"] == types["value"] == "float64"
    assert {types[c] for c in ("run", "scheme", "status", "split", "site", "metric", "mask")} == {"str"}
    assert table.layer.isna().sum() == (table.site == "model").sum()
    assert not table.drop(columns="layer").isna().any().any()


def test_runs_of_one_recipe_have_one_text(tmp_path):
    for name, fields in {"a": {"clip": 5, "init_std": None}, "b": {"clip": 5.0, "init_std": None}, "c": {}}.items():
        make_run(tmp_path, name, config=CONFIG | {"probe_every": len(fields), "warmup": 0.1} | fields)
    recipes = load_runs(tmp_path).groupby("run")["recipe"].unique().map(list)
    later = "gain_lr_ratio=1"
    assert recipes.tolist() == [
        *[[f"init_std=default warmup=0.1 {later} clip=5 stream=false"]] * 2,
        [f"init_std=default warmup=0.1 {later} stream=false"],
    ]


def test_a_run_of_before_a_field_was_added_is_told_from_one_that_sets_it_otherwise(tmp_path):
    for seed, fields in enumerate(({}, {"init_std": None, "gain_lr_ratio": 1.0}, {"init_std": 0.04})):
        make_run(tmp_path, f"run-{seed}", config=CONFIG | {"seed": seed} | fields)
    table = load_runs(tmp_path)
    with pytest.raises(NormlabError, match=r"trained differently \(init_std 0.04 and default\): keep the runs of one"):
        choose(table[table["seed"] != 1])
    assert len(choose(table[table["seed"] < 2]).runs) == 2


def test_a_recipe_says_on_how_many_blocks_a_run_was_measured_if_it_was(tmp_path):
    blocks = {"probe_blocks": 16, "experiment_blocks": 8, "probe_every": 10}
    make_run(tmp_path, "both", config=CONFIG | blocks | {"model": {"gamma0": 2.0}})
    make_run(tmp_path, "none", config=CONFIG | blocks | {"probe_every": 0, "experiment_blocks": 0})
    recipes = load_runs(tmp_path).groupby("run")["recipe"].first()
    assert recipes["both"].endswith(" probe_blocks=16 experiment_blocks=8 model.gamma0=2")
    assert "blocks" not in recipes["none"]


def test_a_recipe_says_what_is_streamed_and_each_change_of_the_model(tmp_path):
    model = {"tie_word_embeddings": False, "lam_input": 10.0, "carried": "exact", "calibration": [1, 2.5], "bend": None}
    make_run(tmp_path, config=CONFIG | {"stream": True, "model": model})
    *first, last = load_runs(tmp_path)["recipe"].iloc[0].split(" model.lam_input=")
    changed = "model.bend=null model.calibration=[1,2.5] model.carried=exact"
    assert first == [f"init_std=default gain_lr_ratio=1 stream=true {changed}"]
    assert last == "10 model.tie_word_embeddings=false"


def test_the_table_holds_every_value_once(tmp_path):
    make_run(tmp_path)
    table = load_runs(tmp_path)
    losses = table[table.metric == "loss"]
    assert losses.value.tolist() == [4.0, 3.0, 2.0] and losses.tokens.tolist() == [10, 20, 30]
    assert table.query("metric == 'token_l2_mean' and mask == 'no_first' and layer == 1").value.tolist() == [1.5]
    assert not table.duplicated(["run", "step", "split", "site", "layer", "metric", "mask"]).any()


def test_what_counting_achieves_and_speed_are_rows_of_the_last_step(tmp_path):
    make_run(tmp_path)
    table = load_runs(tmp_path).set_index("metric")
    for metric, value in {"unigram_entropy": 6.5, "bigram_loss": 4.5, "trigram_loss": 4.0}.items():
        assert tuple(table.loc[metric, ["step", "tokens", "split", "site", "value"]]) == (3, 30, "eval", "model", value)
    speed = tuple(table.loc["tokens_per_s", ["step", "tokens", "split", "site", "value"]])
    assert speed == (3, 30, "train", "model", 1.0)


def test_many_directories_become_one_table_and_runs_in_progress_are_left_out(tmp_path):
    make_run(tmp_path / "a", "one")
    make_run(tmp_path / "b" / "deep", "two", status="diverged", eval_loss=None)
    make_run(tmp_path / "a" / store.PARTIAL / "three", "final")
    assert set(load_runs(tmp_path).run) == {"one", "two"}
    assert set(load_runs([tmp_path / "a" / "one", tmp_path / "b"]).run) == {"one", "two"}
    assert load_runs(tmp_path / "b").status.unique().tolist() == ["diverged"]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _drop_column(path: Path) -> None:
    pd.read_parquet(path).drop(columns="mask").to_parquet(path)


def _set_schema(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))


def _drop_rows(path: Path) -> None:
    pd.read_parquet(path).iloc[:0].to_parquet(path)


DAMAGE = {
    "truncated table": (runs.STATS, _truncate, "stats.parquet cannot be read"),
    "missing table": (runs.STATS, Path.unlink, "stats.parquet cannot be read"),
    "table of other columns": (runs.STATS, _drop_column, "stats.parquet cannot be read .it has columns"),
    "table without rows": (runs.STATS, _drop_rows, "stats.parquet cannot be read"),
    "truncated weights": (runs.WEIGHTS, _truncate, "model.safetensors cannot be read"),
    "truncated manifest": (runs.MANIFEST, _truncate, "manifest.json cannot be read"),
    "empty manifest": (runs.MANIFEST, lambda path: path.write_text(""), "manifest.json cannot be read"),
    "manifest that is no object": (runs.MANIFEST, lambda path: path.write_text("[1]"), "manifest.json cannot be read"),
    "incomplete manifest": (runs.MANIFEST, lambda path: path.write_text('{"schema": 2}'), "run is missing"),
    "other version": (runs.MANIFEST, _set_schema, "has schema version 99, this normlab reads 2"),
}


def test_a_run_needs_its_counted_losses(tmp_path):
    path = make_run(tmp_path)
    manifest = json.loads((path / runs.MANIFEST).read_text())
    del manifest["trigram_loss"]
    store.write_json(path / runs.MANIFEST, manifest)
    with pytest.raises(NormlabError, match="manifest.json cannot be read .trigram_loss is missing"):
        runs.read_run(path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_named_and_the_others_load(damage, tmp_path):
    name, harm, message = DAMAGE[damage]
    harm(make_run(tmp_path, "bad") / name)
    with pytest.raises(NormlabError, match=message) as caught:
        load_runs(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path / "bad") in str(caught.value)
    make_run(tmp_path, "good")
    with pytest.warns(UserWarning, match=message) as warned:
        table = load_runs(tmp_path)
    assert set(table.run) == {"good"}
    assert len(warned) == 1 and "bad" in str(warned[0].message) and "\n" not in str(warned[0].message)


WRONG_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no configuration": ({"config": None}, "config is None"),
    "a word for a configuration": ({"config": "bhyt"}, "config is 'bhyt'"),
    "no depth": ({"config": {k: v for k, v in CONFIG.items() if k != "depth"}}, "config.depth is missing"),
    "a depth in words": ({"config": CONFIG | {"depth": "2"}}, "depth is '2'"),
    "a rate of nothing": ({"config": CONFIG | {"lr": 0}}, "lr is 0"),
    "model fields in a list": ({"config": CONFIG | {"model": [1]}}, "config.model is .1."),
    "nothing measured": ({"measured": None}, "measured is None"),
    "an empty corpus": ({"corpus": {}}, "corpus.unigram_entropy is missing"),
    "a loss that is a word": ({"eval_loss": "low"}, "eval_loss is 'low'"),
    "a loss beyond all numbers": ({"eval_loss": float("inf")}, "eval_loss is inf"),
    "another status": ({"status": "nearly"}, "status is 'nearly'; choose one of finished, diverged, not_learned"),
    "steps in words": ({"steps": "many"}, "steps is 'many'"),
    "no name": ({"run": ""}, "run is ''"),
    "a version in words": ({"schema": "2"}, "schema version '2'"),
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_a_wrong_field_of_a_manifest_is_named_and_the_others_load(case, tmp_path):
    fields, message = WRONG_FIELDS[case]
    make_run(tmp_path, "bad", **fields)
    with pytest.raises(NormlabError, match=message) as caught:
        runs.read_run(tmp_path / "bad")
    assert "\n" not in str(caught.value) and str(tmp_path / "bad") in str(caught.value)
    make_run(tmp_path, "good")
    for read in (load_runs, runs.load_configs, runs.read_configs):
        with pytest.warns(UserWarning, match=message):
            assert len(read(tmp_path))


def test_experiments_of_a_damaged_run_are_left_out(tmp_path):
    table = pd.DataFrame([("skip", "block", 1, None, 0.5, 0.1)], columns=runs.EXPERIMENT_COLUMNS)
    store.write_stats(make_run(tmp_path, "good") / runs.EXPERIMENTS, table)
    (make_run(tmp_path, "bad") / runs.EXPERIMENTS).write_bytes(b"PAR1")
    with pytest.warns(UserWarning, match="left out: .*experiments.parquet cannot be read"):
        assert set(runs.load_experiments(tmp_path).run) == {"good"}


def test_experiments_say_how_long_their_run_was_trained_and_on_which_text(tmp_path):
    rows = pd.DataFrame([("skip", "block", 1, None, 0.5, 0.1)], columns=runs.EXPERIMENT_COLUMNS)
    config = CONFIG | {"steps": 8, "stop_at": 3}
    stopped = {"steps": 3, "tokens": 30, "config": config}
    for name, known in {"stopped": stopped, "older": {"bigram_loss": None}}.items():
        store.write_stats(make_run(tmp_path, name, **known) / runs.EXPERIMENTS, rows)
    told = ["steps", "tokens", "unigram_entropy", "bigram_loss", "trigram_loss"]
    table = runs.load_experiments(tmp_path).set_index("run")
    assert list(table.columns[-5:]) == told and set(table[told].dtypes.astype(str)) == {"float64"}
    assert table.loc["stopped", told].tolist() == [3, 30, 6.5, 4.5, 4.0]
    assert table.loc["older", told].isna().tolist() == [True, True, False, True, False]
    assert runs.read_run(tmp_path / "stopped").experiments().columns.tolist() == ["run", *table.columns]


def test_what_runs_were_configured_with_is_read_beside_the_table(tmp_path):
    path = make_run(tmp_path, "good")
    (make_run(tmp_path, "bad") / runs.MANIFEST).write_text("{")
    run = runs.read_run(path)
    with pytest.warns(UserWarning, match="left out: .*bad"):
        assert runs.read_configs(tmp_path) == {run.name: run.config}
    with pytest.warns(UserWarning, match="left out: .*bad"):
        assert runs.read_runs(tmp_path) == [run]
    assert runs.read_configs([path]) == {run.name: runs.LATER_FIELDS | CONFIG}
    assert load_runs(path).attrs == {runs.SOURCE: [str(path)]}


def test_configurations_have_the_rates_of_the_table(tmp_path):
    path = make_run(tmp_path, "good")
    manifest = json.loads((path / runs.MANIFEST).read_text())
    manifest["config"]["lr"] = 0.1 * 0.003
    (path / runs.MANIFEST).write_text(json.dumps(manifest))
    assert runs.load_configs(tmp_path)["lr"].tolist() == load_runs(tmp_path)["lr"].unique().tolist() == [0.0003]


def test_configurations_have_the_fields_that_manifests_lack(tmp_path):
    """Runs of before a field was added had its default; their precision was float32."""
    config = TrainConfig(scheme="bhyt", lr=0.004, init_std=0.04, dtype="bfloat16", model={"gamma0": 2.0})
    old = {name: value for name, value in config.to_dict().items() if name not in runs.LATER_FIELDS}
    make_run(tmp_path, "new", config=config.to_dict())
    make_run(tmp_path, "old", config=old)
    table = runs.load_configs(tmp_path).drop(columns=["status", "eval_loss"])
    fields = set(TrainConfig.__dataclass_fields__) - {"model"}
    assert set(table) == fields | {"gamma0"}
    for name, expected in (("new", config), ("old", TrainConfig.from_dict(old))):
        values = expected.to_dict()
        found = {field: None if pd.isna(value) else value for field, value in table.loc[name].items()}
        assert found == values.pop("model") | values
    assert runs.read_configs(tmp_path)["old"] == TrainConfig.from_dict(old).to_dict()


def test_a_place_without_runs_is_refused(tmp_path):
    with pytest.raises(NormlabError, match="no runs in"):
        load_runs(tmp_path)
    with pytest.raises(NormlabError, match="does not exist"):
        load_runs(tmp_path / "nowhere")
    with pytest.raises(NormlabError, match="holds no run"):
        runs.read_run(tmp_path)


def test_publishing_syncs_every_file_before_the_rename(tmp_path, monkeypatch):
    staged, final = tmp_path / "staged", tmp_path / "final"
    (staged / "inner").mkdir(parents=True)
    (staged / "a").write_text("a")
    (staged / "inner" / "b").write_text("b")
    events: list[str] = []
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda handle: (events.append(os.readlink(f"/proc/self/fd/{handle}")), sync(handle))[1]
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b))[1])
    store.publish(staged, final)
    before = events[: events.index("rename")]
    assert {Path(name).relative_to(staged).as_posix() for name in before} == {"a", "inner/b", "inner", "."}
    assert events[-1] == str(tmp_path)
    assert (final / "inner" / "b").read_text() == "b" and not staged.exists()


def test_publishing_replaces_what_a_killed_process_left(tmp_path):
    for name, text in (("staged", "new"), ("final", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    store.publish(tmp_path / "staged", tmp_path / "final")
    assert (tmp_path / "final" / "file").read_text() == "new"


def test_json_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    store.write_json(path, {"a": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError):
            store.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_lock_goes_with_its_process_and_its_file_with_the_run(tmp_path):
    lock = tmp_path / store.PARTIAL / "run.lock"
    with store.to_train(tmp_path, "run"):
        assert lock.exists()
    assert not lock.parent.exists()
    with store.to_train(tmp_path, "run"):
        lock.unlink()  # as whoever clears the folder does
    with pytest.raises(ZeroDivisionError), store.to_train(tmp_path, "run"):
        raise ZeroDivisionError
    assert not lock.parent.exists()
    (tmp_path / store.PARTIAL).mkdir()
    (tmp_path / store.PARTIAL / "other").mkdir()
    with store.to_train(tmp_path, "run"):
        pass
    assert [path.name for path in lock.parent.iterdir()] == ["other"]


def test_shipped_runs_can_be_read():
    data = Path(__file__).resolve().parents[1] / "data"
    for name in ("depth", "gpu", "grid"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert set(load_runs(data / name).status) <= set(runs.STATUSES)


def test_runs_that_change_their_schemes_model_can_be_left_out(tmp_path):
    make_run(tmp_path / "plain")
    path = make_run(tmp_path / "other", config=CONFIG | {"seed": 5, "model": {"kappa": 4.0}}, name="other")
    assert load_runs(tmp_path)["run"].nunique() == 2
    assert set(load_runs(tmp_path, variants=False)["run"]) == set(load_runs(tmp_path / "plain")["run"])
    with pytest.raises(NormlabError, match="every run in .* changes its scheme's model"):
        load_runs(path, variants=False)


def test_a_copied_run_is_still_the_run(tmp_path):
    path = make_run(tmp_path)
    shutil.copytree(path, tmp_path / "elsewhere" / "renamed")
    assert load_runs(tmp_path / "elsewhere").run.unique().tolist() == [path.name]


def test_a_run_that_is_in_two_directories_counts_once(tmp_path):
    make_run(tmp_path / "here")
    make_run(tmp_path / "there")
    with pytest.warns(UserWarning, match=r"left out: .*there/bhyt-a, as .*here/bhyt-a is the same run"):
        both = load_runs([tmp_path / "here", tmp_path / "there"])
    pd.testing.assert_frame_equal(both, load_runs(tmp_path / "here"))


def test_a_run_of_the_same_name_on_another_text_is_not_called_the_same(tmp_path):
    for name in ("here", "there"):
        make_run(tmp_path / name, corpus={"unigram_entropy": 6.5, "content_hash": name})
    line = r"left out: .*there/bhyt-a, as .*here/bhyt-a has its name but another text; read one of them at a time"
    with pytest.warns(UserWarning, match=line):
        both = load_runs([tmp_path / "here", tmp_path / "there"])
    pd.testing.assert_frame_equal(both, load_runs(tmp_path / "here"))
