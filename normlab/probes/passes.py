"""A model's passes in experiments: with hooks that must run, and without computing again what is known.

`evaluating`             evaluation mode
`hooked`, `on_blocks`    hooks for one pass
`instead`                modules that return something else and compute nothing
`stream_through`         the residual stream before and after a block
`KeptPass`               a pass whose states are kept: later passes begin behind them
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from normlab.errors import NormlabError
from normlab.probes.layout import (
    find_output,
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
from normlab.probes.sites import Sites, stacks_of

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


def called(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The model's output, uncompiled: compiled code ignores hooks that are added later."""
    with uncompiled(model):
        return model(**inputs)


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
        given[layer] = _with_copy(args, kwargs)
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


def _with_copy(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
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
            module.forward = partial(replaced, module, make)
        with hooked(*own):
            yield
        if must_run:
            _require_run(module for module, _ in calls if module not in ran)
    finally:
        for module, forward in forwards:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward


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
    """The residual among the arguments of a branch that returns it with what it adds: the one beside what it reads."""
    shape = output_tensor(output).shape
    like = [v for v in (*args, *kwargs.values()) if is_activation(v) and v.shape == shape]
    return like[-1] if 0 < len(like) < 3 else None


def return_residual(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Make a branch that returns the stream with itself added add nothing; a forward hook."""
    residual = residual_in(args, kwargs, output)
    assert residual is not None
    return with_output(output, residual)


def _stands_alone(output: Any, x: Tensor) -> bool:
    """True if a module returned `x` and nothing else that it computed."""
    return all(leaf is x or isinstance(leaf, int | float | str | None) for leaf in tree_leaves(output))


# -- passes that begin behind a kept state ---------------------------------------------------------------------------


class KeptPass:
    """A pass of the model whose blocks' outputs are kept, so that later passes compute only what a change reaches.

    A later pass is the model's own call: its embeddings, its masks, what it does between blocks, its head. Blocks
    before the change return copies of what they returned in the kept pass. So do other stacks that had run before them,
    such as an encoder. Skipped blocks and branches compute nothing. Holds one state per block.

    Everything is computed, however, where a block reads what another one made and did not return (shared keys and
    values), or where blocks run in another order than they are listed.

    Args:
        where: the blocks.

    Attributes:
        read_by: layer -> the layers that read what it made, besides what it returned; 0: the model outside its blocks.
    """

    def __init__(self, where: Sites):
        self.read_by: dict[int, set[int]] | None = None  # None: it has not been looked for
        self._where = where
        self._blocks = {block.index: block.module for block in where.blocks}
        self._beside = _beside(where)
        self._entered: list[Tensor] = []
        self._kept: dict[nn.Module, Any] = {}  # what modules returned, in the order in which they did
        self._known: dict[nn.Module, Any] = {}  # what branches return, by shape: the activation is zero

    @property
    def states(self) -> list[Tensor]:
        """h_0 .. h_L of the kept pass: what entered block 1, what the blocks returned."""
        return [*self._entered, *(output_tensor(self._kept[module]) for module in self._blocks.values())]

    def readers(self, layers: range) -> list[int]:
        """The other layers that read what these make besides the stream."""
        read_by = self.read_by or {}
        return sorted(set().union(*(read_by.get(layer, ()) for layer in layers)) - {0, *layers})

    def keep(self, run: Callable[[], Any], branches: Iterable[nn.Module] = (), see: Hook | None = None) -> Any:
        """Keep the states of `run`, which calls the model; returns what it does.

        Args:
            run: may be called twice.
            branches: modules that `changed` may change.
            see: a hook of every block, as for `on_blocks`.

        Raises:
            NormlabError: a block runs twice or not at all, or the residual stream is in two parts.
        """
        result = self._keep(run, branches, see, watch := None if self.read_by is not None else _SideReads())
        if watch is not None and watch.read_by:
            # What a first pass makes for all later ones, such as tables of a rotary embedding, is not shared.
            result = self._keep(run, branches, see, watch := _SideReads())
        if watch is not None:
            self.read_by = watch.read_by
        return result

    def _keep(
        self, run: Callable[[], Any], branches: Iterable[nn.Module], see: Hook | None, watch: _SideReads | None
    ) -> Any:
        self._entered, self._kept, self._known = [], {}, {}
        ran: set[nn.Module] = set()

        def start(number: int, args: tuple, kwargs: dict[str, Any]) -> None:
            if watch is not None:
                watch.running = number
            if number > 0 and not self._entered:
                self._entered.append(hidden_state(args, kwargs)[0])

        def leave(number: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if watch is not None:
                watch.returned(output)
            x = find_output(output)
            if number > 0:
                x = output_tensor(output)
                require_whole_stream(args, kwargs, output)
                if see is not None:
                    see(number, module, args, kwargs, output)
            elif self._entered or module in ran:  # it is not known to be the same in later passes
                self._kept.pop(module, None)
                return
            ran.add(module)
            self._kept[module] = output if x is None else with_output(output, x.clone())

        def measure(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            x = output_tensor(output)
            if _stands_alone(output, x):
                self._known[module] = with_output(output, x.new_zeros(()).expand(x.shape))

        beside = {module: -i for i, module in enumerate(self._beside, start=1)}
        with (
            hooked(
                *((module, partial(leave, number)) for module, number in beside.items()),
                before=[(m, lambda _, *call, number=number: start(number, *call)) for m, number in beside.items()],
                must_run=False,
            ),
            hooked(*((module, measure) for module in branches)),
            on_blocks(self._where, leave, before=start),
            watch or nullcontext(),
        ):
            return run()

    @property
    def _may_begin_late(self) -> bool:
        blocks = [module for module in self._kept if module not in self._beside]
        return not self.read_by and blocks == [*self._blocks.values()]

    def _copy(self, module: nn.Module, *_: Any) -> Any:
        output = self._kept[module]
        x = find_output(output)
        return output if x is None else with_output(output, x.clone())

    def _begin_at(self, layer: int) -> list[tuple[nn.Module, Make]]:
        """What comes before a layer, and returns what it did."""
        if not self._may_begin_late:
            return []
        known = [module for module in self._kept if module in self._beside]
        known += [module for index, module in self._blocks.items() if index < layer]
        return [(module, partial(self._copy, module)) for module in known]

    @contextmanager
    def changed(self, first: int, changes: Iterable[tuple[nn.Module, Hook]]) -> Iterator[None]:
        """While active, forward hooks change what blocks or branches return, from block `first` on.

        Of what does not depend on it, nothing is computed: what comes before, and the changed modules themselves. The
        hooks must not look at values that a module returned.
        """
        calls, hooks = self._begin_at(first), []
        for module, hook in changes:
            kept = self._kept.get(module, self._known.get(module))
            # What else a block returns is as it was if the blocks before it are.
            is_known = kept is not None and (
                module is self._blocks[first] or module in self._known or _stands_alone(kept, output_tensor(kept))
            )
            if is_known and self._may_begin_late:
                calls.append((module, partial(_hooked_alone, hook, module, kept)))
            else:
                hooks.append((module, hook))
        with instead(*calls), _overridden(hooks):
            yield

    def passing_on(self, h: Tensor) -> AbstractContextManager[None]:
        """While active, no block computes anything: each returns `h`, with what else it returned in the kept pass."""
        calls = [(module, partial(self._passed_on, module, h)) for module in self._blocks.values()]
        return instead(*calls)

    def _passed_on(self, module: nn.Module, h: Tensor, *_: Any) -> Any:
        return with_output(self._kept[module], h.clone())


@contextmanager
def _overridden(hooks: Sequence[tuple[nn.Module, Hook]]) -> Iterator[None]:
    """Forward hooks that are given the stream as it entered, though their module may have written into it."""
    given: dict[nn.Module, tuple[tuple, dict[str, Any]]] = {}

    def start(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given[module] = _with_copy(args, kwargs)

    def end(hook: Hook, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        return hook(module, *given.pop(module), output)

    ends = [(module, partial(end, hook)) for module, hook in hooks]
    with hooked(*ends, before=[(module, start) for module, _ in hooks]):
        yield


def _hooked_alone(hook: Hook, module: nn.Module, kept: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return hook(module, args, kwargs, kept)


def _beside(where: Sites) -> list[nn.Module]:
    """The modules beside the way down to the blocks that hold other stacks: an encoder, a vision tower."""
    mine = {block.module for block in where.blocks}
    children = (child for above in where.ancestors for child in above.children() if child not in where.ancestors)
    return [child for child in children if mine.isdisjoint(child.modules()) and stacks_of(child)]


class _SideReads(TorchFunctionMode):
    """Finds blocks that read tensors which another block made and did not return.

    Attributes:
        running: the number of the block that runs; 0 outside of blocks.
        read_by: number -> the numbers of those that read what it made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.read_by: dict[int, set[int]] = {}
        self._made: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id, which is used again after a tensor's end

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = [*_tensors_in(args), *_tensors_in(kwargs)]
        for x in given:
            of_x, maker = self._made.get(id(x), (None, self.running))
            if maker != self.running and of_x is not None and of_x() is x:
                self.read_by.setdefault(maker, set()).add(self.running)
        result = func(*args, **(kwargs or {}))
        if self.running:
            in_place = getattr(func, "__name__", "").endswith("_")  # else what comes back as it went in is not new
            for x in _tensors_in(result):
                if in_place or not any(x is one for one in given):
                    self._made[id(x)] = (weakref.ref(x), self.running)
        return result

    def returned(self, output: Any) -> None:
        """The running block ends and returns `output`."""
        self.running = 0
        for x in _tensors_in(output):
            self._made.pop(id(x), None)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for inner in outputs_of(value):
            yield from _tensors_in(inner)
