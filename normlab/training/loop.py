"""The training loop, from a fresh model to the last optimizer step.

    training = Training(config, corpus, accelerator)
    for step in training.steps():
        ...

A step takes the next blocks of the text, forward and backward in parts, clips, and steps AdamW and its schedule. Then
the scheme acts on the weights and the carried statistic is refreshed. Nothing is measured or written here.

Weights, gradients, optimizer and residual stream stay in float32, and so does everything that is measured. Probes and
held-out losses run the model itself, outside autocast and compilation. That is why autocast is not left to accelerate:
it would wrap the model's own forward.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import get_scheduler, set_seed

from normlab.errors import NormlabError, in_one_line
from normlab.models import NormlabForCausalLM
from normlab.norms.running import RunningNorm
from normlab.training.attention import use_fast_attention
from normlab.training.config import TrainConfig
from normlab.training.distributed import gathered, shard
from normlab.training.text.corpus import Corpus
from normlab.training.text.stream import StreamedBlocks

if TYPE_CHECKING:
    from accelerate import Accelerator


class Step(NamedTuple):
    """One optimizer step.

    number: steps done, this one included. grad_norm: before clipping. learning_rate: of this step. overflowed: float16
    gradients were not finite, and the weights stayed.
    """

    number: int
    grad_norm: Tensor
    learning_rate: float
    overflowed: bool


class MeanLoss(nn.Module):
    """A model's token losses, summed and divided by a number of labels, and nothing else of what it returns.

    A compiled step writes out whatever it returns: logits too, which nobody reads.

    Attributes:
        ran_eager: a call was not compiled, for whatever reason.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.ran_eager = model, False

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.ran_eager = True
        return self.model(input_ids=ids, labels=ids, num_items_in_batch=labels).loss


def compiled_step(loss: nn.Module, dynamic: bool | None = None) -> nn.Module:
    """`loss` compiled as in a process that has compiled nothing; `dynamic` is that of `torch.compile`.

    PyTorch keeps eight graphs of a piece of code and runs the ninth uncompiled, without an error. After a second shape
    it makes a graph of any shape. All trainings share the code of steps, and of blocks and norms where these are
    graphs of their own. So all is forgotten: another compiled model is compiled again when it is next called.
    """
    torch.compiler.reset()
    return cast(nn.Module, torch.compile(loss, dynamic=dynamic))


