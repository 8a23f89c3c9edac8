"""One training run: from a `TrainConfig` to a finished run on disk.

`train(config, out)`         train, or resume, or skip what is finished; returns the `Run`
`train_from_manifest(path)`  repeat the run of a manifest

Under `torchrun` or `accelerate launch` each rank takes its share of every step's blocks (DDP, or FSDP2 with `fsdp`).
Rank 0 alone writes the run.

A process killed at any moment leaves the last whole checkpoint, with the log of measurements in it. A resumed run
repeats, bit for bit on a CPU, what the killed one would have done. The finished run appears under its name in one
rename.

What is logged is also appended to `rows.jsonl` in the run's working directory: a line of JSON per row, for whoever
watches the run. It begins with the losses of n-gram models.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from normlab import __version__, runs, store
from normlab.errors import NormlabError
from normlab.models.block import whole
from normlab.training.checkpoint import restore, resumable, unlike, write_checkpoint
from normlab.training.config import AUTO, TrainConfig, require_same
from normlab.training.distributed import (
    accelerator_for,
    fastest_dtype,
    gathered,
    process_settings,
    settled,
    why_dtype,
)
from normlab.training.experiments import experiments
from normlab.training.loop import Training
from normlab.training.measure import Measurements
from normlab.training.progress import bar_of
from normlab.training.text.corpus import Corpus, corpus_of

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
        out: may be an address (`normlab.store`). The run is trained in a folder of this machine and uploaded when it
            has ended; the returned run is the one here.
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
    store.check_root(root)
    accelerator = accelerator_for(config)
    is_first, ranks = accelerator.is_main_process, accelerator.num_processes
    if place is not None and int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks:
        raise NormlabError("ranks on several machines train in one directory: name one that all see as --out")
    if place is not None:
        with accelerator.main_process_first():
            for candidate in config.candidates() if is_first else ():
                place.fetch(candidate.run_id)
    with accelerator.main_process_first():  # it prepares the text; the others find it in the cache
        corpus = corpus_of(config, cache_dir, progress and is_first)
    text = corpus.identity()
    asked, config = config, _settled(config, root, text, accelerator)
    manifest = manifest_of(config, text)
    final, work = root / config.run_id, root / store.PARTIAL / config.run_id
    if store.is_run(final):  # without the lock: the directory may be read-only
        run = _finished(final, work, config, manifest)
        if place is not None and is_first:
            place.publish(run.name)
        return run
    lock = store.exclusive(root / store.PARTIAL / f"{config.run_id}.lock")
    with store.full_disk_named(root), lock if is_first else contextlib.nullcontext():
        with accelerator.main_process_first():
            finished = store.is_run(final)
        if finished:
            _finished(final, work, config, manifest)
        else:
            if is_first:
                work.mkdir(parents=True, exist_ok=True)
            device, show = accelerator.device, progress and is_first
            if show and asked.dtype == AUTO:
                begun = f"training in {config.dtype}, as this run was begun"
                tqdm.write(why_dtype(device) if config.dtype == fastest_dtype(device) else begun, file=sys.stderr)
            with process_settings(config, device):
                _run(config, corpus, accelerator, work, final, manifest, show, watch)
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
    if not store.is_address(path) and Path(path).name == store.MANIFEST:
        path = Path(path).parent
    manifest = runs.read_run(path).manifest
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
    show: bool,
    watch: Watch | None,
) -> None:
    """Train, and write the run to `final`. Every rank has to call this."""
    started, is_first = time.perf_counter(), accelerator.is_main_process
    training, measurements = Training(config, corpus, accelerator), Measurements(config, corpus)
    tokenizer = corpus.tokenizer() if config.keep_weights else None  # now: the cache may be gone in the end
    log = measurements.log
    newest = broadcast_object_list([resumable(work, manifest) if is_first else None])[0]
    if newest is not None:
        restore(newest, training, log)
    resumed_from = training.done

    def checkpoint() -> None:
        write_checkpoint(training, log, manifest, work)

    with (
        bar_of("train", config.last_step, show, initial=resumed_from, unit=" steps") as bar,
        (work / store.ROWS if is_first else Path(os.devnull)).open("w") as file,
    ):
        levels = {"unigram_entropy": corpus.unigram_entropy, **measurements.on.count_losses}
        _append(file, [runs.Row(0, 0, "eval", "model", None, name, "all", level) for name, level in levels.items()])

        def tell(step: int, rows: list[runs.Row]) -> bool:
            _append(file, rows)
            return watch is None or watch(step, rows)

        diverged = _train_steps(training, measurements, bar, checkpoint, tell)
    model = training.model
    if config.fsdp:
        model = gathered(model)
        model.set_schedules(training.done, config.steps)
    after = None
    if config.experiment_blocks and not diverged:
        after = experiments(model, measurements.on.experiments)
    if not is_first:
        return
    staged = work / "final"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    if tokenizer is not None:
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
    store.write_stats(staged / store.STATS, log.frame())
    if after is not None:
        store.write_stats(staged / store.EXPERIMENTS, after)
    measured = {
        "wall_s": time.perf_counter() - started,
        "tokens_per_s": training.tokens_per_s(),
        "compiled": training.compiled,
        "resumed_from_step": resumed_from,
    }
    results = _results(training, measurements, diverged)
    store.write_json(staged / store.MANIFEST, {**manifest, **results, "measured": measured})
    runs.read_run(staged).table()  # read back, before the checkpoints go
    store.publish(staged, final)


def _train_steps(
    training: Training,
    measurements: Measurements,
    bar: tqdm,
    checkpoint: Callable[[], None],
    watch: Watch,
) -> bool:
    """Train up to the last step, measure, log and write checkpoints. True if the loss became non-finite.

    RunStopped if the watcher asks for it, once a checkpoint is written.
    """
    config, model, log = training.config, training.model, measurements.log
    if training.done == 0:
        measurements.at(model, 0)
    shown = len(log.rows)
    if not watch(training.done, log.rows[:]):
        raise RunStopped
    for number, grad_norm, learning_rate, overflowed in training.steps():
        bar.update()
        measurements.at(model, number)
        if training.scaler is not None:
            log.add(number, "train", "loss_scale", training.scaler.get_scale())
            log.add(number, "train", "skipped_step", overflowed)
        stops = False
        if config.is_due(number, config.log_every):
            loss = training.mean_loss()
            log.add(number, "train", "loss", loss)
            log.add(number, "train", "grad_norm", whole(grad_norm).item())
            log.add(number, "train", "learning_rate", learning_rate)
            if not bar.disable:
                bar.set_postfix_str(f"loss {loss:.3f}, {training.tokens_per_s():,.0f} tokens/s", refresh=False)
            continues = watch(number, log.rows[shown:])
            shown = len(log.rows)
            if not math.isfinite(loss):
                return True
            stops = not continues and number < config.last_step
        if stops or config.is_due(number, config.checkpoint_every):
            checkpoint()
        if stops:
            raise RunStopped
    return False


def _append(file: TextIO, rows: list[runs.Row]) -> None:
    """Write rows as lines of JSON, for whoever watches the run."""
    file.writelines(f"{json.dumps(row)}\n" for row in rows)
    file.flush()


def _settled(config: TrainConfig, root: Path, text: dict[str, Any], accelerator: Accelerator) -> TrainConfig:
    """`config` with dtype "auto" replaced: by the precision of a run that is finished or can be resumed, else by the
    fastest of the device. All ranks take rank 0's."""

    def exists(candidate: TrainConfig) -> bool:
        name = candidate.run_id
        begun = manifest_of(candidate, text)
        checkpoints = store.checkpoints(root / store.PARTIAL / name)
        return store.is_run(root / name) or any(not unlike(path, begun) for path in checkpoints)

    if config.dtype != AUTO:
        return config
    existing = filter(exists, config.candidates())
    return broadcast_object_list([next(existing, settled(config, accelerator.device))])[0]


