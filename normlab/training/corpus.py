"""Text in, fixed-length blocks of token ids out: one road for every corpus.

`load_corpus(source)`   builds (or finds in the cache) the packed train and held-out splits
`Corpus`                what training needs: two memory-mapped arrays, the tokenizer, the hashes, and the losses of
                        models that only count
`SOURCES`               corpora known by name, and what yields their documents
`DEFAULT_CORPUS`        "stdlib": the Python standard library's source and pydoc topics, always at hand with no network

Every source becomes a streamed `datasets.IterableDataset` of documents with two columns, `key` and `text`; after that
there is one code path. A document belongs to the held-out split when a hash of its key falls into the last 5%: a file's
path for the standard library, a work's name for `english`, the text itself for every other source, so a duplicate never
sits in both splits and the order of reading does not matter.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from normlab.errors import NormlabError
from normlab.runs import full_disk_named
from normlab.training.english import english_documents
from normlab.training.ngrams import ngram_losses
from normlab.training.stdlib import stdlib_documents
from normlab.training.tokens import saved_tokenizer, tokenize, train_tokenizer, unigram_entropy

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerFast

    from normlab.training.config import TrainConfig

DEFAULT_CORPUS = "stdlib"
SOURCES: dict[str, Callable[[], Iterator[dict[str, str]]]] = {
    DEFAULT_CORPUS: stdlib_documents,
    "english": english_documents,
}
DEFAULT_CHARACTERS = 100_000_000
HELD_OUT_PERCENT = 5
HELD_OUT = ("all", "validation", "test")  # which held-out blocks: every one, every second from the first, the others
CACHE_VERSION = 2
BUILDERS = {".txt": "text", ".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Corpus:
    """A packed corpus.

    source: as given. train, held_out: int32 arrays (blocks, block_length), memory-mapped from disk.
    content_hash: of every document, in order. tokenizer_hash: of the tokenizer's vocabulary, merges and normalisation.
    unigram_entropy: nats a token; cross-entropy of the held-out tokens under the add-one smoothed token frequencies of
    the train split. A model that does no better has learned nothing but how frequent each token is.
    ngram_losses: (2, held-out blocks), nats a token; see `normlab.training.ngrams`, fitted on all of the train split.
    """

    source: str
    train: np.ndarray
    held_out: np.ndarray
    tokenizer_path: Path
    vocab_size: int
    eos_token_id: int
    content_hash: str
    tokenizer_hash: str
    unigram_entropy: float
    ngram_losses: np.ndarray

    @property
    def train_tokens(self) -> int:
        """Tokens of one epoch."""
        return self.train.size

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, as transformers knows it."""
        from transformers import AutoTokenizer

        return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(self.tokenizer_path))

    def spread(self, count: int, held_out: str = "all") -> np.ndarray:
        """`count` held-out blocks, evenly spaced over the split or over one half of it ("validation", "test"): the same
        ones for every run. Fewer when there are fewer."""
        return self.held_out[self._spread_rows(count, held_out)].astype(np.int64)

    def count_losses(self, count: int | None = None, held_out: str = "all") -> dict[str, float]:
        """`bigram_loss` and `trigram_loss` of the blocks `spread(count, held_out)`, by default of all held-out blocks,
        in nats a token: to be compared with a model's loss on the same blocks."""
        rows = self._spread_rows(len(self.held_out) if count is None else count, held_out)
        bigram, trigram = self.ngram_losses[:, rows].mean(axis=1)
        return {"bigram_loss": float(bigram), "trigram_loss": float(trigram)}

    def _spread_rows(self, count: int, held_out: str) -> np.ndarray:
        first, step = {"all": (0, 1), "validation": (0, 2), "test": (1, 2)}[held_out]
        rows = np.arange(first, len(self.held_out), step)
        count = min(count, len(rows))
        return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]

    def identity(self) -> dict[str, Any]:
        """What a manifest keeps, so that numbers are only compared between equal corpora."""
        return {
            "source": self.source,
            "content_hash": self.content_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "vocab_size": self.vocab_size,
            "train_blocks": len(self.train),
            "train_tokens": self.train_tokens,
            "held_out_blocks": len(self.held_out),
            "unigram_entropy": self.unigram_entropy,
        }


