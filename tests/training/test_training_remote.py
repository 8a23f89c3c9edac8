"""Runs at an address: uploaded when they have ended, and found and read by machines that share nothing else."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import accelerate
import fsspec
import pandas as pd
import pytest
from training_helpers import tiny

import normlab
from normlab import NormlabError, packed, runs, store
from normlab.training import run as run_module
from normlab.training.config import TrainConfig
from normlab.training.sweep import sweep
from normlab.training.workers import Cluster, Outcome, Slurm


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process another machine, with another cache."""

    def machine(number: int) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine-{number}"))

    machine(0)
    return machine


def names(address: str) -> set[str]:
    files, root = fsspec.core.url_to_fs(address)
    files.invalidate_cache()
    return {name[len(root.rstrip("/")) + 1 :] for name in files.find(root)}


def test_a_finished_run_is_uploaded_whole_and_another_machine_finds_it(machine, text, done, go, stop, monkeypatch):
    address, config = "memory://bucket/runs", tiny(text)
    stop(config, address, 5)
    assert not names(address), "a checkpoint stays on its machine"
    run = go(config, address)
    assert run.manifest["measured"]["resumed_from_step"] == 5
    assert (run.path / runs.STATS).read_bytes() == (done.path / runs.STATS).read_bytes()
    assert names(address) == {f"{config.run_id}/{path.name}" for path in run.path.iterdir()}
    assert not any(path.name == store.PARTIAL for path in run.path.parent.iterdir())
    fsspec.filesystem("memory").rm("/bucket", recursive=True)
    go(config, address)
    assert f"{config.run_id}/{store.MANIFEST}" in names(address), "an upload that broke off is made up for"
    machine(2)
    columns = runs.STATS_COLUMNS
    measured = normlab.load_runs(address).query("metric != 'tokens_per_s'")
    assert measured[columns].equals(done.table().query("metric != 'tokens_per_s'")[columns])
    assert list(runs.read_configs(address)) == [config.run_id]
    monkeypatch.setattr(run_module, "_run", lambda *_: pytest.fail("trained again"))
    assert go(config, address).load_model().config.scheme == config.scheme


def test_a_packed_run_is_finished_and_is_read_from_an_address(text, done, go, tmp_path, monkeypatch):
    copy = tmp_path / "runs" / done.name
    copy.mkdir(parents=True)
    for name in (runs.MANIFEST, runs.STATS):
        shutil.copy(done.path / name, copy)
    packed.pack(copy.parent)
    copy.mkdir()  # as a kill leaves it
    monkeypatch.setattr(run_module, "_run", lambda *_: pytest.fail("trained again"))
    assert go(tiny(text, keep_weights=False), copy.parent).manifest == done.manifest
    pd.testing.assert_frame_equal(normlab.load_runs(f"file://{copy.parent}"), done.table())


def test_what_is_half_uploaded_is_not_taken(machine, text, done, go, tmp_path):
    address, config = f"file://{tmp_path}/bucket", tiny(text)
    (tmp_path / "bucket" / config.run_id).mkdir(parents=True)
    (tmp_path / "bucket" / config.run_id / runs.STATS).touch()
    with pytest.raises(NormlabError, match="no runs in file://"):
        normlab.load_runs(address)
    go(config, address)
    assert pd.read_parquet(f"{address}/{config.run_id}/{runs.STATS}").equals(pd.read_parquet(done.path / runs.STATS))


class _Here(Cluster):
    """A cluster of this process."""

    def check(self) -> None: ...

    def finish(self, train_one: Callable, configs: Sequence[TrainConfig], arguments: tuple) -> Iterator[Outcome]:
        for config in configs:
            yield config, runs.read_run(train_one(config, *arguments))


def test_a_sweep_publishes_its_runs_and_skips_those_of_other_machines(machine, text, cache):
    address, configs = "memory://sweep", [tiny(text, steps=2, seed=seed) for seed in range(2)]
    first = sweep(configs[:1], address, workers=_Here(), cache_dir=cache, progress=False)
    assert [run.name for run in first.runs] == [configs[0].run_id] and first.out == address
    machine(1)
    both = sweep(configs, address, workers=_Here(), cache_dir=cache, progress=False)
    assert [run.name for run in both.runs] == [config.run_id for config in configs]
    assert both.runs[0].manifest["measured"] == first.runs[0].manifest["measured"], "trained again"
    assert set(normlab.load_runs(address)["run"]) == {config.run_id for config in configs}
    with pytest.raises(NormlabError, match="name a directory that all machines see"):
        sweep([tiny(text, seed=2)], address, workers=Slurm(address="local"), cache_dir=cache, progress=False)


def test_addresses_that_cannot_be_used_are_one_line(machine, text, go, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with monkeypatch.context() as patch, pytest.raises(NormlabError, match="^ranks on several machines .* as --out$"):
        patch.setattr(accelerate.Accelerator, "num_processes", 2)
        go(tiny(text), "memory://empty")
    with pytest.raises(NormlabError, match="^cannot use nowhere://runs: "):
        normlab.load_runs("nowhere://runs")
    with pytest.raises(NormlabError, match="^memory://empty does not exist, or is empty$"):
        normlab.load_runs("memory://empty")
    with pytest.raises(NormlabError, match="^memory://empty/run holds no run"):
        runs.read_run("memory://empty/run")
