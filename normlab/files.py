"""Files that are written whole or not at all.

whole_file     one file
whole_files    files of a folder, each under its name once all are written
whole_folder   a folder that is there once all of it is
publish, sync  the steps of both
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
def _new(folder: Path) -> Iterator[None]:
    """A new folder, without what a killed process left in it, and gone when the block ends."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
