"""The style of docstrings and Markdown in numbers: words per sentence, separators, words to avoid.

    python docs/style.py                          one row per room
    python docs/style.py README.md normlab/norms  the same of these, and each finding as FILE:LINE; exit code 1 if any

A finding is a sentence of more than 25 words or a word to avoid.
So is a docstring whose first line begins with a question word or "Of".
Code, tables, lists of names in columns, headings and links' addresses are left out.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 25
MANY = 3  # separators
SEPARATORS = re.compile(r"[,;:](?=\s)|\s[-\u2013\u2014]\s")
SENTENCE_END = re.compile(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)[\"')\u201d]*\s+(?=[A-Z\u0391-\u03c9`\"'(\u201c*])")
AVOIDED = re.compile(
    r"\b(an? \w+ an? \w+|goes on|gone on|go on|beside|of its own|of their own|stands|at second hand|"
    r"is told|was told|come to|comes to|came to|hangs? on|held against|gives way|road|dear|dearest)\b"
)
OPENERS = re.compile(r"(What|Whether|Of|Where|How|When|Which|Whose|Who|Why|That|It|This|There)\b")


class Text(NamedTuple):
    """A piece of prose: where it begins, and whether it is a docstring."""

    file: Path
    line: int
    words: str
    is_docstring: bool


class Room(NamedTuple):
    """Files of one row of the table."""

    name: str
    files: list[Path]


def rooms() -> list[Room]:
    """The rooms of the repository: folders of the package, kernels, tests, documents."""
    package = ROOT / "normlab"
    found = [Room("normlab (top)", sorted(package.glob("*.py")))]
    found += [
        Room(f"normlab/{path.name}", files_of(path))
        for path in sorted(package.iterdir())
        if path.is_dir() and files_of(path)
    ]
    found.append(Room("normlab", files_of(package)))
    found += [Room(name, files_of(ROOT / name)) for name in ("kernels", "tests", "docs", "data")]
    return found + [Room(name, [ROOT / name]) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def files_of(path: Path) -> list[Path]:
    """The Python and Markdown files at a path."""
    if path.is_file():
        return [path]
    kinds = (file for kind in ("*.py", "*.md") for file in path.rglob(kind))
    return sorted(file for file in kinds if not {"build", "api", "__pycache__"} & set(file.parts))


def texts(file: Path) -> Iterator[Text]:
    """The prose of a file."""
    if file.suffix == ".md":
        yield from _markdown(file)
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield from _paragraphs(file, node.body[0].lineno, docstring, True)


def _markdown(file: Path) -> Iterator[Text]:
    text = re.sub(r"^ *(```|~~~|:::).*?^ *\1", _blank, file.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n+)+", _blank, text)
    text = re.sub(r"<!--.*?-->|^\$\$.*?\$\$|^---\n.*?^---$", _blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(#|\||!\[|\[!|<|:|\().*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    yield from _paragraphs(file, 1, text, False)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _paragraphs(file: Path, line: int, text: str, is_docstring: bool) -> Iterator[Text]:
    """Paragraphs; an argument or an item of a list is one, and code and lists in columns are none."""
    lines: list[str] = []
    for number, row in enumerate([*text.splitlines(), ""]):
        in_columns = is_docstring and re.match(r"\s*\S.*\S {2,}\S", row)
        is_code = is_docstring and not lines and re.match(r" {4}(?! *\w+(, \w+)*: )\S", row)
        is_header = re.match(r"(Args|Returns|Raises|Yields|Shapes|Source|Example)s?:\s*$", row)
        after_stop = not lines or lines[-1].endswith(".")
        argument = is_docstring and after_stop and re.match(r"( {4})?[a-z]\w*(, \w+)*: ", row)
        begins = argument or (not is_docstring and re.match(r"\s*([-*]|\d+\.) +", row))
        if begins or in_columns or is_code or is_header or not row.strip():
            if lines:
                yield Text(file, line + number - len(lines), " ".join(lines), is_docstring)
            lines = [row[begins.end() :]] if begins else []
        else:
            lines.append(row.strip())


def sentences(text: str) -> list[str]:
    """Sentences, with code and formulas as one word each; headings and scraps below three words are left out."""
    text = re.sub(r"``[^`]+``|`[^`]+`|\$[^$]+\$", "CODE", text).replace("**", "")
    return [sentence for sentence in SENTENCE_END.split(text) if len(sentence.split()) > 2]


@cache
def sentences_of(file: Path) -> list[str]:
    """All sentences of a file."""
    return [sentence for text in texts(file) for sentence in sentences(text.words)]


def findings(text: Text) -> Iterator[str]:
    """Find what the style does not allow in a piece of prose."""
    for sentence in sentences(text.words):
        if len(sentence.split()) > LONGEST:
            yield f"{len(sentence.split())} words: {sentence}"
        for match in AVOIDED.finditer(sentence):
            yield f"avoid {match[0]!r}: {sentence}"


@cache
def openers(file: Path) -> list[tuple[int, str]]:
    """Docstrings' first lines that are no imperative and no noun phrase, with their lines."""
    return list(_openers(file)) if file.suffix == ".py" else []


def _openers(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if OPENERS.match(first):
                yield node.body[0].lineno, first


class Numbers(NamedTuple):
    """The style of a room: counts, means per sentence and shares of the sentences."""

    sentences: int
    words: float
    long: float
    separators: float
    many: float
    avoided: int
    openers: int

    def __str__(self) -> str:
        cells = (
            f"{self.sentences}",
            f"{self.words:.1f}",
            f"{self.long:.0%}",
            f"{self.separators:.1f}",
            f"{self.many:.0%}",
            f"{self.avoided}",
            f"{self.openers}",
        )
        return "".join(cell.rjust(11) for cell in cells)


def numbers(room: Room) -> Numbers:
    """Measure the style of a room."""
    every = [sentence for file in room.files for sentence in sentences_of(file)]
    words = [len(sentence.split()) for sentence in every]
    separators = [len(SEPARATORS.findall(sentence)) for sentence in every]
    count = max(len(every), 1)
    return Numbers(
        sentences=len(every),
        words=sum(words) / count,
        long=sum(n > LONGEST for n in words) / count,
        separators=sum(separators) / count,
        many=sum(n >= MANY for n in separators) / count,
        avoided=sum(len(AVOIDED.findall(sentence)) for sentence in every),
        openers=sum(len(openers(file)) for file in room.files),
    )


HEADER = ("sentences", "words", "above 25", "separators", "3 or more", "avoided", "openers")


def main(paths: list[str]) -> int:
    chosen = [Room(path, files_of(Path(path).resolve())) for path in paths] or rooms()
    print("room".ljust(22) + "".join(name.rjust(11) for name in HEADER))
    for room in chosen:
        print(room.name.ljust(22) + str(numbers(room)))
    if not paths:
        return 0
    lines = [
        f"{file}:{text.line}: {finding}"
        for room in chosen
        for file in room.files
        for text in texts(file)
        for finding in findings(text)
    ]
    lines += [f"{f}:{n}: first line {first!r}" for room in chosen for f in room.files for n, first in openers(f)]
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
