"""Tables that lose nothing: CSV files of one row per thing measured, `KEY`, replaced whole after every row.

Each row says what it was made with, `MADE_WITH`. What fails with this software replaces what another measured.
"""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KEY = ("section", "function", "peer", "pass", "launch", "rows", "width", "dtype", "against")
MEASURED = (
    "microseconds spread eager_microseconds host_microseconds floor_bytes copy_microseconds gigabytes_per_second "
    "share_of_copy copy_gigabytes_per_second teraflops peak_megabytes error ratio ratio_low ratio_high steps note"
).split()
# What must be the same for an earlier row to count as measured: the device, the software, this package's sources.
MADE_WITH = ("device", "torch", "triton", "python", "peer_version", "code")
COLUMNS = (
    *("device", *KEY, *MEASURED, "torch", "triton", "python", "peer_version", "driver", "commit", "code", "time"),
    *("sm_clock_mhz", "memory_clock_mhz", "temperature_c"),
)
BEGUN = "it was begun and did not end"


def key_of(row: Row) -> tuple[str, ...]:
    """The cells that tell one row from another."""
    return tuple(str(row.get(name) or "") for name in KEY)


def is_good(row: Row) -> bool:
    """True if a row holds a time and no note."""
    return bool(row.get("microseconds")) and not row.get("note")


def made_with(row: Row) -> tuple[str, ...]:
    """The cells that tell the software of one row from another's."""
    return tuple(str(row.get(name) or "") for name in MADE_WITH)


class Table:
    """A table with what earlier runs measured; `common` are the columns that all rows of this run share."""

    def __init__(self, path: Path, common: Row | None = None) -> None:
        self.path, self.common = path, common or {}
        self.rows: dict[tuple[str, ...], Row] = {}
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = {key_of(row): row for row in csv.DictReader(file)}

    def earlier(self, row: Row) -> Row:
        """What is there for a row, if this run's device, software and sources made it."""
        row = self.common | row
        found = self.rows.get(key_of(row), {})
        return found if made_with(found) == made_with(row) else {}

    def add(self, row: Row) -> None:
        """Put a row into the table, unless one is there that is good, of the same software, and the new one is not.

        It is on disk when this returns, and until then the table is as it was.
        """
        if is_good(row) or not is_good(self.earlier(row)):
            self.rows[key_of(self.common | row)] = self.common | row
            self._write()

    @contextlib.contextmanager
    def begun(self, row: Row) -> Iterator[None]:
        """Meanwhile the table says that the row was begun. An interrupt takes that back, the end of the process not."""
        before = dict(self.rows)
        self.add(row | {"note": BEGUN})
        try:
            yield
        except KeyboardInterrupt:
            self.rows = before
            self._write()
            raise

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows.values())
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)
