"""Cost of the experiments on layers over loops written by hand for one model, which compute the same values.

    python -m benchmarks.experiments --out data/bench/experiments_cpu.csv

Both sides take turns on a stock Llama and rows of several lengths, padded on the right, with their mask. A ratio is the
median over rounds, with their middle half; CPU seconds are the ones to read on a machine that does other work. Before
that the values of both are compared. The loops call this model's blocks: what precedes a skipped block is not computed
again there either. `diff` compares two implementations of attention, which are equal.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.probes import llama
from benchmarks.timing import arguments, clocks, interleaved, machine, ratio, report, run
from normlab.differences import diff
from normlab.errors import NormlabError
from normlab.probes import angular_distance, skip_future_effect, skip_sensitivity
from normlab.probes.runner import mean_and_error

if TYPE_CHECKING:
    import pandas

Batch = dict[str, Tensor]
Side = Callable[[], Any]  # returns values, to compare with the other's
SKIPPED = ["loss", "skip_delta_loss", "standard_error", "output_kl", "output_kl_error"]
EPS = torch.finfo(torch.float32).eps


def padded(options: argparse.Namespace) -> list[Batch]:
    """Batches of random tokens: rows of half the length up to all of it, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(options.batches):
        ids = torch.randint(3, options.vocabulary, (options.rows, options.length), generator=generator)
        lengths = torch.linspace(options.length // 2, options.length, options.rows).long()
        mask = (torch.arange(options.length) < lengths[:, None]).long()
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return batches


# --- by hand ---


def kept_pass(model: Any, batch: Batch) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """h_0 .. h_L, what else each block is handed, and the logits."""
    states: list[Tensor] = []
    handed: dict[str, Any] = {}

    def enter(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        states.append(args[0])
        handed.update(kwargs)

    layers = model.model.layers
    hooks = [layers[0].register_forward_pre_hook(enter, with_kwargs=True)]
    hooks += [layer.register_forward_hook(lambda module, args, out: states.append(out)) for layer in layers]
    logits = model(**batch, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return states, handed, logits


def without(part: str, layer: Any, h: Tensor, handed: dict[str, Any]) -> Tensor:
    """What a block returns with a part of it skipped."""
    if part == "attention":
        return h + layer.mlp(layer.post_attention_layernorm(h))
    if part == "mlp":
        return h + layer.self_attn(hidden_states=layer.input_layernorm(h), **handed)[0]
    return h


@torch.no_grad()
def skips_by_hand(model: Any, batches: Sequence[Batch], parts: Sequence[str], span: int) -> Any:
    """`SKIPPED` of every part and place."""
    layers, sums, counts = model.model.layers, [], []
    for batch in batches:
        states, handed, logits = kept_pass(model, batch)
        mask = batch["attention_mask"]
        counted = functional.pad(mask[:, :-1] * mask[:, 1:], (0, 1))
        labels = functional.pad(batch["input_ids"][:, 1:], (0, 1))[..., None]
        whole = logits.log_softmax(-1)
        probability, base = whole.exp(), -whole.gather(-1, labels)[..., 0]
        values = [base]
        for part in parts:
            for first in range(len(layers) - span + 1):
                h = states[first]
                for layer in layers[first : first + span]:
                    h = without(part, layer, h, handed)
                for layer in layers[first + span :]:
                    h = layer(h, **handed)
                log_q = model.lm_head(model.model.norm(h)).log_softmax(-1)
                values.append(-log_q.gather(-1, labels)[..., 0] - base)
                values.append((probability * (whole - log_q)).sum(-1))
        sums.append((torch.stack(values) * counted).sum(-1).double())
        counts.append(counted.sum(1).double())
    mean, error = mean_and_error(torch.cat(sums, 1), torch.cat(counts))
    columns = (mean[:1].expand_as(mean[1::2]), mean[1::2], error[1::2], mean[2::2], error[2::2])
    return torch.stack(columns, 1).numpy()


@torch.no_grad()
def future_by_hand(model: Any, batches: Sequence[Batch]) -> Any:
    """Values and errors of `skip_future_effect`."""
    layers, sums, counts = model.model.layers, [], []
    for batch in batches:
        states, handed, _ = kept_pass(model, batch)
        updates = [after - before for before, after in zip(states, states[1:], strict=False)]
        sizes = [update.norm(dim=-1) for update in updates]
        values = []
        for skipped in range(len(layers) - 1):
            h = states[skipped]
            for later in range(skipped + 1, len(layers)):
                after = layers[later](h, **handed)
                values.append((after - h - updates[later]).norm(dim=-1) / sizes[later])
                h = after
        sums.append((torch.stack(values) * batch["attention_mask"]).sum(-1).double())
        counts.append(batch["attention_mask"].sum(1).double())
    return torch.stack(mean_and_error(torch.cat(sums, 1), torch.cat(counts)), 1).numpy()


@torch.no_grad()
def angles_by_hand(model: Any, batches: Sequence[Batch]) -> Any:
    """The table of `angular_distance`, and its errors."""
    sums, counts = [], []
    for batch in batches:
        mask = batch["attention_mask"].bool()
        states = torch.stack([h[mask] for h in kept_pass(model, batch)[0]], 1).double()  # (tokens, layers, width)
        units = states / states.norm(dim=-1, keepdim=True)
        angles = (units @ units.mT).clamp(-1, 1).arccos() / torch.pi
        summed = angles.new_zeros(len(mask), *angles.shape[1:])
        sums.append(summed.index_add(0, mask.nonzero()[:, 0], angles).flatten(1).T)
        counts.append(mask.sum(1).double())
    mean, error = (x.numpy() for x in mean_and_error(torch.cat(sums, 1), torch.cat(counts)))
    return np.stack([mean, error])


def sites_by_hand(model: Any, batch: Batch) -> list[Tensor]:
    """The stream, what norms and branches read and return, and the logits."""
    kept: list[Tensor] = []

    def enter(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        kept.append(args[0] if args else kwargs["hidden_states"])

    def leave(module: Any, args: tuple, out: Any) -> None:
        kept.append(out[0] if isinstance(out, tuple) else out)

    hooks = [model.model.embed_tokens.register_forward_hook(leave)]
    parts = [model.model.norm]
    for layer in model.model.layers:
        parts += [layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp]
    for part in parts:
        hooks += [part.register_forward_pre_hook(enter, with_kwargs=True), part.register_forward_hook(leave)]
    hooks += [layer.register_forward_hook(leave) for layer in model.model.layers]
    kept.append(model(**batch, use_cache=False).logits)
    for hook in hooks:
        hook.remove()
    return kept


@torch.no_grad()
def diff_by_hand(a: Any, b: Any, batch: Batch) -> Any:
    """Difference and noise of each site, where the models are equal."""
    mask = batch["attention_mask"].bool()

    def relative(x: Tensor, y: Tensor) -> Tensor:
        x, y = x[mask].double(), y[mask].double()
        return ((x - y).norm(dim=-1) / x.norm(dim=-1)).square().mean().sqrt()

    single = [sites_by_hand(model, batch) for model in (a, b)]
    double = [sites_by_hand(copy.deepcopy(model).double(), batch) for model in (a, b)]
    rows = []
    for a32, b32, a64, b64 in zip(*single, *double, strict=True):
        if relative(a64, b64) > 2.0**-22:
            raise NormlabError("the models differ")
        noise = min(relative(a64, a32), relative(b64, b32))
        rows.append(torch.stack([relative(a32, b32), noise.clamp_min(EPS / 4)]))
    return torch.stack(rows).numpy()


# --- beside each other ---


def sides(options: argparse.Namespace) -> dict[str, tuple[Side, Side]]:
    """Each experiment and its loop."""
    model, batches = llama(options)[0], padded(options)
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    quiet: dict[str, Any] = {"progress": False}

    def skips(parts: Sequence[str], span: int = 1) -> tuple[Side, Side]:
        ours = partial(skip_sensitivity, model, batches, parts=parts, span=span, **quiet)
        return lambda: ours()[SKIPPED].to_numpy(), partial(skips_by_hand, model, batches, parts, span)

    def future() -> Any:
        return skip_future_effect(model, batches, **quiet)[["value", "standard_error"]].to_numpy()

    def angles() -> Any:
        table = angular_distance(model, batches, **quiet)
        return np.stack([table, table.attrs["standard_error"]]).reshape(2, -1)

    def differences() -> Any:
        return diff(model, other, batches[0]).table[["difference", "noise"]].to_numpy()

    return {
        "skip_sensitivity, blocks": skips(["block"]),
        "skip_sensitivity, attention and MLPs": skips(["attention", "mlp"]),
        "skip_sensitivity, spans of two blocks": skips(["block"], span=2),
        "skip_future_effect": (future, partial(future_by_hand, model, batches)),
        "angular_distance": (angles, partial(angles_by_hand, model, batches)),
        "diff": (differences, partial(diff_by_hand, model, other, batches[0])),
    }


def bench(options: argparse.Namespace) -> pandas.DataFrame:
    """Time all experiments.

    Returns:
        Columns `experiment`, then `s by_hand_s ratio low high` of both clocks, the shape and the machine.

    Raises:
        NormlabError: the two sides of an experiment compute different values.
    """
    import pandas

    rows = []
    for name, (ours, by_hand) in sides(options).items():
        if not np.allclose(ours(), by_hand(), rtol=1e-3, atol=1e-6):
            raise NormlabError(f"{name} and the loop beside it compute different values")
        times = interleaved({"ours": partial(clocks, ours), "by hand": partial(clocks, by_hand)}, options.rounds)
        row: dict[str, object] = {"experiment": name}
        for index, clock in enumerate(("cpu", "wall")):
            mine, theirs = ([each[index] for each in times[side]] for side in ("ours", "by hand"))
            row |= {f"{clock}_s": statistics.median(mine), f"{clock}_by_hand_s": statistics.median(theirs)}
            row[f"{clock}_ratio"], row[f"{clock}_low"], row[f"{clock}_high"] = ratio(mine, theirs)
        rows.append(row)
    names = ("width", "depth", "batches", "rows", "length", "vocabulary", "threads", "rounds")
    return pandas.DataFrame(rows).assign(**{name: getattr(options, name) for name in names}, **machine())


def main() -> None:
    """Measure, print the table, and write it to --out."""
    numbers = {"width": 256, "depth": 12, "batches": 4, "rows": 8, "length": 128, "vocabulary": 4096}
    options = arguments(__doc__, numbers | {"threads": 1, "rounds": 9}).parse_args()
    torch.set_num_threads(options.threads)
    report(bench(options), options.out, columns=6)


if __name__ == "__main__":
    run(main)
