"""Where runs lie, and how they are written there: whole or not at all.

`publish`           sync a finished directory to disk and rename it to its final name
`check_root`        whether a directory is one of runs
`write_json`, `write_stats`        a run's files
`exclusive`, `full_disk_named`     contexts around a run's training
`Place(address)`    runs on another file system: at any address that fsspec knows (s3://..., file:///..., memory://...)
`is_address(path)`, `child(root, name)`, `is_run(path)`   of directories and addresses alike

A run at an address is trained in a copy on this machine and published from there: its files one by one, the manifest
last, so that what has a manifest is whole; its checkpoints likewise, so that another machine goes on from them. Nothing
keeps two machines from training the same run at once: what they publish is the same.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.errors import NormlabError, first_line

if TYPE_CHECKING:
    import pandas as pd

PARTIAL, SEARCH, FINALS = ".partial", "search", "finals"
NOT_REPORTED = {PARTIAL, SEARCH, FINALS}
MANIFEST, STATS, EXPERIMENTS = "manifest.json", "stats.parquet", "experiments.parquet"
LAST = (MANIFEST, "trainer_state.json")  # of a run and of a checkpoint: the file that is published last


def is_address(path: str | Path) -> bool:
    return "://" in str(path)


def child(root: str | Path, name: str) -> str | Path:
    return f"{str(root).rstrip('/')}/{name}" if is_address(root) else Path(root) / name


def is_run(path: str | Path) -> bool:
    return Place(path).has(MANIFEST) if is_address(path) else Path(path).exists()


class Place:
    """address: a directory of runs, or a run. NormlabError where fsspec does not know it, or lacks a package for it."""

    def __init__(self, address: str | Path) -> None:
        import fsspec
        import platformdirs

        self.address = str(address).rstrip("/")
        try:
            self.files, root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise NormlabError(f"cannot use {address}: {first_line(error)}") from None
        self.root = root.rstrip("/")
        name = hashlib.sha256(self.address.encode()).hexdigest()[:16]
        self.copy = Path(platformdirs.user_cache_dir("normlab")) / "remote" / name

    def has(self, name: str) -> bool:
        self.files.invalidate_cache()
        return self.files.exists(self._at(name))

    def fetch_run(self) -> Path:
        """The run at this address."""
        if not self.has(MANIFEST):
            raise NormlabError(f"{self.address} holds no run: {MANIFEST} is missing")
        return self._get("", self.copy / self.root.rsplit("/", 1)[-1], self._names(""))

    def fetch_tables(self) -> list[Path]:
        """Tables and manifests of all runs below this address, as `find_runs` finds them."""
        names = self._names("")
        if not names:
            raise NormlabError(f"{self.address} does not exist, or is empty")
        tables: dict[str, list[str]] = {}
        for folder, file in map(os.path.split, sorted(names)):
            if file in (MANIFEST, STATS, EXPERIMENTS) and not NOT_REPORTED & set(folder.split("/")):
                tables.setdefault(folder, []).append(file)
        return [self._get(run, self.copy / run, files) for run, files in tables.items() if MANIFEST in files]

    def fetch(self, run: str) -> None:
        """What is published of a run: all of a finished one; of one in progress the last checkpoint, unless a later one
        is here."""
        if self.has(f"{run}/{MANIFEST}"):
            shutil.rmtree(self.copy / run, ignore_errors=True)
            self._get(run, self.copy / run, self._names(run))
            return
        work, here = f"{PARTIAL}/{run}", self.copy / PARTIAL / run
        names = self._names(work)
        last = max((os.path.dirname(name) for name in names if name.endswith(LAST)), key=_step, default=None)
        if last is None or any(_step(path.name) >= _step(last) for path in here.glob("checkpoint-*")):
            return
        shutil.rmtree(here, ignore_errors=True)
        self._get(work, here, [name for name in names if "/" not in name])
        os.rename(self._get(f"{work}/{last}", here / "fetched", self._names(f"{work}/{last}")), here / last)

    def publish(self, run: str) -> None:
        """A finished run; its checkpoints go."""
        if not self.has(f"{run}/{MANIFEST}"):
            self._put(self.copy / run, run)
        self._remove(f"{PARTIAL}/{run}")

    def publish_checkpoint(self, checkpoint: Path) -> None:
        """The checkpoint of a run in progress, with what lies beside it; older ones go."""
        work = f"{PARTIAL}/{checkpoint.parent.name}"
        for file in checkpoint.parent.glob("*.json"):
            self._put_file(file, f"{work}/{file.name}")
        self._put(checkpoint, f"{work}/{checkpoint.name}")
        for old in {name.split("/")[0] for name in self._names(work) if "/" in name} - {checkpoint.name}:
            self._remove(f"{work}/{old}")

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def _names(self, name: str) -> list[str]:
        """Files below a name, relative to it."""
        self.files.invalidate_cache()
        base = self._at(name)
        return [file[len(base) + 1 :] for file in self.files.find(base)] if self.files.exists(base) else []

    def _remove(self, name: str) -> None:
        if self.has(name):
            self.files.rm(self._at(name), recursive=True)

    def _get(self, name: str, to: Path, files: list[str]) -> Path:
        for file in sorted(files, key=LAST.__contains__):
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(f"{self._at(name)}/{file}", str(to / file))
        return to

    def _put(self, folder: Path, name: str) -> None:
        for path in sorted(folder.rglob("*"), key=lambda path: path.name in LAST):
            if path.is_file():
                self._put_file(path, f"{name}/{path.relative_to(folder).as_posix()}")

    def _put_file(self, path: Path, name: str) -> None:
        self.files.makedirs(self._at(os.path.dirname(name)), exist_ok=True)
        self.files.put_file(str(path), self._at(name))


def _step(name: str) -> int:
    return int(name.rsplit("-", 1)[1])


def check_root(root: str | Path) -> None:
    """NormlabError when `root` is a file, or a directory that holds something other than runs."""
    if is_address(root):  # there, names are not taken by directories
        return
    root = Path(root)
    if root.exists() and not root.is_dir():
        raise NormlabError(f"output {root} is a file; name a directory")
    if not root.is_dir() or (root / PARTIAL).is_dir():
        return
    entries = list(root.iterdir())
    if entries and not any((entry / MANIFEST).is_file() or entry.name in NOT_REPORTED for entry in entries):
        other = min(entry.name for entry in entries)
        raise NormlabError(f"output directory {root} holds something else ({other}); name an empty or new one")


def write_json(path: Path, value: Any) -> None:
    """JSON through a temporary name, so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.writing")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_stats(path: Path, frame: pd.DataFrame) -> None:
    frame.to_parquet(path, index=False, compression="zstd")


