"""Whole training steps timed against each other, on this machine.

`bench(pairs)`   a table of ratios: each scheme that exists in a cheaper form against Pre-LN, and `normlab train`
                 against a bare loop

A ratio is the median over interleaved pairs: one side, then the other, a few steps each, so that a machine that slows
down slows both. Statistics are off on both sides; what BHyT's schedule refreshes is part of its step.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, set_seed

from normlab.errors import NormlabError
from normlab.models import NormlabForCausalLM
from normlab.schemes import BASELINE, TIMED
from normlab.training.callbacks import refresh_interval
from normlab.training.config import TrainConfig
from normlab.training.corpus import Corpus, load_corpus
from normlab.training.trainer import SeededOrder, build_trainer

if TYPE_CHECKING:
    import pandas as pd

STEPS = 6  # a side of a pair: as many as lie between two refreshes of a 300-step run


class BareLoop:
    """The least that trains: model, AdamW, clipping, the data in the same order as `normlab train`."""

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        set_seed(config.seed)
        self.config, self.corpus = config, corpus
        self.model = NormlabForCausalLM(config.model_config(corpus.vocab_size, corpus.eos_token_id)).train()
        decayed = set(self.model.decay_parameter_names())
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if (n in decayed) is decays], "weight_decay": decay}
            for decays, decay in ((True, config.weight_decay), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
        self.order = iter(SeededOrder(len(corpus.train), config.steps * config.batch_size, config.seed))

    def run(self, steps: int) -> float:
        """Seconds a step."""
        every = refresh_interval(self.config.steps)
        started = time.perf_counter()
        for step in range(1, steps + 1):
            rows = [next(self.order) for _ in range(self.config.batch_size)]
            ids = torch.from_numpy(self.corpus.train[rows].astype("int64"))
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step % every == 0:
                self.model.refresh_carried()
        return (time.perf_counter() - started) / steps


def bare_seconds(config: TrainConfig, corpus: Corpus, steps: int) -> float:
    """Seconds a step of a bare loop from the start, to set beside `trainer_seconds`."""
    return BareLoop(config, corpus).run(steps)


class _Stopwatch(TrainerCallback):
    """Ends training after `steps` and keeps the seconds a step, data loading, logging and refreshing included."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.steps

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = (time.perf_counter() - self.started) / self.steps


def trainer_seconds(config: TrainConfig, corpus: Corpus, steps: int) -> float:
    """Seconds a step of `normlab train` without statistics and checkpoints."""
    with tempfile.TemporaryDirectory() as work:
        trainer, *_ = build_trainer(config, corpus, Path(work), progress=False)
        watch = _Stopwatch(steps)
        trainer.add_callback(watch)
        trainer.train()
    return watch.seconds


def interleaved(
    left: Callable[[], float], right: Callable[[], float], pairs: int, tick: Callable[[], Any]
) -> list[tuple[float, float]]:
    """Times (left, right) of `pairs` pairs, the side that goes first alternating, after one of each that does not
    count."""
    left(), right()
    times = []
    for index in range(pairs):
        if index % 2:
            b, a = right(), left()
        else:
            a, b = left(), right()
        times.append((a, b))
        tick()
    return times


def bench(
    pairs: int = 9,
    *,
    schemes: Sequence[str] = TIMED,
    depth: int = 16,
    width: int = 128,
    threads: int = 1,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Columns: what, base, ratio (median of what/base), low, high (the middle half of the pairs), seconds,
    base_seconds, pairs."""
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
        keep_weights=False,
    )
    corpus = load_corpus(
        vocab_size=config.vocab_size, block_length=config.block_length, cache_dir=cache_dir, progress=progress
    )
    rows = []
    with _threads(threads), tqdm(total=pairs * (len(schemes) + 1), desc="bench", disable=not progress) as bar:
        for scheme in schemes:
            left, right = (BareLoop(_with_scheme(config, name), corpus) for name in (scheme, BASELINE))
            times = interleaved(partial(left.run, STEPS), partial(right.run, STEPS), pairs, bar.update)
            rows.append(_row(f"{scheme} step", f"{BASELINE} step", times))
        times = interleaved(
            partial(trainer_seconds, config, corpus, STEPS),
            partial(bare_seconds, config, corpus, STEPS),
            pairs,
            bar.update,
        )
        rows.append(_row("normlab train", "bare PyTorch loop", times))
    return pd.DataFrame(rows)


def _with_scheme(config: TrainConfig, scheme: str) -> TrainConfig:
    return TrainConfig.from_dict({**config.to_dict(), "scheme": scheme})


def _row(what: str, base: str, times: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = sorted(a / b for a, b in times)
    quarter = len(ratios) // 4
    return {
        "what": what,
        "base": base,
        "ratio": statistics.median(ratios),
        "low": ratios[quarter],
        "high": ratios[-1 - quarter],
        "seconds": statistics.median(a for a, _ in times),
        "base_seconds": statistics.median(b for _, b in times),
        "pairs": len(times),
    }


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
