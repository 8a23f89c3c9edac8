"""Measurements of how a trained model uses its depth, taken once, after the last step.

`experiments(model, blocks)`   one long table, `COLUMNS`; a run keeps it as experiments.parquet

| metric | part | layer | other |
|---|---|---|---|
| `skip_delta_loss`, `skip_output_kl` | block, attention, mlp | the one skipped | - |
| `skip_delta_loss`, `skip_output_kl` | span | the first of a quarter of the blocks, skipped together | how many |
| `skip_delta_loss` | deleted | the block deleted, the others renumbered | - |
| `skip_future_effect` | block | whose update changes | the block skipped |
| `angular_distance` | block | the earlier layer, from 0 | the later one |
| `jacobian_identity`, `logit_lens_kl` | block | the block; the layer, from 0 | - |
| `carried_var_ratio` | mlp | the block | position in a row, from 0 |

A scheme whose blocks cannot be moved has no `deleted`. One with several residual streams has no `skip_future_effect`,
`angular_distance` or `jacobian_identity`, which compare states of one stream. Definitions are those of the functions of
`normlab.probes`. `standard_error` is over sequences, for the Jacobian over random vectors. It says how well this model
is measured, not how models of other seeds differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas
import torch

from normlab.models import NormlabForCausalLM, moves_blocks, without_blocks
from normlab.probes import (
    angular_distance,
    jacobian_identity,
    logit_lens_kl,
    record,
    skip_future_effect,
    skip_sensitivity,
)
from normlab.probes.passes import device_of, evaluating
from normlab.probes.runner import Runner, token_losses
from normlab.runs import EXPERIMENT_COLUMNS as COLUMNS
from normlab.schemes import get_scheme

ROWS = 8  # sequences a batch: a layer's activations of one batch fit the cache of a core
Row = tuple[str, str, "int | None", "int | None", float, float]


def experiments(model: NormlabForCausalLM, blocks: np.ndarray) -> pandas.DataFrame:
    """All of the above on `blocks`, (sequences, tokens) ids. Every token but a sequence's first is a label."""
    device = device_of(model)
    parts = (blocks[start : start + ROWS] for start in range(0, len(blocks), ROWS))
    batches = [{"input_ids": torch.from_numpy(part).to(device)} for part in parts]
    rows = [row for measure in (_skipping, _deleting, _geometry, _carried) for row in measure(model, batches)]
    types = {"metric": "str", "part": "str", "layer": "Int64", "other": "Int64"}
    return pandas.DataFrame(rows, columns=list(COLUMNS)).astype(types)


def _has_one_stream(model: Any) -> bool:
    return get_scheme(model.config.scheme).leave is None


def _skipping(model: Any, batches: list[dict[str, Any]]) -> Iterator[Row]:
    depth = len(model.model.layers)
    table = skip_sensitivity(model, batches, parts=("block", "attention", "mlp"), progress=False)
    spans = skip_sensitivity(model, batches, span=depth // 4, progress=False) if depth >= 8 else table.iloc[:0]
    for part, found in ((None, table), ("span", spans)):
        for row in found.itertuples():
            where = (part or row.part, row.layer, row.span if part else None)
            yield ("skip_delta_loss", *where, row.skip_delta_loss, row.standard_error)
            yield ("skip_output_kl", *where, row.output_kl, row.output_kl_error)
    if depth > 1 and _has_one_stream(model):
        for row in skip_future_effect(model, batches, progress=False).itertuples():
            yield ("skip_future_effect", "block", row.layer, row.skipped, row.value, row.standard_error)


@torch.no_grad()
def _deleting(model: Any, batches: list[dict[str, Any]]) -> Iterator[Row]:
    """Loss added by deleting a block and renumbering the rest, paired by sequence."""
    depth = len(model.model.layers)
    if depth == 1 or not moves_blocks(model):
        return
    whole = _sequence_losses(model, batches)
    for layer in range(1, depth + 1):
        with without_blocks(model, [layer]):
            added = _sequence_losses(model, batches) - whole
        error = float(added.std() / len(added) ** 0.5)
        yield ("skip_delta_loss", "deleted", layer, None, float(added.mean()), error)


def _sequence_losses(model: Any, batches: list[dict[str, Any]]) -> torch.Tensor:
    """Mean token loss of each sequence, float64; all have the same number of labels."""
    runner = Runner(model, batches, progress=False, title="")
    with evaluating(model):
        found = [token_losses(runner.logits(batch), runner.labels(batch)) for batch in runner]
    return torch.cat(found).double().sum(1) / (found[0].shape[1] - 1)


def _geometry(model: Any, batches: list[dict[str, Any]]) -> Iterator[Row]:
    tables = {"logit_lens_kl": logit_lens_kl(model, batches, progress=False)}
    if _has_one_stream(model):
        angles = angular_distance(model, batches, progress=False)
        errors = angles.attrs["standard_error"]
        for a in angles.index:
            for b in angles.index[a + 1 :]:
                yield ("angular_distance", "block", a, b, angles.loc[a, b], errors.loc[a, b])
        tables = {"jacobian_identity": jacobian_identity(model, batches, progress=False), **tables}
    for name, table in tables.items():
        for row in table.itertuples():
            yield (name, "block", row.layer, None, row.value, row.standard_error)


def _carried(model: Any, batches: list[dict[str, Any]]) -> Iterator[Row]:
    if not any(block.carried for block in model.model.layers):
        return
    with evaluating(model), torch.no_grad(), record(model, ["carried_var_ratio"], masks=["all"]) as recorder:
        for batch in batches:
            model(**batch, use_cache=False)
    for row in recorder.stats().carried_by_position().itertuples():
        yield ("carried_var_ratio", "mlp", row.layer, row.position, row.value, float("nan"))
