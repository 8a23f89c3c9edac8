"""Sources of text. Each is a stream of documents with two columns, `key` and `text`.

`SOURCES`          corpora known by name, and what yields their documents
`open_documents`   the stream of any source
`texts`            its (key, text) pairs, without those that hold no text; `read_by_part` reads them all
`is_held_out`      True for documents of the held-out split, by a hash of the key
`part_of`          the part of a source that a document belongs to
`source_key`       changes when the text of a source changes

`stdlib` is the Python standard library's source and pydoc topics: at hand on every machine, with no network. It differs
between Python builds. `packages` is the Python source of scientific packages that normlab's dependencies bring, about
14M tokens, more than a run reads once. It is that of the installed releases; shipped runs read the releases of
`pip install 'normlab[packages]'`. The packages are never imported; data/README.md names their licences. A run's
manifest holds the content hash of its text.
"""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, PackagePath, distribution
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from normlab.errors import ANSWER_SECONDS, NormlabError, first_line
from normlab.loading import hub_or_cache

if TYPE_CHECKING:
    from datasets import IterableDataset

DEFAULT_CORPUS = "stdlib"
SPLIT_BY_FILE = {"packages"}  # whose held-out halves are parts of their own: no file is in both
PARTS = ("validation", "test")  # the halves of held-out text
HELD_OUT_PERCENT = 5
BUILDERS = {".txt": "text", ".jsonl": "json", ".jsonl.gz": "json", ".json.gz": "json", ".parquet": "parquet"}
WEB = ("http://", "https://")
PIECE = 1 << 20  # bytes of a file that are read at a time
BOM = "\ufeff"  # the mark with which some programs begin a text

STDLIB_PACKAGES = (
    "asyncio collections concurrent ctypes curses dbm email ensurepip html http idlelib importlib json logging "
    "multiprocessing re sqlite3 tkinter tomllib turtledemo unittest urllib venv wsgiref xml xmlrpc zoneinfo"
).split()
STDLIB_MODULES = (
    "_collections_abc _markupbase _osx_support _py_abc _pydecimal _pyio _strptime _threading_local _weakrefset "
    "abc argparse ast base64 bdb bisect bz2 cProfile calendar cmd code codecs codeop colorsys compileall "
    "configparser contextlib copy copyreg csv dataclasses datetime difflib dis doctest enum filecmp fileinput "
    "fnmatch fractions ftplib functools genericpath getopt getpass gettext glob graphlib gzip hashlib heapq hmac "
    "imaplib inspect io ipaddress linecache locale lzma mailbox mimetypes modulefinder netrc ntpath nturl2path "
    "numbers opcode operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib "
    "posixpath pprint profile pstats pty py_compile pyclbr pydoc queue quopri random reprlib rlcompleter runpy "
    "sched secrets selectors shelve shlex shutil signal site smtplib socket socketserver ssl stat statistics "
    "string stringprep subprocess symtable sysconfig tabnanny tarfile tempfile textwrap threading timeit token "
    "tokenize trace traceback tracemalloc tty turtle types typing uuid warnings wave weakref webbrowser zipapp "
    "zipfile zipimport"
).split()
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "__pycache__", "_bundled"}
PACKAGES = {
    "mpmath": "1.3.0",
    "networkx": "3.6.1",
    "numpy": "2.4.6",
    "pandas": "3.1.1",
    "scipy": "1.17.1",
    "sympy": "1.14.0",
}
# Folders: tests, parsers that a tool wrote, and what NumPy has for Python 3.11 only.
LEFT_OUT = {"test", "tests", "testing", "_antlr", "distutils"}
# Written when a wheel is built: not the same on every machine. Nor is a package's first file.
OF_A_BUILD = {"__config__.py", "version.py", "_version.py", "_version_meson.py", "_distributor_init.py"}


