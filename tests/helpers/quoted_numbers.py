"""The texts whose numbers are held against the shipped runs, and what a number looks like in them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, FINDINGS = (
    " ".join((ROOT / name).read_text(encoding="utf-8").replace("−", "-").split())
    for name in ("README.md", "docs/findings.md")
)
NUMBER = r"([+-]?\d+\.\d+)"
INTERVAL = rf"\[{NUMBER}, {NUMBER}\]"
