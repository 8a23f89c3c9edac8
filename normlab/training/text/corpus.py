"""Text in, fixed-length blocks of token ids out: one code path for every corpus.

`corpus_of(spec)`                 builds the packed train and held-out splits, or finds them in the cache
`Corpus`                          what training needs of a text
`MeasuredOn`                      the held-out blocks that one run is measured on

Every source becomes a stream of documents with two columns, `key` and `text`. A document is held out if a hash of its
key falls into the last 5%. The key is a file's path for `stdlib` and `packages`. For every other source it is the text
itself without blanks around it, so no duplicate is in both splits. The order of reading does not matter. The halves
"validation" and "test" of held-out blocks are alternate ones. Those of `packages` are blocks of different files, 5% of
the files each.

`datasets` reads and maps the files. Packing and the cache's key are ours: its cache depends on the code that made an
entry, ours on the hash of the text. It also writes a column in pieces, and only a single piece maps as one array.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import platformdirs

from normlab.errors import NormlabError
from normlab.files import first_folder
from normlab.store import full_disk_named
from normlab.training import require_training
from normlab.training.config import CorpusSpec
from normlab.training.progress import can_redraw
from normlab.training.text.source import (
    PARTS,
    SOURCES,
    SPLIT_BY_FILE,
    datasets_in,
    digest,
    read_by_part,
    source_key,
    tokenizer_key,
)
from normlab.training.text.tokens import (
    in_blocks,
    ngram_losses,
    saved_tokenizer,
    tokenize,
    train_tokenizer,
    unigram_entropy,
    vocabulary_size,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CACHE_VERSION = 4
CARRIED = "{}.key"  # in a carried cache: the key of a named source, where it was read
LATER = ("source_key", "eos_token_id")  # of a text's identity: what manifests of earlier versions lack


class MeasuredOn(NamedTuple):
    """Held-out blocks that a run is measured on, (blocks, tokens) ids.

    count_losses: n-gram baselines on the blocks of the held-out loss. eval_files: the files of their tokens.
    """

    probe: np.ndarray
    eval: np.ndarray
    experiments: np.ndarray
    count_losses: dict[str, float]
    eval_files: np.ndarray | None


@dataclass(frozen=True)
class Corpus:
    """A packed corpus.

    source: as given. train, held_out: arrays (blocks, block_length), memory-mapped from disk: uint16, or int32 if a
    token's number does not fit.
    content_hash: of every document, in order. tokenizer_hash: of vocabulary, merges and normalisation.
    vocab_size: ids up to the tokenizer's largest, some perhaps not used.
    unigram_entropy, ngram_losses: see `normlab.training.text.tokens`; nats per token. The first is of all held-out
    text, both halves; the others are (2, held-out blocks).
    validation_blocks: the first so many held-out blocks are the half "validation". None: every other one is.
    files: path and first token of each held-out file, in order, if text is split by file.
    source_key: of the whole source, as `normlab.training.text.source.source_key`. Empty for a carried corpus.
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
    validation_blocks: int | None = None
    files: Sequence[tuple[str, int]] = ()
    source_key: str = ""

    @property
    def cache_dir(self) -> Path:
        """The cache directory that it is in."""
        return self.tokenizer_path.parents[2]

    @property
    def train_tokens(self) -> int:
        """Tokens of one epoch."""
        return self.train.size

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, as transformers knows it."""
        from transformers import AutoTokenizer

        return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(self.tokenizer_path))

    def rows(self, count: int | None = None, held_out: str = "all") -> np.ndarray:
        """Indices of `count` held-out blocks, evenly spaced over all of them or a half ("validation", "test").

        They are the same for every run. Without a count, or if there are fewer, all of them. NormlabError: the half has
        none.
        """
        rows = np.arange(len(self.held_out))
        if held_out in PARTS:
            half = PARTS.index(held_out)
            rows = rows[half::2] if self.validation_blocks is None else np.split(rows, [self.validation_blocks])[half]
        if not len(rows):
            raise NormlabError(
                f"held_out is {held_out!r}, but corpus {self.source!r} has a single held-out block, and this half is "
                "every second one: give more text, a smaller block_length, or held_out 'all'"
            )
        count = len(rows) if count is None else min(count, len(rows))
        return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]

    def spread(self, count: int, held_out: str = "all") -> np.ndarray:
        """The ids of these blocks, (blocks, tokens)."""
        return self.held_out[self.rows(count, held_out)].astype(np.int64)

    def count_losses(self, rows: np.ndarray) -> dict[str, float]:
        """`bigram_loss` and `trigram_loss` of some blocks, in nats per token, as a model's loss on these."""
        bigram, trigram = self.ngram_losses[:, rows].mean(axis=1)
        return {"bigram_loss": float(bigram), "trigram_loss": float(trigram)}

    def files_of(self, rows: np.ndarray) -> np.ndarray | None:
        """The index in `files` of each token of some blocks; None if text is not split by file."""
        if not self.files:
            return None
        starts = np.array([start for _, start in self.files])
        length = self.held_out.shape[1]
        return np.searchsorted(starts, rows[:, None] * length + np.arange(length), side="right") - 1

    def measured_on(self, config: Any) -> MeasuredOn:
        """The blocks that a run of `config`, a `TrainConfig`, is measured on. A warning if there are fewer."""
        most, half = len(self.rows(held_out=config.held_out)), config.held_out
        for name in ("probe_blocks", "eval_blocks", "experiment_blocks"):
            count = getattr(config, name)
            if count > most and count != config.__dataclass_fields__[name].default:
                warnings.warn(f"{name} is {count}; all of the {most} held-out blocks are used", stacklevel=2)
        rows = self.rows(config.eval_blocks, half)
        return MeasuredOn(
            probe=self.spread(config.probe_blocks, half),
            eval=self.spread(config.eval_blocks, half),
            experiments=self.spread(config.experiment_blocks, half),
            count_losses=self.count_losses(rows),
            eval_files=self.files_of(rows),
        )

    def identity(self, config: Any = None) -> dict[str, Any]:
        """The corpus as the manifest of a run of `config` has it: numbers are only compared between equal corpora.

        A run that streams reads more than is here. So it has also the key of the whole source: the hash of local files,
        but only the name of other data. A run with a given tokenizer has also the end-of-text token, which its hash
        leaves out.
        """
        streams, is_given = config is not None and config.stream, config is not None and config.tokenizer is not None
        return {
            "source": self.source,
            "content_hash": self.content_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "vocab_size": self.vocab_size,
            "train_blocks": len(self.train),
            "train_tokens": self.train_tokens,
            "held_out_blocks": len(self.held_out),
            "unigram_entropy": self.unigram_entropy,
            **({"source_key": self.source_key or source_key(self.source)} if streams else {}),
            **({"eos_token_id": self.eos_token_id} if is_given else {}),
        }


