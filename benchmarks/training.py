"""Whole training steps timed against each other, on this machine: `normlab bench`.

Each scheme that exists in a cheaper form runs against Pre-LN, and `normlab train` against a bare loop. At the sweep's
smallest depth bfloat16 runs against float32, and compiled against not. Each of these steps is compared with the core's
peak. The fastest of them also runs with larger batches and on two threads. Statistics are off on both sides. A refresh
of BHyT's statistics is part of its step.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import set_seed

from benchmarks.timing import interleaved, ratio
from normlab.errors import NormlabError
from normlab.models import NormlabForCausalLM
from normlab.schemes import BASELINE, tagged
from normlab.training.config import TrainConfig
from normlab.training.distributed import accelerator_for
from normlab.training.loop import (
    MeanLoss,
    Training,
    autocast,
    block_order,
    compiled_step,
    parameter_groups,
    refresh_interval,
    use_fast_attention,
)
from normlab.training.text.corpus import Corpus, corpus_of

if TYPE_CHECKING:
    import pandas as pd

STEPS = 6  # of one side of a pair: as many as lie between two refreshes of a 300-step run
SMALLEST = 4  # depth of the sweep's smallest models
PEAK_SIZE = 2048  # of the square matrices whose product is the peak: far beyond a core's caches, so blocked and busy
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32 compiled": {"dtype": "float32", "compile": True},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 compiled": {"dtype": "bfloat16", "compile": True},
}
COMPARED = (
    ("bfloat16", "float32"),
    ("bfloat16 compiled", "float32 compiled"),
    ("float32 compiled", "float32"),
    ("bfloat16 compiled", "bfloat16"),
    ("bfloat16 compiled", "float32"),
)
FASTEST = "bfloat16 compiled"
LARGER: dict[str, dict[str, Any]] = {
    "batch 16": {"batch_size": 16},
    "batch 32": {"batch_size": 32},
    "two threads": {"threads": 2},
}


class BareLoop:
    """The least that trains: model, AdamW, clipping, the data in the same order as `normlab train`."""

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        set_seed(config.seed)
        self.config, self.corpus = config, corpus
        self.model = NormlabForCausalLM(config.model_config(corpus.vocab_size, corpus.eos_token_id)).train()
        self.model.set_schedules(0, config.steps)
        self.model.config.use_cache = False
        use_fast_attention(self.model, config.dtype, self.model.device)
        loss = MeanLoss(self.model)
        # Several loops run in turns, each with batches of one shape.
        self.forward = compiled_step(loss, dynamic=False) if config.compile else loss
        self.labels = torch.tensor(float(config.batch_size * (config.block_length - 1)))
        groups = parameter_groups(self.model, config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
        self.order = block_order(len(corpus.train), config.seed)

    def run(self, steps: int) -> float:
        """Seconds per step."""
        every = refresh_interval(self.config.steps)
        started = time.perf_counter()
        for step in range(1, steps + 1):
            rows = [next(self.order) for _ in range(self.config.batch_size)]
            ids = torch.from_numpy(self.corpus.train[rows].astype("int64"))
            with autocast(self.config.dtype, self.model.device):
                loss = self.forward(ids, self.labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.model.after_step(step, self.config.steps)
            if step % every == 0:
                self.model.refresh_carried()
        return (time.perf_counter() - started) / steps


def step_flops(model: torch.nn.Module, config: TrainConfig) -> float:
    """Floating-point operations of a training step's matrix products, 6 N + 12 L d T per token.

    N weights of matrices, tied embeddings once, L layers of width d, T tokens per block (Chowdhery et al. 2022,
    2204.02311, appendix B).
    """
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    return config.tokens_per_step * (6 * weights + 12 * config.depth * config.width * config.block_length)


def peak_seconds(flops: float, dtype: str) -> float:
    """Seconds that as many operations take in a product of large square matrices."""
    matrix = torch.ones(PEAK_SIZE, PEAK_SIZE, dtype=getattr(torch, dtype))
    started = time.perf_counter()
    matrix @ matrix
    return (time.perf_counter() - started) * flops / (2 * PEAK_SIZE**3)


def trainer_seconds(config: TrainConfig, corpus: Corpus, steps: int) -> float:
    """Seconds per step of `normlab train` without statistics and checkpoints, reading the text included."""
    trained = Training(config, corpus, accelerator_for(config)).steps()
    started = time.perf_counter()
    for _ in range(steps):
        next(trained)
    return (time.perf_counter() - started) / steps


def precisions(config: TrainConfig, corpus: Corpus, rounds: int, tick: Callable[[], Any]) -> list[dict[str, Any]]:
    """Rows of COMPARED, then of each precision against the core's peak, all from the same rounds."""
    loops = {name: BareLoop(replace(config, **fields), corpus) for name, fields in PRECISIONS.items()}
    flops = step_flops(loops["float32"].model, config)
    sides: dict[str, Callable[[], float]] = {f"{name} step": partial(loop.run, STEPS) for name, loop in loops.items()}
    for loop in loops.values():
        sides[_peak_name(loop)] = partial(peak_seconds, flops, loop.config.dtype)
    times = interleaved(sides, rounds, tick)
    rows = [_row(f"{what} step", f"{base} step", times) for what, base in COMPARED]
    for name, loop in loops.items():
        row = _row(f"{name} step", _peak_name(loop), times)
        rows.append(row | {"peak_share": 1 / row["ratio"]})
    return [row | {"depth": config.depth} for row in rows]


