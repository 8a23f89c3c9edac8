"""Tokens: tokenizers, documents as ids, and baselines that only count.

`saved_tokenizer(name)`, `train_tokenizer(texts)`   a tokenizer of a folder or the hub; a byte-level BPE
`vocabulary_size(tokenizer)`                        ids up to the largest
`tokenize(texts, tokenizer)`                        the ids of documents; `in_blocks` cuts them
`unigram_entropy(train, held_out, vocab_size)`      loss of the token frequencies
`ngram_losses(train, blocks, vocab_size)`           bigram and trigram loss of every block, scored as a model's is

A model must beat the baselines to have learned more than which tokens follow each other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

import numpy as np
from tqdm import tqdm

from normlab.errors import NormlabError, first_line
from normlab.loading import hub_or_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TRAINING_CHARACTERS = 20_000_000  # a byte-level BPE of a few thousand entries hardly changes with more text
TOKENIZED_AT_ONCE = 256
LONGEST_WORD = 1_000  # letters of a word that a BPE is trained on; in the corpora known by name there are 133
KINDS = (r"[^\W\d_]", r"\d", r"[^\w\s]|_", r"\s")
LONG_WORD = re.compile("|".join(f"(?:{kind}){{{LONGEST_WORD + 1},}}" for kind in KINDS))


def saved_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer in directory `name`, or of that name on the hub. NormlabError if it cannot be used.

    It neither cuts nor pads: a saved tokenizer keeps the truncation and padding of its last call.
    """
    from transformers import AutoTokenizer

    try:
        with hub_or_cache(name):
            tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # hub, network, JSON and missing-dependency errors alike
        raise NormlabError(f"cannot load tokenizer {name!r}: {first_line(error)}") from error
    if tokenizer.eos_token_id is None or not tokenizer.is_fast:
        raise NormlabError(f"tokenizer {name!r} needs an end-of-text token and a fast (tokenizers) form")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return cast("PreTrainedTokenizerFast", tokenizer)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` entries (fewer when the texts have no more pairs to merge)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise NormlabError(f"vocabulary size is {vocab_size}; a byte-level tokenizer needs more than {len(alphabet)}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    pieces = itertools.chain.from_iterable(map(_with_short_words, _head(texts, TRAINING_CHARACTERS)))
    bpe.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id: more than there are tokens if some ids are not used."""
    return max(len(tokenizer), *(id + 1 for id in tokenizer.get_vocab().values()))


def _with_short_words(text: str) -> Iterator[str]:
    """A text in pieces, without words of more than `LONGEST_WORD` characters.

    Words are what the BPE's pre-tokenizer parts: letters, digits, other marks, blanks. Training takes a time that grows
    with the square of a word's length.
    """
    end = 0
    if "\n" * LONGEST_WORD in text or any(len(line) > LONGEST_WORD for line in text.splitlines()):
        for word in LONG_WORD.finditer(text):
            yield text[end : word.start()]
            end = word.end()
            yield from (text[at : min(at + LONGEST_WORD, end)] for at in range(word.start(), end, LONGEST_WORD))
    yield text[end:]


def _head(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text
        characters -= len(text)


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerFast, title: str, progress: bool) -> list[np.ndarray]:
    """The ids of each document, an end-of-text token last."""
    pieces: list[np.ndarray] = []
    starts = range(0, len(texts), TOKENIZED_AT_ONCE)
    for start in tqdm(starts, desc=title, unit="batch", disable=not progress, leave=False, delay=1):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(
            texts[start : start + TOKENIZED_AT_ONCE], add_special_tokens=False
        ):
            pieces.append(np.array([*encoding.ids, tokenizer.eos_token_id], dtype=np.int32))
    return pieces


def in_blocks(ids: np.ndarray, length: int) -> np.ndarray:
    """The ids as (blocks, length). Those that do not fill a block are left out."""
    return ids[: len(ids) // length * length].reshape(-1, length)


# --- baselines ---


def unigram_entropy(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Mean over held-out tokens of -log((n_train(token) + 1) / (N_train + vocab_size)), in nats.

    A model that does no better has learned nothing but the frequency of each token.
    """
    counts = np.bincount(train, minlength=vocab_size).astype(np.float64) + 1.0
    log_probability = np.log(counts) - np.log(counts.sum())
    return float(-log_probability[held_out].mean())


def ngram_losses(train: np.ndarray, blocks: np.ndarray, vocab_size: int) -> np.ndarray:
    """Losses of each block under the bigram and the trigram model fitted on a stream of tokens, in nats per token.

    Interpolated Witten-Bell smoothing. c(h w) counts token w after context h in `train`, and c(h) is its sum over w.
    T(h) is the number of different w after h, and h' is h without its oldest token. Then

        p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)),    p(w | h) = p(w | h') for a context never seen;

    the empty context holds all of `train`, and behind it every token has 1 / vocab_size.

    Each block is scored alone, as by a model. Its first token has no label, and the label of the second has one token
    of context, for the trigram model too. Sources: Witten & Bell 1991 (method C), in the interpolated form of Chen &
    Goodman 1998.

    Args:
        train: (N,) token ids. blocks: (B, T) token ids, T at least 2.

    Returns:
        (2, B): the mean over each block's T - 1 labels, of the bigram model and of the trigram model.
    """
    train, blocks = train.astype(np.int64), blocks.astype(np.int64)  # a trigram of a large vocabulary fills 60 bits
    labels = blocks[:, 1:]
    unigram = _interpolated(train[:, None], labels[..., None], np.full(labels.shape, 1 / vocab_size), vocab_size)
    bigram = _interpolated(_windows(train, 2), _windows(blocks, 2), unigram, vocab_size)
    trigram = bigram.copy()
    if min(len(train), blocks.shape[1]) > 2:
        trigram[:, 1:] = _interpolated(_windows(train, 3), _windows(blocks, 3), bigram[:, 1:], vocab_size)
    return np.stack([-np.log(bigram).mean(axis=1), -np.log(trigram).mean(axis=1)])


def _windows(ids: np.ndarray, length: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(ids, length, axis=-1)


def _interpolated(seen: np.ndarray, ngrams: np.ndarray, shorter: np.ndarray, vocab_size: int) -> np.ndarray:
    """p(w | h) of the n-grams (h, w) in the last axis of `ngrams` by the counts of those in `seen`.

    shorter: p(w | h') of the same. An n-gram is one number in base `vocab_size`, so sorting brings equal contexts
    together.
    """
    places = vocab_size ** np.arange(seen.shape[-1])[::-1]
    grams, counts = np.unique(seen @ places, return_counts=True)
    contexts, first, kinds = np.unique(grams // vocab_size, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first)
    keys = ngrams @ places
    count = _looked_up(grams, counts, keys)
    total = _looked_up(contexts, totals, keys // vocab_size)
    kind = _looked_up(contexts, kinds, keys // vocab_size)
    return np.where(total > 0, (count + kind * shorter) / np.maximum(total + kind, 1), shorter)


def _looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the `wanted` among the sorted `keys`; 0 for a missing one."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)
