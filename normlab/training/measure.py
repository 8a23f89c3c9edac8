"""Measurements of a run while it trains, and its log.

`RunLog`                the run's measurements, one row per value
`Measurements`          `after` a step: layer statistics, held-out and training loss, and all that `store_all` stores

Layer statistics are of one fixed held-out batch. Nothing here changes gradients, parameters or random states.

With `store_all` a run also has these rows:

| metric | split | site | layer | at steps |
|---|---|---|---|---|
| `parameter_rms` | probe | a parameter's name within its block | block | of layer statistics |
| `parameter_mean`, of gains | probe | the same | block | of layer statistics |
| `uniform_attention` | probe | model | block | of layer statistics |
| `copy_loss` | probe | model | - | of layer statistics |
| `seen_loss` | probe | model | - | the last |
| `validation_loss`, of runs that report the half "test" | eval | model | - | the last |
| `file_loss`, `file_tokens` | eval | a held-out file's path | - | the last |

Definitions are in `normlab.probes.metrics.ALL_METRICS`. The mean of `file_loss`, weighted by `file_tokens`, is the
last held-out loss. Text that is not split by file has none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from normlab.models.block import whole
from normlab.probes import record
from normlab.probes.passes import device_of, evaluating
from normlab.probes.runner import token_losses
from normlab.runs import Row, rows_of, stats_frame
from normlab.training.config import TrainConfig
from normlab.training.loop import Step, Training, block_order
from normlab.training.text.corpus import Corpus

EVAL_TOKENS = 4096  # at most in one forward pass; every rank has room for them
NEARLY = 0.98  # of uniform attention's entropy: above it, attention counts as uniform
COPIES = 32  # rows of copied tokens
_IN_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")


class RunLog:
    """Rows of the run's table, in the order in which they were measured."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.rows: list[Row] = []
        self._told = 0

    def add(
        self,
        step: int,
        split: str,
        metric: str,
        value: float,
        site: str = "model",
        layer: Any = None,
        mask: str = "all",
    ) -> None:
        index = None if pd.isna(layer) else int(layer)
        self.rows.append(Row(step, step * self.tokens_per_step, split, site, index, metric, mask, float(value)))

    def frame(self) -> pd.DataFrame:
        return stats_frame(self.rows)

    def news(self) -> list[Row]:
        """The rows since the last call."""
        news, self._told = self.rows[self._told :], len(self.rows)
        return news

    def restore(self, path: Path) -> None:
        """Go back to the rows of a checkpoint."""
        self.rows, self._told = list(rows_of(pd.read_parquet(path))), 0

    def last(self, metric: str, split: str) -> float | None:
        """The value measured last; None if there is none."""
        values = (row.value for row in reversed(self.rows) if (row.metric, row.split) == (metric, split))
        return next(values, None)


