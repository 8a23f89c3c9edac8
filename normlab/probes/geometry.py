"""Compare layers: angles between them, their distance from the identity map, what they would predict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.kept_pass import KeptPass
from normlab.probes.layout import require_one_stream
from normlab.probes.passes import require_rows, see_blocks
from normlab.probes.runner import (
    Batch,
    Runner,
    require_predictions,
    require_same_tokens,
    row_means,
    see_layers,
    table_of,
    token_kl,
    with_errors,
)
from normlab.probes.sites import Sites

if TYPE_CHECKING:
    import pandas

FILLS_A_CACHE = "when it runs again on the same input, as one that fills a cache: call the model without one"
CHUNK = 1 << 20  # numbers in float64 at a time
NEAR = 1e-5  # nats per token between a model's prediction and itself: roundings of the logits in float32 are below it
APART = 10.0  # such a divergence over that which is rounding
PARALLEL = 1e-6  # of a cosine's distance from 1: there an angle, of 1.4e-3, keeps 10 of float64's 16 digits


@torch.no_grad()
def angular_distance(
    model: nn.Module | Sites, batches: Iterable[Batch], *, tokens: str = "all", progress: bool = True
) -> pandas.DataFrame:
    """Measure the angles between the residual streams of all pairs of layers (2403.17887).

    arccos(cos(h_l, h_m))/pi, averaged over tokens, in float64. Where vectors are nearly parallel it is computed as
    2 atan2(|a - b|, |a + b|)/pi on unit vectors, which keeps its digits. One pass over the data. Holds the counted
    tokens of one batch for all layers (layers x tokens x width numbers) and the result.

    Args:
        model, batches, progress: as for `skip_sensitivity` (no labels needed).
        tokens: "all" (padding excluded), "no_first" (as `record` has it, by the positions too), or "last" (each row's
            last real token, as the paper does).

    Returns:
        (L + 1) x (L + 1) table in [0, 1], index and columns = layer (0 = embeddings). `.attrs["standard_error"]` is the
        table of errors and `.attrs["half_width_95"]` that of 95% interval half-widths, rows taken as independent.

    Raises:
        NormlabError: unknown `tokens`, no batch, a mask that is not known, first tokens that are not, a stream that is
            (length, batch, width), or several streams.
    """
    import pandas

    if tokens not in ("all", "no_first", "last"):
        raise NormlabError(f"unknown tokens {tokens!r}: choose from all, no_first, last")
    runner = Runner(model, batches, progress, "angular distance")
    layers = runner.sites.stream_layers
    count = len(layers)
    first, second = torch.triu_indices(count, count, 1)  # all pairs of layers

    def sums(batch: Batch) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []  # the tokens that count, then their states, (layers, tokens, width)

        def keep(layer: int, h: Tensor, read: Tensor) -> None:
            if not kept:
                counted = runner.counted(batch, h, "no_first" if tokens == "no_first" else "all")
                if tokens == "last":
                    order = counted.long().cumsum(1)
                    counted = counted & (order == order[:, -1:])
                kept.append(counted)
            chosen = h[kept[0]]
            if len(kept) == 1:  # one block of memory: many small ones between the model's would leave gaps
                kept.append(chosen.new_empty(count, *chosen.shape))
            kept[1] = kept[1].to(torch.promote_types(kept[1].dtype, chosen.dtype))  # streams may go on in float32
            kept[1][layer - layers[0]] = chosen

        see_layers(runner, batch, keep)
        counted, states = kept
        row_of = counted.nonzero()[:, 0].cpu()
        values = torch.zeros(len(counted), len(first), dtype=torch.float64)
        step = max(1, CHUNK // (count * states.shape[-1]))
        for rows, part in zip(row_of.split(step), states.split(step, dim=1), strict=True):
            values.index_add_(0, rows, _all_angles(part.double(), first, second).cpu())
        return values.T, counted.sum(1).cpu()

    tables = []
    for numbers in row_means(runner, sums)[:2]:
        square = torch.zeros(count, count, dtype=torch.float64)
        square[first, second] = square[second, first] = numbers
        tables.append(pandas.DataFrame(square.numpy(), index=layers, columns=layers))
    return with_errors(*tables)


def _all_angles(states: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Angles over pi between layers `first` and `second`, (layers, tokens, width) in float64 -> (tokens, pairs).

    All cosines are one product. Near 1 and -1 a cosine has lost its angle's digits: there from differences.
    """
    units = (states / torch.linalg.vector_norm(states, dim=-1, keepdim=True)).transpose(0, 1)
    cosines = (units @ units.mT)[:, first, second].clamp_(-1, 1)
    angles = cosines.arccos() / math.pi
    token, pair = (cosines.abs() > 1 - PARALLEL).nonzero(as_tuple=True)
    if len(token):
        a, b = (units[token, layers.to(pair.device)[pair]] for layers in (first, second))
        angles[token, pair] = _angles(a, b)
    return angles


def _angles(a: Tensor, b: Tensor) -> Tensor:
    """Angle between unit vectors over pi, (tokens,)."""
    return 2 / math.pi * torch.atan2(torch.linalg.vector_norm(a - b, dim=-1), torch.linalg.vector_norm(a + b, dim=-1))


