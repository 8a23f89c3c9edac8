"""Train the preset `gpu` on a machine that is there for minutes, with a GPU and without a network.

    python -m benchmarks.gpu_runs --prepare CACHE                                  # where the text is
    python -m benchmarks.gpu_runs --cache-dir CACHE --out OUT --minutes 9          # where the GPU is

`--prepare` writes the text as blocks of tokens into a directory to carry along. Runs begin in the preset's order, six
at a time, without those that data/gpu has. None begins that would not end in time, by the slowest block of those that
ended. Every 20 seconds OUT gets what is finished, as packed runs. `--steps` shortens the runs, to rehearse.

On one H200 six runs of 24 blocks take 280 seconds together, 41,000 tokens/s each, and the GPU is busy all the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from normlab import packed
from normlab.runs import Run, read_run
from normlab.study.presets import get_preset
from normlab.training.config import TrainConfig
from normlab.training.grids import planned
from normlab.training.text.corpus import carry, corpus_of
from normlab.training.workers import end_with_parent, train_one

PACKED_EVERY = 20
THERE = Path(__file__).parents[1] / "data" / "gpu"


def wanted(steps: int | None, threads: int) -> list[TrainConfig]:
    """The preset's runs in order, each once, that are not there yet."""
    more = {} if steps is None else {"steps": steps, "probe_every": steps, "eval_every": steps, "log_every": 1}
    fields = {"threads": threads, "keep_weights": False}
    configs = (dataclasses.replace(config, **more) for config in planned(get_preset("gpu"), **fields))
    there = names(THERE)
    return list({config.run_id: config for config in configs if config.run_id not in there}.values())


def names(folder: Path) -> list[str]:
    """The runs that are packed there."""
    return [] if (found := packed.opened(folder)) is None else found.names


def told(run: Run) -> str:
    measured = run.manifest["measured"]
    return f"loss {run.eval_loss:.3f}, {measured['tokens_per_s']:.0f} tokens/s, {measured['wall_s']:.0f} s in all"


def pack(work: Path, out: Path) -> None:
    try:
        packed.add(work, out)
    except Exception as error:  # what is trained goes on
        print(f"not packed: {error!r}", flush=True)


def train_all(configs: Sequence[TrainConfig], work: Path, cache_dir: Path | None, workers: int, end: float) -> int:
    """Train what ends in time, so many at once; return how many are not finished.

    Each has a process of its own, whose death is no other's.
    """
    began, per_block, left = time.monotonic(), 0.0, list(configs)
    running = dict[Future, tuple[TrainConfig, float]]()
    cache = None if cache_dir is None else str(cache_dir)
    while (now := time.monotonic()) < end:
        for config in [c for c in left if now + per_block * c.depth < end][: workers - len(running)]:
            left.remove(config)
            pool = ProcessPoolExecutor(1, get_context("spawn"), end_with_parent)
            running[pool.submit(train_one, config, str(work), cache)] = config, now
        if not running:
            break
        for future in wait(running, timeout=end - now, return_when=FIRST_COMPLETED).done:
            (config, start), error = running.pop(future), future.exception()
            if error is None:
                per_block = max(per_block, (time.monotonic() - start) / config.depth)
            said = f"failed, {error!r}" if error else told(read_run(future.result()))
            print(f"{time.monotonic() - began:5.0f} s  {config.run_id}: {said}", flush=True)
    return len(left) + len(running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--prepare", type=Path)
    where.add_argument("--out", type=Path)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--first", type=int, help="only so many runs")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    configs = wanted(options.steps, max(1, (os.cpu_count() or 1) // options.workers))[: options.first]
    if not configs:
        parser.exit(message=f"{THERE} has all runs\n")
    if options.prepare:
        carry(configs[0], options.prepare)
        return
    corpus_of(configs[0], options.cache_dir)
    work = Path(tempfile.mkdtemp())

    def packing() -> None:
        while True:
            time.sleep(PACKED_EVERY)
            pack(work, options.out)

    threading.Thread(target=packing, daemon=True).start()
    unfinished = train_all(configs, work, options.cache_dir, options.workers, end)
    pack(work, options.out)
    print(f"{len(names(options.out))} runs in {options.out}, {unfinished} not finished", flush=True)
    os._exit(0)  # what is in progress ends with it


if __name__ == "__main__":
    main()
