"""Files of runs: written whole or not at all, here and at addresses.

publish                      sync a finished directory and rename it to its final name (`normlab.files`)
write_json, write_stats      a run's files
inside                       the one way from a name in data to a path
check_root                   refuse a directory that holds something else
local_folder                 context: the folder where runs are trained, and whence they are uploaded in the end
to_train                     context: a run that one process trains at a time
full_disk_named              context: a full disk is one line
Remote                       runs at an address that fsspec knows: s3://..., file:///..., memory://...
is_address, child, is_run    the same for directories and addresses

A run for an address is trained in a folder of this machine and uploaded when it has ended. Its manifest is uploaded
last, so a run with a manifest is whole. Two machines may train the same run at once: they upload the same files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import queue
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from normlab import packed
from normlab.errors import ANSWER_SECONDS, NormlabError, first_line, in_one_line
from normlab.files import locked, whole_file
from normlab.files import publish as publish

if TYPE_CHECKING:
    import pandas as pd

PARTIAL = ".partial"
MANIFEST, STATS, EXPERIMENTS = packed.MANIFEST, "stats.parquet", "experiments.parquet"
ROWS = "rows.jsonl"  # of a run in progress
SLOWEST = 1e5  # bytes per second of a transfer; a slower one is given up


def is_address(path: str | Path) -> bool:
    return "://" in str(path)


def child(root: str | Path, name: str) -> str | Path:
    return f"{str(root).rstrip('/')}/{name}" if is_address(root) else Path(root) / name


def is_run(path: str | Path) -> bool:
    return Remote(path).has(MANIFEST) if is_address(path) else Path(path).exists() or packed.holds(Path(path))


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, for a name from data: a manifest, an address, an archive, a model's value.

    NormlabError for a name that is empty or absolute, names a drive, or has `..` in it.
    """
    path = PureWindowsPath(name)  # it knows the separators and drives of all systems
    if not path.name or path.anchor or ".." in path.parts or "\0" in name:
        raise NormlabError(f"{name!r} is no name of a file below {folder}: nothing is read or written under it")
    return folder / name


class Remote:
    """Runs at an address, or one run.

    Attributes:
        copy: the folder of this machine that they are copied to and trained in.

    NormlabError: fsspec does not know the address, or a package is missing; no answer within 20 seconds.
    """

    def __init__(self, address: str | Path) -> None:
        import platformdirs
        from upath import UPath

        self.address = str(address).rstrip("/")
        try:
            with warnings.catch_warnings():  # of file systems that universal_pathlib has no class for
                warnings.simplefilter("ignore", UserWarning)
                self.root = UPath(self.address)
        except (ImportError, ValueError) as error:
            raise NormlabError(f"cannot use {address}: {first_line(error)}") from None
        # Each kind of address raises its own errors where it says too little, or has no places below it.
        self.files, _ = self._answer("opening it", lambda: (self.root.fs, self.root / MANIFEST))
        name = hashlib.sha256(self.address.encode()).hexdigest()[:16]
        self.copy = Path(platformdirs.user_cache_dir("normlab")) / "remote" / name

    def has(self, name: str) -> bool:
        self.files.invalidate_cache()
        return self._answer(f"looking for {name or 'it'}", self.files.exists, (self.root / name).path)

    def fetch_run(self) -> Path:
        """The run at this address."""
        if not self.has(MANIFEST):
            raise NormlabError(f"{self.address} holds no run: {MANIFEST} is missing")
        return self._get("", inside(self.copy, self.root.name or "run"), self._sizes(""))

    def fetch_tables(self) -> list[Path]:
        """Copy tables and manifests of all runs below this address, as `find_runs` finds them.

        Returns the copies' manifests, and files of packed runs.
        """
        sizes = self._sizes("")
        if not sizes:
            raise NormlabError(f"{self.address} does not exist, or is empty")
        tables: dict[str, dict[str, int]] = {}
        for path, size in sorted(sizes.items()):
            folder, file = os.path.split(path)
            if file in (MANIFEST, STATS, EXPERIMENTS, packed.FILE) and PARTIAL not in folder.split("/"):
                tables.setdefault(folder, {})[file] = size
        found = []
        for folder, files in tables.items():
            if MANIFEST in files or packed.FILE in files:
                copy = self._get(folder, self.copy / folder, files)
                found += [copy / name for name in (MANIFEST, packed.FILE) if name in files]
        return found

    def fetch(self, run: str) -> None:
        """Copy a run to this machine, if it is there."""
        if self.has(f"{run}/{MANIFEST}"):
            shutil.rmtree(self.copy / run, ignore_errors=True)
            self._get(run, self.copy / run, self._sizes(run))

    def upload(self, run: str) -> None:
        """Upload a run, if it is finished here and not there."""
        if not (self.copy / run / MANIFEST).is_file() or self.has(f"{run}/{MANIFEST}"):
            return
        paths = [path for path in (self.copy / run).rglob("*") if path.is_file()]
        for path in sorted(paths, key=lambda path: path.name == MANIFEST):
            name = path.relative_to(self.copy).as_posix()
            self._answer(f"writing {name}", self._put_file, path, self.root / name, size=path.stat().st_size)

    def _answer(self, task: str, ask: Callable[..., Any], *arguments: Any, size: int = 0) -> Any:
        """The answer of a file system, within a deadline. task: what the error says was tried. size: in bytes.

        A thread asks, because file systems take a deadline in different ways, and some take none.
        """
        answers: queue.Queue[Any] = queue.Queue()
        seconds = ANSWER_SECONDS + size / SLOWEST

        def run() -> None:
            try:
                answers.put(ask(*arguments))
            except Exception as error:
                answers.put(error)

        threading.Thread(target=run, daemon=True).start()
        try:
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            raise NormlabError(f"{self.address} does not answer: {task} took more than {seconds:g} s") from None
        if isinstance(answer, Exception):
            raise NormlabError(f"{self.address} does not allow {task}: {in_one_line(answer)}") from answer
        return answer

    def _sizes(self, name: str) -> dict[str, int]:
        """Files below a name, relative to it, with their sizes. NormlabError if one of them would lie elsewhere."""
        self.files.invalidate_cache()
        base = (self.root / name).path.rstrip("/")
        if not self._answer(f"looking for {name or 'it'}", self.files.exists, base):
            return {}
        details = self._answer(f"listing {name or 'it'}", lambda: self.files.find(base, detail=True))
        sizes = {file[len(base) + 1 :]: detail.get("size") or 0 for file, detail in details.items()}
        for file in sizes:
            inside(self.copy, file)
        return sizes

    def _get(self, name: str, to: Path, sizes: dict[str, int]) -> Path:
        for file in sorted(sizes, key=MANIFEST.__eq__):
            path, source = inside(to, file), self.root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            self._answer(f"reading {file}", self.files.get_file, source.path, str(path), size=sizes[file])
        return to

    def _put_file(self, path: Path, target: Any) -> None:
        self.files.makedirs(target.parent.path, exist_ok=True)
        self.files.put_file(str(path), target.path)


