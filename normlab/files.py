"""Files that are written whole or not at all, and by one process.

whole_file     one file
whole_files    files of a folder, each under its name once all are written
whole_folder   a folder that is there once all of it is
first_folder   the same; of several processes that write it the first one's stays
publish, sync  the steps of these
locked         what one process works on at a time
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normlab.errors import NormlabError

STAGED = ".writing"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write a file at. It takes the place of `path` when the block ends; a failing block changes nothing.

    Several processes may write the same file. The last one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}{STAGED}")
    try:
        yield staged
        sync(staged)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """A folder to write files in. They move to `folder` when the block ends, pages last, and replace what is there.

    A killed or failing block leaves the files of `folder` as they were.
    """
    staged = folder / STAGED
    with _new(staged):
        yield staged
        for path in sorted(filter(Path.is_file, staged.rglob("*")), key=lambda path: (path.suffix == ".html", path)):
            target = folder / path.relative_to(staged)
            target.parent.mkdir(parents=True, exist_ok=True)
            sync(path)
            os.replace(path, target)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write in. It takes the place of `folder` when the block ends.

    A killed or failing block changes nothing.
    """
    staged = folder.with_name(f".{folder.name}{STAGED}")
    with _new(staged):
        yield staged
        publish(staged, folder)


@contextmanager
def first_folder(folder: Path) -> Iterator[Path]:
    """A folder to write in. It becomes `folder` when the block ends, unless another process has written that meanwhile.

    A failing block leaves nothing.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as around:
        staged = Path(around) / folder.name  # with the rights of any new folder, which a temporary one has not
        staged.mkdir()
        yield staged
        try:
            os.rename(staged, folder)
        except OSError:
            if not all((folder / path.name).exists() for path in staged.iterdir()):
                raise


@contextmanager
def _new(folder: Path) -> Iterator[None]:
    """A new folder, without what a killed process left in it, and gone when the block ends."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file, which is removed in the end; if the process dies, the operating system frees it.

    NormlabError: another process holds it. `busy` says so.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise NormlabError(busy) from None
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            lock.release()


def publish(staged: Path, final: Path) -> None:
    """Sync `staged` to disk and rename it to `final`, whole or not at all. What is there is replaced."""
    for path in (*staged.rglob("*"), staged):
        sync(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(staged, final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Have the operating system write a file or a directory to disk now."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open a directory to sync it
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
