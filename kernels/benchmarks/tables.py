"""Tables that lose nothing: CSV files of one row per thing measured, `KEY`, replaced whole after every row."""

from __future__ import annotations

import csv
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


class Table:
    """A table with what earlier runs measured; `common` are the columns that all rows of this run share."""

    def __init__(self, path: Path, common: Row | None = None) -> None:
        self.path, self.common = path, common or {}
        self.rows: dict[tuple[str, ...], Row] = {}
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self._keep(row)

    def _keep(self, row: Row) -> None:
        """One row for each thing measured: the newest good one, or else the newest."""
        if is_good(row) or not is_good(self.rows.get(key_of(row), {})):
            self.rows[key_of(row)] = row

    def is_done(self, row: Row) -> bool:
        """True if it was measured well, or never ended, with this run's device, software and sources."""
        earlier = self.rows.get(key_of(self.common | row), {})
        same = all(earlier.get(name) == str(self.common[name]) for name in MADE_WITH)
        return same and (is_good(earlier) or earlier["note"] == BEGUN)

    def add(self, row: Row) -> None:
        """Put a row into the table; it is on disk when this returns, and until then the table is as it was."""
        self._keep(self.common | row)
        new = self.path.with_suffix(".new")
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows.values())
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)