def default_cache_dir() -> Path:
    """The user's cache directory for normlab, as the platform has it."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("normlab"))


def load_corpus(
    source: str = DEFAULT_CORPUS,
    *,
    tokenizer: str | None = None,
    vocab_size: int = 4096,
    block_length: int = 128,
    text_column: str = "text",
    characters: int = DEFAULT_CHARACTERS,
    cache_dir: str | Path | None = None,
    progress: bool = False,
) -> Corpus:
    """Read, tokenize, pack and cache a corpus; a second call with the same content maps the cached files.

    source: a name in SOURCES, a local .txt (blank lines part documents), .jsonl, .jsonl.gz or .parquet file, a folder
    of such files, or the name of a data set on the Hugging Face hub, read as a stream ("name" or "name:configuration").
    tokenizer: directory or hub name of a saved tokenizer; None trains a byte-level BPE of `vocab_size` on the train
    split.
    characters: read at most so much text. Hub data sets are cached by name: they are not read again to see whether they
    changed. Raises NormlabError for a missing, empty, binary or too small corpus.
    """
    source = str(source)
    if block_length < 2:
        raise NormlabError(f"block length is {block_length}; a block needs at least 2 tokens")
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    key = _digest(
        str(CACHE_VERSION),
        _source_key(source),
        tokenizer or f"bpe-{vocab_size}",
        str(block_length),
        text_column,
        str(characters),
    )
    final = root / "corpus" / key[:20]
    if not (final / "corpus.json").is_file():
        with full_disk_named(root):
            _build(final, source, tokenizer, vocab_size, block_length, text_column, characters, progress)
    return _open(final, source)


def corpus_of(config: TrainConfig, cache_dir: str | Path | None = None, progress: bool = False) -> Corpus:
    """The corpus that a run's configuration asks for."""
    return load_corpus(
        config.corpus,
        tokenizer=config.tokenizer,
        vocab_size=config.vocab_size,
        block_length=config.block_length,
        text_column=config.text_column,
        characters=config.characters,
        cache_dir=cache_dir,
        progress=progress,
    )


def _open(path: Path, source: str) -> Corpus:
    from datasets import Dataset

    facts = json.loads((path / "corpus.json").read_text())
    blocks = {}
    for split in ("train", "held_out"):
        column = Dataset.from_file(str(path / f"{split}.arrow")).data.column("input_ids")
        flat = column.chunk(0).flatten().to_numpy(zero_copy_only=True)  # one chunk, as `_write_blocks` wrote it
        blocks[split] = flat.reshape(-1, facts["block_length"])
    return Corpus(
        source,
        blocks["train"],
        blocks["held_out"],
        path / "tokenizer",
        facts["vocab_size"],
        facts["eos_token_id"],
        facts["content_hash"],
        facts["tokenizer_hash"],
        facts["unigram_entropy"],
        np.load(path / "ngram_losses.npy"),
    )


def _build(
    final: Path,
    source: str,
    tokenizer: str | None,
    vocab_size: int,
    block_length: int,
    text_column: str,
    characters: int,
    progress: bool,
) -> None:
    """Build into a temporary directory beside `final` and rename it there, so that a killed build leaves no half
    cache."""
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".building-", dir=final.parent))
    try:
        train, held_out, content_hash = _read_documents(source, text_column, characters, progress)
        fast = saved_tokenizer(tokenizer) if tokenizer else train_tokenizer(train, vocab_size)
        fast.save_pretrained(staging / "tokenizer")
        tokens = {
            "train": tokenize(train, fast, "tokenizing", progress),
            "held_out": tokenize(held_out, fast, "tokenizing held-out text", progress),
        }
        for split, ids in tokens.items():
            if len(ids) < block_length:
                name = split.replace("_", "-")
                raise NormlabError(
                    f"corpus {source!r} is too small: {len(ids)} {name} tokens, one block has {block_length}"
                )
            _write_blocks(staging / f"{split}.arrow", ids, block_length)
        blocks = _blocks(tokens["held_out"], block_length)
        np.save(staging / "ngram_losses.npy", ngram_losses(tokens["train"], blocks, len(fast)))
        facts = {
            "source": source,
            "block_length": block_length,
            "vocab_size": len(fast),
            "eos_token_id": fast.eos_token_id,
            "content_hash": content_hash,
            "tokenizer_hash": _digest(json.dumps(json.loads(fast.backend_tokenizer.to_str()), sort_keys=True)),
            "unigram_entropy": unigram_entropy(tokens["train"], tokens["held_out"], len(fast)),
        }
        (staging / "corpus.json").write_text(json.dumps(facts, indent=1))
        try:
            os.rename(staging, final)
        except OSError:  # another process built the same corpus meanwhile: both are equal, keep the first
            if not (final / "corpus.json").is_file():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


# --- documents ---