def check_root(root: str | Path) -> None:
    """Check an output directory. NormlabError: it is a file, or holds something other than runs."""
    if is_address(root):  # directories take no names there
        return
    root = Path(root)
    if root.exists() and not root.is_dir():
        raise NormlabError(f"output {root} is a file; name a directory")
    if not root.is_dir() or (root / PARTIAL).is_dir():
        return
    entries = list(root.iterdir())
    ours = {PARTIAL, packed.FILE}
    if entries and not any((entry / MANIFEST).is_file() or entry.name in ours for entry in entries):
        other = min(entry.name for entry in entries)
        raise NormlabError(f"output directory {root} holds something else ({other}); name an empty or new one")


@contextmanager
def local_folder(out: str | Path, names: Sequence[str]) -> Iterator[Path]:
    """The folder of this machine in which runs for `out` are trained: `out`, or for an address a copy of it.

    names: of runs. Those that are finished are copied from the address at the start, and uploaded in the end.
    NormlabError: the directory holds something else, or the address cannot be used.
    """
    if not is_address(out):
        check_root(out)
        yield Path(out)
        return
    place = Remote(out)
    for name in names:
        place.fetch(name)
    yield place.copy
    for name in names:
        place.upload(name)


def write_json(path: Path, value: Any) -> None:
    """Write JSON through a temporary name, so that a reader sees the old file or the new one."""
    with whole_file(path) as staged:
        staged.write_text(json.dumps(value, indent=1) + "\n")


def write_stats(path: Path, frame: pd.DataFrame) -> None:
    frame.to_parquet(path, index=False, compression="zstd")


@contextmanager
def to_train(root: Path, run: str) -> Iterator[bool]:
    """True if a run is not finished; nobody else trains it meanwhile. NormlabError: another process does."""
    if is_run(root / run):  # without the lock: the directory may be read-only
        yield False
        return
    try:
        with locked(root / PARTIAL / f"{run}.lock", f"another process is training {run}; wait for it or stop it"):
            yield not is_run(root / run)  # another process may have finished it just now
    finally:
        with suppress(OSError):  # another run is in progress
            (root / PARTIAL).rmdir()


@contextmanager
def full_disk_named(root: Path) -> Iterator[None]:
    """Raise NormlabError, one line, for a full disk or a limit on file sizes.

    Libraries raise OSError, RuntimeError (PyTorch) or SafetensorError then. Only the first has an error number.
    """
    try:
        yield
    except Exception as error:
        message, number = str(error), getattr(error, "errno", None)
        full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in message
        limited = number == errno.EFBIG or "File too large" in message
        # PyTorch reports a full disk as an inline_container error, not as OSError.
        torch_write = isinstance(error, RuntimeError) and "inline_container" in message and "Reader" not in message
        if full or limited or torch_write:
            reason = (
                "a file exceeds the largest size allowed here (ulimit -f); raise it"
                if limited
                else "no space left; free some"
                if full
                else "no space left, or a limit on file sizes (ulimit -f); free some or raise it"
            )
            raise NormlabError(
                f"cannot write to {root}: {reason} and start again: runs resume from their checkpoints"
            ) from error
        raise
