"""The texts whose numbers are held against the shipped runs, and what a number looks like in them."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
README, FINDINGS = (
    " ".join((ROOT / name).read_text(encoding="utf-8").replace("−", "-").split())
    for name in ("README.md", "docs/findings.md")
)
NUMBER = r"([+-]?\d+\.\d+)"
INTERVAL = rf"\[{NUMBER}, {NUMBER}\]"
SMALL_GAIN, PLAIN = ("bhyt", "bhyt_exact", "rmsnorm_gain"), ("pre_rmsnorm", "lns", "lns_gain")


def quoted(pattern: str, text: str = FINDINGS) -> list[str]:
    found = re.search(pattern.replace("NUMBER", NUMBER).replace("INTERVAL", INTERVAL), text)
    assert found is not None, pattern
    return list(found.groups())


def agrees(text: list[str], row: pd.Series) -> None:
    """Estimate and interval, each to the digits that are quoted."""
    for number, value in zip(text, row[["estimate", "low", "high"]], strict=True):
        digits = len(number.partition(".")[2])
        assert float(number) == pytest.approx(round(float(value), digits), abs=1e-9)
