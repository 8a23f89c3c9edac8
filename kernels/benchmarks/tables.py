"""Tables that lose nothing: a row is on disk when it was measured, and a good one is replaced by a newer good one only.

A table is a CSV file with one row for each thing measured, `KEY`. Rows are appended one by one and synced, so a run
that is killed leaves all it measured; opening a table afterwards drops the torn end of a line and, of two rows for one
thing, the older or the failed one. Imports nothing that is not Python's own.
"""

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


def key_of(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(name) or "") for name in KEY)


def is_good(row: Row) -> bool:
    """Whether it holds a time, and nothing is noted against it."""
    return bool(row.get("microseconds")) and not row.get("note")


def read(path: Path) -> list[Row]:
    """The whole lines of a table as written, of older versions too; nothing if there is none."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def latest(rows: list[Row]) -> dict[tuple[str, ...], Row]:
    """One row for each thing measured: the newest good one, or else the newest."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        _keep(found, row)
    return found


def _keep(found: dict[tuple[str, ...], Row], row: Row) -> None:
    key = key_of(row)
    if key not in found or is_good(row) or not is_good(found[key]):
        found[key] = row


class Table:
    """A file, opened for more rows; `common` are the columns that all rows of this run share."""

    def __init__(self, path: Path, common: Row) -> None:
        self.path, self.common = path, common
        self.rows = latest(read(path))
        self.tidy()

    def tidy(self) -> None:
        """One row for each thing measured; the old file is there until the new one is, whole."""
        new = self.path.with_suffix(".new")
        with new.open("w", newline="", encoding="utf-8") as file:
            self._writer(file).writeheader()
            self._writer(file).writerows(self.rows.values())
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)

    def has(self, row: Row) -> bool:
        """Whether it was measured well, on this device and with the software and the sources of this run."""
        earlier = self.rows.get(key_of(self.common | row))
        same = earlier is not None and all(earlier.get(name) == str(self.common[name]) for name in MADE_WITH)
        return earlier is not None and same and is_good(earlier)

    def add(self, row: Row) -> None:
        """On disk when this returns."""
        full = self.common | row
        line = io.StringIO()
        self._writer(line).writerow(full)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(line.getvalue())
            file.flush()
            os.fsync(file.fileno())
        _keep(self.rows, full)

    @staticmethod
    def _writer(file: Any) -> csv.DictWriter:
        return csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
