"""Measurements of a report: every stack of a model recorded on batches, and experiments on its layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from normlab.errors import NormlabError, in_one_line
from normlab.probes import (
    FORWARD_METRICS,
    METRICS,
    CallInputs,
    LayerStats,
    Sites,
    angular_distance,
    attention_sinks,
    cheapest_spans,
    logit_lens_kl,
    massive_activations,
    mergekit_config,
    record,
    sites,
    skip_sensitivity,
    stacks,
)
from normlab.probes.forward_call import IGNORED_LABEL
from normlab.report.inputs import Batches, Loaded

if TYPE_CHECKING:
    import pandas


@dataclass
class Measured:
    """One stack: its sites, statistics and experiments, and why others were left out."""

    name: str  # empty for a model of one stack
    where: Sites
    stats: LayerStats
    loss: float | None  # the mean of the model's own loss, nats per label
    tables: dict[str, pandas.DataFrame] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def cuts(self, loaded: Loaded) -> list[tuple[Any, str]]:
        """Rows of the table of spans, each with its mergekit configuration."""
        rows = self.tables["spans"].itertuples() if "spans" in self.tables else ()
        dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
        return [(row, mergekit_config(loaded.name, row.keep, dtype)) for row in rows]


def measure(loaded: Loaded, batches: Batches) -> list[Measured]:
    """Record every stack that runs with all metrics, without gradients if there are no labels.

    Raises:
        NormlabError: no stack can be measured.
    """
    try:
        chosen = {"": sites(loaded.model)}
    except NormlabError:
        chosen = stacks(loaded.model)
    metrics = list(METRICS if "labels" in batches[0] else FORWARD_METRICS)
    measured, reasons = [], []
    for name, where in chosen.items():
        try:
            measured.append(Measured(name, where, *_recorded(where, loaded, batches, metrics)))
        except NormlabError as error:
            reasons.append(str(error))
    if not measured:
        raise NormlabError(reasons[0])
    return measured


def _recorded(where: Sites, loaded: Loaded, batches: Batches, metrics: list[str]) -> tuple[LayerStats, float | None]:
    dtype, total, count = next(loaded.model.parameters()).dtype, 0.0, 0.0
    # A loss in 8 or 11 bits is too coarse to be compared with its logits, so the count of its labels is given.
    coarse = partial(_labels_averaged, loaded.task) if torch.finfo(dtype).bits < 32 else None
    with record(where, metrics, loss_tokens=coarse) as recorder, torch.set_grad_enabled("labels" in batches[0]):
        for batch in batches:
            output = _called(loaded, batch, dtype)
            if "labels" in batch:
                recorder.backward(output.loss)
                labels = _label_count(batch["labels"], loaded.task)
                total, count = total + float(output.loss.detach()) * labels, count + labels
    return recorder.stats(), total / count if count else None


def _called(loaded: Loaded, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    pixels = {name: x.to(dtype) for name, x in batch.items() if x.is_floating_point()}
    try:
        return loaded.model(**{**batch, **pixels})
    except NormlabError:
        raise
    except Exception as error:  # the model's own code: what it raises cannot be known
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in batch.items())
        raise NormlabError(f"{type(loaded.model).__name__} does not run on {shapes}: {in_one_line(error)}") from error


def _labels_averaged(task: str, inputs: CallInputs) -> float | None:
    labels = inputs.arguments.get("labels")
    return None if labels is None else _label_count(labels, task)


def _label_count(labels: torch.Tensor, task: str) -> float:
    """The number of labels that a batch's loss averages over."""
    return float(((labels[:, 1:] if task == "causal" else labels) != IGNORED_LABEL).sum())


def experiment(measured: Measured, batches: Batches, progress: bool) -> None:
    """Run the experiments that apply; `left_out` names the others."""
    few, where = batches[: max(1, len(batches) // 4)], measured.where
    changes = [why for why in measured.stats.manifest["absent"].values() if "changes the stream" in why]
    if changes or "labels" not in batches[0]:
        without = "blocks that change the stream's shape" if changes else "images without labels"
        measured.left_out.append(
            f"skip_sensitivity, angular_distance, logit_lens, tokens unlike all others, spans: not for {without}"
        )
        return
    parts = ["block", "attention", "mlp"]
    tests = {
        "skip_sensitivity": lambda: skip_sensitivity(where, few, parts=parts, progress=progress),
        "angular_distance": lambda: angular_distance(where, few, progress=progress),
        "logit_lens": lambda: logit_lens_kl(where, few, progress=progress),
        "massive_activations": lambda: massive_activations(where, batches[0]).table,
        "attention_sinks": lambda: attention_sinks(where, batches[0]).table,
        "spans": lambda: cheapest_spans(where, batches[: max(2, len(few))], progress=progress),
    }
    for name, test in tests.items():
        if name == "spans" and where.depth < 2:
            continue
        try:
            measured.tables[name] = test()
        except Exception as error:  # the model's own code: what it raises cannot be known
            measured.left_out.append(f"{name}: {in_one_line(error)}")
