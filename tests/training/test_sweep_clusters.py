"""Sweeps on real clusters of this machine: Ray with two nodes, submitit's local executor; workers that are killed."""

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import training_helpers
from sweep_helpers import quiet_sweep
from training_helpers import tiny

from normlab import NormlabError, cli, runs, store
from normlab.training import workers as workers_module
from normlab.training.workers import LOCAL, Cluster, Ray, Slurm, cluster


@pytest.fixture(scope="module", autouse=True)
def helpers_for_workers() -> Iterator[None]:
    """Workers can import what replaces training in some tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"), prepend=os.pathsep)
        patch.setenv("RAY_raylet_start_wait_time_s", "300")  # a busy machine starts a node slowly
        yield


@pytest.fixture(scope="module")
def nodes(helpers_for_workers: None) -> Iterator[Ray]:
    """A Ray cluster of two nodes with a worker's room each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster as Nodes

    started = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **_ports()})
    started.add_node(num_cpus=1, **_ports())
    ray.init(address=started.address, log_to_driver=False)
    yield Ray(address=started.address)
    ray.shutdown()
    started.shutdown()


def _ports() -> dict[str, int]:
    """Ports of a node's agents. Ray waits for those that they choose themselves, too briefly on a busy machine."""
    agents = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    with contextlib.ExitStack() as held:
        free = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in agents]
        return {agent: server.getsockname()[1] for agent, server in zip(agents, free, strict=True)}


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Cluster:
    if request.param == "slurm":
        pytest.importorskip("submitit")
        return Slurm(address=LOCAL)
    return request.getfixturevalue("nodes")


BOTH = pytest.mark.parametrize("place", ["ray", "slurm"], indirect=True)


@pytest.mark.slow
@BOTH
def test_a_lost_worker_is_replaced_and_one_that_always_dies_is_reported(place, text, tmp_path, monkeypatch):
    configs = [tiny(text, seed=seed) for seed in range(3)]
    monkeypatch.setattr(workers_module, "train_one", training_helpers.die_the_first_time)
    result = quiet_sweep(configs, tmp_path / "once", workers=place)
    assert (tmp_path / "once" / "died-1").exists()
    assert [run.name for run in result.runs] == [config.run_id for config in configs] and not result.failures
    assert not (tmp_path / "once" / "out" / store.PARTIAL / "slurm").exists(), "what jobs need to start is left behind"
    monkeypatch.setattr(workers_module, "train_one", training_helpers.always_die)
    result = quiet_sweep(configs, tmp_path / "always", workers=place)
    assert [run.name for run in result.runs] == [configs[0].run_id, configs[2].run_id]
    assert list(result.failures) == [configs[1].run_id]
    monkeypatch.setattr(workers_module, "train_one", training_helpers.fail_one)
    result = quiet_sweep(configs, tmp_path / "failing", workers=place)
    assert len(result.runs) == 2 and result.failures == {configs[1].run_id: "this one cannot"}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "count"), [("ray", 40), ("slurm", 6)], indirect=["place"])
def test_a_worker_killed_in_the_middle_of_a_sweep_costs_the_steps_since_a_checkpoint(
    place, count, text, tmp_path, monkeypatch
):
    """Ray's two workers train forty runs; submitit's local executor starts all jobs at once, so there are six."""
    configs = [tiny(text, seed=seed) for seed in range(count)]
    monkeypatch.setattr(workers_module, "train_one", training_helpers.train_and_die_once)
    result = quiet_sweep(configs, tmp_path, workers=place)
    assert [run.name for run in result.runs] == [config.run_id for config in configs] and not result.failures
    assert len(list(tmp_path.glob("trained-*"))) == count and (tmp_path / "killed").exists()
    resumed = [run.manifest["measured"]["resumed_from_step"] for run in result.runs]
    assert resumed == [0, 3, *[0] * (count - 2)]
    assert set(runs.load_runs(result.out)["run"]) == {config.run_id for config in configs}


def test_clusters_that_cannot_serve_are_one_line(text, tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(NormlabError, match="there is no sbatch here"):
        quiet_sweep([tiny(text)], tmp_path, workers="slurm")
    with pytest.raises(NormlabError, match="gpus is 0.5; Slurm gives whole ones"):
        cluster("slurm", address=LOCAL, gpus=0.5)
    with pytest.raises(NormlabError, match="'host:1': Slurm needs none"):
        cluster("slurm", address="host:1")
    with pytest.raises(NormlabError, match="workers is 'pbs'; give a number of processes, at least 1, or ray or slurm"):
        quiet_sweep([tiny(text)], tmp_path, workers="pbs")
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert cli.main(["sweep", "--workers", "slurm", "--out", str(tmp_path / "out"), "--quiet"]) == 2
    assert "pip install 'normlab[slurm]'" in capsys.readouterr().err


def test_flags_reach_the_cluster(monkeypatch):
    monkeypatch.setattr(Slurm, "check", lambda self: None)
    flags = ["--workers", "slurm", "--gpus", "1", "--slurm", "timeout_min=60", "--slurm", "slurm_partition=night"]
    _, options = cli.parse(["sweep", *flags, "--out", "runs"])
    chosen = options.arguments
    workers = cli.workers_of(chosen["workers"], {"gpus": chosen["gpus"], "options": cli.field_values(chosen["slurm"])})
    assert workers == Slurm(None, 1.0, {"timeout_min": 60, "slurm_partition": "night"})
