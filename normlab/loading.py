"""Load a model or a tokenizer with one line on what is wrong, and no other.

require_fit         refuses weights and a configuration that do not fit
of_its_files_size   refuses a model that its configuration makes far larger than its files
hub_or_cache        asks the Hub once whether it answers
without_bars, loads_quietly   hide what transformers prints meanwhile
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normlab.errors import ANSWER_SECONDS, NormlabError

MOST_BLOCKS = 2_000
IS_DEPTH = re.compile(r"(layers?|blocks|depth)$")


def require_fit(source: object, info: dict[str, Any], counts: Callable[[str], bool] = bool) -> None:
    """Raise NormlabError if weights and configuration do not fit: transformers fills in random weights.

    info: of `from_pretrained`, with `ignore_mismatched_sizes`. counts: False for a weight that may be left out.
    """
    problems = {
        "the weights lack": info["missing_keys"],
        "the configuration has no place for": filter(counts, info["unexpected_keys"]),
        "the configuration gives another shape to": [name for name, *_ in info["mismatched_keys"]],
    }
    for problem, found in problems.items():
        names = sorted(found)
        if names:
            more = f" and {len(names) - 1} more" if names[1:] else ""
            raise NormlabError(f"{source}: {problem} {names[0]}{more}; give weights and config.json of one model")


@contextmanager
def of_its_files_size(source: object, config: Mapping[str, Any], any_size: bool = False) -> Iterator[None]:
    """Refuse a model, while it is built, that its configuration makes deeper or larger than its files show.

    Parts are counted as they are built, before weights are read. A quantized weight takes a byte for up to 8 numbers,
    and each weight has its name in the file.

    Args:
        source: folder or hub name. The size of files on the hub is not known here.
        config: what its config.json says.
        any_size: refuse nothing.

    Raises:
        NormlabError: more than `MOST_BLOCKS` blocks, or far more than the folder's files can hold.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    if any_size:
        yield
        return
    remedy = "give a model and its own config.json, or any_size=True (--any-size) to build it"
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    depths = [(value, name) for part in parts for name, value in part.items() if IS_DEPTH.search(str(name))]
    for blocks, name in depths:
        if isinstance(blocks, int) and blocks > MOST_BLOCKS:
            raise NormlabError(f"{source}: {name} is {blocks:,}, more than {MOST_BLOCKS:,}: {remedy}")
    folder = Path(str(source))
    held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if folder.is_dir() else math.inf
    numbers, tensors = 8 * held + 2**20, held / 32 + 1_000
    built = {"numbers": 0, "tensors": 0}

    def count(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.is_meta:
            built["numbers"] += parameter.numel()
            built["tensors"] += 1
            if built["numbers"] > numbers or built["tensors"] > tensors:
                raise NormlabError(f"{source}: config.json makes a far larger model than the files hold: {remedy}")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def hub_or_cache(name: object) -> Iterator[None]:
    """Ask the Hub once, within a deadline, before something is loaded from it. If it does not answer, take its cache.

    Its libraries ask on and on, with a line each time. name: nothing is asked if it is a file or a folder.
    """
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    if not before and not os.path.exists(str(name)):
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
        except Exception:  # of its HTTP client, which is another one in each version
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers and huggingface_hub."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def loads_quietly() -> Iterator[None]:
    """Hide transformers' report of weights that do not fit: `require_fit` says it in one line."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