def jacobian_identity(
    model: nn.Module | Sites, batches: Iterable[Batch], *, probes: int = 4, progress: bool = True
) -> pandas.DataFrame:
    """Measure how near each block's Jacobian is to the identity: ||J - I||_F / ||I||_F, J = dh_l/dh_{l-1}.

    Over all tokens jointly. ||J - I||_F^2 = E ||J^T v - v||^2 over v ~ N(0, I). `probes` vector-Jacobian products per
    block and batch estimate it. The squares are averaged, then the root is taken. 0 = the block is the identity
    map, which deep Pre-LN blocks approach (2502.05795). Padding is left out of v. One block's graph is held at a time;
    no parameter gradient is made.

    Returns:
        One row per block: `layer value standard_error low high`. The error is over probes, by the delta method. Other
        arguments as for `skip_sensitivity`.

    Raises:
        NormlabError: probes < 1, called under inference_mode, a block that writes in place over what its gradient
            needs, or as for `angular_distance`.
    """
    if probes < 1:
        raise NormlabError(f"probes is {probes}: one random vector or more is needed")
    if torch.is_inference_mode_enabled():
        raise NormlabError("jacobian_identity needs gradients: leave inference_mode")
    runner = Runner(model, batches, progress, "jacobian")
    generator, stream = torch.Generator().manual_seed(0), runner.stream
    layers = runner.sites.layers

    def sums(batch: Batch) -> tuple[Tensor, Tensor]:
        gaps: dict[int, list[float]] = {}
        sizes: dict[int, int] = {}

        def probe(layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            x, after = stream.through(args, kwargs, output)
            counted = runner.counted(batch, x)
            sizes[layer] = int(counted.sum()) * x.shape[-1]
            gaps[layer] = []
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                args, kwargs = stream.handed(args, kwargs, leaf.clone())
                out = stream.after(args, kwargs, _again(module, args, kwargs))
                _require_same(after, out.detach())
                for _ in range(probes):
                    v = torch.randn(x.shape, generator=generator).to(x) * counted[..., None]
                    pulled = _pulled_back(out, leaf, v)
                    gaps[layer].append(float((pulled.float() - v.float()).square().sum()))

        see_blocks(stream, partial(runner.run, batch, needs_logits=False), probe)
        return torch.tensor([gaps[layer] for layer in layers]), torch.tensor([sizes[layers[0]]] * probes)

    with torch.no_grad():
        squared, squared_error, _ = row_means(runner, sums)
    mean = squared.sqrt()
    return table_of([{"layer": layer} for layer in layers], mean, squared_error / (2 * mean))


def _again(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a block returns that has just run on the same input."""
    try:
        return block(*args, **kwargs)
    except Exception as error:
        raise NormlabError(f"a block fails {FILLS_A_CACHE}") from error


def _pulled_back(out: Tensor, leaf: Tensor, v: Tensor) -> Tensor:
    """The vector-Jacobian product of `v`."""
    try:
        return torch.autograd.grad(out, leaf, v, retain_graph=True)[0]
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise NormlabError(
            "a block writes in place over what its gradient needs, so that it has no Jacobian: have it add to a copy"
        ) from error


def _require_same(first: Tensor, again: Tensor) -> None:
    """Refuse a block that returns something else when it runs again on the same input."""
    if (again - first).norm() > torch.finfo(first.dtype).eps ** 0.5 * first.norm():
        raise NormlabError(f"a block returns something else {FILLS_A_CACHE}")


@torch.no_grad()
def logit_lens_kl(model: nn.Module | Sites, batches: Iterable[Batch], *, progress: bool = True) -> pandas.DataFrame:
    """Measure KL(prediction of the head from layer l || the model's prediction), averaged over tokens, in nats.

    The head is whatever the model does after its last block: final norm, unembedding, soft-capping. It is run on h_l by
    making every block a no-op that passes h_l on, so no module needs to be named. A head that reads earlier blocks'
    outputs too, such as their average, has no prediction from one layer: the model is refused.

    Returns:
        One row per layer 0..L: `layer value standard_error low high` (0 at layer L). Arguments as for
        `skip_sensitivity`.

    Raises:
        NormlabError: no batch, no logits; several residual streams, unless blocks say by an ``enter`` that they are;
            what follows the last block reads earlier ones too; blocks that hold (length, batch, width).
    """
    runner = Runner(model, batches, progress, "logit lens")
    kept = KeptPass(runner.stream)

    def sums(batch: Batch) -> tuple[Tensor, Tensor]:
        final = kept.keep(partial(runner.logits, batch))
        states = kept.states
        require_rows(states[0])
        if not hasattr(runner.sites.blocks[0].module, "enter"):  # else what follows the last block takes any state
            for before, after in pairwise(states):
                require_same_tokens(before.shape, after)
                require_one_stream(before, after)
        counted = runner.counted(batch, states[0]).to(final.device)
        require_predictions(final, counted, "tokens")

        def divergence(passed: Sequence[Tensor]) -> Tensor:
            with kept.passing_on(passed):
                lens = runner.logits(batch)
            return torch.where(counted, token_kl(lens, final), 0).sum(1)

        depth = runner.sites.depth
        values = torch.stack([divergence([h] * depth) for h in states])
        last = values[-1].sum()
        # Where each block passes on its own state, what is left is rounding.
        if last > NEAR * counted.sum() and last > APART * divergence(states[1:]).sum():
            raise NormlabError(
                "what follows the last block reads what earlier blocks returned too: the model predicts from several "
                "layers, and has no prediction from one"
            )
        return values, counted.sum(1)

    mean, error, _ = row_means(runner, sums)
    return table_of([{"layer": layer} for layer in runner.sites.stream_layers], mean, error)

