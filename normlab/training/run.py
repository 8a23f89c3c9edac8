"""One training run: from a `TrainConfig` to a finished run on disk.

`train(config, out)`         train, or resume, or skip what is finished; returns the `Run`
`train_from_manifest(path)`  repeat the run of a manifest

Under `torchrun` or `accelerate launch` each rank takes its share of every step's blocks (DDP, or FSDP2 with `fsdp`).
Rank 0 alone writes the run.

A process killed at any moment leaves the last whole checkpoint, with the log of measurements in it. A resumed run
repeats, bit for bit on a CPU, what the killed one would have done. The finished run appears under its name in one
rename.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list

from normlab import __version__, runs, store
from normlab.errors import NormlabError
from normlab.models.block import whole
from normlab.training import distributed
from normlab.training.checkpoint import begun_alike, restore, resumable, write_checkpoint
from normlab.training.config import AUTO, TrainConfig, require_same
from normlab.training.experiments import experiments
from normlab.training.loop import Training, is_due
from normlab.training.measure import Measurements, RunLog
from normlab.training.progress import Reporter, one_run
from normlab.training.text.corpus import Corpus, MeasuredOn, corpus_of

if TYPE_CHECKING:
    from accelerate import Accelerator

# Called with the number of steps done and the rows logged since the last call. False stops the run.
Watch = Callable[[int, list[runs.Row]], bool]


class RunStopped(Exception):
    """A watcher stopped the run. It is at a checkpoint, or has not begun, and resumes when it is trained again."""


def train(
    config: TrainConfig,
    out: str | Path = "runs",
    *,
    cache_dir: str | Path | None = None,
    progress: bool = True,
    watch: Watch | None = None,
) -> runs.Run:
    """Train `config` under directory `out` and return the run. A killed run resumes; a finished one returns at once.

    Args:
        out: may be an address (`normlab.store`). Checkpoints and the finished run are published there, and the
            returned run is the copy on this machine.
        watch: watch(step, rows) is called before the first step and after every logged one, with the rows logged since
            the last call. If it returns False, the run writes a checkpoint and RunStopped is raised.

    Raises:
        NormlabError: a corpus that cannot be read, or an output directory that holds something else. Also a run of the
            same name made from other text, or a number of ranks that does not divide the batch. A non-finite loss is no
            error: the run ends with status "diverged".
    """
    if not isinstance(config, TrainConfig):
        raise NormlabError(f"{config!r:.80} is no TrainConfig")
    place = store.Remote(out) if store.is_address(out) else None
    root = Path(out) if place is None else place.copy
    accelerator = distributed.accelerator_for(config)
    _check_ranks(config, accelerator.num_processes, place)
    is_first = accelerator.is_main_process
    with accelerator.main_process_first():  # it prepares the text; the others find it in the cache
        store.check_root(root)
        corpus = corpus_of(config, cache_dir, progress and is_first)
    asked = config.dtype
    config = _settled(config, root, place, corpus, accelerator)
    manifest = manifest_of(config, corpus.identity())
    final, work = root / config.run_id, root / store.PARTIAL / config.run_id
    if place is None and final.exists():  # without the lock: the directory may be read-only
        return _finished(final, work, config, manifest)
    lock = store.exclusive(root / store.PARTIAL / f"{config.run_id}.lock")
    with store.full_disk_named(root), lock if is_first else contextlib.nullcontext():
        with accelerator.main_process_first():
            if place is not None and is_first:
                place.fetch(config.run_id)
            finished = final.exists()
        if finished:
            _finished(final, work, config, manifest)
        else:
            if is_first:
                work.mkdir(parents=True, exist_ok=True)
            if progress and is_first and asked == AUTO:
                _say_precision(config, accelerator.device)
            distributed.warn_if_emulated(config, accelerator.device)
            shown = one_run(config, root, progress and is_first)
            with _settings(config.threads), distributed.memory_kept(), distributed.compile_again(), shown:
                _run(config, corpus, accelerator, work, final, manifest, watch, place)
            if is_first:
                shutil.rmtree(work)
        if place is not None and is_first:
            place.publish(config.run_id)
        if not finished:
            accelerator.wait_for_everyone()
    return runs.read_run(final)


def train_from_manifest(path: str | Path, out: str | Path = "runs", **options: Any) -> runs.Run:
    """Repeat the run of a manifest.json, or of a run's directory: same configuration, threads and text.

    Options are those of `train`. NormlabError if the corpus or tokenizer of this machine differs from the manifest's:
    the numbers could not be the same.
    """
    path = Path(path)
    manifest = runs.read_run(path.parent if path.name == store.MANIFEST else path).manifest
    config = TrainConfig.from_dict(manifest["config"])
    corpus = corpus_of(config, options.get("cache_dir"), options.get("progress", True))
    require_same(manifest, config, corpus.identity())
    return train(config, out, **options)


def _run(
    config: TrainConfig,
    corpus: Corpus,
    accelerator: Accelerator,
    work: Path,
    final: Path,
    manifest: dict[str, Any],
    watch: Watch | None,
    place: store.Remote | None,
) -> None:
    started = time.perf_counter()
    measured_on = corpus.measured_on(config)
    training, log = Training(config, corpus, accelerator), RunLog(config.tokens_per_step)
    newest = broadcast_object_list([resumable(work, manifest) if accelerator.is_main_process else None])[0]
    if newest is not None:
        restore(newest, training, log)
    resumed_from = training.done

    def checkpoint() -> None:
        written = write_checkpoint(training, log, manifest, work)
        if place is not None and accelerator.is_main_process:
            place.publish_checkpoint(written)

    report = Reporter(work if accelerator.is_main_process else None, resumed_from)
    diverged = _train_steps(training, log, Measurements(config, corpus, measured_on, log), report, checkpoint, watch)
    model = training.model
    if config.fsdp:
        model = distributed.gathered(model)
        model.set_schedules(training.done, config.steps)
    after = None
    if config.experiment_blocks and not diverged:
        after = experiments(model, measured_on.experiments)
    if not accelerator.is_main_process:
        return
    manifest = manifest | _results(config, corpus, measured_on, training, log, diverged)
    manifest["measured"] = {
        "wall_s": time.perf_counter() - started,
        "tokens_per_s": training.tokens_per_s(),
        "compiled": training.compiled,
        "resumed_from_step": resumed_from,
    }
    staged = work / "final"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    if config.keep_weights:
        model.save_pretrained(staged)
        corpus.tokenizer().save_pretrained(staged)
    store.write_stats(staged / store.STATS, log.frame())
    if after is not None:
        store.write_stats(staged / store.EXPERIMENTS, after)
    store.write_json(staged / store.MANIFEST, manifest)
    runs.read_run(staged).table()  # read back, before the checkpoints go
    store.publish(staged, final)


def _train_steps(
    training: Training,
    log: RunLog,
    measurements: Measurements,
    report: Reporter,
    checkpoint: Callable[[], None],
    watch: Watch | None,
) -> bool:
    """Train up to the last step, measure, log and write checkpoints. True if the loss became non-finite.

    RunStopped if the watcher asks for it, once a checkpoint is written.
    """
    config, model = training.config, training.model
    if training.done == 0:
        measurements.at(model, 0)
    shown = len(log.rows)
    if watch is not None and not watch(training.done, log.rows[:]):
        raise RunStopped
    for number, grad_norm, learning_rate, overflowed in training.steps():
        report.step(number, training.tokens_per_s())
        measurements.at(model, number)
        if training.scaler is not None:
            log.add(number, "train", "loss_scale", training.scaler.get_scale())
            log.add(number, "train", "skipped_step", overflowed)
        stops = False
        if number % config.log_every == 0:
            loss = report.loss = training.mean_loss()
            log.add(number, "train", "loss", loss)
            log.add(number, "train", "grad_norm", whole(grad_norm).item())
            log.add(number, "train", "learning_rate", learning_rate)
            continues = watch is None or watch(number, log.rows[shown:])
            shown = len(log.rows)
            if not math.isfinite(loss):
                report.write(number, training.tokens_per_s())
                return True
            stops = not continues and number < config.last_step
        if stops or is_due(number, config.checkpoint_every, config.last_step):
            checkpoint()
        if stops:
            raise RunStopped
    report.write(training.done, training.tokens_per_s())
    return False


def _check_ranks(config: TrainConfig, ranks: int, place: store.Remote | None) -> None:
    if config.batch_size % (ranks * config.accumulate):
        parts = "" if config.accumulate == 1 else f" x {config.accumulate} parts"
        raise NormlabError(
            f"{ranks} ranks{parts} do not divide batch_size {config.batch_size}, the blocks that all of "
            "them together take a step: change one of the two"
        )
    if place is not None and int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks:
        raise NormlabError("ranks on several machines resume from one directory: name one that all see as --out")


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


def _settled(
    config: TrainConfig, root: Path, place: store.Remote | None, corpus: Corpus, accelerator: Accelerator
) -> TrainConfig:
    """`config` with dtype "auto" replaced: by the precision of a run that is finished or can be resumed, else by the
    fastest of the device. All ranks take rank 0's."""

    def exists(candidate: TrainConfig) -> bool:
        name = candidate.run_id
        if place is not None and (place.has(f"{name}/{store.MANIFEST}") or place.has(f"{store.PARTIAL}/{name}")):
            return True
        begun = manifest_of(candidate, corpus.identity())
        checkpoints = store.checkpoints(root / store.PARTIAL / name)
        return store.is_run(root / name) or any(begun_alike(path, begun) for path in checkpoints)

    if config.dtype != AUTO:
        return config
    existing = filter(exists, config.candidates())
    return broadcast_object_list([next(existing, distributed.settled(config, accelerator.device))])[0]


