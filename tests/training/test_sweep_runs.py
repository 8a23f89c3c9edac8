"""Many runs: which ones, in which order, on how many workers, and what a failing or killed one does to the others."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import training_helpers
from sweep_helpers import InProcess, quiet_sweep, small_preset
from training_helpers import tiny, until, write_run, write_text

import normlab
from normlab import NormlabError, runs, store
from normlab.training import sweep as sweep_module
from normlab.training import workers as workers_module
from normlab.training.config import TrainConfig
from normlab.training.sweep import sweep
from normlab.training.workers import Pool, Ray, share_cores


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


@pytest.fixture
def configs(text: Path) -> list[TrainConfig]:
    return [tiny(text, seed=seed) for seed in range(4)]


def test_a_sweep_started_again_trains_only_what_is_missing(configs, tmp_path, monkeypatch):
    fake = InProcess(failing=lambda config: config.seed == 2)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    first = quiet_sweep(configs, tmp_path)
    assert len(fake.started) == 4 and list(first.failures) == [configs[2].run_id]
    fake.failing = lambda config: False
    second = quiet_sweep(configs, tmp_path)
    assert fake.started[4:] == [replace(configs[2], threads=share_cores(None, None)[1])]
    assert [run.name for run in second.runs] == [config.run_id for config in configs] and not second.failures


def test_a_run_that_is_asked_for_twice_is_trained_once(text, configs, tmp_path, monkeypatch):
    fake = InProcess(failing=lambda config: False)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    result = quiet_sweep([configs[0], configs[0]], tmp_path)
    assert len(fake.started) == 1 and len(result.runs) == 1 and not result.failures
    assert small_preset(text).only(["lns", "lns"], None).parts[0].schemes == ("lns",)


def test_a_failing_run_is_reported_and_stops_no_other(configs, tmp_path, monkeypatch):
    fake = InProcess(failing=lambda config: config.seed == 0)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    result = quiet_sweep(configs, tmp_path)
    assert [run.name for run in result.runs] == [config.run_id for config in configs[1:]]
    assert result.failures == {configs[0].run_id: "RuntimeError: it broke"}


def test_a_scheme_whose_trials_failed_is_left_out_of_the_grid(text, tmp_path, monkeypatch):
    fake = InProcess(failing=lambda config: config.scheme == "lns")
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    with pytest.warns(UserWarning, match="lns at depth 2: no rate was chosen"):
        result = quiet_sweep(small_preset(text), tmp_path)
    assert {run.manifest["config"]["scheme"] for run in result.runs} == {"bhyt"}
    assert len(result.failures) == 3


def test_a_damaged_or_different_run_in_the_way_is_a_failure_of_that_run(configs, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "finish_in_any_order", InProcess())
    out = tmp_path / "out"
    manifest = write_run(configs[0], out) / runs.MANIFEST
    manifest.write_text(manifest.read_text()[:100])
    corpus = runs.read_run(write_run(configs[1], out)).manifest["corpus"]
    write_run(configs[2], out)
    store.write_json(
        out / configs[1].run_id / runs.MANIFEST,
        runs.read_run(out / configs[1].run_id).manifest | {"corpus": corpus | {"content_hash": "other"}},
    )
    result = quiet_sweep(configs, tmp_path)
    assert len(result.runs) == 2
    assert "manifest.json cannot be read" in result.failures[configs[0].run_id]
    assert "has content_hash 'other'" in result.failures[configs[1].run_id]


def test_workers_share_the_cores(monkeypatch):
    for cores, expected in ((1, (1, 1)), (2, (2, 1)), (3, (2, 1)), (16, (2, 8))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert share_cores(None, None) == expected
    assert share_cores(None, 4) == (4, 4)
    assert share_cores(8, None) == (8, 2)
    assert share_cores(32, None) == (32, 1)
    assert share_cores(3, 7) == (3, 7)
    assert share_cores(Ray(), None) == (Ray(), 1)
    for workers, threads in ((0, None), ("some", None), (2, 0)):
        with pytest.raises(NormlabError):
            share_cores(workers, threads)


def test_bad_input_is_refused_before_any_run_starts(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "finish_in_any_order", lambda *_: pytest.fail("started"))
    with pytest.raises(NormlabError, match="does not exist"):
        quiet_sweep([tiny(tmp_path / "missing.txt")], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NormlabError, match="is a file"):
        sweep([tiny(text)], tmp_path / "file", progress=False)


# --- processes ---


@pytest.fixture
def workers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that have imported everything; where a sweep is a script's, and in test_notebook_prepare.py, they are
    spawned as they are by default."""
    monkeypatch.setattr(workers_module.multiprocessing, "get_context", lambda _: training_helpers.FORKS)


