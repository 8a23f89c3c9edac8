"""Every link within a built site leads somewhere: `python docs/links.py build/site`. Nothing is fetched.

broken_links   (page, link) of those that do not
"""

from __future__ import annotations

import functools
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links of a page, and the places in it that links can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.places.add(value)


@functools.cache
def _read(path: Path) -> _Page:
    return _Page(path.read_text(encoding="utf-8"))


def broken_links(site: Path) -> list[tuple[str, str]]:
    return [
        (str(page.relative_to(site)), link)
        for page in sorted(site.rglob("*.html"))
        if "_static" not in page.parts  # the theme's templates
        for link in _read(page).links
        if not _leads_somewhere(page, link)
    ]


def _leads_somewhere(page: Path, link: str) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:  # elsewhere, or data in the page itself
        return True
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        return False
    is_state = "=" in parts.fragment  # what the explorer shows, no place in it
    return not parts.fragment or is_state or target.suffix != ".html" or unquote(parts.fragment) in _read(target).places


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]).resolve())
    sys.exit("\n".join(["links that lead nowhere:", *(f"  {page}: {link}" for page, link in found)]) if found else 0)