def publish(staged: Path, final: Path) -> None:
    """Sync everything in `staged` to disk and rename it to `final`, replacing what is there: whole or not at all."""
    for path in (*staged.rglob("*"), staged):
        _fsync(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(staged, final)
    _fsync(final.parent)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file that the operating system frees when the process dies; it is removed in the end, and so is its
    directory when nothing else is in it. NormlabError when another process holds the lock."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0):
            yield
            path.unlink(missing_ok=True)
    except Timeout:
        raise NormlabError(f"another process is training {path.stem}; wait for it or stop it") from None
    with suppress(OSError):  # another run is in progress
        path.parent.rmdir()


@contextmanager
def full_disk_named(root: Path) -> Iterator[None]:
    """A full disk as one line. The libraries that write do not agree on the exception: OSError, RuntimeError (PyTorch),
    SafetensorError; only the first of them carries an error number."""
    try:
        yield
    except Exception as error:
        message = str(error)
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in message
        # PyTorch's own words name a place in its source: it checks what it has written, not what the system said.
        torch_write = isinstance(error, RuntimeError) and "inline_container" in message and "Reader" not in message
        if full or torch_write:
            raise NormlabError(
                f"cannot write to {root}: no space left; free some and start again, runs go on from their checkpoints"
            ) from error
        raise


def _fsync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open a directory to sync it
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
