"""What a model loses where its blocks compute with few bits: outliers are what norms are blamed for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.experiments import IGNORED_LABEL, Batch, Runner, interval, row_means, token_losses
from normlab.probes.passes import hooked
from normlab.probes.sites import Sites

if TYPE_CHECKING:
    import pandas

PARTS = ("weights", "activations", "both")


@torch.no_grad()
def quantization_costs(
    model: nn.Module | Sites, batches: Iterable[Batch], *, bits: Sequence[int] = (8, 4), progress: bool = True
) -> pandas.DataFrame:
    """Measure how much the loss rises where the linear layers of all blocks compute with few bits.

    Round to nearest, symmetric: x is replaced by s round(x/s), |round(x/s)| <= 2^(bits-1) - 1, s = max |x| /
    (2^(bits-1) - 1). The maximum is over an output channel of a weight, and over a token of what a linear layer reads,
    as in the tables of *Outlier-Safe Pre-Training* (2506.19697). One outlier then takes the digits of all other values
    of its token. The products themselves are in the model's precision. Embeddings and head keep theirs.

    Args:
        model, batches, progress: as for `skip_sensitivity`.
        bits: of a number, 2 or more each.

    Returns:
        One row per number of bits and part, "weights", "activations" or "both": `bits part loss delta_loss
        standard_error low high tokens`. `loss` is the whole model's, in nats per token, `delta_loss` what it rises by.

    Raises:
        NormlabError: bits below 2; a block has matrices outside of linear layers, as experts in one tensor; or as for
            `skip_sensitivity`.
    """
    import pandas

    for number in bits:
        if not isinstance(number, int) or number < 2:
            raise NormlabError(f"bits is {number!r}: give whole numbers from 2 on")
    runner = Runner(model, batches, progress, "quantization")
    linear = _linear_layers(runner.sites)
    cases = [(number, part) for number in bits for part in PARTS]

    def sums(batch: Batch) -> tuple[Tensor, Tensor]:
        labels = runner.labels(batch)
        base = token_losses(runner.logits(batch), labels)
        values = [base.sum(1)]
        for number, part in cases:
            hook = partial(_rounded_input, number)
            inputs = hooked(before=[(module, hook) for module in linear]) if part != "weights" else nullcontext()
            with inputs, _rounded_weights(linear if part != "activations" else {}, number):
                values.append((token_losses(runner.logits(batch), labels) - base).sum(1))
        return torch.stack(values), (labels != IGNORED_LABEL).sum(1)

    means, errors, tokens = row_means(runner, sums)
    (loss, *deltas), (_, *errors_of) = means.tolist(), errors.tolist()
    rows: list[dict[str, Any]] = []
    for (number, part), delta, error in zip(cases, deltas, errors_of, strict=True):
        row = {"bits": number, "part": part, "loss": loss, "delta_loss": delta}
        rows.append(row | interval(delta, error) | {"tokens": tokens})
    return pandas.DataFrame(rows)


def rounded(x: Tensor, bits: int, dim: int) -> Tensor:
    """`x` to the nearest of 2^bits - 1 values, symmetric about 0, with a scale for each slice along `dim`."""
    most = 2 ** (bits - 1) - 1
    scale = x.float().abs().amax(dim, keepdim=True) / most
    return (torch.where(scale > 0, x.float() / scale, 0).round() * scale).to(x.dtype)


def _linear_layers(where: Sites) -> dict[nn.Module, int]:
    """The linear layers of all blocks, and the dimension of their weights that inputs are along.

    Raises:
        NormlabError: another module of a block holds a matrix, or a weight is no tensor of floats in memory.
    """
    found: dict[nn.Module, int] = {}
    for block in where.blocks:
        for name, module in block.module.named_modules():
            matrices = {key: x for key, x in module.named_parameters(recurse=False) if x.ndim > 1}
            is_transposed = type(module).__name__ == "Conv1D"  # GPT-2's linear layer
            weight = matrices.get("weight") if isinstance(module, nn.Linear) or is_transposed else None
            if weight is not None and weight.is_floating_point() and not weight.is_meta:
                found[module] = 0 if is_transposed else 1
            elif matrices and not isinstance(module, nn.Embedding):
                place = f"{name}.{next(iter(matrices))}".removeprefix(".")
                raise NormlabError(
                    f"block {block.index} holds {place} in a {type(module).__name__}: only linear layers of floats in "
                    "memory are quantized, and this would stay as it is"
                )
    return found


def _rounded_input(bits: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Round what a linear layer reads, per token; a hook before it runs."""
    if args:
        return (rounded(args[0], bits, -1), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, kwargs | {name: rounded(kwargs[name], bits, -1)}


@contextmanager
def _rounded_weights(linear: Mapping[nn.Module, int], bits: int) -> Iterator[None]:
    """While active, weights are rounded, per output channel."""
    weights: dict[Any, int] = {module.weight: dim for module, dim in linear.items()}  # shared: once
    before = [(weight, weight.data) for weight in weights]
    try:
        for weight, dim in weights.items():
            weight.data = rounded(weight.data, bits, dim)
        yield
    finally:
        for weight, data in before:
            weight.data = data
