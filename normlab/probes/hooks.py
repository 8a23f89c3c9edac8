"""Hooks of a recording: they change nothing, end no call, and run where compiled code would leave them out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn

from normlab.probes.layout import Refusal

_CALL: Any = nn.Module._call_impl


class RecorderHook:
    """A hook of the model. It ends no call, acts only while its recording is open, and does nothing in copies."""

    def __init__(self, recorder: Any = None, act: Callable | None = None):
        self._recorder, self._act = recorder, act

    def __call__(self, *call: Any) -> Any:
        recorder, act = self._recorder, self._act
        if recorder is None or act is None or not recorder.is_open:
            return None
        try:
            return act(*call)
        except Refusal as error:
            if not recorder.forgives:
                raise
            recorder.lose(call[0], error)
        except Exception as error:
            recorder.lose(call[0], error)
        return None

    def __deepcopy__(self, memo: dict) -> RecorderHook:
        return RecorderHook()

    def __reduce__(self) -> tuple:
        return RecorderHook, ()


class _Experiments(threading.local):
    """How many experiments are under way in this thread, one inside the other."""

    running = 0


EXPERIMENTS = _Experiments()


def is_running(modules: set[nn.Module]) -> bool:
    """True if this thread is inside a call of one of these modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL.__code__ and frame.f_locals.get("self") in modules:
            return True
        frame = frame.f_back
    return False


def is_dry_run() -> bool:
    """True if a stage of a pipeline asks the model for shapes alone, on tensors that hold anything."""
    return _is_inside("torch.distributed.pipelining.stage", "_inference")


def is_on_other_weights() -> bool:
    """True if the model is called with tensors in place of its parameters."""
    return _is_inside("torch.nn.utils.stateless", "functional_call")


def _is_inside(module: str, ending: str) -> bool:
    """True if this thread is inside a function of a Python module whose name ends so."""
    frame: FrameType | None = sys._getframe(1) if module in sys.modules else None
    while frame is not None:
        if frame.f_code.co_name.endswith(ending) and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def has_fake_tensors() -> bool:
    """True while tensors have shapes alone, as where a program is exported or its memory is estimated."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY))


def called_by(block: nn.Module | None) -> list[nn.Module]:
    """The modules inside of which this thread is, from the one that a running block has called; none in its code."""
    frame: FrameType | None = sys._getframe(1)
    inner: list[nn.Module] = []
    while frame is not None:
        if frame.f_code is _CALL.__code__:
            module: Any = frame.f_locals.get("self")
            if module is block:
                return inner[::-1]
            inner.append(module)
        frame = frame.f_back
    return []


def shards_itself(module: nn.Module) -> bool:
    """True if FSDP2 shards parameters of a module, and holds them whole while it runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # else nothing is sharded
    return isinstance(module, getattr(fsdp, "FSDPModule", ()))


class _Uncompiled:
    """Has compiled code run uncompiled, in this process, while any recording of a model that it may run is open.

    Compiled code ignores hooks that are added later, or is compiled anew around them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._stance: AbstractContextManager = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._open += 1

    def __exit__(self, *exception: Any) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._stance.__exit__(None, None, None)


_UNCOMPILED = _Uncompiled()


def uncompiled(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which compiled code that may run the model runs uncompiled, so that hooks run."""
    return _UNCOMPILED if _runs_compiled(model) else nullcontext()


def _runs_compiled(model: nn.Module) -> bool:
    """True if compiled code may run the model, which does not know from where it is called.

    Attention that compiles itself would hold all scores if it ran uncompiled. There only marks on the modules count.
    """
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "flex_attention":
        return "torch._dynamo" in sys.modules
    return any(
        hasattr(m, "_orig_mod")
        or getattr(m, "_compiled_call_impl", None) is not None
        or hasattr(vars(m).get("forward"), "_torchdynamo_orig_callable")
        for m in model.modules()
    )
