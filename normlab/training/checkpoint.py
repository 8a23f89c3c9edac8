"""Checkpoints of a run in progress: whole or absent.

`Checkpoints`            of one run: `resume` from the newest that is whole and begun alike, `write` the next
`can_resume(work, ...)`  True if a run's working directory holds one that was begun alike
`why_left(work, ...)`    why those of a run's working directory are left where they are

    checkpoint-N/state.pt         weights, optimizer, schedule, loss scaler, random states, losses not logged yet
                 stats.parquet    the log up to step N
                 begun.json       the run's manifest before its first step; its seconds, and whether all ran compiled
                 stream.json      with `stream`: the position in the text
                 files.json       size and SHA-256 of all these files
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from normlab import store
from normlab.errors import NormlabError, first_line
from normlab.training.config import TrainConfig
from normlab.training.distributed import decided_by_first
from normlab.training.loop import Training
from normlab.training.measure import RunLog
from normlab.training.text.corpus import LATER

STATE, STREAM, BEGUN, LISTED = "state.pt", "stream.json", "begun.json", "files.json"
HARMLESS = ("keep_weights", "checkpoint_every")  # settings that change no number


class Checkpoints:
    """The checkpoints of a run that is training, in its working directory. Every rank has to call each method.

    Args:
        started: `time.perf_counter()` when this process began with the run.

    Attributes:
        manifest: of the run before its first step. Once it is resumed, also `earlier_commits`: those of the processes
            before this one, where the commit changed; "unknown" without git.
    """

    def __init__(
        self, training: Training, log: RunLog, manifest: dict[str, Any], work: Path, started: float
    ) -> None:
        self.training, self.log, self.manifest, self.work = training, log, manifest, work
        self.started, self._seconds_before = started, 0.0

    def resume(self) -> None:
        """Continue from the newest one that can be used, if there is one.

        NormlabError: it is whole, but holds something else.
        """
        newest = decided_by_first(self.training.accelerator, lambda: _newest_usable(self.work, self.manifest))
        if newest is None:
            return
        try:
            _load(self.training, newest)
            self.log.restore(newest / store.STATS)
            if self.training.stream is not None:
                self.training.stream.restore(json.loads((newest / STREAM).read_text()))
            begun = json.loads((newest / BEGUN).read_text())
            measured = begun.get("measured", {})  # not in those of earlier versions
            self._seconds_before = measured.get("wall_s", 0.0)
            self.training.compiled_before = measured.get("compiled", True)
        except Exception as error:  # of pickle, PyTorch or pyarrow
            raise NormlabError(
                f"{newest} cannot be resumed ({first_line(error)}); delete it and start again"
            ) from error
        unsaid = [name for name in LATER if name in self.manifest["corpus"] and name not in begun["corpus"]]
        if unsaid and self.training.accelerator.is_main_process:
            warnings.warn(
                f"{newest} does not say its {', '.join(unsaid)}: it may have begun on another text", stacklevel=2
            )
        self._name_commits(newest, begun)

    def wall_s(self) -> float:
        """Seconds of the run in all its processes: of each that ended, up to its last checkpoint."""
        return self._seconds_before + time.perf_counter() - self.started

    def _name_commits(self, checkpoint: Path, begun: dict[str, Any]) -> None:
        earlier = begun.get("earlier_commits", [])
        last, here = (manifest["commit"] or "unknown" for manifest in (begun, self.manifest))
        if last != here:
            earlier = [*earlier, last]
            if self.training.accelerator.is_main_process:
                warnings.warn(
                    f"{checkpoint} was written at commit {last}, and the run goes on at {here}: its numbers may be "
                    "those of neither; the manifest names both",
                    stacklevel=3,
                )
        if earlier:
            self.manifest = {**self.manifest, "earlier_commits": earlier}

    def write(self) -> None:
        """Write one aside, sync, rename and read it back; then delete the older ones."""
        training, accelerator = self.training, self.training.accelerator
        staging, final = self.work / "staging", self.work / f"checkpoint-{training.done}"
        try:
            if accelerator.is_main_process:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir()
            accelerator.wait_for_everyone()
            _save(training, staging)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                store.write_stats(staging / store.STATS, self.log.frame())
                measured = {"wall_s": self.wall_s(), "compiled": training.compiled}
                store.write_json(staging / BEGUN, {**self.manifest, "measured": measured})
                if training.stream is not None:
                    store.write_json(staging / STREAM, training.stream.position._asdict())
                list_files(staging)
                store.publish(staging, final)
                check_files(final)
                for old in checkpoints(self.work):
                    if old != final:
                        shutil.rmtree(old)
        finally:
            if accelerator.is_main_process:
                shutil.rmtree(staging, ignore_errors=True)


def _save(training: Training, folder: Path) -> None:
    """Write the state of weights, optimizer, schedule, loss scaler and random numbers: whole, by rank 0."""
    model, optimizer, accelerator = training.model, training.optimizer, training.accelerator
    loss, loss_begins = training.summed_loss()
    state: dict[str, Any] = {
        "loss": loss,
        "loss_begins": loss_begins,
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
    training.resume_at(_step_of(folder), state.get("loss"), state.get("loss_begins"))


# --- which one to resume from ---


def can_resume(work: Path, manifest: dict[str, Any]) -> bool:
    """True if a checkpoint of a run was begun with this manifest."""
    return any(not _unlike(checkpoint, manifest) for checkpoint in checkpoints(work))


def why_left(work: Path, manifest: dict[str, Any]) -> str | None:
    """What the newest checkpoint of a run in another precision was begun with that is not here; None without one."""
    newest = next(reversed(checkpoints(work)), None)
    return None if newest is None else f"{newest} was begun with another {', '.join(_unlike(newest, manifest))}"


def _newest_usable(work: Path, manifest: dict[str, Any]) -> Path | None:
    """The newest whole checkpoint that was begun alike. Others before it are set aside, each with a warning."""
    unusable, newest = [], None
    for checkpoint in reversed(checkpoints(work)):
        try:
            check_files(checkpoint)
        except NormlabError as error:
            damaged = f"{_set_aside(checkpoint, 'damaged')} is a damaged checkpoint ({error}), set aside"
            unusable.append((damaged, "stay the same"))
            continue
        if differs := _unlike(checkpoint, manifest):
            names = ", ".join(differs)
            other = f"{_set_aside(checkpoint, 'other')} was begun with another {names}, set aside"
            unusable.append((other, "may be others"))
        elif (checkpoint / STATE).is_file():
            newest = checkpoint
            break
        else:
            early = f"{checkpoint} was written by an earlier version of normlab and cannot be read"
            unusable.append((early, "stay the same"))
    then = f"resumes from {newest.name}" if newest else "starts again from step 0, as no other can be used"
    for reason, numbers in unusable:
        warnings.warn(f"{reason}: the run {then}; its numbers {numbers}", stacklevel=2)
    return newest


def checkpoints(work: Path) -> list[Path]:
    """The checkpoints in a run's working directory, oldest first."""
    paths = {_step_of(path): path for path in work.glob("checkpoint-*")}
    return [paths[step] for step in sorted(paths.keys() - {0})]