def corpus_of(config: Any, cache_dir: str | Path | None = None, progress: bool = False) -> Corpus:
    """Read, tokenize, pack and cache a corpus. A second call with the same content maps the cached files.

    Hub data sets are cached by name: they are not read again to see whether they changed.

    Args:
        config: a `CorpusSpec`, or a configuration with the same fields.

    Raises:
        NormlabError: a missing, empty, binary or too small corpus, or the extra `train` is not installed.
    """
    require_training()
    spec = CorpusSpec.of(config)
    root = Path(cache_dir or platformdirs.user_cache_dir("normlab"))
    carried = root / "corpus" / CARRIED.format(spec.corpus)
    is_carried = spec.corpus in SOURCES and carried.is_file()
    source = carried.read_text() if is_carried else source_key(spec.corpus)
    final = root / "corpus" / _key(spec, source)
    if not (final / "corpus.json").is_file():
        with full_disk_named(root), datasets_in(root), first_folder(final) as staged:
            _write(staged, spec, progress and can_redraw())
    return _open(final, spec.corpus, "" if is_carried else source)


def carry(config: Any, cache_dir: str | Path) -> Corpus:
    """Prepare a corpus of `SOURCES` in a new cache directory for a machine that has not the same packages.

    There `cache_dir` stands for them: the corpus is taken from it, whatever is installed.
    """
    spec = CorpusSpec.of(config)
    corpus = corpus_of(config, cache_dir)
    (Path(cache_dir) / "corpus" / CARRIED.format(spec.corpus)).write_text(source_key(spec.corpus))
    return corpus


