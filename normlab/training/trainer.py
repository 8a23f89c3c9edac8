"""One training run: from a `TrainConfig` to a finished run on disk.

`train(config, out)`   train, or resume, or skip what is finished; returns the `Run`. Under `torchrun` or `accelerate
                       launch`, each rank takes its share of every step's blocks (DDP, or FSDP2 where the run says
                       `fsdp`); rank 0 alone writes the run

A run in progress is a directory of checkpoints, each of them staged, synced and renamed; the log of measurements is
part of the checkpoint. So a process killed at any moment leaves the last whole checkpoint, and a resumed run repeats,
bit for bit on a CPU, what the killed one would have done. The finished run appears under its name in one rename.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from torch import nn
from transformers import TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from normlab import runs
from normlab.errors import NormlabError
from normlab.models import NormlabForCausalLM
from normlab.training.batches import Blocks
from normlab.training.callbacks import (
    EvalCallback,
    ProbeCallback,
    ProgressCallback,
    PublishCallback,
    RefreshCallback,
    RunLog,
    ScaleCallback,
    SchemeCallback,
    StopCallback,
    Watch,
    WatchCallback,
    refresh_interval,
)
from normlab.training.config import TrainConfig, require_same
from normlab.training.corpus import Corpus, corpus_of
from normlab.training.experiments import experiments
from normlab.training.manifest import manifest_of
from normlab.training.precision import memory_kept, require_compiler, use_fast_attention
from normlab.training.run_trainer import STREAM, RunTrainer, checkpoint_step, checkpoints
from normlab.training.sharded import gathered, shard
from normlab.training.stream import StreamedBlocks

EVAL_TOKENS = 4096  # at once, at most
PARTIAL_MANIFEST = "partial.json"


def training_arguments(config: TrainConfig, work: Path) -> TrainingArguments:
    """AdamW, linear warm-up, cosine to a minimum, clipping; nothing that costs time beside it."""
    # By a name that older transformers do not have: not given when it is not asked for.
    memory: dict[str, Any] = {"activation_checkpointing": True} if config.gradient_checkpointing else {}
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size // (_ranks(config).num_processes * config.accumulate),
        gradient_accumulation_steps=config.accumulate,
        use_cpu=_on_cpu(config),
        learning_rate=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        max_grad_norm=config.clip,
        # The fused one leaves out a step by itself, unseen by the schedule, and takes no scaler with split weights.
        optim="adamw_torch" if config.dtype == "float16" else "adamw_torch_fused",
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": config.min_lr_ratio},
        warmup_steps=config.warmup,
        seed=config.seed,
        logging_strategy="steps",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps" if config.checkpoint_every else "no",
        save_steps=config.checkpoint_every or config.steps,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
        torch_compile=config.compile,
        ignore_data_skip=config.stream,  # it goes to its position by itself
        log_level="error",
        **memory,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # else the Trainer multiplies the batch by the number of GPUs that it sees
    return arguments


def _ranks(config: TrainConfig) -> PartialState:
    """The processes that train this run together; one, unless a launcher started more."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise NormlabError("device is 'cuda', and PyTorch sees no GPU here; leave it at 'auto'")
    return PartialState(cpu=_on_cpu(config))


