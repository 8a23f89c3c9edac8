"""The pages of the API reference: one per module, its public names as `__all__` has them.

write_pages   write them as reStructuredText, for autodoc to fill
"""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import normlab

MODULES = {
    "normlab": "models, measurements, training and runs",
    "normlab.probes": "further measurements and experiments",
    "normlab.norms": "the norms as PyTorch modules",
    "normlab.figures": "tables to plotly figures",
    "normlab.widgets": "figures with controls",
    "normlab.analysis.claims": "what the papers claim of depth, asked of runs",
    "normlab.analysis.verdicts": "differences with intervals, and when one is called a difference",
    "normlab.analysis.theory": "what layers will hold before training, in closed form",
    "normlab_kernels": "the norms as fused functions",
}
# Tables of data have pages of their own.
DATA = {"SCHEMES": "/reference/schemes", "METRICS": "/reference/metrics", "FIGURES": "/reference/figures"}
# What signatures name by the module that defines it, where no page has it: readers are handed such objects.
UNDOCUMENTED = [("py:class", r"normlab\.\w+\..*")]


@functools.cache
def public_names() -> frozenset[str]:
    """Every name that has an entry, in full."""
    return frozenset(f"{module}.{name}" for module in MODULES for name in _names(importlib.import_module(module)))


def write_pages(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, what in MODULES.items():
        page = _page(importlib.import_module(name), what)
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text(encoding="utf-8") != page:
            path.write_text(page, encoding="utf-8")


def _names(module: ModuleType) -> dict[str, Any]:
    """The names of `__all__`, or else the public functions and classes that the module defines.

    What `normlab` itself has is described there.
    """
    names = {name: getattr(module, name) for name in getattr(module, "__all__", ()) if not name.startswith("__")}
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    names = names or {name: value for name, value in own.items() if not name.startswith("_")}
    if module is not normlab:
        names = {name: value for name, value in names.items() if name not in normlab.__all__}
    return {name: value for name, value in names.items() if not inspect.ismodule(value)}


def _page(module: ModuleType, what: str) -> str:
    names = _names(module)
    described = [name for name, value in names.items() if callable(value)]
    title = f"{module.__name__}: {what}"
    lines = [
        title,
        "=" * len(title),
        "",
        f".. automodule:: {module.__name__}",
        "",
        f".. currentmodule:: {module.__name__}",
    ]
    lines += ["", ".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in described), ""]
    for name, value in names.items():
        lines += _entry(name, value)
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        fields = ", ".join(getattr(value, "_fields", ()))  # a named tuple's, whose docstrings say "alias for field 0"
        without = [f"   :exclude-members: {fields}"] if fields else []
        return [f".. autoclass:: {name}", "   :members:", *without, "   :show-inheritance:", ""]
    if callable(value):
        return [f".. autofunction:: {name}", ""]
    about = f"A table: :doc:`{DATA[name]}`." if name in DATA else f"``{value!r}``"
    return [f".. py:data:: {name}", "", f"   {about}", ""]
