"""The way of one run from its configuration to a figure: each file on it is entered once or twice."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from training_helpers import tiny

import normlab
from normlab.analysis.selection import Selection
from normlab.figures import FIGURES
from normlab.training.build import Built
from normlab.training.config import TrainConfig
from normlab.training.corpus import Corpus
from normlab.training.manifest import manifest_of

pytest_plugins = ["training_fixtures"]

LIBRARY = Path(normlab.__file__).parent
CONTRIBUTING = LIBRARY.parent / "CONTRIBUTING.md"


def stays(call: Callable[[], Any], *kinds: type) -> list[str]:
    """The library's files that are handed an object of these kinds while `call` runs, one after the other: a stay
    begins with a function that takes one as an argument, and ends with a function of another file that does. A
    configuration's own methods and a selection's, which only say what is in them, are not among them."""
    found: list[str] = []

    def called(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or not path.is_relative_to(LIBRARY) or code.co_name.startswith("<"):
            return
        taken = {
            name: frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        }
        if isinstance(taken.get("self"), TrainConfig | Selection):
            del taken["self"]
        handed = any(isinstance(value, kinds) for value in taken.values())
        if handed and found[-1:] != [place := path.relative_to(LIBRARY).as_posix()]:
            found.append(place)

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def test_a_run_enters_each_file_once_or_twice_from_its_configuration_to_a_figure(
    text: Path, cache: Path, tmp_path: Path
) -> None:
    config = tiny(text, experiment_blocks=2)
    trained = stays(
        lambda: normlab.train(config, tmp_path, cache_dir=cache, progress=False), TrainConfig, Corpus, Built
    )
    table = normlab.load_runs(tmp_path)
    drawn = stays(lambda: FIGURES["token_l2_growth"](table), pd.DataFrame, Selection)
    way = trained + drawn
    assert {"training/trainer.py", "training/build.py", "training/manifest.py", "figures/growth.py"} <= set(way)
    assert max(Counter(way).values()) <= 2, way
    message = f"{len(way)} stays in {len(set(way))} files"
    assert message in " ".join(CONTRIBUTING.read_text(encoding="utf-8").split()), message


def test_a_way_that_comes_back_is_counted(text: Path, corpus: Corpus) -> None:
    config = tiny(text)

    def back_and_forth() -> None:
        manifest_of(config, corpus.identity())
        manifest_of(config, corpus.identity())

    assert stays(back_and_forth, TrainConfig, Corpus) == ["training/corpus.py", "training/manifest.py"] * 2
    assert stays(config.to_arguments, TrainConfig) == []