def _say_precision(config: TrainConfig, device: torch.device) -> None:
    from tqdm import tqdm

    kept = config.dtype != distributed.fastest_dtype(device)
    line = f"training in {config.dtype}, as this run was begun" if kept else distributed.why_dtype(device)
    tqdm.write(line, file=sys.stderr)


def _finished(final: Path, work: Path, config: TrainConfig, manifest: dict[str, Any]) -> runs.Run:
    """The finished run. NormlabError if it is damaged, or not the run that `config` asks for."""
    run = runs.read_run(final)
    require_same(run.manifest, config, manifest["corpus"])
    if not (final / store.STATS).is_file():
        raise NormlabError(f"run {final}: {store.STATS} is missing; delete the run and train it again")
    shutil.rmtree(work, ignore_errors=True)
    return run


# --- the manifest ---


def manifest_of(config: TrainConfig, corpus: Mapping[str, Any]) -> dict[str, Any]:
    """A run's manifest before its first step: all that its numbers depend on. corpus: `Corpus.identity()`."""
    return {
        "schema": runs.SCHEMA_VERSION,
        "run": config.run_id,
        "config": config.to_dict(),
        "corpus": dict(corpus),
        "environment": environment(config.device),
        "commit": commit(),
        "command": f"normlab train {shlex.join(config.to_arguments())}",
    }


