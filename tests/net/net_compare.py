"""Snapshots on disk, and how a fresh record is compared with one.

A snapshot is {"environment": ..., "content": ...}. What is recorded must stay; what is new is not held until it is
recorded. In the environment that it was recorded in, a number must be equal bit for bit. In any other one it may differ
by `tolerance` times the largest value of its list. There entries in EXACT are not compared: hashes of bits, help texts.
"""

import json
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

FOLDER = Path(__file__).parent / "snapshots"
EXACT = ("bits", "text")


def machine() -> dict[str, str]:
    """The causes of a float's last bits: versions, and the processor that kernels are chosen for."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
    }


def interpreter() -> dict[str, str]:
    """The versions that the wording of help depends on."""
    return {"python": ".".join(platform.python_version_tuple()[:2]), "cyclopts": version("cyclopts")}


def _processor() -> str:
    """Vendor, family and model: MKL and oneDNN choose their kernels by them."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = [re.search(rf"^{key}\s*: (.*)$", text, re.MULTILINE) for key in ("vendor_id", "cpu family", "model")]
    return " ".join(match[1] for match in found if match) or f"{platform.system()} {platform.machine()}"


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def write(name: str, environment: dict[str, str], content: Any) -> Path:
    """Write a snapshot: one line per entry, a list of numbers on one line, so that a diff names what changed."""
    path = FOLDER / f"{name}.json"
    path.write_text(_lines({"environment": environment, "content": content}) + "\n")
    return path


def _lines(value: Any, indent: str = "") -> str:
    flat, deeper = json.dumps(value), indent + " "
    nested = isinstance(value, dict) or (isinstance(value, list) and not _numbers(value))
    if not nested or len(indent + flat) <= 110:
        return flat
    if isinstance(value, dict):
        opening, rows = "{}", [f"{json.dumps(key)}: {_lines(entry, deeper)}" for key, entry in value.items()]
    else:
        opening, rows = "[]", [_lines(entry, deeper) for entry in value]
    return opening[0] + "\n" + ",\n".join(deeper + row for row in rows) + f"\n{indent}" + opening[1]


def differences(recorded: Any, now: Any, tolerance: float | None, where: str = "") -> list[str]:
    """One line per difference of `now` from `recorded`. tolerance: None compares every bit."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        keys = [key for key in recorded if tolerance is None or key not in EXACT]
        lines = [f"{where}/{key}: is gone" for key in keys if key not in now]
        pairs = [(f"{where}/{key}", recorded[key], now[key]) for key in keys if key in now]
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        if tolerance is not None and _numbers(recorded) and _near(recorded, now, tolerance):
            return []
        lines, pairs = [], [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(recorded, now, strict=True))]
    else:
        return [] if recorded == now else [f"{where}: recorded {recorded!r}, now {now!r}"]
    return lines + [line for path, old, new in pairs for line in differences(old, new, tolerance, path)]


def _near(recorded: list[float], now: list[float], tolerance: float) -> bool:
    size = max(map(abs, recorded))
    return all(abs(old - new) <= tolerance * size for old, new in zip(recorded, now, strict=True))


def _numbers(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, int | float) for value in values)