class Training:
    """A model in training: weights, optimizer, schedule and position in the text.

    Attributes:
        model: the model itself. It is what is measured.
        done: optimizer steps so far.
        compiled_before: whether all steps of earlier processes ran compiled.
        loss: what a step computes of the model.
        scaler: the loss scaler of float16 steps; else None.
        seconds: of each step of this process, without reading the text.

    Raises:
        NormlabError: the model has norms with statistics of a whole batch, and a step is several passes or has several
            ranks.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, accelerator: Accelerator) -> None:
        self.config, self.corpus, self.accelerator = config, corpus, accelerator
        self.done = 0
        self.seconds: list[float] = []
        self.model = fresh_model(config, corpus, accelerator)
        parts = config.accumulate * accelerator.num_processes
        if parts > 1 and any(isinstance(module, RunningNorm) for module in self.model.modules()):
            raise NormlabError(
                f"{config.scheme} has norms with running statistics, of a step's whole batch: train it on one rank, "
                "without accumulate"
            )
        self.optimizer = optimizer_of(self.model, config)
        self.schedule = get_scheduler(
            "cosine_warmup_with_min_lr",
            self.optimizer,
            num_warmup_steps=math.ceil(round(config.warmup * config.steps, 6)),  # 0.07 * 100 is above 7
            num_training_steps=config.steps,
            scheduler_specific_kwargs={"min_lr_rate": config.min_lr_ratio},
        )
        # float16 gradients would vanish. The loss is multiplied by a scale, which a step that overflows halves.
        self.scaler = torch.amp.GradScaler(accelerator.device.type) if config.dtype == "float16" else None
        # DDP sums gradients over the ranks. A model that is split over them does so by itself.
        self.loss = MeanLoss(self.model)
        self.forward: nn.Module = self.loss if config.fsdp else accelerator.prepare_model(self.loss)
        if config.compile:
            self.forward = compiled_step(self.forward)
        self.compiled_before, self._compiling_failed = True, False
        self.stream: StreamedBlocks | None = None
        if config.stream:
            self.stream = StreamedBlocks(
                config.corpus, config.text_column, corpus.tokenizer(), config.block_length, corpus.cache_dir
            )
        # The loss of the steps since it was last asked for.
        self._loss = torch.zeros((), device=accelerator.device)
        self._loss_begins = 0
        set_seed(config.seed)  # Dropout would not depend on what a scheme drew for its weights.
        self.model.set_schedules(0, config.steps)
        self.model.refresh_carried()

    @property
    def compiled(self) -> bool:
        """Whether all steps ran compiled."""
        return self.config.compile and self.compiled_before and not self.loss.ran_eager

    def steps(self) -> Iterator[Step]:
        """Train up to the last step, and yield after each one."""
        blocks = self._blocks()
        while self.done < self.config.last_step:
            yield self.step(next(blocks))

    def step(self, blocks: Tensor) -> Step:
        """Train one step on this rank's `blocks`, (parts, blocks, tokens) ids."""
        started = time.perf_counter()
        config, model, optimizer = self.config, self.model, self.optimizer
        labels = torch.tensor(float(config.batch_size * (config.block_length - 1)), device=self.accelerator.device)
        for part, ids in enumerate(blocks, 1):
            is_last = part == len(blocks)
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.forward):
                self._loss += self._forward_backward(ids, labels)
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        overflowed = False
        if self.scaler is None:
            optimizer.step()
        else:
            scale = self.scaler.get_scale()
            self.scaler.step(optimizer)
            self.scaler.update()
            overflowed = self.scaler.get_scale() < scale
        if self.accelerator.device.type != "cpu":  # kernels were only launched so far
            torch.accelerator.synchronize(self.accelerator.device)
        self.seconds.append(time.perf_counter() - started)
        learning_rate = self._learning_rate()
        if not overflowed:
            self.schedule.step()
        model.zero_grad()
        self.done += 1
        model.after_step(self.done, config.steps)
        if config.is_due(self.done, refresh_interval(config.steps)):
            model.refresh_carried()
        return Step(self.done, grad_norm, learning_rate, overflowed)

    def _learning_rate(self) -> float:
        """The configuration's rate at this point of the schedule; some parameters have a multiple of it."""
        return self.config.lr * self.schedule.lr_lambdas[0](self.schedule.last_epoch)

    def _forward_backward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Add the gradients of one part of a step; its share of the step's mean token loss.

        labels: their number in the whole step, on all ranks. DDP divides gradients by the number of ranks.
        """
        stance = torch.compiler.set_stance("force_eager") if self._compiling_failed else contextlib.nullcontext()
        try:
            with stance, autocast(self.config.dtype, self.accelerator.device):
                loss = self.forward(ids, labels)
        except TorchDynamoException as error:
            self._compiling_failed = True
            warnings.warn(
                f"training continues uncompiled, torch.compile fails here: {in_one_line(error)}", stacklevel=2
            )
            return self._forward_backward(ids, labels)
        loss = loss * self.accelerator.num_processes
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def resume_at(self, done: int, loss: Tensor | None = None, loss_begins: int | None = None) -> None:
        """Continue after `done` steps, with weights and states of that time.

        loss: `summed_loss` of the steps after `loss_begins`. By default it begins anew.
        """
        self.done, self._loss_begins = done, done if loss_begins is None else loss_begins
        if loss is not None:
            self._loss = loss.to(self._loss)
        self.model.set_schedules(done, self.config.steps)

    def summed_loss(self) -> tuple[Tensor, int]:
        """The summed losses of the steps since `mean_loss` was last called, on all ranks; the step of that call."""
        return self.accelerator.gather(self._loss).mean(), self._loss_begins

    def mean_loss(self) -> float:
        """Mean token loss in nats over the steps since the last call, on all ranks."""
        total, begins = self.summed_loss()
        mean = total.item() / (self.done - begins)
        self._loss, self._loss_begins = torch.zeros_like(self._loss), self.done
        return mean

    def tokens_per_s(self) -> float | None:
        """Tokens per second by the median of the last 200 steps; None before the first step."""
        return self.config.tokens_per_step / float(np.median(self.seconds[-200:])) if self.seconds else None

    def whole_model(self) -> NormlabForCausalLM:
        """The model with whole weights: itself, or with `fsdp` a copy. Every rank has to call this."""
        if not self.config.fsdp:
            return self.model
        model = gathered(self.model)
        model.set_schedules(self.done, self.config.steps)
        return model

    def _blocks(self) -> Iterator[Tensor]:
        """Blocks of each step for this rank, (parts, blocks, tokens) ids."""
        ranks, device = self.accelerator.num_processes, self.accelerator.device
        shape = (self.config.accumulate, ranks, -1, self.config.block_length)
        for ids in self._streamed() if self.stream is not None else self._read():
            yield ids.view(shape)[:, self.accelerator.process_index].to(device)

    def _read(self) -> Iterator[Tensor]:
        """Each step's blocks of the prepared text, on every rank."""
        train, size = self.corpus.train, self.config.batch_size
        order = itertools.islice(block_order(len(train), self.config.seed), self.done * size, None)
        while True:
            rows = list(itertools.islice(order, size))
            yield torch.from_numpy(train[rows].astype(np.int64))

    def _streamed(self) -> Iterator[Tensor]:
        """Each step's blocks of the text that is read while training: by the first rank, which hands them on."""
        shape = (self.config.batch_size, self.config.block_length)
        blocks = iter(cast(StreamedBlocks, self.stream))
        while True:
            if self.accelerator.is_main_process:
                ids = torch.from_numpy(np.stack(list(itertools.islice(blocks, shape[0]))).astype(np.int64))
            else:
                ids = torch.empty(shape, dtype=torch.int64)
            yield broadcast(ids.to(self.accelerator.device)) if self.accelerator.num_processes > 1 else ids


