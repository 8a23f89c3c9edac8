"""A model's passes in experiments and in `diff`: uncompiled, with hooks that must run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.layout import (
    hidden_state,
    is_activation,
    output_tensor,
    outputs_of,
    require_one_stream,
    same_tensor,
    with_argument,
    with_output,
)
from normlab.probes.record import uncompiled
from normlab.probes.sites import Sites

Hook = Callable[..., Any]
Make = Callable[[tuple, dict[str, Any]], Any]  # what a module returns instead, of its arguments


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's former mode after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def called(model: nn.Module, inputs: dict[str, Any], *args: Any) -> Any:
    """The model's output, uncompiled: compiled code ignores hooks that are added later."""
    with uncompiled(model):
        return model(*args, **inputs)


def device_of(model: nn.Module) -> torch.device:
    """The device that a model's inputs go to: that of its first parameter, or where accelerate runs offloaded ones."""
    devices = (parameter.device for parameter in model.parameters())
    offloaded = (getattr(getattr(m, "_hf_hook", None), "execution_device", None) for m in model.modules())
    found = next((device for device in devices if device.type != "meta"), None)
    return torch.device(found or next((device for device in offloaded if device is not None), "cpu"))


# -- hooks -----------------------------------------------------------------------------------------------------------


@contextmanager
def hooked(
    *hooks: tuple[nn.Module, Hook], before: Sequence[tuple[nn.Module, Hook]] = (), must_run: bool = True
) -> Iterator[None]:
    """Forward hooks (module, args, kwargs, output), and hooks `before` (module, args, kwargs), gone when this ends.

    Raises:
        NormlabError: at the end, where one that must run did not: its effect would be missing from the result.
    """
    ran: set[int] = set()

    def noted(number: int, hook: Hook, *call: Any) -> Any:
        ran.add(number)
        return hook(*call)

    handles: list[Any] = []
    try:
        for module, hook in before:
            handles.append(module.register_forward_pre_hook(partial(noted, len(handles), hook), with_kwargs=True))
        for module, hook in hooks:
            handles.append(module.register_forward_hook(partial(noted, len(handles), hook), with_kwargs=True))
        yield
        if must_run:
            _require_run(module for number, (module, _) in enumerate((*before, *hooks)) if number not in ran)
    finally:
        for handle in handles:
            handle.remove()


def _require_run(idle: Iterator[nn.Module]) -> None:
    module = next(idle, None)
    if module is not None:
        raise NormlabError(
            f"a {type(module).__name__} did not run in the model's pass, or was not called as a module: choose blocks "
            "that run with sites(model, blocks=...), and call module(x), not module.forward(x)"
        )


