"""The exception that bad input raises, and errors of other libraries as one line."""

from __future__ import annotations

import math
import os
import re
import reprlib
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
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


def require_fit(source: object, info: dict[str, Any], counts: Callable[[str], bool] = bool) -> None:
    """Raise NormlabError if weights and configuration do not fit: transformers fills in random weights.

    info: of `from_pretrained`, with `ignore_mismatched_sizes`. counts: False for a weight that may be left out.
    """
    problems = {
        "the weights lack": info["missing_keys"],
        "the configuration has no place for": filter(counts, info["unexpected_keys"]),
        "the configuration gives another shape to": [name for name, *_ in info["mismatched_keys"]],
    }
    for problem, found in problems.items():
        names = sorted(found)
        if names:
            more = f" and {len(names) - 1} more" if names[1:] else ""
            raise NormlabError(f"{source}: {problem} {names[0]}{more}; give weights and config.json of one model")


MOST_BLOCKS = 2_000
IS_DEPTH = re.compile(r"(layers?|blocks|depth)$")


@contextmanager
def of_its_files_size(source: object, config: Mapping[str, Any], any_size: bool = False) -> Iterator[None]:
    """Refuse a model, while it is built, that its configuration makes deeper or larger than its files show.

    Parts are counted as they are built, before weights are read. A quantized weight takes a byte for up to 8 numbers,
    and each weight has its name in the file.

    Args:
        source: folder or hub name. The size of files on the hub is not known here.
        config: what its config.json says.
        any_size: refuse nothing.

    Raises:
        NormlabError: more than `MOST_BLOCKS` blocks, or far more than the folder's files can hold.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    if any_size:
        yield
        return
    remedy = "give a model and its own config.json, or any_size=True (--any-size) to build it"
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    depths = [(value, name) for part in parts for name, value in part.items() if IS_DEPTH.search(str(name))]
    for blocks, name in depths:
        if isinstance(blocks, int) and blocks > MOST_BLOCKS:
            raise NormlabError(f"{source}: {name} is {blocks:,}, more than {MOST_BLOCKS:,}: {remedy}")
    folder = Path(str(source))
    held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if folder.is_dir() else math.inf
    numbers, tensors = 8 * held + 2**20, held / 32 + 1_000
    built = {"numbers": 0, "tensors": 0}

    def count(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.is_meta:
            built["numbers"] += parameter.numel()
            built["tensors"] += 1
            if built["numbers"] > numbers or built["tensors"] > tensors:
                raise NormlabError(f"{source}: config.json makes a far larger model than the files hold: {remedy}")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


# What a value must be, by pydantic's name of the fault.
_REQUIREMENTS = {
    "greater_than_equal": "it must be at least {ge}",
    "greater_than": "it must be greater than {gt}",
    "less_than_equal": "it must be at most {le}",
    "less_than": "it must be below {lt}",
    "finite_number": "it must be finite",
    "literal_error": "choose one of {expected}",
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


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers and huggingface_hub."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def hub_or_cache(name: object) -> Iterator[None]:
    """Ask the Hub once, within a deadline, before something is loaded from it. If it does not answer, take its cache.

    Its libraries ask on and on, with a line each time. name: nothing is asked if it is a file or a folder.
    """
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    if not before and not os.path.exists(str(name)):
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
        except Exception:  # of its HTTP client, which is another one in each version
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def loads_quietly() -> Iterator[None]:
    """Hide transformers' report of weights that do not fit: `require_fit` says it in one line."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
