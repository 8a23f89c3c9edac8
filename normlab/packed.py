"""Many finished runs in one file, a row per run: `packed_runs.parquet` in a folder, in place of the runs' directories.

Pack, opened   the runs of a folder's file, as it was when it was opened
holds          whether a path, folder / run, is one of them
read_table     a table in a run's own directory, under the same schema and limits
pack           write the file, and delete the directories: `python -m normlab.packed FOLDER ...`
add            add what a sweep has finished: `python -m normlab.packed --from SWEEP FOLDER`

A run keeps its path, folder / run: what reads a directory of runs reads the file too. Columns: `run`, `manifest` (the
text of manifest.json), `stats` and `experiments` (the rows of these tables, `TABLES`). Weights are not packed.

A file may be a stranger's: its sizes are looked at before it is unpacked, and each run that cannot be read has a line.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from normlab.errors import NormlabError, fail, first_line
from normlab.files import locked, sync

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    from pyarrow.parquet import ParquetFile

FILE = "packed_runs.parquet"
MANIFEST = "manifest.json"
# Columns of each table of a run, by Arrow's names of types.
TABLES: dict[str, dict[str, str]] = {
    "stats": {
        "step": "int64",
        "tokens": "int64",
        "split": "large_string",
        "site": "large_string",
        "layer": "int64",
        "metric": "large_string",
        "mask": "large_string",
        "value": "double",
    },
    "experiments": {
        "metric": "large_string",
        "part": "large_string",
        "layer": "int64",
        "other": "int64",
        "value": "double",
        "standard_error": "double",
    },
}
MAY_BE_MISSING = {"layer", "other", "value", "standard_error"}
LONGEST_NAME = 200  # of sites and metrics
# A file unpacks to so many bytes, or so many times its own size. Files that sweeps wrote reach 26 times.
UNPACKED_BYTES, UNPACKED_TIMES = 2**26, 100
_COLUMNS = ("run", "manifest", *TABLES)


# --- reading ---


class Pack:
    """The packed runs of a folder. The file is read into memory, so another process may replace or delete it.

    unreadable: a line for each row that is no run, or column that is unknown.

    NormlabError: the file cannot be read. FileNotFoundError: there is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._columns: dict[str, Any] = {}
        with self._named():
            self._file = _parquet(folder / FILE)
            self._known = self._file.schema_arrow.names
            runs = self._column("run").to_pylist()
        self._rows: dict[str, list[int]] = {}
        strange = []
        for row, name in enumerate(runs):
            if _is_name(name):
                self._rows.setdefault(name, []).append(row)
            else:
                strange.append(f"{name!r:.80} is no name of a run")
        strange += [f"column {name!r:.80} is unknown" for name in self._known if name not in _COLUMNS]
        self.unreadable = [f"{folder / FILE}: {line}" for line in strange]

    @property
    def names(self) -> list[str]:
        return list(self._rows)

    def manifest(self, run: str) -> str:
        """The text of a run's manifest."""
        with self._named(run):
            text = self._column("manifest")[self._row(run)].as_py()
            if not isinstance(text, str):
                raise ValueError(f"{MANIFEST} is missing")
            return text

    def table(self, run: str, name: str) -> pd.DataFrame | None:
        """A run's `stats` or `experiments`; None if it has none."""
        import pyarrow as pa

        if name not in self._known:
            return None
        with self._named(run):
            rows = self._column(name)
            if not pa.types.is_list(rows.type) or not pa.types.is_struct(rows.type.value_type):
                raise ValueError(f"{name} is of another type")
            of_run = rows[self._row(run)]
            return _frame(pa.Table.from_struct_array(of_run.values), name) if of_run.is_valid else None

    def _row(self, run: str) -> int:
        first, *more = self._rows[run]
        if more:
            raise ValueError(f"{len(more) + 1} runs have this name")
        return first

    def _column(self, name: str) -> Any:
        if name not in self._columns:
            self._columns[name] = _read(self._file, [name])[name].combine_chunks()
        return self._columns[name]

    @contextmanager
    def _named(self, run: str = "") -> Iterator[None]:
        """NormlabError naming the file, and the run if it is about one."""
        try:
            yield
        except (FileNotFoundError, MemoryError):
            raise
        except Exception as error:  # pyarrow raises several kinds, OSError among them
            what = f"run {self.folder / run}: {FILE}" if run else self.folder / FILE
            raise NormlabError(f"{what} cannot be read ({first_line(error)}): fetch it again") from error


