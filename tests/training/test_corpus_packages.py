"""The corpus `packages`: sources of installed packages, the same with the same releases, split by file."""

import importlib.metadata
import re
from collections import Counter
from pathlib import Path

import pytest

from normlab import NormlabError
from normlab.training.config import CorpusSpec
from normlab.training.text import source
from normlab.training.text.corpus import carry, corpus_of
from normlab.training.text.source import part_of, source_key

ROOT = Path(__file__).resolve().parents[2]
RELEASES = {name: importlib.metadata.version(name) for name in source.PACKAGES}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    documents = list(source.package_documents())
    assert len({document["key"] for document in documents}) == len(documents)
    return {document["key"]: document["text"] for document in documents}


def test_every_file_is_a_source_of_a_package_and_none_is_a_test(sources):
    assert {key.split("/")[0] for key in sources} == set(source.PACKAGES)
    assert not [key for key in sources if re.search(r"/(tests?|testing)/|/test_|conftest|__config__", key)]
    assert "sympy/core/add.py" in sources and "pandas/core/frame.py" in sources
    assert len(set(sources.values())) == len(sources), "a text stands twice"


def test_any_head_of_the_text_has_files_of_all_packages(sources):
    assert {key.split("/")[0] for key in list(sources)[:200]} == set(source.PACKAGES)


def test_files_are_split_in_fixed_shares(sources):
    parts = Counter(part_of("packages", key) for key in sources)
    shares = {part: count / len(sources) for part, count in parts.items()}
    assert shares == pytest.approx({"train": 0.9, "validation": 0.05, "test": 0.05}, abs=0.015)


@pytest.mark.skipif(source.PACKAGES != RELEASES, reason="other releases: pip install 'normlab[packages]'")
def test_the_text_of_the_named_releases_is_known():
    assert source_key("packages") == "fe810e3de0267bdb33c08f7212a79fd0d5652275c1ed7f6c7c050ff7f5a4200a"


def test_the_releases_that_are_named_are_those_of_the_extra():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["packages"] == [f"{name}=={version}" for name, version in source.PACKAGES.items()]


def test_a_carried_cache_stands_for_packages_that_are_not_there(tmp_path, monkeypatch):
    def missing():
        raise NormlabError("needs a package")

    words = [{"key": f"a/{number}.py", "text": f"x{number} = {number} + y\n" * 20} for number in range(200)]
    monkeypatch.setitem(source.SOURCES, "packages", lambda: iter(words))
    spec = CorpusSpec("packages", vocab_size=300, block_length=16)
    carried = carry(spec, tmp_path)
    monkeypatch.setitem(source.SOURCES, "packages", missing)
    found = corpus_of(spec, tmp_path)
    assert found.identity() == carried.identity() and (found.train == carried.train).all()


def test_a_missing_package_is_one_line_that_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "PACKAGES", {"no-such-package": "1.0"})
    with pytest.raises(NormlabError, match="needs the package no-such-package: pip install 'normlab\\[packages\\]'"):
        corpus_of(CorpusSpec("packages"), tmp_path)