def _on_cpu(config: TrainConfig) -> bool:
    """Whether accelerate has to be told: by itself it takes several processes on a CPU for one."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    return config.device == "cpu" or (several and not torch.cuda.is_available())


def train(
    config: TrainConfig,
    out: str | Path = "runs",
    *,
    cache_dir: str | Path | None = None,
    progress: bool = True,
    watch: Watch | None = None,
) -> runs.Run:
    """Train `config` under directory `out` and return the run; resume a killed one; return a finished one at once. out
    may be an address (`normlab.storage`): checkpoints and the finished run are published there, and the run that is
    returned is the copy on this machine.

    watch(step, rows): called before the first step and after every one with the rows logged since; where it returns
    False the run is checkpointed and RunStopped raised.
    Raises NormlabError for bad input: a corpus that cannot be read, an output directory that holds something else, a
    run of the same name made from other text, a number of ranks that does not divide the batch. A loss that becomes
    non-finite is no error: the run ends with status "diverged".
    """
    place = runs.Place(out) if runs.is_address(out) else None
    root = Path(out) if place is None else place.copy
    ranks = _ranks(config)
    if config.batch_size % (ranks.num_processes * config.accumulate):
        parts = "" if config.accumulate == 1 else f" x {config.accumulate} parts"
        raise NormlabError(
            f"{ranks.num_processes} ranks{parts} do not divide batch_size {config.batch_size}, the blocks that all of "
            "them together take a step: change one of the two"
        )
    if place is not None and int(os.environ.get("LOCAL_WORLD_SIZE", ranks.num_processes)) < ranks.num_processes:
        raise NormlabError("ranks on several machines go on from one directory: name one that all of them see as --out")
    with ranks.main_process_first():  # the first reads, prepares and takes the lock; the others find it done
        runs.check_root(root)
        corpus = corpus_of(config, cache_dir, progress and ranks.is_main_process)
    final, work = root / config.run_id, root / runs.PARTIAL / config.run_id
    lock = runs.exclusive(root / runs.PARTIAL / f"{config.run_id}.lock")
    with runs.full_disk_named(root), lock if ranks.is_main_process else contextlib.nullcontext():
        manifest = manifest_of(config, corpus)
        with ranks.main_process_first():
            if place is not None and ranks.is_main_process:
                place.fetch(config.run_id)
            finished = final.exists()
            if ranks.is_main_process and not finished:
                _prepare(work, manifest)
        if finished:
            run = runs.read_run(final)
            require_same(run.manifest, config, corpus.identity())
            shutil.rmtree(work, ignore_errors=True)
            if place is not None and ranks.is_main_process:
                place.publish(config.run_id)
            return run
        with _settings(config.threads), memory_kept():
            _run(config, corpus, work, final, manifest, progress and ranks.is_main_process, watch, place)
        if place is not None and ranks.is_main_process:
            place.publish(config.run_id)
        ranks.wait_for_everyone()
    return runs.read_run(final)


def train_from_manifest(path: str | Path, out: str | Path = "runs", **options: Any) -> runs.Run:
    """Repeat the run of a manifest.json (or of a run's directory): same configuration, threads and text; options as in
    `train`.

    NormlabError when the corpus or tokenizer of this machine differs from the manifest's: the numbers could not be the
    same.
    """
    path = Path(path)
    manifest = runs.read_run(path.parent if path.name == runs.MANIFEST else path).manifest
    config = TrainConfig.from_dict(manifest["config"])
    corpus = corpus_of(config, options.get("cache_dir"), options.get("progress", True))
    require_same(manifest, config, corpus.identity())
    return train(config, out, **options)


def _run(
    config: TrainConfig,
    corpus: Corpus,
    work: Path,
    final: Path,
    manifest: dict[str, Any],
    progress: bool,
    watch: Watch | None,
    place: runs.Place | None,
) -> None:
    started = time.perf_counter()
    trainer, log, stop, bar = build_trainer(config, corpus, work, progress)
    if place is not None:
        trainer.add_callback(PublishCallback(lambda: place.publish_checkpoint(checkpoints(work)[-1])))
    if watch is not None:
        trainer.add_callback(WatchCallback(log, watch))
    latest = next(reversed(checkpoints(work)), None)
    if latest is not None:
        log.restore(latest / runs.STATS)
        if isinstance(trainer.train_dataset, StreamedBlocks):
            done = checkpoint_step(latest) * config.batch_size
            trainer.train_dataset.restore(json.loads((latest / STREAM).read_text()), done)
    trainer.train(resume_from_checkpoint=str(latest) if latest else None)

    model = trainer.accelerator.unwrap_model(trainer.model)
    if config.fsdp:
        model = gathered(model)
        model.set_schedules(trainer.state.global_step, config.steps)
    counted = corpus.count_losses(config.eval_blocks, config.held_out)
    tokens = trainer.state.global_step * config.tokens_per_step
    manifest |= _outcome(log, stop.diverged, counted["trigram_loss"]) | counted
    found = None
    if config.experiment_blocks and not stop.diverged:
        found = experiments(model, corpus.spread(config.experiment_blocks, config.held_out))
    manifest |= {
        "steps": trainer.state.global_step,
        "tokens": tokens,
        "epochs": None if config.stream else tokens / corpus.train_tokens,
        "model": _model_facts(model.config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "measured": {
            "wall_s": time.perf_counter() - started,
            "tokens_per_s": bar.tokens_per_s(),
            "resumed_from_step": checkpoint_step(latest) if latest else 0,
        },
    }
    if not trainer.args.should_save:
        return
    staged = work / "final"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    if config.keep_weights:
        model.save_pretrained(staged)
        corpus.tokenizer().save_pretrained(staged)
    runs.write_stats(staged / runs.STATS, log.frame())
    if found is not None:
        runs.write_stats(staged / runs.EXPERIMENTS, found)
    runs.write_json(staged / runs.MANIFEST, manifest)
    runs.publish(staged, final)
    shutil.rmtree(work)


def _model_facts(config: Any) -> dict[str, Any]:
    """The model's configuration without the two fields that saving a checkpoint writes into it: whether a process saved
    one before its run ended must not show."""
    return {name: value for name, value in config.to_diff_dict().items() if name not in ("architectures", "dtype")}


def _outcome(log: RunLog, diverged: bool, trigram_loss: float) -> dict[str, Any]:
    """`status` and `eval_loss`, the last held-out loss: None where it is not finite, or was never measured (then
    learning is taken for granted). See `Run.status`."""
    loss = log.last("loss", "eval")
    if diverged or (loss is not None and not math.isfinite(loss)):
        return {"status": runs.DIVERGED, "eval_loss": None}
    learned = loss is None or loss < trigram_loss
    return {"status": runs.FINISHED if learned else runs.NOT_LEARNED, "eval_loss": loss}


@contextlib.contextmanager
def _settings(threads: int) -> Iterator[None]:
    """The process's thread count for the time of a run, and no bars of transformers' own between ours."""
    from transformers.utils import logging

    before, bars = torch.get_num_threads(), logging.is_progress_bar_enabled()
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if bars:
            logging.enable_progress_bar()


def build_trainer(
    config: TrainConfig, corpus: Corpus, work: Path, progress: bool
) -> tuple[RunTrainer, RunLog, StopCallback, ProgressCallback]:
    """The trainer with a freshly initialised model and all callbacks, in the order in which they must act."""
    set_seed(config.seed)
    model = NormlabForCausalLM(config.model_config(corpus.vocab_size, corpus.eos_token_id))
    with torch.no_grad():
        embeddings = cast(nn.Embedding, model.get_input_embeddings())
        embeddings.weight[:, : config.outlier_channels] = config.outlier_size
    ranks = _ranks(config)
    if config.fsdp and ranks.num_processes > 1:
        shard(model, ranks.device)
    measured = functools.partial(corpus.spread, held_out=config.held_out)
    log = RunLog(config.tokens_per_step)
    stop = StopCallback()
    bar = ProgressCallback(config.run_id, config.tokens_per_step, progress)
    callbacks = [
        bar,
        SchemeCallback(),
        RefreshCallback(refresh_interval(config.steps)),
        ProbeCallback(log, measured(config.probe_blocks), config.probe_every, config.probe_metrics()),
        EvalCallback(log, measured(config.eval_blocks), _blocks_at_once(config), config.eval_every),
        ScaleCallback(log),
        stop,
    ]
    trainer = RunTrainer(
        model=model,
        args=training_arguments(config, work),
        train_dataset=_training_blocks(config, corpus),
        callbacks=callbacks,
        log=log,
        dtype=config.dtype,
        fsdp=config.fsdp,
    )
    if trainer.is_fsdp_enabled:
        raise NormlabError("accelerate is configured to shard the model itself: take that out, and give --fsdp")
    use_fast_attention(model, config.dtype, trainer.args.device)
    if config.compile:
        require_compiler(trainer.args.device)
    trainer.remove_callback(PrinterCallback)
    return trainer, log, stop, bar


def _blocks_at_once(config: TrainConfig) -> int:
    """Held-out blocks in a forward pass: what every rank has room for."""
    return max(1, min(config.batch_size // config.accumulate, EVAL_TOKENS // config.block_length))


def _training_blocks(config: TrainConfig, corpus: Corpus) -> Blocks | StreamedBlocks:
    if not config.stream:
        return Blocks(corpus.train)
    ahead = 4 * config.batch_size  # accelerate's loaders take a step's blocks before the step before it has ended
    return StreamedBlocks(config.corpus, config.text_column, corpus.tokenizer(), config.block_length, ahead)


def _prepare(work: Path, manifest: dict[str, Any]) -> None:
    """The working directory, emptied when its checkpoints come from other text, versions or threads: they could not be
    continued to the same numbers."""
    file = work / PARTIAL_MANIFEST
    if file.is_file():
        begun = json.loads(file.read_text())
        begun["config"] = TrainConfig.from_dict(begun["config"]).to_dict()  # with fields that were added since
        if all(begun[part] == manifest[part] for part in ("schema", "config", "corpus", "environment")):
            return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    runs.write_json(file, manifest)