class Measurements:
    """Everything that a run measures on its model.

    Attributes:
        on: the held-out blocks.
        log: where rows are added.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        self.config, self.corpus, self.log = config, corpus, RunLog(config.tokens_per_step)
        self.on = corpus.measured_on(config)
        self.batch_size = max(1, min(config.batch_size // config.accumulate, EVAL_TOKENS // config.block_length))

    def at(self, model: nn.Module, step: int) -> None:
        """Measure what is due after `step` optimizer steps."""
        config = self.config
        if config.is_due(step, config.probe_every):
            self.layers(model, step)
        if config.is_due(step, config.eval_every):
            self.log.add(step, "eval", "loss", mean_token_loss(model, self.on.eval, self.batch_size))
        if config.store_all and config.is_due(step, config.probe_every):
            self.stored(model, step)

    def after(self, training: Training, step: Step) -> float | None:
        """Measure and log what is due after a step of training. The logged training loss; None if it is not due."""
        config, number = self.config, step.number
        self.at(training.model, number)
        if training.scaler is not None:
            self.log.add(number, "train", "loss_scale", training.scaler.get_scale())
            self.log.add(number, "train", "skipped_step", step.overflowed)
        if not config.is_due(number, config.log_every):
            return None
        loss = training.mean_loss()
        self.log.add(number, "train", "loss", loss)
        self.log.add(number, "train", "grad_norm", whole(step.grad_norm).item())
        self.log.add(number, "train", "learning_rate", step.learning_rate)
        return loss

    def layers(self, model: nn.Module, step: int) -> None:
        """Layer statistics. Gradients are of the summed token loss, towards block 1's input by `autograd.grad`."""
        ids = torch.from_numpy(self.on.probe).to(device_of(model))
        # Given, because logits that are all alike do not tell it.
        recorder = record(model, metrics=self.config.probe_metrics(), loss_tokens=ids[:, 1:].numel())
        with evaluating(model), torch.enable_grad(), recorder:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            recorder.backward(loss)
        self.log.add(step, "probe", "loss", loss.item())
        table = recorder.stats().to_pandas()
        for row in table[["site", "layer", "metric", "mask", "value"]].itertuples(index=False):
            self.log.add(step, "probe", row.metric, row.value, row.site, row.layer, row.mask)

    def stored(self, model: nn.Module, step: int) -> None:
        """The table above, after the layer statistics, whose attention entropy it reads."""
        for site, layer, metric, value in (*_parameter_sizes(model), *self._uniform_attention(step)):
            self.log.add(step, "probe", metric, value, site, layer)
        copied = copied_tokens(self.corpus.vocab_size, self.corpus.eos_token_id, self.config.block_length)
        # The first copy determines what follows the first copied token.
        copy_losses = each_token_loss(model, copied, self.batch_size)[:, copied.shape[1] // 2 :]
        self.log.add(step, "probe", "copy_loss", copy_losses.mean())
        if step == self.config.last_step:
            seen = seen_blocks(self.config, self.corpus.train)
            self.log.add(step, "probe", "seen_loss", each_token_loss(model, seen, self.batch_size).mean())
            if self.config.held_out == "test":
                others = self.corpus.spread(self.config.eval_blocks, "validation")
                self.log.add(step, "eval", "validation_loss", mean_token_loss(model, others, self.batch_size))
            self._file_losses(model, step)

    def _uniform_attention(self, step: int) -> Iterator[tuple[str, int | None, str, float]]:
        """1 for each block whose attention is uniform at this step. A query at position t sees t tokens."""
        most = np.log(np.arange(1, self.config.block_length + 1)).mean()
        for row in self.log.rows:
            if (row.step, row.metric, row.mask) == (step, "attention_entropy", "all"):
                yield "model", row.layer, "uniform_attention", float(row.value > NEARLY * most)

    def _file_losses(self, model: nn.Module, step: int) -> None:
        if self.on.eval_files is None:
            return
        losses = each_token_loss(model, self.on.eval, self.batch_size)
        files = self.on.eval_files[:, 1:].reshape(-1)  # of the labels
        sums, counts = np.bincount(files, losses.reshape(-1)), np.bincount(files)
        for file in np.flatnonzero(counts).tolist():
            path = self.corpus.files[file][0]
            self.log.add(step, "eval", "file_loss", sums[file] / counts[file], path)
            self.log.add(step, "eval", "file_tokens", counts[file], path)


def _batches(model: nn.Module, blocks: np.ndarray, batch_size: int) -> Iterator[torch.Tensor]:
    for start in range(0, len(blocks), batch_size):
        yield torch.from_numpy(blocks[start : start + batch_size]).to(device_of(model))


def mean_token_loss(model: nn.Module, blocks: np.ndarray, batch_size: int) -> float:
    """Mean cross-entropy per token over all blocks, in nats. All blocks have equally many labels."""
    total = 0.0
    with evaluating(model), torch.no_grad():
        for ids in _batches(model, blocks, batch_size):
            total += model(input_ids=ids, labels=ids, use_cache=False).loss.item() * len(ids)
    return total / len(blocks)


def each_token_loss(model: nn.Module, blocks: np.ndarray, batch_size: int) -> np.ndarray:
    """(blocks, tokens - 1) cross-entropies in nats: of each token but a row's first."""
    losses = []
    with evaluating(model), torch.no_grad():
        for ids in _batches(model, blocks, batch_size):
            losses.append(token_losses(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:]))
    return torch.cat(losses).double().cpu().numpy()


def copied_tokens(vocab_size: int, eos_token_id: int, length: int) -> np.ndarray:
    """(COPIES, 2 x (length // 2)) ids: random tokens, each row twice, equal for all runs of a vocabulary."""
    tokens = np.delete(np.arange(vocab_size), eos_token_id)
    once = np.random.default_rng(0).choice(tokens, (COPIES, length // 2))
    return np.concatenate([once, once], axis=1)


def seen_blocks(config: TrainConfig, train: np.ndarray) -> np.ndarray:
    """As many blocks as the held-out loss is taken on, evenly spaced over those trained on, in their order. They are
    equal for all runs with one seed and number of steps."""
    order = list(itertools.islice(block_order(len(train), config.seed), config.last_step * config.batch_size))
    chosen = np.linspace(0, len(order) - 1, min(config.eval_blocks, len(order))).round().astype(int)
    return train[np.array(order)[chosen]].astype(np.int64)


def _parameter_sizes(model: nn.Module) -> Iterator[tuple[str, int | None, str, float]]:
    """Site, layer, metric and value of every parameter's size."""
    for name, parameter in model.named_parameters():
        inside = _IN_BLOCK.fullmatch(name)
        layer, site = (int(inside[1]) + 1, inside[2]) if inside else (None, name)
        values = whole(parameter.detach()).float()
        yield site, layer, "parameter_rms", values.square().mean().sqrt().item()
        if parameter.dim() < 2:
            yield site, layer, "parameter_mean", values.mean().item()
