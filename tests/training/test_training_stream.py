"""Text read while training: over HTTP, packed, resumed at its position, one order whatever the number of ranks."""

import dataclasses
import functools
import gzip
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_training_ranks import assert_same, finish
from training_helpers import tiny, write_text

from normlab import NormlabError, runs, store
from normlab.training.config import TrainConfig
from normlab.training.text import source
from normlab.training.text.corpus import Corpus, corpus_of
from normlab.training.text.source import is_held_out, texts
from normlab.training.text.stream import DOCUMENTS, StreamedBlocks

pytest.importorskip("aiohttp")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder, and the address of a server of this machine that has its files: text.txt, and its documents in two
    compressed files, as C4's are."""
    folder = tmp_path_factory.mktemp("web")
    documents = write_text(folder / "text.txt", 600).read_text().split("\n\n")
    for part, some in enumerate((documents[:250], documents[250:])):
        lines = "\n".join(json.dumps({"text": text}) for text in some)
        (folder / f"c4-{part}.json.gz").write_bytes(gzip.compress(lines.encode()))
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def address(web: tuple[Path, str]) -> str:
    return f"{web[1]}/c4-0.json.gz,{web[1]}/c4-1.json.gz"


@pytest.fixture(scope="module")
def config(address: str) -> TrainConfig:
    return tiny(address, stream=True, steps=10, batch_size=4, block_length=32, characters=20_000)


@pytest.fixture(scope="module")
def corpus(config: TrainConfig, cache: Path) -> Corpus:
    return corpus_of(config, cache)


@pytest.fixture(scope="module")
def alone(config: TrainConfig, go: Callable, tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    return go(config, tmp_path_factory.mktemp("alone"))


def streamed(config: TrainConfig, corpus: Corpus) -> StreamedBlocks:
    return StreamedBlocks(config.corpus, "text", corpus.tokenizer(), config.block_length, corpus.cache_dir)


def take(blocks: StreamedBlocks, count: int) -> np.ndarray:
    return np.stack(list(islice(blocks, count)))


def test_documents_are_packed_without_gaps_in_their_order_and_begin_again(config, corpus, address):
    tokenizer = corpus.tokenizer()
    texts = [json.loads(line)["text"] for line in _lines(address)]
    train = [text for text in texts if not is_held_out(text)]
    assert len(train) > 3 * DOCUMENTS and len(train) < len(texts)
    once = [id for text in train for id in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    count = len(once) // 32 + 50
    expected = np.array((once + once)[: count * 32]).reshape(-1, 32)
    assert (take(streamed(config, corpus), count) == expected).all()


def _lines(address: str) -> Iterator[str]:
    from urllib.request import urlopen

    for one in address.split(","):
        with urlopen(one) as response:
            yield from gzip.decompress(response.read()).decode().splitlines()


@pytest.mark.parametrize("done", [0, 3, 150, 333])
def test_a_stream_goes_on_after_any_block_from_what_was_saved_as_json(done, config, corpus):
    first = streamed(config, corpus)
    list(islice(first, done))
    saved = json.dumps(first.position._asdict())
    assert len(saved) < 4000
    again = streamed(config, corpus)
    again.restore(json.loads(saved))
    assert done < 150 or json.loads(saved)["documents"] is not None, "read from the beginning"
    assert (take(again, 12) == take(streamed(config, corpus), done + 12)[done:]).all()


def test_a_streamed_run_that_is_stopped_goes_on_to_the_same_numbers(config, alone, go, stop, tmp_path):
    stop(config, tmp_path, 7)
    (stream,) = (tmp_path / store.PARTIAL / config.run_id / "checkpoint-7").glob("stream.json")
    assert 0 <= json.loads(stream.read_text())["taken"] <= 7 * 4
    run = go(config, tmp_path)
    assert run.manifest["measured"]["resumed_from_step"] == 7 and run.manifest["epochs"] is None
    assert pd.read_parquet(run.path / runs.STATS).equals(pd.read_parquet(alone.path / runs.STATS))


@pytest.mark.slow
def test_two_ranks_take_the_same_blocks(config, alone, cache, tmp_path):
    finish(config, tmp_path, cache)
    assert_same(runs.read_run(tmp_path / config.run_id), alone)


def test_a_tokenizer_of_a_folder_is_loaded_as_one_of_the_hub(config, corpus, cache, tmp_path):
    """By the same `AutoTokenizer.from_pretrained`; here it gives the ids of the run's own tokenizer."""
    corpus.tokenizer().save_pretrained(tmp_path / "tokenizer")
    loaded = dataclasses.replace(config, tokenizer=str(tmp_path / "tokenizer"))
    found = corpus_of(loaded, cache)
    assert found.tokenizer_hash == corpus.tokenizer_hash and (found.train == corpus.train).all()
    assert (take(streamed(loaded, found), 20) == take(streamed(config, corpus), 20)).all()


def test_a_txt_at_an_address_is_the_same_corpus_as_the_file(config, cache, web):
    here, there = (corpus_of(dataclasses.replace(config, corpus=f"{place}/text.txt"), cache) for place in web)
    assert there.content_hash == here.content_hash and (there.held_out == here.held_out).all()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_documents_of_a_txt_at_an_address_part_as_those_of_the_file(piece, web, monkeypatch):
    folder, address = web
    content = "\ufeffGrün\r\n\r\n\r\nzwei\r\nlines\n\n\n\nthree\n \n still three\n"
    (folder / "odd.txt").write_bytes(content.encode())
    monkeypatch.setattr(source, "PIECE", piece)
    found = list(texts(f"{address}/odd.txt", "text"))
    assert found == list(texts(str(folder / "odd.txt"), "text")) and len(found) == 3
    assert [text for _, text in texts(f"{address}/odd.txt,{address}/odd.txt", "text")] == 2 * [t for _, t in found]
    with pytest.raises(NormlabError, match="has no column 'body'"):
        list(texts(f"{address}/odd.txt", "body"))


def test_a_stream_of_a_txt_at_an_address_goes_on_where_it_was_saved(config, corpus, web):
    config = dataclasses.replace(config, corpus=f"{web[1]}/text.txt,{web[1]}/text.txt")
    first = streamed(config, corpus)
    list(islice(first, 150))
    again = streamed(config, corpus)
    again.restore(json.loads(json.dumps(first.position._asdict())))
    assert first.position.documents is not None, "read from the beginning"
    assert (take(again, 12) == take(streamed(config, corpus), 162)[150:]).all()


def test_addresses_that_cannot_be_read_are_one_line(address, cache):
    with pytest.raises(NormlabError, match=r"an address must end in one of \.txt"):
        corpus_of(tiny("https://example.org/page.html"), cache)
    with pytest.raises(NormlabError, match="^cannot read corpus 'http://127.*nowhere.json.gz'"):
        corpus_of(tiny(address.split("c4-0")[0] + "nowhere.json.gz"), cache)
    with pytest.raises(NormlabError, match="^cannot read corpus 'http://127.*nowhere.txt'"):
        corpus_of(tiny(address.split("c4-0")[0] + "nowhere.txt"), cache)
    with pytest.raises(NormlabError, match=r"mixes kinds of files; keep one of \.txt"):
        corpus_of(tiny("https://example.org/a.txt,https://example.org/b.jsonl"), cache)
