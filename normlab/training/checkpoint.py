"""Checkpoints of a run in progress: whole or absent.

`write_checkpoint(...)`     write aside, sync, rename and read back; then delete older ones
`resumable(work, ...)`      the newest whole checkpoint that continues to the same numbers
`unlike(folder, ...)`       what a checkpoint's run differs in: text, versions, threads

    checkpoint-N/state.pt         weights, optimizer, schedule, loss scaler, random states
                 stats.parquet    the log up to step N
                 begun.json       the run's manifest before its first step
                 stream.json      with `stream`: the position in the text
                 files.json       size and SHA-256 of all these files
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from normlab import store
from normlab.errors import NormlabError, first_line
from normlab.training.config import TrainConfig
from normlab.training.loop import Training
from normlab.training.measure import RunLog

STATE, STREAM, BEGUN = "state.pt", "stream.json", "begun.json"


def write_checkpoint(training: Training, log: RunLog, manifest: dict[str, Any], work: Path) -> None:
    """Write a checkpoint in the run's working directory. Every rank has to call this."""
    accelerator = training.accelerator
    staging, final = work / "staging", work / f"checkpoint-{training.done}"
    try:
        if accelerator.is_main_process:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
        accelerator.wait_for_everyone()
        _save(training, staging)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            store.write_stats(staging / store.STATS, log.frame())
            store.write_json(staging / BEGUN, manifest)
            if training.stream is not None:
                store.write_json(staging / STREAM, training.stream.position._asdict())
            store.list_files(staging)
            store.publish(staging, final)
            store.check_files(final)
            for old in store.checkpoints(work):
                if old != final:
                    shutil.rmtree(old)
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(staging, ignore_errors=True)


def restore(checkpoint: Path, training: Training, log: RunLog) -> None:
    """Continue from a checkpoint. Every rank has to call this. NormlabError: it is whole, but holds something else."""
    try:
        _load(training, checkpoint)
        log.restore(checkpoint / store.STATS)
        if training.stream is not None:
            training.stream.restore(json.loads((checkpoint / STREAM).read_text()))
    except Exception as error:  # of pickle, PyTorch or pyarrow
        raise NormlabError(
            f"{checkpoint} cannot be resumed ({first_line(error)}); delete it and start again"
        ) from error


def _save(training: Training, folder: Path) -> None:
    """Write the state of weights, optimizer, schedule, loss scaler and random numbers: whole, by rank 0."""
    model, optimizer, accelerator = training.model, training.optimizer, training.accelerator
    state: dict[str, Any] = {
        "schedule": training.schedule.state_dict(),
        "scaler": None if training.scaler is None else training.scaler.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if accelerator.device.type == "cuda" else None,
    }
    if training.config.fsdp:  # on the CPU, and empty in all ranks but the first
        from torch.distributed.checkpoint import state_dict as states

        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, optimized = states.get_state_dict(model, optimizer, options=options)
        state |= {"model": weights, "optimizer": optimized}
    else:
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if accelerator.is_main_process:
        torch.save(state, folder / STATE)


def _load(training: Training, folder: Path) -> None:
    """Continue from what `_save` wrote, on any number of ranks. Each one reads all and takes its share."""
    model, optimizer = training.model, training.optimizer
    state = torch.load(folder / STATE, weights_only=True, map_location="cpu")
    weights, optimized = state["model"], state["optimizer"]
    if training.config.fsdp:
        from torch.distributed.checkpoint import state_dict as states

        options = states.StateDictOptions(full_state_dict=True)
        states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimized, options=options)
    else:
        model.load_state_dict(weights)
        optimizer.load_state_dict(optimized)
    training.schedule.load_state_dict(state["schedule"])
    if training.scaler is not None:
        training.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"])
    if state["random_cuda"] is not None and training.accelerator.device.type == "cuda":
        torch.cuda.set_rng_state(state["random_cuda"])
    training.resume_at(store.checkpoint_step(folder.name))


HARMLESS = ("keep_weights", "checkpoint_every")  # settings that change no number


def unlike(checkpoint: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of the settings, versions and properties of the text with which a checkpoint was begun otherwise.

    Without any it continues to the same numbers.
    """
    try:
        begun = json.loads((checkpoint / BEGUN).read_text())
        begun["config"] = TrainConfig.from_dict(begun["config"]).to_dict()  # with fields that were added since
        if begun["schema"] != manifest["schema"]:
            return ["schema"]
        parts = [(begun[part], manifest[part]) for part in ("config", "corpus", "environment")]
        return [name for old, new in parts for name in new if old[name] != new[name] and name not in HARMLESS]
    except (OSError, ValueError, LookupError, TypeError):  # of another version, or damaged: `check_files` says so
        return ["version"]


def resumable(work: Path, manifest: dict[str, Any]) -> Path | None:
    """The newest whole checkpoint that was begun alike. Others before it are set aside, each with a warning."""
    unusable, newest = [], None
    for checkpoint in reversed(store.checkpoints(work)):
        try:
            store.check_files(checkpoint)
        except NormlabError as error:
            unusable.append(f"{store.set_aside(checkpoint, 'damaged')} is a damaged checkpoint ({error}), set aside")
            continue
        if differs := unlike(checkpoint, manifest):
            names = ", ".join(differs)
            unusable.append(f"{store.set_aside(checkpoint, 'other')} was begun with another {names}, set aside")
        elif (checkpoint / STATE).is_file():
            newest = checkpoint
            break
        else:
            unusable.append(f"{checkpoint} was written by an earlier version of normlab and cannot be read")
    then = f"resumes from {newest.name}" if newest else "starts again from step 0, as no other can be used"
    for reason in unusable:
        warnings.warn(f"{reason}: the run {then}; its numbers stay the same", stacklevel=2)
    return newest
