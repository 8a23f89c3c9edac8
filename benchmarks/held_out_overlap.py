"""How much of the held-out text of a corpus stands in its training files too.

    python -m benchmarks.held_out_overlap --out data/bench/held_out_overlap.csv

One row per corpus and half: characters of non-empty lines, and the share of them that is in at least `LINES` equal
lines in a row of a training file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.timing import written
from normlab.training.text.source import read_by_part

LINES = 5
CORPORA = ("packages", "stdlib")
COLUMNS = ("corpus", "part", "files", "characters", "share")
ALL = 10**9  # characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    written((row for corpus in CORPORA for row in shares(corpus)), parser.parse_args().out, COLUMNS)


def shares(corpus: str) -> Iterator[dict[str, object]]:
    parts, _ = read_by_part(corpus, "text", ALL, False)
    known = {rows for _, text in parts.pop("train") for rows in _windows(_lines(text))}
    for part, files in parts.items():
        whole = found = 0
        for _, text in files:
            lines = _lines(text)
            starts = [at for at, rows in enumerate(_windows(lines)) if rows in known]
            equal = {at + offset for at in starts for offset in range(LINES)}
            whole += sum(map(len, lines))
            found += sum(len(lines[at]) for at in equal)
        yield {"corpus": corpus, "part": part, "files": len(files), "characters": whole, "share": found / whole}


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _windows(lines: list[str]) -> Iterator[int]:
    return (hash(tuple(lines[at : at + LINES])) for at in range(len(lines) - LINES + 1))


if __name__ == "__main__":
    main()
