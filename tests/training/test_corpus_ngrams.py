"""Bigram and trigram losses: the formula, by hand and by a slow dictionary, on the blocks that a model is scored on."""

import math
from collections import Counter

import numpy as np
import pytest
from training_helpers import write_text

from normlab.training.config import CorpusSpec
from normlab.training.text import corpus as corpora
from normlab.training.text.corpus import corpus_of
from normlab.training.text.tokens import ngram_losses


def probability(train: list[int], context: tuple[int, ...], token: int, vocab_size: int) -> float:
    """Interpolated Witten-Bell, from the formula: counts from plain loops, one context at a time."""
    length = len(context)
    after = Counter(train[i + length] for i in range(len(train) - length) if tuple(train[i : i + length]) == context)
    shorter = probability(train, context[1:], token, vocab_size) if context else 1 / vocab_size
    if not after:
        return shorter
    return (after[token] + len(after) * shorter) / (after.total() + len(after))


def slow_losses(train: list[int], block: list[int], vocab_size: int) -> tuple[float, float]:
    bigram, trigram = [], []
    for at in range(1, len(block)):
        bigram.append(-math.log(probability(train, tuple(block[at - 1 : at]), block[at], vocab_size)))
        trigram.append(-math.log(probability(train, tuple(block[max(0, at - 2) : at]), block[at], vocab_size)))
    return sum(bigram) / len(bigram), sum(trigram) / len(trigram)


def test_a_text_counted_by_hand():
    # "a b a b c" of a vocabulary {a, b, c, d}; the block "a b d"
    train, block = np.array([0, 1, 0, 1, 2]), np.array([[0, 1, 3]])
    b, d = (2 + 3 / 4) / 8, (0 + 3 / 4) / 8  # 5 tokens of 3 kinds, d never seen
    b_after_a = (2 + 1 * b) / 3  # a is followed by b twice, and by nothing else
    d_after_b = (0 + 2 * d) / 4  # b is followed by a and by c, once each
    d_after_ab = (0 + 2 * d_after_b) / 4  # and so is "a b"
    expected = [[-math.log(b_after_a * d_after_b) / 2], [-math.log(b_after_a * d_after_ab) / 2]]
    assert ngram_losses(train, block, 4) == pytest.approx(np.array(expected), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_losses_are_those_of_the_formula(seed):
    draw = np.random.default_rng(seed)
    vocab_size = 9
    train = np.minimum(draw.geometric(0.4, 60), vocab_size - 2)  # tokens 0 and 8 never occur
    blocks = draw.integers(0, vocab_size, (7, 6))
    blocks[0] = train[20:26]
    expected = np.array([slow_losses(train.tolist(), block.tolist(), vocab_size) for block in blocks]).T
    assert {0, 8} <= set(blocks.ravel().tolist()) and not {0, 8} & set(train.tolist())
    assert ngram_losses(train, blocks, vocab_size) == pytest.approx(expected, rel=1e-12)


def test_large_vocabularies_do_not_overflow():
    size = 300_000
    train = np.array([size - 1, size - 2, size - 1, size - 2, 0], dtype=np.int32)
    small = ngram_losses(np.array([3, 2, 3, 2, 0]), np.array([[3, 2, 0]]), size)
    assert ngram_losses(train, np.array([[size - 1, size - 2, 0]], dtype=np.int32), size).tolist() == small.tolist()


@pytest.mark.parametrize("block_length", [2, 16, 500])
def test_a_corpus_counts_all_its_training_text_and_scores_the_blocks_that_models_are_scored_on(
    block_length, tmp_path, monkeypatch
):
    streams = []
    original = corpora.tokenize
    monkeypatch.setattr(corpora, "tokenize", lambda *args: (streams.append(original(*args)), streams[-1])[1])
    text = write_text(tmp_path / "a.txt")
    corpus = corpus_of(CorpusSpec(str(text), vocab_size=300, block_length=block_length), tmp_path / "cache")
    stream = np.concatenate(streams[0])
    assert corpus.train_tokens == corpus.identity()["train_tokens"] == len(stream) // block_length * block_length
    for count in (3, 20):
        bigram, trigram = ngram_losses(stream, corpus.spread(count), corpus.vocab_size).mean(axis=1)
        counted = corpus.count_losses(corpus.rows(count))
        assert counted == pytest.approx({"bigram_loss": bigram, "trigram_loss": trigram}, rel=1e-12)
    if block_length > 2:
        counted = corpus.count_losses(corpus.rows())
        assert counted["trigram_loss"] < counted["bigram_loss"] < corpus.unigram_entropy
