"""Fields of a configuration, each described once: default, meaning, and values that it takes.

`setting(default, help, rule)`   a dataclass field
`shared(cls, name)`              the same field in another dataclass
`check(configuration)`           NormlabError for a value of another type, or that its rule refuses
`described(cls)`                 the fields as text, for a docstring
`flag_of(name)`                  the command-line flag of a field
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from normlab.errors import NormlabError, first_fault

# Rules are metadata of a type, as pydantic reads them.
POSITIVE = Field(gt=0)
SHARE = Field(ge=0, lt=1)
NOT_NEGATIVE = Field(ge=0)
SEED = Field(ge=0, lt=2**32)  # what NumPy's generators take
TEXT = Field(min_length=1)  # a length is that of UTF-8: what cannot be written there is refused
THREADS = Field(ge=1, le=1024)  # PyTorch crashes for numbers that no machine has


def at_least(least: int, most: int = 2**40) -> Any:
    return Field(ge=least, le=most)


def one_of(*values: str) -> Any:
    """A type, used instead of the field's own."""
    return Literal[values]


def setting(default: Any, help: str, rule: Any = None, *, identity: bool = True) -> Any:
    """A dataclass field. default: a value, or the type of an empty one. identity: True if numbers depend on it."""
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
    """NormlabError naming the first field whose value has another type than its annotation, or breaks its rule.

    Types are strict: 2.5, "2" and True are no whole numbers. Floats are finite.
    """
    kind: Any = type(configuration)
    try:
        _schema(kind).model_validate(vars(configuration))
    except ValidationError as error:
        raise NormlabError(first_fault(error)) from None


@functools.cache
def _schema(cls: Any) -> type[BaseModel]:
    types = get_type_hints(cls)
    known: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        rule = spec.metadata["rule"]
        is_type = rule is None or hasattr(rule, "__args__")
        known[spec.name] = (rule or types[spec.name] if is_type else Annotated[types[spec.name], rule], ...)
    return create_model(cls.__name__, __config__=ConfigDict(strict=True, allow_inf_nan=False), **known)


def described(cls: Any) -> str:
    """The fields as the arguments of a docstring."""
    lines = (f"{spec.name}: {spec.metadata['help']}." for spec in dataclasses.fields(cls))
    inner, more = " " * 8, " " * 12
    return "    Args:\n" + "\n".join(
        textwrap.fill(line, 116, initial_indent=inner, subsequent_indent=more) for line in lines
    )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")