def stdlib_documents() -> Iterator[dict[str, str]]:
    """Documents {"key": path or topic, "text": ...}, sorted by key. Modules that this Python lacks are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = [p for name in STDLIB_MODULES if (p := root / f"{name}.py").is_file()]
    # These three are packages in newer Pythons only.
    for name in (*STDLIB_PACKAGES, "pathlib", "zipfile", "sysconfig"):
        found = (root / name).rglob("*.py") if (root / name).is_dir() else ()
        files += [p for p in found if not STDLIB_LEFT_OUT.intersection(p.relative_to(root).parts)]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            yield {"key": path.relative_to(root).as_posix(), "text": text}
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield {"key": f"pydoc_data/{name}", "text": topics[name]}


def package_documents() -> Iterator[dict[str, str]]:
    """Documents {"key": path, "text": ...}, one per source file; of files with equal text only one.

    They are ordered by a hash of the path, so that any head of the text has files of all packages. NormlabError if a
    package is missing.
    """
    paths = {path.as_posix(): path for name in PACKAGES for path in _installed(name) if _is_source(path.parts)}
    seen = set()
    for key in sorted(paths, key=lambda key: hashlib.sha256(key.encode()).digest()):
        text = Path(paths[key].locate()).read_text(encoding="utf-8", errors="replace")
        if text.strip() and text not in seen:
            seen.add(text)
            yield {"key": key, "text": text}


def _installed(name: str) -> list[PackagePath]:
    try:
        return distribution(name).files or []
    except PackageNotFoundError:
        raise NormlabError(f"corpus 'packages' needs the package {name}: pip install 'normlab[packages]'") from None


def _is_source(parts: tuple[str, ...]) -> bool:
    *folders, name = parts
    left_out = name in OF_A_BUILD or name == "conftest.py" or name.startswith("test_") or LEFT_OUT.intersection(folders)
    is_first = len(folders) == 1 and name == "__init__.py"
    return bool(folders) and name.endswith(".py") and not is_first and not left_out


SOURCES: dict[str, Callable[[], Iterator[dict[str, str]]]] = {
    DEFAULT_CORPUS: stdlib_documents,
    "packages": package_documents,
}


@contextmanager
def datasets_in(cache_dir: Path) -> Iterator[None]:
    """Have `datasets` write what it needs to open a source below a cache directory, not in the user's home."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = cache_dir / "datasets"
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = before


def open_documents(source: str, text_column: str = "text") -> IterableDataset:
    """A stream of documents with columns `key`, by which text is held out, and `text`."""
    import datasets

    if source in SOURCES:
        return datasets.IterableDataset.from_generator(SOURCES[source])
    # datasets takes a path as a pattern, the working directory before a relative one too.
    local = [glob.escape(str(path.absolute())) for path in _local_files(source)]
    files = source.split(",") if source.startswith(WEB) else local
    if files:
        builder, is_web = BUILDERS[_suffix(files[0])], source.startswith(WEB)
        if builder == "text" and is_web:
            stream = datasets.IterableDataset.from_generator(_paragraphs, gen_kwargs={"addresses": files})
        else:
            options: dict[str, Any] = {"sample_by": "paragraph"} if builder == "text" else {}
            if is_web:
                options["storage_options"] = _web_options()
            stream = datasets.load_dataset(builder, data_files=files, split="train", streaming=True, **options)
    else:
        name, _, configuration = source.partition(":")
        with hub_or_cache(name):
            stream = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
    return stream.map(lambda row: {"key": row[text_column], "text": row[text_column]}).select_columns(["key", "text"])


def _paragraphs(addresses: list[str]) -> Iterator[dict[str, str]]:
    """The documents of .txt files at addresses, parted as those of files here.

    datasets names an encoding where it opens text, which no address takes.
    """
    from datasets import DownloadConfig
    from datasets.utils.file_utils import xopen

    web = DownloadConfig(storage_options=_web_options())
    for address in addresses:
        with xopen(address, "rb", download_config=web) as content, TextIOWrapper(content, encoding="utf-8") as file:
            left = ""
            while piece := file.read(PIECE):
                *whole, left = (left + piece).split("\n\n")
                yield from ({"text": text} for text in whole if text)
            if left:
                yield {"text": left}


def _web_options() -> dict[str, Any]:
    """A limit for each answer, not for the whole file."""
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        raise NormlabError("a corpus at an address needs aiohttp: pip install 'normlab[web]'") from None
    return {"client_kwargs": {"timeout": ClientTimeout(sock_connect=ANSWER_SECONDS, sock_read=ANSWER_SECONDS)}}


def texts(source: str, text_column: str, stream: Iterable[dict[str, Any]] | None = None) -> Iterator[tuple[str, str]]:
    """(key, text) of every document that has text. NormlabError for whatever a reader raises.

    Keys are without blanks around them: the reader of paragraphs leaves line breaks before some.

    stream: the source's, if it is open already.
    """
    import datasets.utils.logging as log

    level = log.get_verbosity()
    try:
        log.set_verbosity(log.CRITICAL)  # it also logs what it raises
        for document in open_documents(source, text_column) if stream is None else stream:
            text = document["text"]
            if text is None:  # a row without text, as many data sets have
                continue
            if not isinstance(text, str):
                raise NormlabError(f"corpus {source!r}: column {text_column!r} does not hold text")
            text = text.removeprefix(BOM)
            if text.strip():
                yield document["key"].removeprefix(BOM).strip(), text
    except KeyError as error:
        raise NormlabError(f"corpus {source!r} has no column {text_column!r}; name one with --text-column") from error
    except NormlabError:
        raise
    except Exception as error:  # readers raise their own kinds: arrow, JSON, unicode, hub, network
        raise NormlabError(f"cannot read corpus {source!r}: {first_line(error)}") from error
    finally:
        log.set_verbosity(level)


