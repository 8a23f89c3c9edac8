"""Write every number of the pages of `PAGES`.

`make findings` calls it.

    python docs/generate.py           write them
    python docs/generate.py --check   change nothing; exit code 1 and a diff if a page is out of date

A page marks a generated text by comments, which GitHub and Sphinx hide: `<!-- query -->text<!-- / -->`. Most marks ask
shipped tables themselves (`docs/queries.py`). A plain name is a text of one of the modules in `pages`.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bench  # noqa: E402
import forms  # noqa: E402
import names  # noqa: E402
import papers  # noqa: E402
import queries  # noqa: E402
import standings  # noqa: E402
import tables  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "docs/findings.md", "docs/league.md", "docs/compare.md", "docs/papers.md", "docs/forms.md", "docs/beside.md",
    "docs/extend/kernel.md", "kernels/README.md", "data/README.md", "README.md",
)  # fmt: skip
MARKED = re.compile(r"<!-- (\w+) -->(.*?)<!-- / -->", re.DOTALL)


def main(arguments: list[str]) -> int:
    changed = []
    for name, text in pages().items():
        before = (ROOT / name).read_text(encoding="utf-8")
        if text == before:
            continue
        changed.append(name)
        if "--check" in arguments:
            lines = (page.splitlines(keepends=True) for page in (before, text))
            sys.stdout.writelines(difflib.unified_diff(*lines, name, f"{name}, generated", n=0))
        else:
            (ROOT / name).write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return int("--check" in arguments and bool(changed))


def pages() -> dict[str, str]:
    """The pages with the numbers of the shipped tables, and the league as a table."""
    texts = {name: text for part in (standings, papers, bench, forms, names) for name, text in part.texts().items()}
    texts["site_names"] = tables.site_names()
    written = {}
    for name in PAGES:
        written[name] = queries.fill(filled((ROOT / name).read_text(encoding="utf-8"), texts, name), name)
        if name == "docs/findings.md":
            texts["first_findings"] = first_findings(written[name])
    return written


def filled(page: str, texts: Mapping[str, str], name: str) -> str:
    """The page with the text of each marked name.

    Raises:
        ValueError: a name without a text, or a mark at the start of a line, where Markdown ends the paragraph.
    """

    def text_of(match: re.Match[str]) -> str:
        key = match[1]
        if key not in texts:
            raise ValueError(f"{name}: nothing makes the text {key!r}")
        text, is_block = texts[key], match[2].startswith("\n")
        if not is_block and page[: match.start()].endswith("\n"):
            raise ValueError(f"{name}: the mark of {key!r} begins a line: break the line elsewhere")
        return f"<!-- {key} -->" + (f"\n\n{text}\n\n" if is_block else text) + "<!-- / -->"

    return MARKED.sub(text_of, page)


def first_findings(page: str, count: int = 3) -> str:
    """The first findings of docs/findings.md as a list, without marks."""
    items = re.findall(r"^\d\. (.*?)(?=\n\d\. |\n\n)", page, flags=re.MULTILINE | re.DOTALL)
    return "\n".join("- " + re.sub(r"<!--.*?-->", "", item) for item in items[:count])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
