"""normlab's docstrings are plain text with Markdown's backticks; Sphinx reads reStructuredText.

to_rst   Sphinx's event: a docstring's lines, changed in place
"""

from __future__ import annotations

import inspect
import re

import reference

_CODE = re.compile(r"``[^`]+``|(?<![:`])`[^`\n]+`(?!`)")
_BROKEN_CODE = re.compile(r"(?<=[\s(])`[^`\n]+\n[^`\n]+`(?=[\s.,;:)])")  # over the end of a line
_LISTED = re.compile(r"^[\w`.,()= ]+\S {2,}\S")  # "name   what it is", in columns
_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Example|Note)s?:$")
_SPECIAL = re.compile(r"[*|]|(?<=\w)_(?!\w)")


def to_rst(app, what: str, name: str, obj, options, lines: list[str]) -> None:
    """Code as code, everything else as text; a module's list of names goes, since the page has a table of them."""
    if what == "module":
        lines[:] = _without_lists(lines)
    found: list[str] = []
    in_code = in_section = False
    lines[:] = _BROKEN_CODE.sub(_on_one_line, "\n".join(lines)).split("\n")
    lines[:] = _one_parameter_a_line(lines, obj)
    for i, line in enumerate(lines):
        if line.strip() and not line.startswith(" "):
            in_code, in_section = False, bool(_SECTION.match(line))
        elif line.startswith("    ") and not in_section and not in_code and not lines[i - 1].strip():
            found += ["::", ""]
            in_code = True
        found.append(line if in_code else _text(line))
    lines[:] = found


def _on_one_line(code: re.Match[str]) -> str:
    return " ".join(code[0].split())


def _one_parameter_a_line(lines: list[str], obj) -> list[str]:
    """`x: (..., d). weight: (d,).` describes two parameters; napoleon wants a line for each."""
    known = "|".join(re.escape(name) for name in _parameters(obj))
    if not known:
        return lines
    another = re.compile(rf"(?<=\.) (?=(?:{known})(?:, (?:{known}))*: )")
    return [
        part for line in lines for part in (another.sub("\n    ", line) if line[:4] == " " * 4 else line).split("\n")
    ]


def _parameters(obj) -> list[str]:
    try:
        return list(inspect.signature(obj).parameters)
    except (TypeError, ValueError):  # a module, or what Python cannot read a signature of
        return []


def _text(line: str) -> str:
    """One line with its special signs escaped outside code, and with code in reStructuredText's marks."""
    parts, at = [], 0
    for found in _CODE.finditer(line):
        parts += [_escaped(line[at : found.start()]), _reference(found[0].strip("`"))]
        at = found.end()
    return "".join([*parts, _escaped(line[at:])])


def _reference(code: str) -> str:
    """A public name leads to its entry."""
    return f":py:obj:`{code}`" if code in reference.public_names() else f"``{code}``"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda sign: "\\" + sign[0], text)


def _without_lists(lines: list[str]) -> list[str]:
    paragraphs = "\n".join(lines).split("\n\n")
    kept = [part for part in paragraphs if not _LISTED.match(part.strip("\n"))]
    return "\n\n".join(kept).split("\n")
