"""Tables that lose nothing: CSV files of one row per thing measured, `KEY`, appended and synced one by one."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KEY = ("section", "function", "peer", "pass", "launch", "rows", "width", "dtype", "against")
MEASURED = (
    "microseconds spread eager_microseconds host_microseconds floor_bytes copy_microseconds gigabytes_per_second "
    "share_of_copy copy_gigabytes_per_second teraflops peak_megabytes error ratio ratio_low ratio_high steps note"
).split()
# What must be the same for an earlier row to count as measured: the device, the software, this package's sources.
MADE_WITH = ("device", "torch", "triton", "python", "code")
COLUMNS = (
    *("device", *KEY, *MEASURED, "torch", "triton", "python", "driver", "commit", "code", "time"),
    *("sm_clock_mhz", "memory_clock_mhz", "temperature_c"),
)
BEGUN = "it was begun and did not end"


def key_of(row: Row) -> tuple[str, ...]:
    """The cells that tell one row from another."""
    return tuple(str(row.get(name) or "") for name in KEY)


def is_good(row: Row) -> bool:
    """True if a row holds a time and no note."""
    return bool(row.get("microseconds")) and not row.get("note")


def read(path: Path) -> list[Row]:
    """The whole lines of a table as written, of older versions too; nothing if there is none."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def latest(rows: list[Row]) -> dict[tuple[str, ...], Row]:
    """One row for each thing measured: the newest good one, or else the newest."""
    kept: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = key_of(row)
        if is_good(row) or not is_good(kept.get(key, {})):
            kept[key] = row
    return kept


class Table:
    """A file, opened for more rows; `common` are the columns that all rows of this run share."""

    def __init__(self, path: Path, common: Row) -> None:
        self.path, self.common = path, common
        self.tidy()

    def tidy(self) -> None:
        """Keep one row for each thing measured. The old file is replaced when the new one is whole."""
        self.earlier = latest(read(self.path))
        self._write(self.path.with_suffix(".new"), "w", list(self.earlier.values()))
        self.path.with_suffix(".new").replace(self.path)

    def is_done(self, row: Row) -> bool:
        """True if it was measured well, or never ended, with this run's device, software and sources."""
        earlier = self.earlier.get(key_of(self.common | row), {})
        same = all(earlier.get(name) == str(self.common[name]) for name in MADE_WITH)
        return same and (is_good(earlier) or earlier["note"] == BEGUN)

    def add(self, row: Row) -> None:
        """Append a row; it is on disk when this returns."""
        self._write(self.path, "a", [self.common | row])

    def _write(self, path: Path, mode: str, rows: list[Row]) -> None:
        with path.open(mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