def larger(config: TrainConfig, corpus: Corpus, rounds: int, tick: Callable[[], Any]) -> list[dict[str, Any]]:
    """Rows of the fastest precision's step with each of LARGER over the same without, for as many tokens."""
    base = replace(config, threads=1, **PRECISIONS[FASTEST])
    configs = {f"{FASTEST} step": base}
    configs |= {f"{FASTEST} step, {name}": replace(base, **fields) for name, fields in LARGER.items()}
    sides = {name: partial(_seconds_of_base, BareLoop(each, corpus), base.batch_size) for name, each in configs.items()}
    times = interleaved(sides, rounds, tick)
    return [
        _row(name, f"{FASTEST} step", times) | {"depth": config.depth, "threads": each.threads}
        for name, each in configs.items()
        if each is not base
    ]


def _seconds_of_base(loop: BareLoop, batch_size: int) -> float:
    """Seconds for a step's worth of tokens at that batch size, on the loop's own threads."""
    with threads_of(loop.config.threads):
        return loop.run(STEPS) * batch_size / loop.config.batch_size


def _peak_name(loop: BareLoop) -> str:
    return f"{loop.config.dtype} matrix product"


def bench(
    pairs: int = 9,
    *,
    schemes: Sequence[str] = tagged("timed"),
    depth: int = 16,
    precision_depth: int = SMALLEST,
    width: int = 128,
    threads: int = 1,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Time all pairs of sides, `pairs` times each.

    Returns:
        Columns `what base depth threads ratio low high seconds base_seconds pairs tokens_per_s peak_share`. ratio is
        the median of what/base, low and high are the middle half of the pairs. tokens_per_s is that of `what` on one
        core. peak_share, where the base is a matrix product, is the share of the core's peak that the step reaches.

    Raises:
        NormlabError: a bad argument, or no C++ compiler for the compiled steps.
    """
    import pandas as pd
    from tqdm import tqdm

    if pairs < 1:
        raise NormlabError(f"pairs is {pairs}; it must be at least 1")
    config = TrainConfig(
        depth=depth,
        width=width,
        threads=threads,
        probe_every=0,
        eval_every=0,
        checkpoint_every=0,
        scheme=BASELINE,
        dtype="float32",
        keep_weights=False,
    )
    timed = {name: replace(config, scheme=name) for name in (*schemes, BASELINE)}
    if not any(map(shutil.which, ("g++", "clang++", "cl"))):
        raise NormlabError("compiled steps are timed here, which needs a C++ compiler: install g++ or clang")
    corpus = corpus_of(config, cache_dir, progress)
    rows = []
    total = pairs * (len(schemes) + 3)
    with threads_of(threads), tqdm(total=total, desc="bench", disable=not progress) as bar:
        for scheme in schemes:
            loops = {f"{name} step": BareLoop(timed[name], corpus) for name in (scheme, BASELINE)}
            times = interleaved({name: partial(loop.run, STEPS) for name, loop in loops.items()}, pairs, bar.update)
            rows.append(_row(f"{scheme} step", f"{BASELINE} step", times) | {"depth": depth})
        whole = {
            "normlab train": partial(trainer_seconds, config, corpus, STEPS),
            "bare PyTorch loop": lambda: BareLoop(config, corpus).run(STEPS),
        }
        times = interleaved(whole, pairs, bar.update)
        rows.append(_row("normlab train", "bare PyTorch loop", times) | {"depth": depth})
        small = replace(config, depth=precision_depth)
        rows += [*precisions(small, corpus, pairs, bar.update), *larger(small, corpus, pairs, bar.update)]
    table = pd.DataFrame([{"threads": threads} | row for row in rows])
    return table.assign(tokens_per_s=config.tokens_per_step / table["seconds"] / table["threads"])


def _row(what: str, base: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """One row: the times of a side over those of another."""
    middle, low, high = ratio(times[what], times[base])
    return {
        "what": what,
        "base": base,
        "ratio": middle,
        "low": low,
        "high": high,
        "seconds": statistics.median(times[what]),
        "base_seconds": statistics.median(times[base]),
        "pairs": len(times[what]),
    }


@contextlib.contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Compute with this many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
