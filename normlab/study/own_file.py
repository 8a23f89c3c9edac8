"""A reader's own file of Python: a norm, a scheme, a preset."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

from normlab.errors import NormlabError, in_one_line


class OwnFile(NamedTuple):
    """The file, the first digits of its hash (of the file alone, not of what it imports), and what it defines."""

    path: Path
    digest: str
    names: dict[str, Any]


def executed(path: str | Path) -> OwnFile:
    """Run a file that the reader named. NormlabError: it is none, or it does not run."""
    file = Path(path)
    if not file.is_file():
        raise NormlabError(f"{file} is no file: write NAME, or FILE.py:NAME")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:6]
    module = f"normlab_own_{digest}"
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    loaded = sys.modules[module] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(loaded)
    except Exception as error:
        del sys.modules[module]
        raise NormlabError(f"{file} does not run: {in_one_line(error)}") from error
    return OwnFile(file, digest, vars(loaded))