def on_blocks(
    where: Sites, hook: Hook, layers: range | None = None, before: Hook | None = None
) -> AbstractContextManager[None]:
    """`hooked` with one hook (layer, module, args, kwargs, output) on every block, for one pass.

    The hook is given the stream as it entered, though the block may have written into it. It may run its block again,
    which it does not see.

    Args:
        where: the blocks.
        hook: what is called.
        layers: only at these; default: at all.
        before: is called as (layer, args, kwargs) before a block runs.

    Raises:
        NormlabError: in the pass, where a block runs twice; after it, where one did not run.
    """
    ran: set[int] = set()
    inside: list[int] = []
    given: dict[int, tuple[tuple, dict[str, Any]]] = {}

    def enter(layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if inside:
            return
        if layer in ran:
            raise NormlabError(
                f"block {layer} runs more than once in a pass, as in ALBERT: experiments need blocks that run once "
                "(`record` takes each run for a layer)"
            )
        ran.add(layer)
        given[layer] = with_copy(args, kwargs)
        if before is not None:
            before(layer, *given[layer])

    def leave(layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if inside:
            return None
        inside.append(layer)
        try:
            return hook(layer, module, *given.pop(layer), output)
        finally:
            inside.clear()

    blocks = [block for block in where.blocks if layers is None or block.index in layers]
    starts = [(block.module, partial(enter, block.index)) for block in blocks]
    return hooked(*((block.module, partial(leave, block.index)) for block in blocks), before=starts)


def with_copy(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A block's arguments with a copy of the stream."""
    x, name = hidden_state(args, kwargs)
    return with_argument(args, kwargs, name, x.clone())


@contextmanager
def instead(*calls: tuple[nn.Module, Make], must_run: bool = True) -> Iterator[None]:
    """While active, modules compute nothing: each returns `make(args, kwargs)`, whatever hooks of others do to it.

    Raises:
        NormlabError: at the end, where one that must run was not called.
    """
    ran: set[nn.Module] = set()

    def replaced(module: nn.Module, make: Make, *args: Any, **kwargs: Any) -> Any:
        ran.add(module)
        return make(args, kwargs)

    forwards = [(module, vars(module).get("forward")) for module, _ in calls]
    own = [
        (module, lambda _, args, kwargs, output, make=make: make(args, kwargs))
        for module, make in calls
        if module._forward_hooks
    ]
    try:
        for module, make in calls:
            vars(module)["forward"] = partial(replaced, module, make)  # a wrapper may hand on what is set on it
        with hooked(*own):
            yield
        if must_run:
            _require_run(module for module, _ in calls if module not in ran)
    finally:
        for module, forward in forwards:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward


@contextmanager
def without_head(where: Sites) -> Iterator[None]:
    """While active, the output embeddings return zeros for what they read after the last block."""
    model: Any = where.model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear):
        yield
        return
    forward = head.forward
    ended: list[bool] = []

    def make(args: tuple, kwargs: dict[str, Any]) -> Tensor:
        if not ended:
            return forward(*args, **kwargs)
        x = hidden_state(args, kwargs)[0]
        return x.new_zeros(*x.shape[:-1], head.out_features)

    last = where.blocks[-1].module
    with instead((head, make), must_run=False), hooked((last, lambda *_: ended.append(True)), must_run=False):
        yield


# -- the stream ------------------------------------------------------------------------------------------------------


def require_whole_stream(args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Refuse a block that is given and returns two tensors of the stream's shape, both new: their sum may be it."""
    x = hidden_state(args, kwargs)[0]
    given = [v for v in (*args, *kwargs.values()) if is_activation(v) and v.shape == x.shape]
    returned = [v for v in outputs_of(output) if is_activation(v) and v.shape == x.shape]
    new = [v for v in returned if not any(same_tensor(v, one) for one in given)]
    if len(given) > 1 and len(new) > 1:
        raise NormlabError(
            "a block is given and passes on two tensors of the stream's shape, as where the residual is kept apart "
            "from what the last branch adds: which sum of them is the residual stream cannot be told"
        )


def stream_through(args: tuple, kwargs: dict[str, Any], output: Any) -> tuple[Tensor, Tensor]:
    """The residual stream before and after a block, (batch, length, width).

    Raises:
        NormlabError: several streams, or one in two parts.
    """
    require_whole_stream(args, kwargs, output)
    before, after = hidden_state(args, kwargs)[0], output_tensor(output)
    require_rows(before)
    require_one_stream(before, after)
    return before, after


def require_rows(x: Tensor) -> None:
    """Refuse an input of a block that is not (batch, length, width)."""
    if x.ndim != 3:
        raise NormlabError(
            f"a block is given {' x '.join(map(str, x.shape))} numbers: several residual streams, or tokens that are "
            "not in rows; this compares one stream of (batch, length, width)"
        )


# -- what modules return instead -------------------------------------------------------------------------------------


def return_input(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Make a block the identity; a forward hook."""
    return with_output(output, hidden_state(args, kwargs)[0])


def return_zero(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Make a branch add nothing; a forward hook."""
    return with_output(output, torch.zeros_like(output_tensor(output)))


def residual_in(args: tuple, kwargs: dict[str, Any], output: Any) -> Tensor | None:
    """The residual among the arguments of a branch that returns it with what it adds: the last of two activations."""
    shape = output_tensor(output).shape
    like = [v for v in (*args, *kwargs.values()) if is_activation(v) and v.shape == shape]
    return like[-1] if 0 < len(like) < 3 else None


def return_residual(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Make a branch that returns the stream with itself added add nothing; a forward hook."""
    residual = residual_in(args, kwargs, output)
    assert residual is not None
    return with_output(output, residual)
