"""What a model loses where its blocks compute with few bits: outliers are what norms are blamed for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from normlab.errors import NormlabError
from normlab.probes.passes import hooked
from normlab.probes.returned_loss import IGNORED_LABEL
from normlab.probes.runner import Batch, Runner, interval, row_means, token_losses
from normlab.probes.sites import Sites

if TYPE_CHECKING:
    import pandas

PARTS = ("weights", "activations", "both")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def quantization_costs(
    model: nn.Module | Sites, batches: Iterable[Batch], *, bits: int | Iterable[int] = (8, 4), progress: bool = True
) -> pandas.DataFrame:
    """Measure how much the loss rises where the linear layers of all blocks compute with few bits.

    Round to nearest, symmetric: x is replaced by s round(x/s), |round(x/s)| <= 2^(bits-1) - 1, s = max |x| /
    (2^(bits-1) - 1). The maximum is over an output channel of a weight, and over a token of what a linear layer reads,
    as in the tables of *Outlier-Safe Pre-Training* (2506.19697). One outlier then takes the digits of all other values
    of its token. The products themselves are in the model's precision. Embeddings and head keep theirs.

    Args:
        model, batches, progress: as for `skip_sensitivity`.
        bits: of a number, 2 or more each; one or several.

    Returns:
        One row per number of bits and part, "weights", "activations" or "both": `bits part loss delta_loss
        standard_error low high tokens`. `loss` is the whole model's, in nats per token, `delta_loss` what it rises by.

    Raises:
        NormlabError: bits below 2; a block has matrices outside of linear layers, as experts in one tensor; a weight is
            read by other code than its linear layer; or as for `skip_sensitivity`.
    """
    import pandas

    numbers = [bits] if isinstance(bits, int) else list(bits)
    for number in numbers or [0]:
        if not isinstance(number, Integral) or number < 2:
            raise NormlabError(f"bits is {bits!r}: give whole numbers from 2 on")
    runner = Runner(model, batches, progress, "quantization")
    linear = _linear_layers(runner.sites)
    cases = [(int(number), part) for number in numbers for part in PARTS]
    never_ran = set(linear)

    def sums(batch: Batch) -> tuple[Tensor, Tensor]:
        labels = runner.labels(batch)
        base = token_losses(runner.logits(batch), labels)
        values = [base.sum(1)]
        for number, part in cases:
            with _rounding(linear, number, part) as ran:
                values.append((token_losses(runner.logits(batch), labels) - base).sum(1))
            never_ran.difference_update(ran)
        if never_ran:
            with _WeightReads(never_ran):
                runner.run(batch)
        return torch.stack(values), (labels != IGNORED_LABEL).sum(1)

    means, errors, tokens = row_means(runner, sums)
    if never_ran == set(linear):
        raise NormlabError("no linear layer of the blocks ran: there is nothing to quantize")
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
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in where.model.modules()):
        raise NormlabError("weights are views of FSDP's flat ones: quantize the plain model")
    found: dict[nn.Module, int] = {}
    for block in where.blocks:
        for name, module in block.module.named_modules():
            held = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            matrices = {key: x for key, x in held if x.ndim > 1 and _is_weight(module, x)}
            is_transposed = type(module).__name__ == "Conv1D"  # GPT-2's linear layer
            weight = matrices.get("weight") if isinstance(module, nn.Linear) or is_transposed else None
            if isinstance(weight, nn.Parameter) and weight.dtype in FLOATS and not weight.is_meta:
                found[module] = 0 if is_transposed else 1
            elif matrices and not isinstance(module, nn.Embedding):
                place = f"{name}.{next(iter(matrices))}".removeprefix(".")
                raise NormlabError(
                    f"block {block.layer} holds {place} in a {type(module).__name__}: only linear layers of floats in "
                    "memory are quantized, and this would stay as it is"
                )
    if not found:
        raise NormlabError("no block holds a linear layer: there is nothing to quantize")
    return found


def _is_weight(module: nn.Module, x: Tensor) -> bool:
    """True for parameters, and for buffers that hold packed weights; masks and tables of positions are none."""
    packed = not x.is_floating_point() and x.dtype is not torch.bool
    return isinstance(x, nn.Parameter) or packed or "Linear" in type(module).__name__


@contextmanager
def _rounding(linear: Mapping[nn.Module, int], bits: int, part: str) -> Iterator[set[nn.Module]]:
    """While active, linear layers compute with rounded weights, with rounded inputs, or with both; those that ran.

    A weight is rounded when its layer runs, as it is then: where weights are sharded, they are whole only there.
    """
    own: dict[nn.Module, Any] = {}
    ran: set[nn.Module] = set()

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        ran.add(module)
        if part != "activations":
            weight = own[module] = module._parameters["weight"]
            if not isinstance(weight, Tensor) or isinstance(weight, DTensor) or module.weight is not weight:
                raise NormlabError(
                    "a linear layer does not hold its whole weight, as in a sharded model: quantize it on one device"
                )
            module._parameters["weight"] = nn.Parameter(rounded(weight.detach(), bits, linear[module]), False)
        if part == "weights":
            return None
        if args:
            return (rounded(args[0], bits, -1), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: rounded(kwargs[name], bits, -1)}

    def after(module: nn.Module, *_: Any) -> None:
        if module in own:
            module._parameters["weight"] = own.pop(module)

    try:
        starts = [(module, before) for module in linear]
        with hooked(*((module, after) for module in linear), before=starts, must_run=False):
            yield ran
    finally:
        for module, weight in own.items():  # of a pass that failed
            module._parameters["weight"] = weight


class _WeightReads(TorchFunctionMode):
    """Refuses operations on the weights of linear layers that do not run: an idle expert's are not read."""

    def __init__(self, idle: Iterable[nn.Module]):
        super().__init__()
        self._weights = {id(module._parameters["weight"]) for module in idle}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_computed = any(isinstance(x, Tensor) for x in tree_leaves(result))  # unlike a weight's dtype
        if is_computed and any(id(x) in self._weights for x in tree_leaves((args, kwargs))):
            raise NormlabError(
                "a linear layer's weight is read by other code, which would go on with it as it is: call module(x), "
                "not functional.linear(x, module.weight)"
            )
        return result