def _key(spec: CorpusSpec, source: str) -> str:
    """A name that changes with the text, whose key is `source`, and with how it is cut."""
    tokenizer = tokenizer_key(spec.tokenizer) or f"bpe-{spec.vocab_size}"
    cut = (tokenizer, str(spec.block_length), spec.text_column, str(spec.characters))
    return digest(str(CACHE_VERSION), source, *cut)[:20]


def _write(directory: Path, spec: CorpusSpec, progress: bool) -> None:
    """The files of a cached corpus."""
    documents, content_hash = read_by_part(spec.corpus, spec.text_column, spec.characters, progress)
    train = [text for _, text in documents.pop("train")]
    tokenizer = saved_tokenizer(spec.tokenizer) if spec.tokenizer else train_tokenizer(train, spec.vocab_size)
    train_ids = np.concatenate(tokenize(train, tokenizer, "tokenizing", progress))
    pieces = [  # the ids of each document of each held-out part
        tokenize([text for _, text in keyed], tokenizer, "tokenizing held-out text", progress)
        for keyed in documents.values()
    ]
    held_out_ids = [np.concatenate(part) for part in pieces]
    train_blocks = in_blocks(train_ids, spec.block_length)
    parts = [in_blocks(ids, spec.block_length) for ids in held_out_ids]
    for split, ids in (("train", train_ids), *(("held-out", ids) for ids in held_out_ids)):
        if len(ids) < spec.block_length:
            raise NormlabError(
                f"corpus {spec.corpus!r} is too small: {len(ids)} {split} tokens, one block has {spec.block_length}"
            )
    held_out = np.concatenate(parts)
    vocab_size = vocabulary_size(tokenizer)
    losses = ngram_losses(train_ids, held_out, vocab_size)
    facts = {
        "source": spec.corpus,
        "block_length": spec.block_length,
        "vocab_size": vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "content_hash": content_hash,
        "tokenizer_hash": digest(json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()), sort_keys=True)),
        "unigram_entropy": unigram_entropy(train_ids, np.concatenate(held_out_ids), vocab_size),
    }
    if spec.corpus in SPLIT_BY_FILE:
        keys = [[key for key, _ in keyed] for keyed in documents.values()]
        facts |= {"validation_blocks": len(parts[0]), "files": _files(keys, pieces, parts)}
    tokenizer.save_pretrained(directory / "tokenizer")
    _write_blocks(directory / "train.arrow", train_blocks)
    _write_blocks(directory / "held_out.arrow", held_out)
    np.save(directory / "ngram_losses.npy", losses)
    (directory / "corpus.json").write_text(json.dumps(facts, indent=1))


def _files(
    keys: list[list[str]], pieces: list[list[np.ndarray]], parts: list[np.ndarray]
) -> list[tuple[str, int]]:
    """Key and first token of each held-out document, counted through the blocks of all parts.

    keys, pieces: of each part's documents. parts: their blocks.
    """
    files: list[tuple[str, int]] = []
    before = 0
    for of_part, ids, blocks in zip(keys, pieces, parts, strict=True):
        starts = np.cumsum([0, *map(len, ids[:-1])]).tolist()
        files += [(key, before + at) for key, at in zip(of_part, starts, strict=True) if at < blocks.size]
        before += blocks.size
    return files


def _write_blocks(path: Path, blocks: np.ndarray) -> None:
    """One record batch, so that the memory-mapped column is a single array."""
    import pyarrow as pa

    if blocks.max() < 2**16:
        blocks = blocks.astype(np.uint16)

    column = pa.FixedSizeListArray.from_arrays(pa.array(blocks.reshape(-1)), blocks.shape[1])
    table = pa.table({"input_ids": column})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def _open(path: Path, source: str, key: str) -> Corpus:
    from datasets import Dataset

    facts = json.loads((path / "corpus.json").read_text())
    length = facts.pop("block_length")
    blocks = {}
    for split in ("train", "held_out"):
        column = Dataset.from_file(str(path / f"{split}.arrow")).data.column("input_ids")
        flat = column.chunk(0).flatten().to_numpy(zero_copy_only=True)  # one chunk, as `_write_blocks` wrote it
        blocks[split] = flat.reshape(-1, length)
    return Corpus(
        **facts | {"source": source},
        **blocks,
        tokenizer_path=path / "tokenizer",
        ngram_losses=np.load(path / "ngram_losses.npy"),
        source_key=key,
    )
