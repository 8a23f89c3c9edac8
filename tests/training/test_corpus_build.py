"""Every kind of source gives the same packed corpus, the same every time; what cannot serve is refused in one line."""

import gzip
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from training_helpers import WORDS, tiny, write_text

from normlab import NormlabError
from normlab.training.config import CorpusSpec
from normlab.training.text import corpus as corpora
from normlab.training.text import source as sources
from normlab.training.text import tokens
from normlab.training.text.corpus import Corpus, corpus_of
from normlab.training.text.source import BUILDERS, is_held_out, open_documents, stdlib_documents
from normlab.training.text.tokens import END_OF_TEXT, train_tokenizer, unigram_entropy

SETTINGS = {"vocab_size": 300, "block_length": 16}


@pytest.fixture(scope="module")
def documents() -> list[str]:
    choose = random.Random(1)
    return [" ".join(choose.choices(WORDS, k=choose.randint(5, 40))) + f" {index}" for index in range(300)]


def _write(path: Path, documents: list[str], column: str = "text") -> Path:
    import pandas as pd

    lines = "\n".join(json.dumps({column: text, "other": 1}) for text in documents)
    if path.name.endswith(".txt"):
        path.write_text("\n\n".join(documents))
    elif path.name.endswith(".jsonl"):
        path.write_text(lines)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        pd.DataFrame({column: documents, "other": 1}).to_parquet(path)
    return path


@pytest.fixture
def path(documents: list[str], tmp_path: Path) -> Path:
    return _write(tmp_path / "a.jsonl", documents)


def _load(path: Path, cache: str = "cache", **options: object) -> Corpus:
    """The corpus of a text, with its cache next to it."""
    return corpus_of(CorpusSpec(str(path), **{**SETTINGS, **options}), path.parent / cache)  # type: ignore[arg-type]


def _text(corpus: Corpus, split: str) -> str:
    return corpus.tokenizer().decode(getattr(corpus, split).reshape(-1))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_every_file_format_gives_the_same_corpus(name, documents, tmp_path):
    corpus = _load(_write(tmp_path / name, documents))
    reference = _load(_write(tmp_path / "reference.parquet", documents))
    assert corpus.content_hash == reference.content_hash
    assert corpus.tokenizer_hash == reference.tokenizer_hash
    assert np.array_equal(corpus.train, reference.train)
    assert np.array_equal(corpus.held_out, reference.held_out)
    assert corpus.unigram_entropy == reference.unigram_entropy


def test_every_source_is_read_as_a_stream(documents, tmp_path):
    from datasets import IterableDataset

    for source in ("stdlib", *(str(_write(tmp_path / f"a{end}", documents)) for end in BUILDERS)):
        stream = open_documents(source)
        assert isinstance(stream, IterableDataset)
        assert set(next(iter(stream))) == {"key", "text"}


