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

import bench
import forms
import papers
import queries
import standings
from tables import ROOT, site_names

PAGES = (
    "docs/findings.md", "docs/league.md", "docs/compare.md", "docs/spikes.md", "docs/papers.md", "docs/measure.md",
    "docs/forms.md", "docs/beside.md", "docs/statistics.md", "docs/extend/kernel.md", "kernels/README.md",
    "data/README.md", "README.md",
)  # fmt: skip


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
    texts = {name: text for part in (standings, papers, bench, forms) for name, text in part.texts().items()}
    texts["site_names"] = site_names()
    written = {}
    for name in PAGES:
        written[name] = queries.fill((ROOT / name).read_text(encoding="utf-8"), name, texts)
        if name == "docs/findings.md":
            texts["first_findings"] = first_findings(written[name])
    return written


def first_findings(page: str, count: int = 3) -> str:
    """The first findings of docs/findings.md as a list, without marks."""
    items = re.findall(r"^\d\. (.*?)(?=\n\d\. |\n\n)", page, flags=re.MULTILINE | re.DOTALL)
    return "\n".join("- " + re.sub(r"<!--.*?-->", "", item) for item in items[:count])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
