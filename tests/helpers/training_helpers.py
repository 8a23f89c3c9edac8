"""Small runs for the training tests: a text of a few kilobytes and models that train in a second."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from normlab.errors import NormlabError
from normlab.training.config import TrainConfig

WORDS = "the residual stream grows with depth because every block adds its branch to what it was given before".split()
TINY: dict[str, Any] = dict(
    depth=2,
    width=32,
    heads=2,
    steps=8,
    batch_size=2,
    block_length=16,
    vocab_size=300,
    probe_every=4,
    probe_blocks=2,
    eval_every=4,
    eval_blocks=4,
    checkpoint_every=3,
    warmup=0.0,
    dtype="float32",
)

CONFIG = {"scheme": "bhyt", "depth": 1, "width": 8, "seed": 0, "lr": 0.1}


def write_text(path: Path, paragraphs: int = 300) -> Path:
    """A .txt corpus of short paragraphs, the same every time."""
    choose = random.Random(0)
    path.write_text("\n\n".join(" ".join(choose.choices(WORDS, k=20)) for _ in range(paragraphs)))
    return path


def tiny(corpus: Path, **fields: Any) -> TrainConfig:
    return TrainConfig(**{**TINY, "scheme": "bhyt", "corpus": str(corpus), **fields})


def write_files(path: Path, rows: list[tuple], **manifest: Any) -> None:
    """The table and the manifest of a finished run; `manifest` has at least "run" and "config"."""
    from normlab import runs, store

    store.write_stats(path / runs.STATS, runs.stats_frame(rows))
    content = {
        "schema": runs.SCHEMA_VERSION,
        "status": "finished",
        "eval_loss": 2.0,
        "corpus": {"unigram_entropy": 6.5},
        "bigram_loss": 4.5,
        "trigram_loss": 4.0,
        "measured": {"wall_s": 0.0, "tokens_per_s": 1.0},
    }
    store.write_json(path / runs.MANIFEST, {**content, **manifest})


def make_run(root: Path, name: str = "bhyt-a", **manifest: Any) -> Path:
    """A finished run written by hand, with weights."""
    import numpy as np
    from safetensors.numpy import save_file

    from normlab import runs

    path = root / name
    path.mkdir(parents=True)
    rows = [(step, 10 * step, "train", "model", None, "loss", "all", 5.0 - step) for step in range(1, 4)]
    rows += [
        (3, 30, "probe", "block_out", layer, "token_l2_mean", mask, layer + 0.5)
        for layer in (0, 1)
        for mask in ("all", "no_first")
    ]
    save_file({"weight": np.zeros((8, 8), dtype=np.float32)}, path / runs.WEIGHTS)
    write_files(path, rows, **{"run": name, "config": CONFIG, **manifest})
    return path


def write_run(
    config: TrainConfig,
    out: str | Path,
    eval_loss: float | None = 2.0,
    corpus: dict[str, Any] | None = None,
    **manifest: Any,
) -> Path:
    """A finished run written by hand, in no time. `corpus`: its identity, where a true one would take too long."""
    from normlab import store
    from normlab.training.text.corpus import corpus_of

    staged = Path(out) / store.PARTIAL / config.run_id
    shutil.rmtree(staged, ignore_errors=True)  # of a worker that was killed
    staged.mkdir(parents=True)
    rows = [(step, step * config.tokens_per_step, "train", "model", None, "loss", "all", 3.0) for step in (1, 2)]
    content = {
        "run": config.run_id,
        "status": "finished" if eval_loss is not None else "diverged",
        "eval_loss": eval_loss,
        "config": config.to_dict(),
        "corpus": corpus or corpus_of(config, Path(out).parent / "cache").identity(),
    }
    write_files(staged, rows, **{**content, **manifest})
    store.publish(staged, Path(out) / config.run_id)
    return Path(out) / config.run_id


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition. AssertionError if it does not come true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# What processes do in tests; in a module of their own, so that a fresh process can import them.


def work_at_once(config: TrainConfig, out: str, cache_dir: str | None) -> str:
    return str(write_run(config, out, corpus={"unigram_entropy": 6.5}))


def fail_one(config: TrainConfig, out: str, cache_dir: str | None) -> str:
    if config.seed == 1:
        raise NormlabError("this one cannot")
    return work_at_once(config, out, cache_dir)


def die_the_first_time(config: TrainConfig, out: str, cache_dir: str | None) -> str:
    marker = Path(out).parent / f"died-{config.seed}"
    if config.seed == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return work_at_once(config, out, cache_dir)


def train_and_die_once(config: TrainConfig, out: str, cache_dir: str | None) -> str:
    """Train; the first to train seed 1 is killed two steps after a checkpoint. A run that is trained twice fails."""
    from normlab.training.run import train

    place = Path(out).parent

    def watch(step: int, rows: list) -> bool:
        if config.seed == 1 and step == 5 and not (place / "killed").exists():
            (place / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    run = train(config, out, cache_dir=cache_dir, progress=False, watch=watch)
    (place / f"trained-{config.seed}").touch(exist_ok=False)
    return str(run.path)


def always_die(config: TrainConfig, out: str, cache_dir: str | None) -> str:
    if config.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return work_at_once(config, out, cache_dir)


def work_for_ever(config: TrainConfig, out: str, cache_dir: str | None) -> str:
    (Path(out).parent / f"worker-{config.seed}").write_text(str(os.getpid()))
    time.sleep(600)
    raise AssertionError


def observe_for_ever(path: Path) -> None:
    from probe_zoo import tiny_llama, token_batch

    import normlab

    model = tiny_llama()
    observer = normlab.observe(model, every=1, metrics=["rms"], path=path)
    for step in range(10**6):
        observer.step(model(**token_batch()).loss.item(), step)


# Children of a server that has imported everything start to train at once.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["normlab.training.run", "normlab.probes", "datasets", "pandas", "pyarrow.parquet"])


class ForkedCommand:
    """`subprocess.Popen` of a `python -m normlab ...`, in a child of that server."""

    def __init__(self, command: list[str], *, stderr: Any, **_: Any) -> None:
        self._process = FORKS.Process(target=_run_command, args=(command[3:], DupFd(stderr.fileno())), daemon=True)
        self._process.start()
        self.pid, self.terminate, self.kill = self._process.pid, self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("normlab", timeout or 0.0)


def _run_command(arguments: list[str], errors: Any) -> None:
    from normlab.cli import main

    handle = errors.detach()
    os.dup2(handle, 2)
    os.close(handle)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  (the process's own)
    sys.exit(main(arguments))