def read_by_part(
    source: str, text_column: str, characters: int, progress: bool
) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """Keys and texts of the first `characters` of a source by `part_of`, and the hash of these texts in order.

    NormlabError: there are none, or a part has none.
    """
    held_out = PARTS if source in SPLIT_BY_FILE else ("held_out",)
    documents: dict[str, list[tuple[str, str]]] = {part: [] for part in ("train", *held_out)}
    content = hashlib.sha256()
    left = characters
    with tqdm(desc="reading corpus", unit="char", unit_scale=True, disable=not progress, leave=False, delay=1) as bar:
        for key, text in texts(source, text_column):
            text = text[:left]
            content.update(len(text).to_bytes(8, "little") + text.encode("utf-8", "surrogatepass"))
            documents[part_of(source, key)].append((key, text))
            left -= len(text)
            bar.update(len(text))
            if left <= 0:
                break
    if not any(documents.values()):
        raise NormlabError(f"corpus {source!r} is empty: it holds no text")
    if not all(documents.values()):
        raise NormlabError(f"corpus {source!r} is too small to hold out {HELD_OUT_PERCENT}% of its documents")
    return documents, content.hexdigest()


def is_held_out(key: str) -> bool:
    return _percentile(key) >= 100 - HELD_OUT_PERCENT


def part_of(source: str, key: str) -> str:
    """The part of a key: "train" or "held_out"; in `SPLIT_BY_FILE` "train", "validation" or "test"."""
    if source not in SPLIT_BY_FILE:
        return "held_out" if is_held_out(key) else "train"
    if is_held_out(key):
        return "test"
    return "validation" if _percentile(key) >= 100 - 2 * HELD_OUT_PERCENT else "train"


def _percentile(key: str) -> int:
    """A number from 0 to 99, by a hash."""
    return int(digest(key)[:8], 16) % 100


def _suffix(path: str | Path) -> str:
    """The ending as in `BUILDERS`: two endings of a compressed file."""
    suffixes = Path(path).suffixes
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])


def _local_files(source: str) -> list[Path]:
    """The files of a local source, sorted; none for a hub name or addresses. NormlabError for a missing path."""
    path = Path(source).expanduser()
    known = ", ".join(BUILDERS)
    if source.startswith(WEB):
        kinds = {BUILDERS.get(_suffix(address)) for address in source.split(",")}
        if None in kinds:
            raise NormlabError(f"corpus {source!r}: an address must end in one of {known}")
        if len(kinds) > 1:
            raise NormlabError(f"corpus {source!r} mixes kinds of files; keep one of {known}")
        return []
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


def _pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file. NormlabError for a .txt or .jsonl with a NUL byte.

    It never occurs in text, and readers fail on it late and obscurely, or not at all.
    """
    is_text = _suffix(path) in (".txt", ".jsonl")
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            if is_text and b"\0" in piece:
                raise NormlabError(f"corpus {str(path)!r} is binary, not text")
            yield piece


def source_key(source: str) -> str:
    """A key that changes with the source: the hash of local files, the name of a hub data set, or the addresses.

    The hash is of each file's kind and bytes. NormlabError for an empty file, or a binary one. Of each file the
    beginning is looked at before any is read.
    """
    content = hashlib.sha256()
    if source in SOURCES:
        for document in SOURCES[source]():
            content.update(document["key"].encode() + b"\0" + document["text"].encode("utf-8", "surrogatepass") + b"\0")
        return content.hexdigest()
    files = _local_files(source)
    if not files:
        return f"hub:{source}"
    for path in files:
        if not next(_pieces(path), b""):
            raise NormlabError(f"corpus {str(path)!r} is empty")
    for path in files:
        of_file = hashlib.sha256(BUILDERS[_suffix(path)].encode() + b"\0")
        for piece in _pieces(path):
            of_file.update(piece)
        content.update(of_file.digest())
    return content.hexdigest()


def tokenizer_key(name: str | None) -> str:
    """A key that changes with the tokenizer: the hash of a folder's files besides weights, or the name of another."""
    if not name or not Path(name).is_dir():
        return name or ""
    files = sorted(path for path in Path(name).iterdir() if path.suffix in (".json", ".txt", ".model"))
    return digest(*(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files))


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
