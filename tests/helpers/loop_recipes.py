"""The recipes of docs/loops.md, run as they stand there; and a loop with Adam."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from probe_toys import X

import normlab

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


def trained_by_adam(model: Any, step: Callable[[], None], **options: Any) -> Any:
    """The observer's table of two steps of AdamW with an evaluation after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    metrics = ["token_l2_mean", "grad_l2_mean"]
    observer = normlab.observe(model, 1, metrics, blocks="layers.*", loss_tokens=1, optimizer=optimizer, **options)
    for number in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(X)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no tokens tell which dimension is the batch
            observer.step(1.0, number)
    observer.close()
    return observer.to_pandas()


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().sum()