def fresh_model(config: TrainConfig, corpus: Corpus, accelerator: Accelerator) -> NormlabForCausalLM:
    """The model before its first step: by the seed alone, on its device, split over the ranks with `fsdp`."""
    set_seed(config.seed)
    model = NormlabForCausalLM(config.model_config(corpus.vocab_size, corpus.eos_token_id))
    model.config.use_cache = False
    with torch.no_grad():
        embeddings = cast(nn.Embedding, model.get_input_embeddings())
        embeddings.weight[:, : config.outlier_channels] = config.outlier_size
    if config.gradient_checkpointing:
        # Under its older name in transformers before 5.20.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if config.fsdp and accelerator.num_processes > 1:
        shard(model, accelerator.device)
    model.to(device=accelerator.device)  # type: ignore[call-arg]
    use_fast_attention(model, config.dtype, accelerator.device)
    return model.train()


def autocast(dtype: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Autocast to `dtype` on the device's kind; nothing for float32."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))


def optimizer_of(model: NormlabForCausalLM, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay where the model asks for it, and the scheme's rates."""
    groups = parameter_groups(model, config.weight_decay)
    # The fused one skips a float16 step by itself, unseen by the schedule, and takes no scaler with split weights.
    fused = config.dtype != "float16"
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused)
    model.apply_rates(optimizer, config.gain_lr_ratio)
    return optimizer


def parameter_groups(model: NormlabForCausalLM, weight_decay: float) -> list[dict[str, Any]]:
    """An optimizer's parameters: those that the model decays, and the others."""
    decayed = set(model.decay_parameter_names())
    return [
        {"params": [p for n, p in model.named_parameters() if (n in decayed) is decays], "weight_decay": decay}
        for decays, decay in ((True, weight_decay), (False, 0.0))
    ]


def block_order(blocks: int, seed: int) -> Iterator[int]:
    """Indices of `blocks` blocks without end: one permutation of all of them after another, from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(blocks, generator=generator).tolist()


def refresh_interval(steps: int) -> int:
    """Steps between two refreshes of the carried constant: clamp(steps // 50, 1, 1000), the paper's schedule."""
    return min(max(steps // 50, 1), 1000)