def open_documents(source: str, text_column: str = "text") -> IterableDataset:
    """A stream of documents with columns `key` (what the held-out split hashes) and `text`, for every kind of
    source."""
    import datasets

    if source in SOURCES:
        return datasets.IterableDataset.from_generator(SOURCES[source])
    files = _local_files(source)
    if files:
        builder = BUILDERS[_suffix(files[0])]
        options: dict[str, Any] = {"sample_by": "paragraph"} if builder == "text" else {}
        stream = datasets.load_dataset(
            builder, data_files=[str(f) for f in files], split="train", streaming=True, **options
        )
    else:
        name, _, configuration = source.partition(":")
        stream = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
    return stream.map(lambda row: {"key": row[text_column], "text": row[text_column]}).select_columns(["key", "text"])


def _read_documents(source: str, text_column: str, characters: int, progress: bool) -> tuple[list[str], list[str], str]:
    """The train texts, the held-out texts, and the hash of all of them in order."""
    from tqdm import tqdm

    _check_text(source)
    train: list[str] = []
    held_out: list[str] = []
    content = hashlib.sha256()
    read = 0
    bar = tqdm(desc="reading corpus", unit="char", unit_scale=True, disable=not progress, leave=False, delay=1)
    try:
        with bar:
            for document in open_documents(source, text_column):
                text = document["text"]
                if text is None:  # a row without text, as many data sets have
                    continue
                if not isinstance(text, str):
                    raise NormlabError(f"corpus {source!r}: column {text_column!r} does not hold text")
                if not text.strip():
                    continue
                text = text[: characters - read]
                content.update(len(text).to_bytes(8, "little") + text.encode("utf-8", "surrogatepass"))
                (held_out if _is_held_out(document["key"]) else train).append(text)
                read += len(text)
                bar.update(len(text))
                if read >= characters:
                    break
    except KeyError as error:
        raise NormlabError(f"corpus {source!r} has no column {text_column!r}; name one with --text-column") from error
    except NormlabError:
        raise
    except Exception as error:  # readers raise their own kinds: arrow, JSON, unicode, hub, network
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise NormlabError(f"cannot read corpus {source!r}: {reason[0]}") from error
    if not train and not held_out:
        raise NormlabError(f"corpus {source!r} is empty: it holds no text")
    if not train or not held_out:
        raise NormlabError(f"corpus {source!r} is too small to hold out {HELD_OUT_PERCENT}% of its documents")
    return train, held_out, content.hexdigest()


def _is_held_out(key: str) -> bool:
    return int(_digest(key)[:8], 16) % 100 >= 100 - HELD_OUT_PERCENT


def _suffix(path: Path) -> str:
    return ".jsonl.gz" if path.name.endswith(".jsonl.gz") else path.suffix


def _local_files(source: str) -> list[Path]:
    """The files that a local source stands for, sorted; empty for a hub name. A path that is not there is an error, not
    a hub name."""
    path = Path(source).expanduser()
    known = ", ".join(BUILDERS)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _suffix(p) in BUILDERS)
        if not files:
            raise NormlabError(f"corpus directory {source!r} holds none of {known}")
        if len({BUILDERS[_suffix(p)] for p in files}) > 1:
            raise NormlabError(f"corpus directory {source!r} mixes kinds of files; keep one of {known}")
        return files
    if path.is_file():
        if _suffix(path) not in BUILDERS:
            raise NormlabError(f"corpus {source!r} is not one of {known}")
        return [path]
    if _suffix(path) in BUILDERS or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise NormlabError(f"corpus {source!r} does not exist")
    return []


def _check_text(source: str) -> None:
    """Refuse a binary .txt or .jsonl: a NUL byte never occurs in text, and readers only fail on it later, obscurely."""
    if source in SOURCES:
        return
    for path in _local_files(source):
        if path.stat().st_size == 0:
            raise NormlabError(f"corpus {str(path)!r} is empty")
        if _suffix(path) in (".txt", ".jsonl"):
            with path.open("rb") as file:
                if b"\0" in file.read(1 << 16):
                    raise NormlabError(f"corpus {str(path)!r} is binary, not text")


def _source_key(source: str) -> str:
    """What decides whether a cached corpus still stands for its source: the bytes of local files, the name of a hub
    data set."""
    digest = hashlib.sha256()
    if source in SOURCES:
        for document in SOURCES[source]():
            digest.update(document["key"].encode() + b"\0" + document["text"].encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()
    files = _local_files(source)
    if not files:
        return f"hub:{source}"
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _blocks(ids: np.ndarray, block_length: int) -> np.ndarray:
    """The stream in rows; what does not fill a row is left out."""
    return ids[: len(ids) // block_length * block_length].reshape(-1, block_length)


def _write_blocks(path: Path, ids: np.ndarray, block_length: int) -> None:
    """One record batch, so that the memory-mapped column is a single array."""
    import pyarrow as pa

    flat = _blocks(ids, block_length).reshape(-1)
    blocks = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(pa.array(flat), block_length)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, blocks.schema) as writer:
        writer.write_table(blocks)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
