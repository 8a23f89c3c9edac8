"""Estimates of a sweep or a run before it starts.

`plan(preset, out)`     a `Plan`: one row per run of a sweep in order, with hours of one core
`needs(config, gpus)`   a `Needs`: parameters, FLOPs, memory, time and disk of one run on GPUs

Hours of a planned run are those of finished runs of its shape below `out`. Without any, a few steps are timed at two
depths, as time grows linearly with depth, and measurements count in steps (`progress.steps_in_all`).

Needs take no GPU and no training:

    FLOPs per step    6 N tokens + 6 L T d_attention tokens. N: parameters in products with activations, thus without an
                      untied input embedding. The second term is causal attention's scores and sums.
    memory per rank   weights 4 B and AdamW's two moments 8 B per parameter, what autograd keeps for the backward pass,
                      and two float32 copies of the logits. Several ranks: 4 B for gradients in transit. A step in
                      parts: 4 B for their sum.
    split (fsdp)      16 B per parameter of the rank's share: weights, gradients and moments. Gradients use the memory
                      that activations leave. Further what is gathered around a block, see `held_when_split`.
    disk              two checkpoints (one is written while the last is kept) of 12 B per parameter, the model 4 B

Parameters are counted on the model itself, built on the meta device. What autograd keeps is counted on fake tensors at
depths 1 and 2, and grows by the same amount per block. The allocator's gaps come on top.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from normlab import runs, store
from normlab.errors import NormlabError
from normlab.models import NormlabConfig, NormlabForCausalLM
from normlab.training.config import TrainConfig
from normlab.training.distributed import device_of, settled
from normlab.training.grids import Preset, planned
from normlab.training.loop import autocast
from normlab.training.progress import steps_in_all
from normlab.training.run import train
from normlab.training.workers import Cluster, share_cores

if TYPE_CHECKING:
    import pandas

TIMED_STEPS = 12
GIB = 2**30
PEAK_TFLOPS, MFU, MEMORY_GIB = 989.0, 0.4, 72.0  # an H100 (SXM): bfloat16; a common share of it; of its 80 GB


# --- hours of a sweep ---


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep.

    table: one row per run in order: `what` ("search" or "runs"), `run scheme depth seed lr steps tokens hours done`.
    """

    table: pandas.DataFrame
    workers: int | Cluster

    def in_words(self) -> str:
        """Runs, tokens and hours in order, and their sums."""
        table, lines = self.table, []
        number = (table[["what", "depth"]] != table[["what", "depth"]].shift()).any(axis=1).cumsum()
        for _, group in table.groupby(number):
            first = group.iloc[0]
            lines.append(
                f"{len(group):4d} {first['what']:6s} depth {first['depth']:<3d} "
                f"{first['tokens'] / 1e6:5.2f}M tokens each {group['hours'].max():6.2f} h at most "
                f"{group['hours'].sum():7.2f} h in all, {int(group['done'].sum())} done   "
                + ", ".join(dict.fromkeys(group["scheme"]))
            )
        left = table[~table["done"]]
        total, ahead = table["hours"].sum(), left["hours"].sum()
        lines.append(f"{len(table)} runs, {total:.1f} core-hours; left: {len(left)} runs, {ahead:.1f} core-hours")
        if isinstance(self.workers, int):
            lines.append(f"about {ahead / self.workers:.1f} hours with {self.workers} workers")
        return "\n".join(lines)


