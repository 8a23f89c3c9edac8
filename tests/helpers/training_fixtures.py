"""Fixtures of the tests of whole training runs: a text, its corpus, a short way to train, one finished run.

No test changes the text or its corpus, which are made once for all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_helpers import tiny, write_text

from normlab import runs
from normlab.training.config import TrainConfig
from normlab.training.run import RunStopped, train
from normlab.training.text.corpus import Corpus, corpus_of


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def corpus(text: Path, cache: Path) -> Corpus:
    return corpus_of(tiny(text), cache)


@pytest.fixture(scope="session")
def go(cache: Path) -> Callable[..., runs.Run]:
    def go(config: TrainConfig, out: Path, **options: Any) -> runs.Run:
        return train(config, out, cache_dir=cache, progress=False, **options)

    return go


@pytest.fixture(scope="module")
def stop(go: Callable) -> Callable[[TrainConfig, Path, int], None]:
    """Train until that step, and leave the run as it is then."""

    def stop(config: TrainConfig, out: Path, step: int) -> None:
        with pytest.raises(RunStopped):
            go(config, out, watch=lambda now, rows: now != step)

    return stop


@pytest.fixture(scope="module")
def done(text: Path, go: Callable, tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """One finished run that several tests look at and none changes."""
    return go(tiny(text), tmp_path_factory.mktemp("done"))