def _step_of(checkpoint: Path) -> int:
    """The optimizer steps that a checkpoint's name says; 0 for the name of something else."""
    match = re.fullmatch(r"checkpoint-([0-9]{1,18})", checkpoint.name)
    return int(match[1]) if match else 0


def _unlike(checkpoint: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of the settings, versions and properties of the text with which a checkpoint was begun otherwise.

    Without any it continues to the same numbers.
    """
    try:
        begun = json.loads((checkpoint / BEGUN).read_text())
        begun["config"] = TrainConfig.from_dict(begun["config"]).to_dict()  # with fields that were added since
        begun["corpus"] = {name: manifest["corpus"].get(name) for name in LATER} | begun["corpus"]
        if begun["schema"] != manifest["schema"]:
            return ["schema"]
        parts = [(begun[part], manifest[part]) for part in ("config", "corpus", "environment")]
        return [name for old, new in parts for name in new if old[name] != new[name] and name not in HARMLESS]
    except (OSError, ValueError, LookupError, TypeError):  # of another version, or damaged: `check_files` says so
        return ["version"]


def _set_aside(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint to `why-...`, so that it is not tried again, and return its new path."""
    free = checkpoint.with_name(f"{why}-{checkpoint.name}")
    while free.exists():
        free = free.with_name(f"{free.name}+")
    os.rename(checkpoint, free)
    return free


# --- the list of its files ---


def list_files(folder: Path) -> None:
    """Write `files.json`: the size and SHA-256 of every file in `folder`, subfolders included."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    store.write_json(folder / LISTED, {path.relative_to(folder).as_posix(): _size_and_hash(path) for path in paths})


def check_files(folder: Path) -> None:
    """Check a folder against its list. NormlabError: no list, or a file that is missing or has other bytes."""
    try:
        listed = json.loads((folder / LISTED).read_text())
    except FileNotFoundError:
        raise NormlabError(f"{LISTED} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise NormlabError(f"{LISTED} cannot be read: {first_line(error)}") from None
    if not isinstance(listed, dict) or not listed:
        raise NormlabError(f"{LISTED} lists no files")
    for name, expected in listed.items():
        try:
            actual = _size_and_hash(store.inside(folder, name))
        except FileNotFoundError:
            raise NormlabError(f"{name} is missing") from None
        except OSError as error:
            raise NormlabError(f"{name} cannot be read: {first_line(error)}") from None
        if actual != expected:
            raise NormlabError(f"{name} is not the file that was written")


def _size_and_hash(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _digest_of(path)}


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
