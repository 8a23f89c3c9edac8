"""Several ranks train one run together: the same curve and tables as one process, resumed on any number of ranks."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pandas as pd
import psutil
import pytest
from training_helpers import FORKS, tiny

from normlab import runs, store
from normlab.errors import NormlabError
from normlab.training import distributed
from normlab.training.config import TrainConfig
from normlab.training.run import RunStopped

KEYS = ["step", "split", "site", "layer", "metric", "mask"]


@pytest.fixture(scope="module")
def config(text: Path) -> TrainConfig:
    return tiny(text, steps=50, lr=1e-3, batch_size=4, probe_every=25, eval_every=25, checkpoint_every=5)


@pytest.fixture(scope="module")
def alone(config: TrainConfig, go: Callable, tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """The same run of one process."""
    return go(config, tmp_path_factory.mktemp("alone"))


def _train_rank(environment: dict[str, str], config: TrainConfig, out: Path, cache: Path, stop_at: int) -> None:
    os.environ.update(environment)
    from normlab.training.run import train

    with contextlib.suppress(RunStopped):
        train(config, out, cache_dir=cache, progress=False, watch=lambda step, _: step != stop_at)


def environments(ranks: int) -> list[dict[str, str]]:
    """The environment that a launcher gives to each of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    each = (shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks))
    return [{name: str(value) for name, value in environment.items()} for environment in each]


def start(
    config: TrainConfig, out: Path, cache: Path, ranks: int = 2, stop_at: int = -1, target: Callable = _train_rank
) -> list[Any]:
    """Processes that see what a launcher tells them."""
    processes = [
        FORKS.Process(target=target, args=(environment, config, out, cache, stop_at))
        for environment in environments(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def finish(*arguments: Any, **options: Any) -> None:
    processes = start(*arguments, **options)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def assert_same(run: runs.Run, alone: runs.Run) -> None:
    tables = [pd.read_parquet(each.path / runs.STATS) for each in (run, alone)]
    assert tables[0][KEYS].equals(tables[1][KEYS])
    losses = [table.query("metric == 'loss'")["value"].to_numpy() for table in tables]
    assert abs(losses[0] - losses[1]).max() <= 1e-5
    assert tables[0]["value"].to_numpy() == pytest.approx(tables[1]["value"].to_numpy(), rel=2e-3, abs=1e-5)
    first = [table.query("step == 0")["value"].tolist() for table in tables]
    assert first[0] == first[1]
    left_out = {"measured", "eval_loss"}
    assert {k: v for k, v in run.manifest.items() if k not in left_out} == {
        k: v for k, v in alone.manifest.items() if k not in left_out
    }


@pytest.mark.slow
def test_two_ranks_train_and_measure_as_one_process(config, alone, cache, tmp_path):
    finish(config, tmp_path, cache)
    run = runs.read_run(tmp_path / config.run_id)
    assert_same(run, alone)
    assert list(tmp_path.iterdir()) == [run.path]


def test_a_run_goes_on_with_another_number_of_ranks(config, alone, stop, cache, tmp_path):
    finish(config, tmp_path, cache, stop_at=12)
    stop(config, tmp_path, 31)
    finish(config, tmp_path, cache)
    run = runs.read_run(tmp_path / config.run_id)
    assert run.manifest["measured"]["resumed_from_step"] == 31
    assert_same(run, alone)


def kill_a_rank(config: TrainConfig, out: Path, cache: Path, step: int, wait: float = 0.0) -> None:
    """Kill the second rank `wait` seconds after checkpoint `step`, and the first as a launcher does."""
    processes = start(config, out, cache)
    work = out / store.PARTIAL / config.run_id
    while not list(work.glob(f"checkpoint-{step}")):
        assert all(process.exitcode is None for process in processes)
        time.sleep(0.002)
    time.sleep(wait)
    for process in reversed(processes):
        os.kill(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.slow
def test_a_killed_rank_costs_no_more_than_the_steps_since_the_last_checkpoint(config, alone, go, cache, tmp_path):
    kill_a_rank(config, tmp_path, cache, 10)
    run = go(config, tmp_path)
    assert run.manifest["measured"]["resumed_from_step"] >= 10
    assert_same(run, alone)


def test_ranks_that_do_not_divide_the_batch_are_refused_in_one_line(config, go, tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", 3)
    with pytest.raises(NormlabError, match="^3 ranks do not divide batch_size 4, .*: change one of the two$"):
        go(config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["normlab", "train", "--ranks", "2"],
        ["torch.distributed.run", "--nproc-per-node", "2", "-m", "normlab", "train"],
        ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "normlab", "train"],
    ],
    ids=lambda words: words[0],
)
def test_launchers_start_the_command(launcher, config, alone, cache, tmp_path):
    options = [*config.to_arguments(), "--out", str(tmp_path / "out"), "--cache-dir", str(cache), "--quiet"]
    done = subprocess.run([sys.executable, "-m", *launcher, *options], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("eval loss") == 1
    assert_same(runs.read_run(tmp_path / "out" / config.run_id), alone)


# What the second of two ranks does, and what becomes of them. The first would train on.
ENDS: dict[str, tuple[str, int | tuple[type[BaseException], str]]] = {
    "a rank that fails ends the others": ("exit 3", 3),
    "a killed rank is one line": ("kill -9 $$", (NormlabError, "^rank 1 was ended by SIGKILL; .* resumes")),
    "Ctrl-C ends all, and is said by nobody else": ("kill -2 $PPID; exec sleep 60", (KeyboardInterrupt, "^$")),
    "a launcher that is ended ends all": ("kill -15 $PPID; exec sleep 60", (SystemExit, "^143$")),
}


@pytest.mark.parametrize("case", ENDS)
def test_ranks_of_one_machine_end_together(case, tmp_path, monkeypatch):
    second, end = ENDS[case]
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\necho $$ $WORLD_SIZE $@ >> {tmp_path}/started\n[ $RANK = 1 ] && {second}\nsleep 60\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(end, int):
        assert distributed.start_ranks(2, ["train"]) == end
    else:
        with pytest.raises(end[0], match=end[1]):
            distributed.start_ranks(2, ["train"])
    for line in (tmp_path / "started").read_text().splitlines():
        number, *rest = line.split()
        assert rest == ["2", "-m", "normlab", "train"] and not psutil.pid_exists(int(number))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
