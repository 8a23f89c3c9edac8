"""The exception that bad input raises, and errors of other libraries as one line."""

from __future__ import annotations

import os
import reprlib
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

ANSWER_SECONDS = 20.0  # what a connection waits for an answer
PATIENCE = 5.0  # seconds that other ranks leave to the first, to speak
STOPPED = "stopped; the same command resumes from the last checkpoint"


class NormlabError(ValueError):
    """Bad input: one line that says what is wrong and what to do. Commands print it and exit with code 2."""


class MissingPackage(NormlabError):
    """A package of an extra that is not installed. A notebook shows its one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, to quote in ours; its type if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def in_one_line(error: BaseException) -> str:
    """The first line of an error's message, with the error's type unless it is ours."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, NormlabError) else f"{type(error).__name__}: {line}"


@cache
def _require(requirement: str) -> None:
    """Looked up once in a process, which keeps the packages that it began with."""
    from transformers.utils.versions import require_version

    require_version(requirement)


def require_packages(what: str, needed: Iterable[str], remedy: str) -> None:
    """Raise NormlabError if a package is missing or too old.

    Args:
        what: the feature that needs them, for the error.
        needed: requirements as pip writes them, e.g. "accelerate>=1.12".
        remedy: the requirement that pip should install.
    """
    for requirement in needed:
        try:
            _require(requirement)
        except ImportError:
            raise NormlabError(f"{what} needs {requirement}: pip install --upgrade '{remedy}'") from None


def is_first_rank() -> bool:
    """True in rank 0 of torchrun or accelerate launch, and in a single process. Only that one prints."""
    return os.environ.get("RANK", "0") == "0"


def show_warning(message: Any, category: Any, *rest: Any) -> None:
    """`warnings.showwarning` for commands and workers: one line, without the place in the source."""
    if is_first_rank():
        print(f"normlab: warning: {message}", file=sys.stderr)


def fail(message: str, code: int = 2) -> int:
    """Print an error as one line and return its exit code. Of several ranks the first speaks."""
    if code == 2 and not is_first_rank():  # torchrun ends all ranks with the first that ends
        time.sleep(PATIENCE)
    if code == 2 or is_first_rank():
        print(f"normlab: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def ended_by(error: BaseException) -> int:
    """Print what ended a command as one line and return its exit code. What is no user's matter is raised again."""
    if isinstance(error, NormlabError):
        return fail(str(error))
    if isinstance(error, KeyboardInterrupt):
        return fail(STOPPED, 130)
    if isinstance(error, BrokenPipeError) and _is_not_read():
        return 128 + signal.SIGPIPE
    text = str(error).lower()
    # A library that cannot be loaded for lack of memory is an ImportError, or a SystemError that says nothing.
    is_of_memory = isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY)
    if is_of_memory or (isinstance(error, ImportError | SystemError) and _memory_is_limited()):
        remedy = "allow more memory, make the model or the batch smaller, or split it (--fsdp)"
        return fail(f"out of memory: {first_line(error)}; {remedy}")
    if isinstance(error, OSError) and error.errno is not None:  # the operating system's
        return fail(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    raise error


NO_MEMORY = ("tried to allocate", "cannot allocate memory", "failed to map segment")


def _is_not_read() -> bool:
    """True if a reader of the output, such as `head`, has closed it. What is left to print goes nowhere then."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _memory_is_limited() -> bool:
    try:
        import resource
    except ImportError:  # Windows
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


@contextmanager
def ends_at_once() -> Iterator[None]:
    """End the process with one line on Ctrl-C.

    For imports: a library that is half loaded turns a KeyboardInterrupt into a traceback, or swallows it.
    """

    def end(*_: Any) -> None:
        os._exit(fail(STOPPED, 130))

    is_ours = threading.current_thread() is threading.main_thread()
    if is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    else:  # in a thread, or Ctrl-C is already another's
        yield


# What a value must be, by pydantic's name of the fault.
_REQUIREMENTS = {
    "greater_than_equal": "it must be at least {ge}",
    "greater_than": "it must be greater than {gt}",
    "less_than_equal": "it must be at most {le}",
    "less_than": "it must be below {lt}",
    "finite_number": "it must be finite",
    "literal_error": "choose one of {expected}",
    "extra_forbidden": "there is no such field",
}


def first_fault(error: Any) -> str:
    """The first field that a schema refuses, its value and what it must be.

    error: pydantic's ValidationError.
    """
    fault = error.errors(include_url=False)[0]
    field = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"{field} is missing"
    rule = _REQUIREMENTS.get(fault["type"], fault["msg"].replace("Input should be", "it must be"))
    bounds = {name: f"{value:g}" if isinstance(value, float) else value for name, value in fault.get("ctx", {}).items()}
    rule = rule.format(**bounds | {"expected": str(bounds.get("expected")).replace("'", "").replace(" or ", ", ")})
    return f"{field or 'it'} is {reprlib.repr(fault['input'])}; {rule}"