def test_a_real_sweep_in_two_processes_equals_the_same_runs_in_this_one(text, tmp_path, monkeypatch, workers_at_once):
    pools: list[Pool] = []

    class Kept(Pool):
        def __post_init__(self) -> None:
            super().__post_init__()
            pools.append(self)

    monkeypatch.setattr(sweep_module, "Pool", Kept)
    configs = [tiny(text, scheme=scheme, keep_weights=False, threads=1) for scheme in ("lns", "bhyt", "dyt")]
    with store.to_train(tmp_path / "out", configs[2].run_id):
        result = normlab.sweep(
            configs, tmp_path / "out", workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False
        )
    assert [run.name for run in result.runs] == [config.run_id for config in configs[:2]]
    assert "another process is training" in result.failures[configs[2].run_id]
    assert pools[0].steps() == {config.run_id: config.steps for config in configs[:2]}
    for config, run in zip(configs, result.runs, strict=False):
        alone = normlab.train(config, tmp_path / "alone", cache_dir=tmp_path / "cache", progress=False)
        assert (alone.path / runs.STATS).read_bytes() == (run.path / runs.STATS).read_bytes()
    assert set(normlab.load_runs(tmp_path / "out").scheme) == {"lns", "bhyt"}


def test_a_killed_worker_costs_no_run(configs, tmp_path, monkeypatch, workers_at_once):
    monkeypatch.setattr(workers_module, "train_one", training_helpers.die_the_first_time)
    result = quiet_sweep(configs[:3], tmp_path, workers=2, threads=1)
    assert (tmp_path / "died-1").exists()
    assert len(result.runs) == 3 and not result.failures


@pytest.mark.slow
def test_a_run_that_kills_its_worker_every_time_is_given_up_and_takes_no_other_with_it(configs, tmp_path, monkeypatch):
    monkeypatch.setattr(workers_module, "train_one", training_helpers.always_die)
    result = quiet_sweep(configs[1:3], tmp_path, workers=2, threads=1)
    assert [run.name for run in result.runs] == [configs[2].run_id]  # that was in progress beside it
    assert list(result.failures) == [configs[1].run_id]
    assert "its process was killed" in result.failures[configs[1].run_id]


SLEEPING_SWEEP = """
import signal
import sys
import training_helpers
from sweep_helpers import InProcess, quiet_sweep, small_preset
from pathlib import Path
from normlab.training import workers
from normlab.training.sweep import sweep

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    workers.train_one = training_helpers.work_for_ever
    root = Path(sys.argv[1])
    configs = [training_helpers.tiny(root / "text.txt", seed=seed) for seed in range(2)]
    sweep(configs, root / "out", workers=2, threads=1, cache_dir=root / "cache", progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_sweep(how, text, tmp_path):
    script = tmp_path / "sleeping.py"
    script.write_text(SLEEPING_SWEEP)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
    process = subprocess.Popen([sys.executable, script, tmp_path], env=environment, stderr=subprocess.PIPE, text=True)
    files = [tmp_path / f"worker-{seed}" for seed in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files) or process.poll() is not None, 300)
    workers = [int(file.read_text()) for file in files]
    assert len(set(workers)) == 2 and all(map(_alive, workers))
    process.send_signal(how)
    process.wait(60)
    until(lambda: not any(map(_alive, workers)), 30)
    if how == signal.SIGINT:  # a killed process cannot tidy up: Python's resource tracker does, and says so
        assert process.stderr and "leaked" not in process.stderr.read()


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_without_ray_the_message_names_what_to_install(configs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NormlabError, match=r"pip install 'normlab\[ray\]'"):
        quiet_sweep(configs, tmp_path, workers="ray")
