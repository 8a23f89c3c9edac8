"""Fields of a configuration, each said once: its default, what it means, which values it takes.

`setting(default, help, rule)`   a dataclass field
`shared(cls, name)`              the same field in another dataclass
`check(configuration)`           NormlabError for a value that its rule refuses
`described(cls)`                 the fields as text, for a docstring
`flag_of(name)`                  the command-line flag of a field
`add_flags(parser, cls)`         a flag for every field
`given(options, cls)`            the fields whose flags were given
`pairs(texts, flag)`             a mapping from FIELD=VALUE
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from normlab.errors import NormlabError

Rule = tuple[Callable[[Any], bool], str]  # whether a value is taken, and what to say where it is not

POSITIVE: Rule = (lambda value: value > 0, "it must be positive")
SHARE: Rule = (lambda value: 0 <= value < 1, "it must be in [0, 1)")
NOT_NEGATIVE: Rule = (lambda value: value >= 0, "it must not be negative")
FINITE: Rule = (math.isfinite, "it must be finite")


def at_least(least: int) -> Rule:
    return lambda value: value >= least, f"it must be at least {least}"


def one_of(*values: str) -> Rule:
    return lambda value: value in values, f"choose one of {', '.join(values)}"


def setting(default: Any, help: str, rule: Rule | None = None, *, identity: bool = True) -> Any:
    """A dataclass field. default: a value, or the type of an empty one. identity: whether numbers depend on it."""
    metadata = {"help": help, "rule": rule, "identity": identity}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def shared(cls: Any, name: str) -> Any:
    """Field `name` of dataclass `cls`, for another one that has it too."""
    original = cls.__dataclass_fields__[name]
    return dataclasses.field(default=original.default, metadata=original.metadata)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise NormlabError(message)


def check(configuration: Any) -> None:
    """NormlabError naming the first field whose value its rule refuses; None, a default yet to be filled in, passes."""
    for spec in dataclasses.fields(configuration):
        value, rule = getattr(configuration, spec.name), spec.metadata["rule"]
        if rule is not None and value is not None:
            accepts, remedy = rule
            require(accepts(value), f"{spec.name} is {value!r}; {remedy}")


def described(cls: Any) -> str:
    """The fields as the arguments of a docstring."""
    lines = (f"{spec.name}: {spec.metadata['help']}." for spec in dataclasses.fields(cls))
    inner, more = " " * 8, " " * 12
    return "    Args:\n" + "\n".join(
        textwrap.fill(line, 116, initial_indent=inner, subsequent_indent=more) for line in lines
    )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, cls: Any) -> None:
    """A flag for every field of a configuration; one that is not given stays None. transformers' HfArgumentParser reads
    such a dataclass too, but has no `--no-compile`, takes no FIELD=VALUE, and fills in defaults: which flags were given
    is lost."""
    for spec in dataclasses.fields(cls):
        flag, text = flag_of(spec.name), spec.metadata["help"]
        if spec.default_factory is not dataclasses.MISSING:
            parser.add_argument(flag, action="append", metavar="FIELD=VALUE", help=text)
            continue
        text += "" if spec.default is None else f" (default: {spec.default})"
        if isinstance(spec.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            kind = {"int": int, "float": float}.get(str(spec.type).split(" ")[0], str)
            parser.add_argument(flag, type=kind, help=text)


def given(options: argparse.Namespace, cls: Any) -> dict[str, Any]:
    """Fields of a configuration whose flags were given."""
    values = {spec.name: getattr(options, spec.name) for spec in dataclasses.fields(cls)}
    return {
        name: pairs(value, flag_of(name)) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }


def pairs(texts: Iterable[str], flag: str) -> dict[str, Any]:
    """What FIELD=VALUE, given more than once, says; a value is JSON or a word."""
    fields = {}
    for pair in texts:
        name, sign, value = pair.partition("=")
        if not sign:
            raise NormlabError(f"{flag} takes FIELD=VALUE, not {pair!r}")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields
