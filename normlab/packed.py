"""Many finished runs in one file, a row per run: `packed_runs.parquet` in a folder, in place of the runs' directories.

names, manifest, table   the runs of a folder's file, and what each holds
holds                    whether a path, folder / run, is one of them
pack                     write the file, and delete the directories: `python -m normlab.packed FOLDER ...`
add                      add what a sweep has finished: `python -m normlab.packed --from SWEEP FOLDER`

A run keeps its path, folder / run: what reads a directory of runs reads the file too. Columns: `run`, `manifest` (the
text of manifest.json), `stats` and `experiments` (the rows of these tables). Weights are not packed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.errors import NormlabError, first_line

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

FILE = "packed_runs.parquet"
_TABLES = ("stats", "experiments")


def names(folder: Path) -> list[str]:
    """The packed runs of a folder; none without the file."""
    return list(_manifests(folder, _changed(folder)))


def holds(path: Path) -> bool:
    return path.name in _manifests(path.parent, _changed(path.parent))


def manifest(path: Path) -> str:
    """The text of a packed run's manifest."""
    return _manifests(path.parent, _changed(path.parent))[path.name]


def table(path: Path, name: str) -> pd.DataFrame | None:
    """A packed run's `stats` or `experiments`; None if it has none."""
    found = _table(path, name)
    return None if found is None else found.to_pandas()


def _table(path: Path, name: str) -> pyarrow.Table | None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder = path.parent
    if name not in parquet.read_schema(folder / FILE).names:  # no run has it
        return None
    rows, metadata = _rows(folder, name, _changed(folder))
    of_run = rows[names(folder).index(path.name)]
    if not of_run.is_valid:
        return None
    return pa.Table.from_struct_array(of_run.values).replace_schema_metadata({b"pandas": metadata})


def _changed(folder: Path) -> int:
    """The time at which the file was written; 0 without one."""
    file = folder / FILE
    return file.stat().st_mtime_ns if file.is_file() else 0


@lru_cache
def _manifests(folder: Path, changed: int) -> dict[str, str]:
    if not changed:
        return {}
    columns = _read(folder, ["run", "manifest"]).to_pydict()
    return dict(zip(columns["run"], columns["manifest"], strict=True))


@lru_cache(maxsize=2)
def _rows(folder: Path, name: str, changed: int) -> tuple[pyarrow.ListArray, bytes]:
    """A column of tables, and the pandas metadata of each of them."""
    read = _read(folder, [name])
    return read[name].combine_chunks(), read.schema.metadata[name.encode()]


def _read(folder: Path, columns: list[str]) -> pyarrow.Table:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(folder / FILE, columns=columns)
    except Exception as error:  # pyarrow raises several kinds, OSError among them
        raise NormlabError(f"{folder / FILE} cannot be read ({first_line(error)}): fetch it again") from error


def pack(folder: Path) -> Path:
    """Write the runs directly in a folder as its `packed_runs.parquet`, read it back, and delete their directories.

    NormlabError: there is no run, one keeps its weights, or the folder has such a file.
    """
    directories = sorted(path.parent for path in folder.glob("*/manifest.json"))
    if not directories:
        raise NormlabError(f"{folder} has no run to pack")
    if names(folder):
        raise NormlabError(f"{folder / FILE} exists: pack into a folder without it")
    if kept := [path for path in directories if (path / "model.safetensors").is_file()]:
        raise NormlabError(f"{kept[0]} keeps its weights: only runs without are packed")
    _write(folder, directories)
    for path in directories:
        shutil.rmtree(path)
    return folder / FILE


def add(sweep: Path, folder: Path) -> list[Path]:
    """Add the finished runs of a sweep, its search and its finals to the packed ones of a folder, without weights.

    Nothing changes in the sweep's directory, so it may still be running. A run that is there already is replaced.
    """
    written = []
    for place in (".", "search", "finals"):
        found = {path.parent.name: path.parent for path in sweep.glob(f"{place}/*/manifest.json")}
        if found:
            there = {name: folder / place / name for name in names(folder / place)}
            written.append(_write(folder / place, [path for _, path in sorted((there | found).items())]))
    return written


def _write(folder: Path, runs: Sequence[Path]) -> Path:
    """Write directories of runs, and runs packed before, as the file of a folder, and read it back."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Any] = {
        "run": [path.name for path in runs],
        "manifest": [
            manifest(path) if holds(path) else (path / "manifest.json").read_text(encoding="utf-8") for path in runs
        ],
    }
    metadata = {}
    for name in _TABLES:
        tables = [_table(path, name) if holds(path) else _stored(path / f"{name}.parquet") for path in runs]
        if (first := next((t for t in tables if t is not None), None)) is not None:
            columns[name] = _lists(tables, first.schema.remove_metadata())
            metadata[name.encode()] = first.schema.metadata[b"pandas"]
    whole = pa.table(columns).replace_schema_metadata(metadata)
    leaves = [f"{name}.list.element" for name in _TABLES if name in columns]
    others = [f"{leaf}.{field.name}" for leaf in leaves for field in _struct(whole, leaf) if field.name != "value"]
    staged = folder / f".{FILE}.writing"
    parquet.write_table(
        whole,
        staged,
        compression="zstd",
        compression_level=19,
        row_group_size=len(whole),
        use_dictionary=others,
        column_encoding={f"{leaf}.value": "BYTE_STREAM_SPLIT" for leaf in leaves},
    )
    if not parquet.read_table(staged).equals(whole):
        raise NormlabError(f"{staged} does not read back as it was written; nothing was deleted")
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    staged.replace(folder / FILE)
    return folder / FILE


def _stored(file: Path) -> pyarrow.Table | None:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(file) if file.is_file() else None


def _struct(whole: pyarrow.Table, leaf: str) -> pyarrow.StructType:
    return whole.schema.field(leaf.partition(".")[0]).type.value_type


def _lists(tables: Sequence[pyarrow.Table | None], schema: pyarrow.Schema) -> pyarrow.ListArray:
    """One list of rows per run; null for a run without the table."""
    import pyarrow as pa

    rows = [t.cast(schema).to_struct_array().combine_chunks() for t in tables if t is not None]
    ends, end = [], 0
    for t in tables:
        ends.append(end)
        end += 0 if t is None else len(t)
    missing = pa.array([t is None for t in tables])
    return pa.ListArray.from_arrays(pa.array([*ends, end], pa.int32()), pa.concat_arrays(rows), mask=missing)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--from"]:
        print(*add(*map(Path, sys.argv[2:])), sep="\n")
    else:
        print(*[pack(Path(argument)) for argument in sys.argv[1:]], sep="\n")
