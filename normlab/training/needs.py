"""What a run needs before it starts: parameters, FLOPs, memory, time, disk, and the commands. No GPU, no training.

`needs(config, gpus)`   a `Needs`; `in_words()` is what `normlab plan` prints

    FLOPs a step    6 N tokens + 6 L T d_attention tokens: N the parameters in products with activations (without an
                    input embedding of its own), the second term causal attention's scores and sums
    memory a rank   weights 4 B and AdamW's two moments 8 B a parameter, what autograd keeps for the backward pass, and
                    at its first step two float32 copies of the logits; several ranks: 4 B for gradients in transit; a
                    step in parts: 4 B for their sum
    split (fsdp)    16 B a parameter of the rank's share, weights, gradients and moments, the gradients in the room that
                    what autograd keeps leaves behind; what is gathered around a block: `held`
    disk            two checkpoints (one is written while the last is kept) of 12 B a parameter, the model 4 B

Parameters are those of the model itself, built on the meta device; what autograd keeps is counted on fake tensors at
depths 1 and 2, from which it grows by the same amount a block. Gradients, which are not all there while activations
are, and the optimizer's own step stay below this peak unless a batch is very small; what the allocator leaves unused
between blocks of memory comes on top.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from dataclasses import dataclass
from typing import Any

import torch

from normlab.errors import NormlabError
from normlab.models import NormlabConfig, NormlabForCausalLM
from normlab.training.config import TrainConfig
from normlab.training.distributed import autocast

GIB = 2**30
PEAK_TFLOPS, MFU, MEMORY_GIB = 989.0, 0.4, 72.0  # an H100 (SXM): bfloat16; a common share of it; of its 80 GB


@dataclass(frozen=True)
class Held:
    """Parameters on a rank: those that it keeps, with their optimizer state, and those gathered at the peak, 0 unless
    the model is split."""

    kept: int
    gathered: int = 0


@dataclass(frozen=True)
class Needs:
    """config: with the number of parts that a rank's memory asks for. held: parameters on a rank. memory: bytes a rank
    at the peak. seconds: of the whole run. disk: bytes."""

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
        return "\n".join(
            (
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
            )
        )


def needs(
    config: TrainConfig,
    gpus: int = 1,
    *,
    vocab_size: int | None = None,
    mfu: float = MFU,
    tflops: float = PEAK_TFLOPS,
    memory_gib: float = MEMORY_GIB,
) -> Needs:
    """What `config` needs on `gpus` ranks.

    Args:
        vocab_size: of the tokenizer, where the configuration's model does not say.
        mfu: share of `tflops` that training reaches.
        tflops: a GPU's peak, in 10^12 FLOPs a second.
        memory_gib: a GPU's; a step is computed in as few parts as keep the peak below it.

    Raises:
        NormlabError: a number of ranks that does not divide the batch, or a share out of range.
    """
    if gpus < 1 or config.batch_size % gpus:
        raise NormlabError(f"{gpus} GPUs do not divide batch_size {config.batch_size}: change one of the two")
    if not (0 < mfu <= 1 and tflops > 0 and memory_gib > 0):
        raise NormlabError(f"mfu {mfu}, tflops {tflops}, memory {memory_gib}: the first in (0, 1], all positive")
    vocab_size = vocab_size or config.model.get("vocab_size") or config.vocab_size
    model_config = config.model_config(vocab_size, 0)
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
    """The first rank's under `sharded.shard`, no other's is larger: of every tensor its share of the rows. Gathered are
    what lies outside the blocks, and three times a block: the weights of one and of the next, and the gradients of one
    before they are dealt out."""
    with torch.device("meta"):
        model = NormlabForCausalLM(config)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    kept = sum(math.ceil(p.shape[0] / ranks) * p[0].numel() for p in model.parameters())
    outside = sum(p.numel() for p in model.parameters()) - sum(blocks)
    return Held(kept, outside + 3 * max(blocks))


def flops_a_step(model: NormlabConfig, parameters: int, config: TrainConfig) -> float:
    """See the head of this file."""
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    attention = model.num_attention_heads * (model.head_dim or model.hidden_size // model.num_attention_heads)
    a_token = 6 * (parameters - looked_up) + 6 * model.num_hidden_layers * config.block_length * attention
    return float(a_token * config.tokens_per_step)


def _peak(held: Held, activations: float, gpus: int, parts: int) -> float:
    if held.gathered:
        gradients = 4 * held.kept
        passing = activations + gradients if parts > 1 else max(activations, gradients)
        return 12 * held.kept + passing + 4 * held.gathered
    static = 12 + 4 * (gpus > 1) + 4 * (parts > 1)
    return static * held.kept + activations


def _kept(config: NormlabConfig, length: int, dtype: str) -> tuple[float, float]:
    """Bytes between forward and backward pass, and in the loss: whatever the number of blocks of text (weights rounded
    for autocast), and those that each of them adds."""
    counted = {}
    for texts in (1, 2):
        one, two = (_saved_bytes(_at_depth(config, depth), texts, length, dtype) for depth in (1, 2))
        counted[texts] = one + (two - one) * (config.num_hidden_layers - 1)
    a_block = counted[2] - counted[1]
    return counted[1] - a_block, a_block + 2 * 4 * length * config.vocab_size


def _at_depth(config: NormlabConfig, depth: int) -> NormlabConfig:
    return NormlabConfig(**{**config.to_dict(), "num_hidden_layers": depth})


def _saved_bytes(config: NormlabConfig, texts: int, length: int, dtype: str) -> int:
    """What autograd keeps of a forward pass over some blocks of text, weights aside."""
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
