"""The recipes of docs/loops.md, run as they stand there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
SETUP, *_recipes = re.findall(r"^```py(?:thon)?\n(.*?)^```", PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
RECIPES = dict(zip(re.findall(r"^## (.*)$", PAGE.read_text("utf-8"), flags=re.MULTILINE), _recipes, strict=True))
PLAIN = "Plain PyTorch"
KEYS = ["step", "site", "layer", "metric", "mask"]


def run(name: str, prepare: Callable[[dict[str, Any]], None] = lambda names: None) -> Any:
    """Run one recipe on a new model, after `prepare` has changed what it runs on; return the table it measured."""
    names: dict[str, Any] = {}
    exec(SETUP, names)
    prepare(names)
    exec(RECIPES[name], names)
    callback = names.get("callback")
    measured = names["observer"] if callback is None else getattr(callback, "observer", callback)
    return measured.to_pandas()
