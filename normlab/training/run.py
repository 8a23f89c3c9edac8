"""One training run: from a `TrainConfig` to a finished run on disk.

`train(config, out)`         train, or resume, or skip what is finished; returns the `Run`
`train_from_manifest(path)`  repeat the run of a manifest

To be read from top to bottom: `train` finds the processes, the folder, the text and the precision; `_run` makes the
model, resumes, trains and writes; `_train_steps` is what happens at each step.

Under `torchrun` or `accelerate launch` each rank takes its share of every step's blocks (DDP, or FSDP2 with `fsdp`).
Rank 0 alone writes the run, and decides from where it goes on.

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
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from normlab import runs, store
from normlab.errors import NormlabError
from normlab.training.checkpoint import Checkpoints, can_resume, why_left
from normlab.training.config import AUTO, TrainConfig
from normlab.training.distributed import (
    accelerator_for,
    decided_by_first,
    on_one_machine,
    process_settings,
    settled,
    why_dtype,
)
from normlab.training.experiments import experiments
from normlab.training.loop import Training
from normlab.training.manifest import manifest_of, require_same, results_of
from normlab.training.measure import Measurements
from normlab.training.progress import bar_of
from normlab.training.text.corpus import Corpus, corpus_of

if TYPE_CHECKING:
    import torch
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
    """Train `config` under directory `out` and return the run. A killed run resumes; a finished one returns at once,
    with a warning where it lacks weights that `config` keeps.

    Args:
        out: may be an address (`normlab.store`). The run is trained in a folder of this machine and uploaded when it
            has ended; the returned run is the one here.
        watch: watch(step, rows) is called before the first step and after every one, with the rows logged since the
            last call. If it returns False, the run writes a checkpoint and RunStopped is raised. Each rank asks its
            own, and all must answer alike.

    Raises:
        NormlabError: a corpus that cannot be read, or an output directory that holds something else. Also a run of the
            same name made from other text, or a number of ranks that does not divide the batch, or ranks or parts of a
            step that the scheme cannot have. A non-finite loss is no error: the run ends with status "diverged".
    """
    if not isinstance(config, TrainConfig):
        raise NormlabError(f"{config!r:.80} is no TrainConfig")
    accelerator = accelerator_for(config)
    is_first, device = accelerator.is_main_process, accelerator.device
    show = progress and is_first
    if store.is_address(out) and not on_one_machine(accelerator):
        raise NormlabError("ranks on several machines train in one directory: name one that all see as --out")
    names = [candidate.run_id for candidate in config.candidates()]
    with store.local_folder(out, names if is_first else ()) as root, store.full_disk_named(root):
        with accelerator.main_process_first():  # it prepares the text; the others find it in the cache
            corpus = corpus_of(config, cache_dir, show)
        asked, text = config, corpus.identity(config)
        config, manifest = decided_by_first(accelerator, lambda: _settled(asked, text, root, device))
        final, work = root / config.run_id, root / store.PARTIAL / config.run_id
        with store.to_train(root, config.run_id) if is_first else contextlib.nullcontext(False) as to_train:
            if decided_by_first(accelerator, lambda: to_train):
                if show and asked.dtype == AUTO:
                    tqdm.write(why_dtype(device, config.dtype), file=sys.stderr)
                with process_settings(config, device):
                    _run(config, corpus, accelerator, work, final, manifest, show, watch)
            if is_first and config.keep_weights and not (final / runs.WEIGHTS).is_file():
                warnings.warn(
                    f"run {final} is finished and has no weights here; to train it again delete it or use another "
                    "directory",
                    stacklevel=2,
                )
            return _finished(final, work, config, manifest)


def _settled(
    config: TrainConfig, text: dict[str, Any], root: Path, device: torch.device
) -> tuple[TrainConfig, dict[str, Any]]:
    """`config` with dtype "auto" replaced, and its manifest before the first step.

    The dtype is that of a run that is finished or can be resumed, else the device's fastest. A run that was begun in
    another, and cannot be resumed here, starts again with a warning. Its checkpoints stay, to be resumed elsewhere.
    """
    left = {}
    for candidate in config.candidates():
        name, manifest = candidate.run_id, manifest_of(candidate, text)
        if store.is_run(root / name) or can_resume(root / store.PARTIAL / name, manifest):
            return candidate, manifest
        left[candidate.dtype] = why_left(root / store.PARTIAL / name, manifest)
    fastest = settled(config, device)
    for dtype, reason in left.items():
        if reason is not None and dtype != fastest.dtype:
            then = f"the run starts again from step 0, in {fastest.dtype}; its numbers may be others"
            warnings.warn(f"{reason}, in {dtype}: {then}", stacklevel=2)
    return fastest, manifest_of(fastest, text)


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
    if is_first:
        work.mkdir(parents=True, exist_ok=True)
    training = Training(config, corpus, accelerator)
    measurements = Measurements(config, corpus)
    log = measurements.log
    checkpoints = Checkpoints(training, log, manifest, work, started)
    checkpoints.resume()
    resumed_from = training.done
    tokenizer = corpus.tokenizer() if config.keep_weights else None  # now: the cache may be gone in the end
    with (
        bar_of("train", config.last_step, show, initial=resumed_from, unit=" steps") as bar,
        (work / store.ROWS if is_first else Path(os.devnull)).open("w") as file,
    ):
        levels = {"unigram_entropy": corpus.unigram_entropy, **measurements.on.count_losses}
        _append(file, (runs.Row(0, 0, "eval", "model", None, name, "all", level) for name, level in levels.items()))

        def tell(step: int) -> bool:
            rows = log.news()
            _append(file, rows)
            return watch is None or watch(step, rows)

        diverged = _train_steps(training, measurements, checkpoints, bar, tell)
    model, after = training.whole_model(), None
    diverged = diverged or not all(parameter.isfinite().all() for parameter in model.parameters())
    if config.experiment_blocks and not diverged:
        after = experiments(model, measurements.on.experiments)
    if is_first:
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
            "wall_s": checkpoints.wall_s(),
            "tokens_per_s": training.tokens_per_s(),
            "compiled": training.compiled,
            "resumed_from_step": resumed_from,
        }
        results = results_of(training, measurements, diverged)
        store.write_json(staged / store.MANIFEST, {**checkpoints.manifest, **results, "measured": measured})
        runs.read_run(staged).table()  # read back, before the checkpoints go
        store.publish(staged, final)
    accelerator.wait_for_everyone()


def _train_steps(
    training: Training,
    measurements: Measurements,
    checkpoints: Checkpoints,
    bar: tqdm,
    tell: Callable[[int], bool],
) -> bool:
    """Train up to the last step, measure and write checkpoints. True if the loss became non-finite.

    tell: called before the first step and after every one. RunStopped if it answers False, once a checkpoint is
    written.
    """
    config = training.config
    if training.done == 0:
        measurements.at(training.model, 0)
    if not tell(training.done):
        raise RunStopped
    for step in training.steps():
        bar.update()
        loss = measurements.after(training, step)
        stops = not tell(step.number) and step.number < config.last_step
        if loss is not None:
            bar.set_postfix_str(f"loss {loss:.3f}, {training.tokens_per_s():,.0f} tokens/s", refresh=False)
            if not math.isfinite(loss):
                return True
        if stops or config.is_due(step.number, config.checkpoint_every):
            checkpoints.write()
        if stops:
            raise RunStopped
    return False


def _append(file: TextIO, rows: Iterable[runs.Row]) -> None:
    """Write rows as lines of JSON, for whoever watches the run."""
    file.writelines(f"{json.dumps(row)}\n" for row in rows)
    file.flush()


def _finished(final: Path, work: Path, config: TrainConfig, manifest: dict[str, Any]) -> runs.Run:
    """The finished run. NormlabError if it is damaged, or not the run that `config` asks for."""
    run = runs.read_run(final)
    require_same(run.manifest, config, manifest["corpus"])
    run.table()  # raises if it cannot be read
    shutil.rmtree(work, ignore_errors=True)
    return run


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
    require_same(manifest, config, corpus.identity(config))
    return train(config, out, **options)
