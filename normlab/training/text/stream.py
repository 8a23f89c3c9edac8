"""Blocks that are read from the source while training, for text that is too large to prepare.

`StreamedBlocks`   packed blocks without end, and their position in the source

Documents come in the source's order, without those of the held-out split. Their ids, an end-of-text token after each,
are cut into blocks with nothing in between, as in a prepared corpus. A source that ends begins again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normlab.errors import NormlabError
from normlab.training.text.source import datasets_in, open_documents, part_of, texts
from normlab.training.text.tokens import in_blocks, tokenize

DOCUMENTS = 64  # tokenized at a time


class Position(NamedTuple):
    """A position in the source, as JSON takes it.

    documents: state of the source before some documents; None: its beginning.
    left: ids that did not fill a block before them.
    taken: blocks that were taken since.
    """

    documents: dict[str, Any] | None = None
    left: list[int] = []  # noqa: RUF012  (never changed)
    taken: int = 0


class StreamedBlocks:
    """Blocks of `length` ids of a source's training documents, without end.

    Args:
        source, text_column: as in `CorpusSpec`.
        tokenizer: a fast one with an end-of-text token.
        length: ids per block.
        cache_dir: the cache directory of the corpus.

    Attributes:
        position: after the blocks taken so far.
    """

    def __init__(self, source: str, text_column: str, tokenizer: Any, length: int, cache_dir: Path) -> None:
        self.source, self.text_column, self.tokenizer, self.length = source, text_column, tokenizer, length
        self.cache_dir = cache_dir
        self.position = Position()

    def restore(self, position: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self.position = Position(**position)

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            with datasets_in(self.cache_dir):
                stream = open_documents(self.source, self.text_column)
            is_beginning = self.position.documents is None
            if not is_beginning:
                stream.load_state_dict(self.position.documents)
            documents = texts(self.source, self.text_column, stream)
            is_empty = is_beginning
            while batch := self._next_documents(documents):
                is_empty = False
                pieces = tokenize(batch, self.tokenizer, "", False)
                ids = np.concatenate([np.array(self.position.left, dtype=np.int32), *pieces])
                blocks = in_blocks(ids, self.length)
                for block in blocks[self.position.taken :]:
                    self.position = self.position._replace(taken=self.position.taken + 1)
                    yield block
                self.position = Position(stream.state_dict(), ids[blocks.size :].tolist())
            if is_empty:
                raise NormlabError(f"corpus {self.source!r} holds no text to train on")
            self.position = self.position._replace(documents=None)

    def _next_documents(self, documents: Iterator[tuple[str, str]]) -> list[str]:
        """The next training texts; none at the source's end."""
        batch: list[str] = []
        for key, text in documents:
            if part_of(self.source, key) == "train":
                batch.append(text)
                if len(batch) == DOCUMENTS:
                    break
        return batch