def opened(folder: Path) -> Pack | None:
    """The packed runs of a folder; None without the file. NormlabError: it cannot be read."""
    try:
        return Pack(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None


def holds(path: Path) -> bool:
    pack = opened(path.parent)
    return pack is not None and path.name in pack.names


def read_table(path: Path, name: str) -> pd.DataFrame:
    """A table in a run's own directory. FileNotFoundError without one; ValueError for other columns or types."""
    return _frame(_read(_parquet(path)), name)


def _is_name(name: Any) -> bool:
    """True for the name of a folder here, and of nothing elsewhere."""
    return isinstance(name, str) and PureWindowsPath(name).parts == (name,) and name != ".." and "\0" not in name


def _parquet(path: Path) -> ParquetFile:
    """A file in memory, not unpacked yet. ValueError: it would take far more memory than its size lets expect."""
    import pyarrow
    from pyarrow import parquet

    content = path.read_bytes()
    footer = parquet.read_metadata(pyarrow.BufferReader(content))
    leaves = [footer.schema.column(place) for place in range(footer.num_columns)]
    columns = [footer.row_group(g).column(c) for g in range(footer.num_row_groups) for c in range(footer.num_columns)]
    unpacked = sum(abs(column.total_uncompressed_size) + 8 * abs(column.num_values) for column in columns)
    if unpacked > max(UNPACKED_BYTES, UNPACKED_TIMES * len(content)):
        raise ValueError(f"its {len(content):,} bytes unpack to {unpacked:,}")
    # A text that is repeated is kept once, in memory as in the file.
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    buffer = pyarrow.BufferReader(content)
    return parquet.ParquetFile(buffer, read_dictionary=texts, page_checksum_verification=True)


def _read(file: ParquetFile, columns: list[str] | None = None) -> pyarrow.Table:
    table = file.read(columns=columns)
    table.validate(full=True)
    return table


def _frame(table: pyarrow.Table, name: str) -> pd.DataFrame:
    """A run's table as pandas has it. ValueError: other columns or types, or an entry is missing."""
    import pyarrow as pa

    kinds = TABLES[name]
    if table.column_names != list(kinds):
        raise ValueError(f"it has columns {table.column_names}")
    for column, kind in kinds.items():
        values = table[column]
        given = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
        is_text = pa.types.is_string(given) or pa.types.is_large_string(given)
        if is_text != (kind == "large_string") and not pa.types.is_null(given):
            raise ValueError(f"its column {column} is of type {given}")
        if values.null_count and column not in MAY_BE_MISSING:
            raise ValueError(f"its column {column} has an empty entry")
        if is_text and any(_longest(part) > LONGEST_NAME for part in values.chunks):
            raise ValueError(f"its column {column} has a name of more than {LONGEST_NAME} letters")
    frame = table.cast(pa.schema(kinds)).replace_schema_metadata(None).to_pandas()
    whole = [column for column in MAY_BE_MISSING if kinds.get(column) == "int64"]
    return frame.assign(**{column: frame[column].astype("Int64") for column in whole})


def _longest(texts: Any) -> int:
    import pyarrow.compute as pc

    return pc.max(pc.utf8_length(getattr(texts, "dictionary", texts))).as_py() or 0


# --- writing ---


def pack(folder: Path) -> Path:
    """Write the runs directly in a folder into its `packed_runs.parquet`, and delete the directories that it read back.

    A killed call is finished by the next one.

    Raises:
        NormlabError: there is no run; or a directory is no run, keeps its weights, or has another file in it. Nothing
            is deleted then.
    """
    with _alone(folder):
        there = opened(folder)
        done = [] if there is None else [folder / name for name in there.names if (folder / name).is_dir()]
        found = sorted({*done, *(path.parent for path in folder.glob(f"*/{MANIFEST}"))})
        if not found and there is None:
            raise NormlabError(f"{folder} has no run to pack")
        for path in found:
            _require_only_a_run(path)
        if new := [path for path in found if path not in done]:
            _write(folder, there, new)
        whole = Pack(folder)
        for path in found:
            _require_packed(path, whole)
        for path in found:
            for name in _FILES:  # the manifest first: a directory that has one is whole
                (path / name).unlink(missing_ok=True)
            with suppress(OSError):  # something else was put there meanwhile, and stays
                path.rmdir()
    return folder / FILE


def add(sweep: Path, folder: Path) -> Path | None:
    """Add the finished runs of a sweep to the packed ones of a folder, without weights. None: it has no finished run.

    Nothing changes in the sweep's directory, so it may still be running. A run that is there already is replaced, with
    a warning if it is of another text.
    """
    found = sorted(path.parent for path in sweep.glob(f"*/{MANIFEST}"))
    if not found:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        there = opened(folder)
        other = [] if there is None else [path.name for path in found if _has_another_text(path, there)]
        file = _write(folder, there, found)
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        line = f"{folder}: replaced by a run of the same name on another text: {other[0]}{more}"
        warnings.warn(line, stacklevel=2)
    return file


_FILES = (MANIFEST, *(f"{name}.parquet" for name in TABLES))


def _alone(folder: Path) -> AbstractContextManager[None]:
    """NormlabError: another process packs in this folder."""
    return locked(folder / f".{FILE}.lock", f"another process packs the runs of {folder}: wait for it")


def _has_another_text(path: Path, pack: Pack) -> bool:
    """True if a run's name is in the pack, of a run on another text. False where one of the two does not say."""
    if path.name not in pack.names:
        return False
    try:
        one, other = (json.loads(manifest)["corpus"] for manifest in (_text(path), pack.manifest(path.name)))
        return differ_in_text(one, other)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def differ_in_text(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two runs' manifests, in "corpus", say of two texts. What one of them does not say tells nothing."""
    says = [(one.get(name), other.get(name)) for name in ("content_hash", "source_key")]
    return any(a is not None and b is not None and a != b for a, b in says)


def _require_only_a_run(path: Path) -> None:
    """NormlabError if a directory holds anything that is not packed."""
    if path.is_symlink():
        raise NormlabError(f"{path} is a link: only a run's own directory is packed")
    names = sorted(entry.name for entry in path.iterdir())
    if "model.safetensors" in names:
        raise NormlabError(f"{path} keeps its weights: only runs without are packed")
    if other := [name for name in names if name not in _FILES or not (path / name).is_file()]:
        raise NormlabError(f"{path} has {other[0]}, which is not packed: move it elsewhere")


def _require_packed(path: Path, pack: Pack) -> None:
    """NormlabError if a directory has a file that the pack has otherwise."""
    for name in _FILES:
        if not (path / name).is_file():
            continue
        if name == MANIFEST:
            same = _text(path) == pack.manifest(path.name)
        else:
            table = pack.table(path.name, name.removesuffix(".parquet"))
            same = table is not None and table.equals(_stored(path, name.removesuffix(".parquet")))
        if not same:
            raise NormlabError(f"{path / name} is not as {FILE} has it: nothing was deleted; remove one of the two")


def _text(path: Path) -> str:
    """A run's manifest. NormlabError: it is none."""
    try:
        text = (path / MANIFEST).read_bytes().decode("utf-8")
        if json.loads(text)["run"]:
            return text
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise NormlabError(f"{path / MANIFEST} is no run's: nothing was packed")


def _stored(path: Path, name: str) -> pd.DataFrame | None:
    """A table of a run; None if it has no experiments. NormlabError: it cannot be read."""
    try:
        return read_table(path / f"{name}.parquet", name)
    except FileNotFoundError:
        if name == "stats":
            raise NormlabError(f"{path} has no {name}.parquet: it is no finished run, and nothing was packed") from None
        return None
    except MemoryError:
        raise
    except Exception as error:  # pyarrow raises several kinds, OSError among them
        raise NormlabError(f"{path / name}.parquet cannot be read ({first_line(error)}): nothing was packed") from None


def _write(folder: Path, there: Pack | None, new: Sequence[Path]) -> Path:
    """Write the runs packed before and those of new directories, which replace them, as the file of a folder.

    NormlabError: what was packed before cannot be read as a whole; or the file does not read back as it was written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    if there is not None and there.unreadable:
        raise NormlabError(f"{there.unreadable[0]}: nothing was written, as it would be lost")
    runs: dict[str, tuple[str, dict[str, pd.DataFrame | None]]] = {}
    if there is not None:
        for name in set(there.names) - {path.name for path in new}:
            runs[name] = there.manifest(name), {table: there.table(name, table) for table in TABLES}
    for path in new:
        runs[path.name] = _text(path), {table: _stored(path, table) for table in TABLES}
    order = sorted(runs)
    columns: dict[str, Any] = {"run": order, "manifest": [runs[name][0] for name in order]}
    for table, kinds in TABLES.items():
        schema = pa.schema(kinds)
        frames = [runs[name][1][table] for name in order]
        if any(frame is not None for frame in frames):
            columns[table] = _lists([None if f is None else pa.Table.from_pandas(f, schema) for f in frames], schema)
    whole = pa.table(columns)
    leaves = {table: f"{table}.list.element" for table in TABLES if table in columns}
    numbers = [f"{leaf}.value" for leaf in leaves.values()]
    others = [f"{leaf}.{name}" for table, leaf in leaves.items() for name in TABLES[table] if name != "value"]
    staged = folder / f".{FILE}.writing"
    parquet.write_table(
        whole,
        staged,
        compression="zstd",
        compression_level=19,
        row_group_size=len(whole),
        use_dictionary=others,
        column_encoding=dict.fromkeys(numbers, "BYTE_STREAM_SPLIT"),
        write_page_checksum=True,
    )
    if not parquet.read_table(staged).equals(whole):
        raise NormlabError(f"{staged} does not read back as it was written; nothing was deleted")
    sync(staged)
    staged.replace(folder / FILE)
    sync(folder)
    return folder / FILE


def _lists(tables: Sequence[pyarrow.Table | None], schema: pyarrow.Schema) -> pyarrow.ListArray:
    """One list of rows per run; null for a run without the table."""
    import pyarrow as pa

    ends = [0, *itertools.accumulate(0 if table is None else len(table) for table in tables)]
    rows = pa.concat_tables([schema.empty_table(), *(table for table in tables if table is not None)])
    missing = pa.array([table is None for table in tables])
    rows = rows.replace_schema_metadata(None).to_struct_array().combine_chunks()
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), rows, mask=missing)


def main(arguments: Sequence[str]) -> int:
    try:
        if arguments[:1] == ["--from"] and len(arguments) == 3:
            print(add(*map(Path, arguments[1:])) or f"{arguments[1]} has no finished run")
        elif arguments and not arguments[0].startswith("-"):
            print(*(pack(Path(argument)) for argument in arguments), sep="\n")
        else:
            raise NormlabError("give folders of runs to pack, or --from SWEEP FOLDER")
    except NormlabError as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