def _results(
    config: TrainConfig, corpus: Corpus, measured_on: MeasuredOn, training: Training, log: RunLog, diverged: bool
) -> dict[str, Any]:
    """The results of a run: its end, its tokens, and its model.

    `status` is explained in `Run.status`. `eval_loss` is the last held-out loss: None if it is not finite or was never
    measured. A run whose held-out loss was never measured counts as learned.
    """
    loss = log.last("loss", "eval")
    if diverged or (loss is not None and not math.isfinite(loss)):
        status, loss = runs.DIVERGED, None
    else:
        learned = loss is None or loss < measured_on.count_losses["trigram_loss"]
        status = runs.FINISHED if learned else runs.NOT_LEARNED
    tokens = training.done * config.tokens_per_step
    facts = training.model.config.to_diff_dict()
    return {
        "status": status,
        "eval_loss": loss,
        **measured_on.count_losses,
        "steps": training.done,
        "tokens": tokens,
        "epochs": None if config.stream else tokens / corpus.train_tokens,
        # Saving a model writes these two fields into its configuration.
        "model": {name: value for name, value in facts.items() if name not in ("architectures", "dtype")},
        "parameters": sum(p.numel() for p in training.model.parameters()),
    }


def commit(package: Path = Path(__file__).parents[1]) -> str | None:
    """The commit of the checkout that this code is in, with "-dirty" if tracked files differ; None outside one."""
    git = ["git", "-C", str(package)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], check=True, capture_output=True)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
        return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    return None


def environment(device: str = "auto") -> dict[str, str]:
    """Versions and machine: what else the last digits of a number depend on."""
    import tokenizers
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "normlab": __version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and device != "cpu" else "cpu",
    }