def test_a_directory_is_read_in_the_order_of_its_files(documents, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    _write(folder / "b.jsonl", documents[100:])
    _write(folder / "a.jsonl", documents[:100])
    whole = _write(tmp_path / "whole.jsonl", documents)
    assert _load(folder).content_hash == _load(whole).content_hash


def test_text_comes_from_the_named_column(documents, tmp_path):
    path = _write(tmp_path / "a.jsonl", documents, column="body")
    assert len(_load(path, text_column="body").train) > 0
    with pytest.raises(NormlabError, match="no column 'text'; name one with --text-column"):
        _load(path)


def test_documents_are_joined_with_the_end_token_and_cut_into_blocks(path, documents):
    corpus = _load(path)
    for split in ("train", "held_out"):
        chosen = [text for text in documents if is_held_out(text) == (split == "held_out")]
        whole = "".join(text + END_OF_TEXT for text in chosen)
        packed = _text(corpus, split)
        assert whole.startswith(packed)
        assert len(whole) - len(packed) < 16 * max(map(len, WORDS)) * 2  # less than a block is cut off
        assert (getattr(corpus, split) == corpus.eos_token_id).sum() >= len(chosen) - 1


def test_held_out_documents_do_not_depend_on_the_order_and_duplicates_stay_together(documents, tmp_path):
    shuffled = [*documents, *documents[:50]]
    random.Random(2).shuffle(shuffled)
    first = _load(_write(tmp_path / "a.jsonl", documents))
    second = _load(_write(tmp_path / "b.jsonl", shuffled))

    def ids(corpus: Corpus, split: str) -> set[str]:  # every document ends in its own number
        return {text.split()[-1] for text in _text(corpus, split).split(END_OF_TEXT)[1:-1]}

    assert not ids(second, "train") & ids(second, "held_out")
    assert not ids(first, "train") & ids(second, "held_out")


def test_a_document_with_blanks_around_it_is_a_duplicate(documents, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(documents) + "\n\n\n" + " \n\n\n".join(documents))
    parts, _ = sources.read_by_part(str(path), "text", 10**8, False)
    train, held_out = ({text.strip() for _, text in parts[part]} for part in ("train", "held_out"))
    assert held_out and not train & held_out
    assert len(train) + len(held_out) == len(documents)


def test_held_out_share_is_about_five_percent_of_the_files():
    keys = [document["key"] for document in stdlib_documents()]
    share = sum(map(is_held_out, keys)) / len(keys)
    assert 0.02 < share < 0.08


def test_the_standard_library_is_sorted_without_tests_and_with_help_topics():
    keys = [document["key"] for document in stdlib_documents()]
    assert keys == [document["key"] for document in stdlib_documents()]
    files = [key for key in keys if not key.startswith("pydoc_data/")]
    assert files == sorted(files)
    assert not [key for key in files if {"test", "tests", "idle_test"} & set(key.split("/"))]
    assert "pydoc_data/lambda" in keys and "asyncio/events.py" in keys and "argparse.py" in keys


@pytest.mark.slow
def test_the_default_corpus_is_the_same_in_two_caches(tmp_path):
    first, second = (corpus_of(CorpusSpec(characters=1_200_000, **SETTINGS), tmp_path / name) for name in "ab")
    assert first.identity() == second.identity()
    assert np.array_equal(first.train, second.train)
    assert first.vocab_size == SETTINGS["vocab_size"]


def test_rows_without_text_are_passed_over(path, documents, tmp_path):
    with path.open("a") as file:
        file.write('\n{"text": null, "other": 1}\n{"text": "  ", "other": 1}')
    reference = _load(_write(tmp_path / "b.jsonl", documents))
    assert _load(path).content_hash == reference.content_hash


def test_unigram_entropy_is_the_add_one_smoothed_cross_entropy():
    train, held_out = np.array([0, 0, 1, 2]), np.array([0, 3])
    expected = -(np.log(3 / 8) + np.log(1 / 8)) / 2
    assert unigram_entropy(train, held_out, vocab_size=4) == pytest.approx(expected, rel=1e-12)


def test_splits_are_memory_mapped_and_read_only(path):
    corpus = _load(path)
    for split in (corpus.train, corpus.held_out):
        assert not split.flags.owndata and not split.flags.writeable
        assert split.dtype == np.uint16 and split.shape[1] == SETTINGS["block_length"]
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert "train.arrow" in mapped.read_text()


def test_a_second_load_reads_the_cache_only_and_changed_text_is_read_again(path, documents, monkeypatch):
    first = _load(path)
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "read_by_part", lambda *_: pytest.fail("read again"))
        assert np.array_equal(_load(path).train, first.train)
    _write(path, documents[:200])
    assert _load(path).content_hash != first.content_hash


def test_equal_bytes_of_another_kind_are_another_corpus(documents, tmp_path):
    lines = "\n\n".join(json.dumps({"text": text}) for text in documents)
    hashes = []
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text(lines)
        hashes.append(_load(tmp_path / name).content_hash)
    assert hashes[1] == _load(_write(tmp_path / "reference.parquet", documents)).content_hash != hashes[0]


@pytest.mark.parametrize("name", ["n[1].txt", "n?.txt", "n*.txt"])
def test_the_file_of_that_name_is_read_whatever_its_letters(name, documents, tmp_path, monkeypatch):
    reference = _load(_write(tmp_path / "reference.txt", documents)).content_hash
    folder = tmp_path / "[f]"
    folder.mkdir()
    _write(folder / "n1.txt", documents[:200])
    path = _write(folder / name, documents)
    assert _load(path).content_hash == reference
    monkeypatch.chdir(folder)
    assert corpus_of(CorpusSpec(name, **SETTINGS), tmp_path / "other").content_hash == reference  # type: ignore[arg-type]
    (folder / "n1.txt").unlink()
    assert _load(folder).content_hash == reference


