"""SIGKILL at random moments, forty times: every run ends as if nothing had been killed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from training_helpers import tiny, write_text

from normlab import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
HERE = Path(__file__).parent
CORPUS = "text.txt"
FIELDS = dict(steps=100, probe_every=50, eval_every=50, checkpoint_every=5)
SWEEP = f"""
import sys
from training_helpers import tiny
from normlab import sweep

if __name__ == "__main__":
    configs = [tiny({CORPUS!r}, seed=seed, **{FIELDS}) for seed in range(3)]
    sweep(configs, sys.argv[1], workers=2, threads=1, cache_dir="cache", progress=False)
"""
RANKS = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def command(kind: str, out: str) -> list[str]:
    if kind == "sweep":
        return [sys.executable, "sweep.py", out]
    train = ["-m", "normlab", "train", *tiny(Path(CORPUS), **FIELDS).to_arguments()]
    ranks = RANKS if kind == "ranks" else []
    return [sys.executable, *ranks, *train, "--out", out, "--cache-dir", "cache", "--quiet"]


def start(kind: str, out: str, folder: Path) -> subprocess.Popen:
    paths = [str(HERE.parent), str(HERE.parent / "kernels"), str(HERE / "helpers")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    streams = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    return subprocess.Popen(command(kind, out), cwd=folder, env=environment, **streams)  # type: ignore[call-overload]


def written(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    """The table and the weights of each run, by name."""
    return {
        path.name: ((path / runs.STATS).read_bytes(), (path / runs.WEIGHTS).read_bytes())
        for path in runs.find_runs(folder)
        if runs.read_run(path)
    }


def kill_one(process: subprocess.Popen, choose: random.Random) -> bool:
    """Kill the process or one that it started. False if it has ended before."""
    try:
        parent = psutil.Process(process.pid)
        victim = choose.choice([parent, *parent.children(recursive=True)])
        if process.poll() is not None:
            return False
        victim.kill()
    except psutil.NoSuchProcess:
        return False
    if victim == parent:  # as a scheduler does, which ends what is left
        os.killpg(process.pid, signal.SIGKILL)
    return True


@pytest.mark.parametrize("kind, kills", [("process", 16), ("ranks", 12), ("sweep", 12)])
def test_runs_that_are_killed_end_as_if_they_were_not(kind, kills, tmp_path):
    write_text(tmp_path / CORPUS)
    (tmp_path / "sweep.py").write_text(SWEEP)
    began = time.perf_counter()
    assert start(kind, "whole", tmp_path).wait() == 0
    seconds, reference = time.perf_counter() - began, written(tmp_path / "whole")
    assert len(reference) == (3 if kind == "sweep" else 1)
    choose, done = random.Random(kills), 0
    while done < kills:
        process = start(kind, "killed", tmp_path)
        time.sleep(choose.uniform(0.3, 1) * seconds)
        done += kill_one(process, choose)
        if process.wait(600) == 0:  # a sweep survives its workers
            assert written(tmp_path / "killed") == reference
            shutil.rmtree(tmp_path / "killed")
    assert start(kind, "killed", tmp_path).wait(600) == 0
    assert written(tmp_path / "killed") == reference