def _finished(final: Path, work: Path, config: TrainConfig, manifest: dict[str, Any]) -> runs.Run:
    """The finished run. NormlabError if it is damaged, or not the run that `config` asks for."""
    run = runs.read_run(final)
    require_same(run.manifest, config, manifest["corpus"])
    run.table()  # raises if it cannot be read
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


def _results(training: Training, measurements: Measurements, diverged: bool) -> dict[str, Any]:
    """The results of a run: its end, its tokens, and its model.

    `status` is explained in `Run.status`. `eval_loss` is the last held-out loss: None if it is not finite or was never
    measured. A run whose held-out loss was never measured counts as learned.
    """
    config, loss = training.config, measurements.log.last("loss", "eval")
    count_losses = measurements.on.count_losses
    if diverged or (loss is not None and not math.isfinite(loss)):
        status, loss = runs.DIVERGED, None
    else:
        learned = loss is None or loss < min(training.corpus.unigram_entropy, *count_losses.values())
        status = runs.FINISHED if learned else runs.NOT_LEARNED
    chosen_by = measurements.log.last("validation_loss", "eval")
    tokens = training.done * config.tokens_per_step
    facts = training.model.config.to_diff_dict()
    return {
        "status": status,
        "eval_loss": loss,
        **count_losses,
        **({} if chosen_by is None or diverged else {"validation_loss": chosen_by}),
        "steps": training.done,
        "tokens": tokens,
        "epochs": None if config.stream else tokens / training.corpus.train_tokens,
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