def plan(
    preset: Preset,
    out: str | Path,
    *,
    workers: int | str | Cluster | None = None,
    threads: int | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> Plan:
    """The sweep that `normlab.sweep(preset, out)` would train. Arguments as there; nothing is written below `out`."""
    import pandas

    workers, threads = share_cores(workers, threads)
    done: dict[str, runs.Run] = {}
    order: list[tuple[str, TrainConfig]] = []
    for what, asked in planned(preset, threads=threads, keep_weights=False):
        config = settled(asked, device_of(asked))
        if (path := asked.finished_in(store.child(out, store.SEARCH) if what == "search" else out)) is not None:
            run = runs.read_run(path)
            config = dataclasses.replace(config, dtype=run.manifest["config"]["dtype"])
            done[config.run_id] = run
        order.append((what, config))
    seconds = _Seconds([config for _, config in order], list(done.values()), cache_dir, progress)
    rows = [
        {
            "what": what,
            "run": config.run_id,
            **{name: getattr(config, name) for name in ("scheme", "depth", "seed", "lr", "steps")},
            "tokens": config.last_step * config.tokens_per_step,
            "hours": seconds.of(config) * threads / 3600,
            "done": config.run_id in done,
        }
        for what, config in order
    ]
    return Plan(pandas.DataFrame(rows), workers)


class _Seconds:
    """Seconds of a run: from finished ones of its shape, or from the time of a step."""

    def __init__(
        self, configs: Sequence[TrainConfig], done: Sequence[runs.Run], cache_dir: Any, progress: bool
    ) -> None:
        times: dict[tuple, list[float]] = {}
        for run in done:
            if run.manifest["measured"].get("resumed_from_step") == 0:
                config = TrainConfig.from_dict(run.manifest["config"])
                times.setdefault(_shape(config), []).append(run.manifest["measured"]["wall_s"])
        self.known = {shape: statistics.median(seconds) for shape, seconds in times.items()}
        missing = [config for config in configs if _shape(config) not in self.known]
        self.steps: dict[int, float] = {}
        for depth in sorted({config.depth for config in missing})[:2]:
            config = next(config for config in missing if config.depth == depth)
            self.steps[depth] = _step_seconds(config, cache_dir, progress)

    def of(self, config: TrainConfig) -> float:
        if (known := self.known.get(_shape(config))) is not None:
            return known
        (shallow, first), *rest = self.steps.items()
        slope = (rest[0][1] - first) / (rest[0][0] - shallow) if rest else first / (shallow + 2)
        slope = min(max(slope, 0.0), first / shallow)  # on a noisy machine the deeper may have been the faster
        return (first + slope * (config.depth - shallow)) * steps_in_all(config)


def _shape(config: TrainConfig) -> tuple:
    return config.depth, config.width, config.last_step, config.tokens_per_step, config.dtype, config.compile


def _step_seconds(config: TrainConfig, cache_dir: Any, progress: bool) -> float:
    """Median over a few steps of a run of that shape, which is thrown away."""
    never: dict[str, Any] = dict.fromkeys(("probe_every", "eval_every", "checkpoint_every", "experiment_blocks"), 0)
    never |= {"stop_at": None, "keep_weights": False, "store_all": False}
    config = dataclasses.replace(config, steps=TIMED_STEPS, log_every=1, **never)
    with tempfile.TemporaryDirectory() as out:
        run = train(config, out, cache_dir=cache_dir, progress=progress)
    return config.tokens_per_step / run.manifest["measured"]["tokens_per_s"]


# --- needs of one run ---


@dataclass(frozen=True)
class Held:
    """Parameters on a rank.

    kept: those that it keeps, with their optimizer state. gathered: at the peak; 0 unless the model is split.
    """

    kept: int
    gathered: int = 0


@dataclass(frozen=True)
class Needs:
    """Needs of a run on `gpus` ranks.

    config: with as many parts as a rank's memory asks for. memory: bytes per rank at the peak. seconds: of the whole
    run. disk: bytes.
    """

    config: TrainConfig
    gpus: int
    parameters: int
    held: Held
    flops_a_step: float
    memory: float
    seconds: float
    disk: float
    fits: bool

    def command(self) -> str:
        launch = f"torchrun --nproc-per-node {self.gpus} -m normlab" if self.gpus > 1 else "normlab"
        return f"{launch} train {shlex.join(self.config.to_arguments())} --out runs"

    def in_words(self) -> str:
        config, tokens = self.config, self.config.steps * self.config.tokens_per_step
        part = config.batch_size // (self.gpus * config.accumulate)
        step = f"{config.batch_size} blocks of {config.block_length}"
        short = "" if self.fits else "; more than a rank has"
        parts = f"{part} blocks at a time, a step in {config.accumulate} parts{short}"
        kept, gathered = 4 * self.held.kept / GIB, 4 * self.held.gathered / GIB
        split = f"split        {kept:.1f} GiB a rank of weights, as much of gradients, {2 * kept:.1f} GiB of moments"
        lines = [
            f"parameters   {self.parameters / 1e6:,.1f}M",
            f"tokens       {tokens / 1e9:.2f}B: {config.steps:,} steps of {step}",
            f"FLOPs        {self.flops_a_step:.3g} a step, {self.flops_a_step * config.steps:.3g} in all",
            f"memory       {self.memory / GIB:.1f} GiB a rank: {parts}",
            *([f"{split}; {gathered:.1f} GiB gathered"] if gathered else []),
            f"time         {self.seconds / 3600:,.1f} hours on {self.gpus} GPUs",
            f"disk         {self.disk / GIB:.1f} GiB for checkpoints and the model",
            "",
            self.command(),
            "normlab export runs/NAME DIR",
        ]
        return "\n".join(lines)


def needs(
    config: TrainConfig,
    gpus: int = 1,
    *,
    mfu: float = MFU,
    tflops: float = PEAK_TFLOPS,
    memory_gib: float = MEMORY_GIB,
) -> Needs:
    """Needs of `config` on `gpus` ranks.

    Args:
        mfu: share of `tflops` that training reaches.
        tflops: a GPU's peak, in 10^12 FLOPs per second.
        memory_gib: a GPU's. A step is computed in as few parts as keep the peak below it.

    Raises:
        NormlabError: a number of ranks that does not divide the batch, or a share out of range.
    """
    if gpus < 1 or config.batch_size % gpus:
        raise NormlabError(f"{gpus} GPUs do not divide batch_size {config.batch_size}: change one of the two")
    if not (0 < mfu <= 1 and tflops > 0 and memory_gib > 0):
        raise NormlabError(f"mfu {mfu}, tflops {tflops}, memory {memory_gib}: the first in (0, 1], all positive")
    model_config = config.model_config(config.model.get("vocab_size") or config.vocab_size, 0)
    parameters = count_parameters(model_config)
    held = held_when_split(model_config, gpus) if config.fsdp and gpus > 1 else Held(parameters)
    each = config.batch_size // gpus
    # GPUs that models of such sizes are trained on compute bfloat16, the first candidate of dtype "auto".
    fixed, a_block = _kept(model_config, config.block_length, config.candidates()[0].dtype)
    parts = [n for n in range(1, each + 1) if each % n == 0]
    peaks = {n: _peak(held, fixed + a_block * (each // n), gpus, n) for n in parts}
    chosen = next((n for n in parts if peaks[n] <= memory_gib * GIB), parts[-1])
    flops = flops_a_step(model_config, parameters, config)
    return Needs(
        config=dataclasses.replace(config, accumulate=chosen),
        gpus=gpus,
        parameters=parameters,
        held=held,
        flops_a_step=flops,
        memory=peaks[chosen],
        seconds=flops * config.steps / (gpus * tflops * 1e12 * mfu),
        disk=28.0 * parameters,
        fits=peaks[chosen] <= memory_gib * GIB,
    )


def count_parameters(config: NormlabConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in NormlabForCausalLM(config).parameters())


def held_when_split(config: NormlabConfig, ranks: int) -> Held:
    """The first rank's share under `distributed.shard`; no other rank's is larger. Each tensor is split by rows.

    Gathered are the parameters outside the blocks, and three times a block's. Those are the weights of one block and of
    the next, and one block's gradients before they are scattered.
    """
    with torch.device("meta"):
        model = NormlabForCausalLM(config)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    kept = sum(math.ceil(p.shape[0] / ranks) * p[0].numel() for p in model.parameters())
    outside = sum(p.numel() for p in model.parameters()) - sum(blocks)
    return Held(kept, outside + 3 * max(blocks))


def flops_a_step(model: NormlabConfig, parameters: int, config: TrainConfig) -> float:
    """FLOPs of a training step, by the formula at the head of this file."""
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    attention = model.num_attention_heads * (model.head_dim or model.hidden_size // model.num_attention_heads)
    a_token = 6 * (parameters - looked_up) + 6 * model.num_hidden_layers * config.block_length * attention
    return float(a_token * config.tokens_per_step)


def _peak(held: Held, activations: float, gpus: int, parts: int) -> float:
    """Bytes on a rank at the peak."""
    if held.gathered:
        gradients = 4 * held.kept
        passing = activations + gradients if parts > 1 else max(activations, gradients)
        return 12 * held.kept + passing + 4 * held.gathered
    static = 12 + 4 * (gpus > 1) + 4 * (parts > 1)
    return static * held.kept + activations


def _kept(config: NormlabConfig, length: int, dtype: str) -> tuple[float, float]:
    """Bytes between forward and backward pass, and in the loss.

    The first do not depend on the number of blocks of text, such as weights rounded for autocast. The second are per
    block of text.
    """
    counted = {}
    for texts in (1, 2):
        one, two = (_saved_bytes(_at_depth(config, depth), texts, length, dtype) for depth in (1, 2))
        counted[texts] = one + (two - one) * (config.num_hidden_layers - 1)
    a_block = counted[2] - counted[1]
    return counted[1] - a_block, a_block + 2 * 4 * length * config.vocab_size


def _at_depth(config: NormlabConfig, depth: int) -> NormlabConfig:
    return NormlabConfig(**{**config.to_dict(), "num_hidden_layers": depth})


def _saved_bytes(config: NormlabConfig, texts: int, length: int, dtype: str) -> int:
    """Bytes that autograd keeps of a forward pass over some blocks of text, without the weights."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    saved: dict[int, int] = {}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    cpu = torch.device("cpu")
    with FakeTensorMode(), cpu:
        model = NormlabForCausalLM(config, kernels="torch")
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        ids = torch.zeros(texts, length, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast(dtype, cpu):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        total = sum(size for storage, size in saved.items() if storage not in weights)
        del loss
    return total
