"""Snapshots on disk, and how a fresh record is compared with one.

A snapshot is {"environment": ..., "content": ...}. What is recorded must stay; what is new is not held until it is
recorded. The texts of help are compared only under the versions that they were recorded with.
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "snapshots"
TEXT = "text"


def environment() -> dict[str, str]:
    """The versions that the wording of help depends on."""
    return {"python": ".".join(platform.python_version_tuple()[:2]), "cyclopts": version("cyclopts")}


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def write(name: str, environment: dict[str, str], content: Any) -> Path:
    """Write a snapshot: one line per entry, so that a diff names what changed."""
    path = FOLDER / f"{name}.json"
    path.write_text(_lines({"environment": environment, "content": content}) + "\n")
    return path


def _lines(value: Any, indent: str = "") -> str:
    flat, deeper = json.dumps(value), indent + " "
    if not isinstance(value, dict | list) or len(indent + flat) <= 110:
        return flat
    if isinstance(value, dict):
        opening, rows = "{}", [f"{json.dumps(key)}: {_lines(entry, deeper)}" for key, entry in value.items()]
    else:
        opening, rows = "[]", [_lines(entry, deeper) for entry in value]
    return opening[0] + "\n" + ",\n".join(deeper + row for row in rows) + f"\n{indent}" + opening[1]


def differences(recorded: Any, now: Any, with_text: bool = True, where: str = "") -> list[str]:
    """One line per difference of `now` from `recorded`. with_text: compare entries named "text" too."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        keys = [key for key in recorded if with_text or key != TEXT]
        lines = [f"{where}/{key}: is gone" for key in keys if key not in now]
        pairs = [(f"{where}/{key}", recorded[key], now[key]) for key in keys if key in now]
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        lines, pairs = [], [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(recorded, now, strict=True))]
    else:
        return [] if recorded == now else [f"{where}: recorded {recorded!r}, now {now!r}"]
    return lines + [line for path, old, new in pairs for line in differences(old, new, with_text, path)]