def test_a_build_that_breaks_off_leaves_no_cache(path, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "unigram_entropy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _load(path)
    assert list((tmp_path / "cache" / "corpus").iterdir()) == []
    assert len(_load(path).train) > 0


def test_a_prepared_text_has_the_rights_of_any_new_folder(path, tmp_path):
    (tmp_path / "new").mkdir()
    assert _load(path).tokenizer_path.parent.stat().st_mode == (tmp_path / "new").stat().st_mode


def test_a_build_that_another_process_finished_first_is_used(path, tmp_path, monkeypatch):
    original = corpora.unigram_entropy

    def meanwhile(*args: object) -> float:
        monkeypatch.setattr(corpora, "unigram_entropy", original)
        _load(path)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(corpora, "unigram_entropy", meanwhile)
    assert len(_load(path).train) > 0
    assert len(list((tmp_path / "cache" / "corpus").iterdir())) == 1


def test_a_saved_tokenizer_is_used_as_it_is(path, tmp_path):
    trained = _load(path)
    saved = _load(path, "other", tokenizer=str(trained.tokenizer_path))
    assert saved.tokenizer_hash == trained.tokenizer_hash
    assert np.array_equal(saved.train, trained.train)
    with pytest.raises(NormlabError, match="cannot load tokenizer"):
        _load(path, "other", tokenizer=str(tmp_path))


@pytest.mark.parametrize("used", [{"truncation": True, "max_length": 8}, {"padding": True}])
def test_what_a_saved_tokenizer_was_last_called_with_neither_cuts_nor_pads_the_text(used, path, documents, tmp_path):
    tokenizer = train_tokenizer(documents, 300)
    tokenizer.pad_token = END_OF_TEXT
    tokenizer.save_pretrained(tmp_path / "plain")
    tokenizer(documents[:4], **used)
    tokenizer.save_pretrained(tmp_path / "used")
    kept = json.loads((tmp_path / "used" / "tokenizer.json").read_text())
    assert kept["truncation"] or kept["padding"]
    plain, corpus = (_load(path, tokenizer=str(tmp_path / name)) for name in ("plain", "used"))
    assert corpus.identity() == plain.identity()
    assert np.array_equal(corpus.train, plain.train)
    assert corpus.tokenizer()(documents[:4]).input_ids == plain.tokenizer()(documents[:4]).input_ids


def test_a_tokenizer_with_unused_ids_has_a_vocabulary_up_to_its_last(path, documents, tmp_path):
    train_tokenizer(documents, 300).save_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    plain = _load(path, tokenizer=str(tmp_path / "tokenizer"))
    content["model"]["vocab"][END_OF_TEXT] = content["added_tokens"][0]["id"] = 500
    file.write_text(json.dumps(content))
    corpus = _load(path, tokenizer=str(tmp_path / "tokenizer"))
    assert (plain.vocab_size, corpus.vocab_size, corpus.train.max()) == (300, 501, 500)
    renamed = np.where(plain.train == plain.eos_token_id, 500, plain.train)
    assert np.array_equal(corpus.train, renamed)
    # Behind the counts stands 1 / vocab_size alone.
    assert corpus.ngram_losses == pytest.approx(plain.ngram_losses, rel=1e-2)


def test_another_tokenizer_in_the_same_folder_is_another_corpus(path, tmp_path):
    folder, sizes = tmp_path / "tokenizer", {}
    for size in (300, 320):
        _load(path, "trained", vocab_size=size).tokenizer().save_pretrained(folder)
        sizes[size] = _load(path, "other", tokenizer=str(folder)).vocab_size
    assert sizes == {300: 300, 320: 320}


def test_no_more_than_the_asked_characters_are_read(path, documents):
    half = _load(path, characters=sum(map(len, documents)) // 2)
    assert len(half.train) < 0.7 * len(_load(path).train)


def test_spread_takes_the_same_blocks_from_the_whole_split(path):
    corpus = _load(path)
    blocks = corpus.spread(3)
    assert blocks.dtype == np.int64
    middle = round((len(corpus.held_out) - 1) / 2)
    assert np.array_equal(blocks, corpus.held_out[[0, middle, len(corpus.held_out) - 1]])
    assert len(corpus.spread(10_000)) == len(corpus.held_out)


BAD_SOURCES: dict[str, tuple[bytes | None, str]] = {
    "missing.txt": (None, "does not exist"),
    "empty.txt": (b"", "is empty"),
    "blank.txt": (b"\n\n  \n\n", "is empty"),
    "binary.txt": (b"\x7fELF\0\0\1", "is binary"),
    "latin.txt": ("caf\xe9 ".encode("latin-1") * 100, "cannot read"),
    "bad.jsonl": (b'{"text": "a"}\n{"text": ', "cannot read"),
    "numbers.jsonl": (b'{"text": 1}\n' * 50, "does not hold text"),
    "bad.parquet": (b"PAR1 not really", "cannot read"),
    "bad.jsonl.gz": (b"not gzip", "cannot read"),
    "small.txt": (b"a few words", "too small"),
    "notes.md": (b"text", "is not one of"),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_what_cannot_serve_is_refused_in_one_line_that_names_it(name, tmp_path):
    content, reason = BAD_SOURCES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(NormlabError, match=reason) as caught:
        _load(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_needs_files_of_one_kind(documents, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(NormlabError, match="holds none of"):
        _load(folder)
    _write(folder / "a.txt", documents)
    _write(folder / "a.jsonl", documents)
    with pytest.raises(NormlabError, match="mixes kinds"):
        _load(folder)


def test_a_hub_name_that_cannot_be_reached_is_one_line(tmp_path):
    with pytest.raises(NormlabError, match="cannot read corpus 'nobody/nothing'") as caught:
        corpus_of(CorpusSpec("nobody/nothing"), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"), [({"vocab_size": 200}, "vocabulary size is 200"), ({"block_length": 100_000}, "too small")]
)
def test_a_vocabulary_below_the_bytes_and_a_split_below_a_block_are_refused(options, message, path):
    with pytest.raises(NormlabError, match=message):
        _load(path, **options)


def test_a_mark_of_byte_order_is_no_part_of_the_text(tmp_path):
    plain = write_text(tmp_path / "plain.txt")
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    first, second = (corpus_of(tiny(tmp_path / name), tmp_path / "cache") for name in ("plain.txt", "marked.txt"))
    assert first.content_hash == second.content_hash and np.array_equal(first.train, second.train)


def test_a_binary_file_is_refused_before_any_is_hashed_wherever_its_first_zero_is(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"word " * sources.PIECE)
    (folder / "z.txt").write_bytes(b"\0")
    read, pieces = [], sources._pieces
    monkeypatch.setattr(sources, "_pieces", lambda path: (read.append(path.name) or piece for piece in pieces(path)))
    with pytest.raises(NormlabError, match=r"z.txt' is binary, not text"):
        corpus_of(tiny(folder), tmp_path / "cache")
    assert read == ["a.txt"]
    (folder / "z.txt").write_bytes(b"word " * (sources.PIECE // 5 + 1) + b"\0")
    with pytest.raises(NormlabError, match=r"z.txt' is binary, not text"):
        corpus_of(tiny(folder), tmp_path / "cache")


def test_a_tokenizer_is_trained_in_time_whatever_the_length_of_a_word():
    choose = random.Random(0)
    word = "".join(choose.choices("abcdefgh", k=200_000))
    began = time.process_time()
    tokenizer = train_tokenizer([f"before {word} after", "\n" * 100_000, "x, y"], 400)
    assert time.process_time() - began < 8
    assert tokenizer.decode(tokenizer(f"before {word[:50]}")["input_ids"]) == f"before {word[:50]}"
    text = f"a b{word[:1500]}1{word[:900]} c\n"
    assert "".join(tokens._with_short_words(text)) == text
    assert list(tokens._with_short_words(text)) == ["a ", f"b{word[:999]}", word[999:1500], f"1{word[:900]} c\n"]
    assert list(tokens._with_short_words("a, b\n" * 900)) == ["a, b\n" * 900]
