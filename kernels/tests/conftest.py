"""Fresh memory holds NaN, so that a kernel that leaves an element unwritten is found out; tests on a GPU carry the
marker."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

# Before Triton is imported: what it compiles stays with the checkout, not in the user's home.
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).resolve().parents[2] / "build" / "test-cache" / "triton"))

# transformers takes our folder for Hugging Face's package, and reads what every distribution holds to find its version.
sys.modules["kernels"] = None  # type: ignore[assignment]


def pytest_collectstart() -> None:
    """Import torch and Triton when tests are collected: xdist's first process collects none, and starts without."""
    prepare()


@cache
def prepare() -> None:
    import torch
    from kernel_harness import INTERPRETING

    # PyTorch lists its constructors at the first use of a device context and keeps the list: made under the patch
    # below, it would hold the patched `empty`, and `with torch.device("meta")` would do nothing to the real one for
    # ever after.
    with torch.device("cpu"):
        torch.empty(0)
    if INTERPRETING:
        hasten_the_interpreter()


def hasten_the_interpreter() -> None:
    """Leave out what the interpreter does at every call of a function and for every value.

    It replaces the language's builtins at every call and puts them back after a launch: here once and for all. It
    computes every addition and product of int32 again in int64, to see whether one overflows: at these shapes none
    does. Both take half of its time. A third of what is left goes into tables of NumPy's types, made anew for each
    value, into block types that are made of themselves, into the same types and sizes for each value again, and into
    arguments that are sorted at each call.
    """
    from triton import language
    from triton.runtime import interpreter

    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    def bind(owner: Any, name: str, builtin: Any, builder: Any, scope: Any) -> None:
        known, call = {"_semantic": interpreter.interpreter_semantic}, getattr(builtin, "__wrapped__", builtin)
        scope.set_attr(owner, name, lambda *given, **named: call(*given, **named | known))

    interpreter._patch_attr = bind
    np_dtypes: dict[str, Any] = {}

    def np_dtype(kind: Any, find: Callable[[Any], Any] = interpreter._get_np_dtype) -> Any:
        name = kind.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = find(kind)
        return np_dtypes[name]

    interpreter._get_np_dtype = np_dtype
    language.block_type.to_ir = lambda kind, builder: kind
    made: dict[Any, dict[str, Any]] = {}

    def make_block(kind: Any, element: Any, shape: Any, make: Any = language.block_type.__init__) -> None:
        key = (element.name, *map(int, shape))
        if key not in made:
            make(kind, element, shape)
            made[key] = vars(kind).copy()
        vars(kind).update(made[key])

    def make_tensor(value: Any, handle: Any, type: Any, make: Any = language.tensor.__init__) -> None:
        if type.name not in made:
            make(value, handle, type)
            made[type.name] = vars(value).copy()
        vars(value).update(made[type.name], handle=handle, type=type)

    language.block_type.__init__ = make_block
    language.tensor.__init__ = make_tensor


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    import torch

    torch.set_num_threads(request.config.getoption("threads", 1))
    for empty in (torch.empty, torch.empty_like):

        def poisoned(*args: object, made: Callable[..., torch.Tensor] = empty, **kwargs: object) -> torch.Tensor:
            tensor = made(*args, **kwargs)
            if tensor.is_floating_point() and not torch.compiler.is_compiling():
                with torch.no_grad():  # a checkpoint on a GPU makes a leaf that requires a gradient
                    tensor.fill_(float("nan"))
            return tensor

        monkeypatch.setattr(torch, empty.__name__, poisoned)
    yield


@pytest.fixture(autouse=True)
def launches_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are remembered; a test that moves their thresholds gets those it asks for.

    In the interpreter wide rows of partial sums are finished by programs of 512 columns, as the widest are: 32 columns,
    at which more multiprocessors take part, are a hundred programs one after another.
    """
    from kernel_harness import INTERPRETING
    from normlab_kernels import choices

    for name in ("forward", "backward", "reduction", "finish", "moments"):
        monkeypatch.setattr(choices, name, getattr(choices, name).__wrapped__)
    if INTERPRETING:
        finish, widest = choices.finish, choices.finish(65_536)
        monkeypatch.setattr(choices, "finish", lambda width: finish(width) if width < 1024 else widest)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and leave out tests. Where compiled kernels run, everything here is a GPU test.

    Without kernels, tests of the kernels themselves are left out. In the interpreter, those are left out for which it
    makes no difference: the other process runs them.
    """
    from kernel_harness import DEVICE, INTERPRETING, KERNELS

    for item in items:
        if DEVICE == "cuda":
            item.add_marker(pytest.mark.gpu)
        if INTERPRETING and item.get_closest_marker("once"):
            item.add_marker(pytest.mark.skip(reason="the same without the interpreter, where it runs"))
        if not KERNELS and item.get_closest_marker("kernels"):
            item.add_marker(pytest.mark.skip(reason="needs the Triton kernels: set TRITON_INTERPRET=1, or use a GPU"))


def pytest_collection_finish() -> None:
    """The garbage collector leaves alone what imports brought, and looks through what a test makes seldom."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels: tests a Triton kernel, not a function that has another form")
    config.addinivalue_line("markers", "once: tests nothing that a kernel computes: not in the interpreter as well")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
