"""A model's passes in experiments and in `diff`: uncompiled, with hooks that must run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.hooks import EXPERIMENTS, uncompiled
from normlab.probes.layout import (
    find_output,
    hidden_state,
    is_activation,
    like,
    output_tensor,
    outputs_of,
    replaced,
    require_one_stream,
    same_tensor,
    with_output,
)
from normlab.probes.record import Recorder, record
from normlab.probes.sites import Sites
from normlab.probes.stream_sums import passes_on

Hook = Callable[..., Any]
Make = Callable[[tuple, dict[str, Any]], Any]  # what a module returns instead, of its arguments


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's former mode after.

    Modes are set by `train`, as modules may do more then: loralib's merge their weights. Recordings that were opened
    before leave out what runs inside.
    """
    modes = [(module, module.training) for module in model.modules()]  # each before its children
    EXPERIMENTS.running += 1
    try:
        model.eval()
        yield
    finally:
        EXPERIMENTS.running -= 1
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)


def called(model: nn.Module, inputs: dict[str, Any], *args: Any) -> Any:
    """The model's output, uncompiled: compiled code ignores hooks that are added later."""
    with uncompiled(model):
        return model(*args, **inputs)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that torch.compile, DDP or a wrapper of one child wraps."""
    inner: Any = getattr(model, "_orig_mod", getattr(model, "module", None))
    is_wrapper = isinstance(inner, nn.Module) and [*model.children()] == [inner] and not model._parameters
    return unwrapped(inner) if is_wrapper else model


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
    stream: Stream, hook: Hook, layers: range | None = None, before: Hook | None = None
) -> AbstractContextManager[None]:
    """`hooked` with one hook (layer, module, args, kwargs, output) on every block, for one pass.

    The hook is given the stream as it entered, though the block may have written into it. It may run its block again,
    which it does not see.

    Args:
        stream: that of the blocks.
        hook: what is called.
        layers: only at these; default: at all.
        before: is called as (layer, args, kwargs) before a block runs.

    Raises:
        NormlabError: in the pass, where a block runs twice; after it, where one did not run.
    """
    ran: set[int] = set()
    inside: list[int] = []
    first: list[tuple[Tensor, Tensor]] = []  # what block 1 read and returned, while `settles`
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
        if first:
            with torch._C.DisableTorchFunction():  # a look is no read of the model's
                stream.settle(*first.pop(), stream.before(args, kwargs))
        given[layer] = stream.copied_arguments(args, kwargs)
        if before is not None:
            before(layer, *given[layer])

    def leave(layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if inside:
            return None
        inside.append(layer)
        call = given.pop(layer)
        if layer == stream.sites.layers[0] and stream.settles:
            first.append((stream.before(*call), stream.total(output)))
        try:
            return hook(layer, module, *call, output)
        finally:
            inside.clear()

    blocks = [block for block in stream.sites.blocks if layers is None or block.layer in layers]
    starts = [(block.module, partial(enter, block.layer)) for block in blocks]
    return hooked(*((block.module, partial(leave, block.layer)) for block in blocks), before=starts)


def see_blocks(stream: Stream, run: Callable[[], Any], hook: Hook) -> None:
    """`run` a pass of the model under `on_blocks`; `hook` may ask for the stream."""

    def once() -> None:
        with on_blocks(stream, hook):
            run()

    stream.watched(once, run)


@contextmanager
def forwards(computing: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """While active, these functions compute what modules return, in place of their own `forward`."""
    own = {module: forward for module in computing if (forward := vars(module).get("forward")) is not None}
    try:
        for module, forward in computing.items():
            vars(module)["forward"] = forward  # a wrapper may hand on what is set on it
        yield
    finally:
        for module in computing:
            vars(module).pop("forward", None)
        for module, forward in own.items():
            vars(module)["forward"] = forward


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

    own = [
        (module, lambda _, args, kwargs, output, make=make: make(args, kwargs))
        for module, make in calls
        if module._forward_hooks
    ]
    with forwards({module: partial(replaced, module, make) for module, make in calls}), hooked(*own):
        yield
    if must_run:
        _require_run(module for module, _ in calls if module not in ran)


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
        x = hidden_state(args, kwargs)
        return x.new_zeros(*x.shape[:-1], head.out_features)

    last = where.blocks[-1].module
    with instead((head, make), must_run=False), hooked((last, lambda *_: ended.append(True)), must_run=False):
        yield


# -- the stream ------------------------------------------------------------------------------------------------------


class _TwoTensors(Exception):
    """A block has returned two tensors of the stream's shape, and whether the stream is their sum is not known."""


class _Outside(Exception):
    """Block 2 reads what block 1 has read plus what it has returned."""


class _Between(Exception):
    """Block 2 reads neither that nor what block 1 has returned."""


class Stream:
    """The residual stream in the calls of a model's blocks: what they read and return of it, and what they are handed.

    It is one tensor; or the sum of two, where a block passes on its last branch and the residual apart (mamba_ssm,
    flash_attn, vLLM) and the next one adds them. Which of the two is told by a recording, once a block has returned two
    tensors of one shape.

    A model may add the residual itself, x + block(x). That is told by what block 2 reads in the first pass; of a single
    block by what the modules after it read, else by whether it adds up. Skipping a block then makes it return zero.

    Attributes:
        settles: where the residual is added is being found out; the pass may be begun again once block 2 is reached.
    """

    def __init__(self, where: Sites):
        self.sites = where
        self.settles = False
        self._is_outside: bool | None = None  # the model adds the residual; None: no pass was seen yet
        self._is_sum: bool | None = None  # None: no block has returned two tensors yet
        self._block = where.blocks[0].module
        self._shape: torch.Size | None = None  # of the stream, as a block has read it

    def watched(self, watch: Callable[[], Any], run: Callable[[], Any]) -> Any:
        """`watch()`, which calls `run`, a pass of the model, under hooks that ask for the stream.

        It is called again where blocks return two tensors, or block 2 reads another one than block 1 has returned.

        Raises:
            NormlabError: where the residual is added cannot be told.
        """
        while True:
            self.settles = self._is_outside is None
            try:
                result = watch()
            except _TwoTensors:
                self._is_sum = self._recorded(run).joins
            except _Outside:
                self._is_outside = True
            except _Between:
                self._is_outside = False
                if not self._adds_up(self._recorded(run)):
                    raise NormlabError(
                        "block 2 reads neither what block 1 returns nor that added to what it read: where the residual "
                        "is added cannot be told"
                    ) from None
            else:
                if self._is_outside is None:
                    self._is_outside = self.sites.depth == 1 and self._is_added_after(run)
                    if self._is_outside:  # what has been seen is not the stream
                        continue
                return result
            finally:
                self.settles = False

    def _is_added_after(self, run: Callable[[], Any]) -> bool:
        """True if the model adds what the only block returns to what it has read."""
        after = _After(self)
        with torch.no_grad(), after.watching():
            run()
        if after.is_added is not None:
            return after.is_added
        if after.is_of_other_shape or self._adds_up(self._recorded(run)):
            return False
        raise NormlabError(
            "there is one block, which is not its input plus what its branches add, and nothing after it shows that it "
            "reads its output or both added: where the residual is added cannot be told"
        )

    def _adds_up(self, recorder: Recorder) -> bool:
        """True if block 1 was found to be its input and what its branches add."""
        return any(layer == self.sites.blocks[0].layer for _, layer in recorder.branches)

    def _recorded(self, run: Callable[[], Any]) -> Recorder:
        with torch.no_grad(), record(self.sites, ["relative_contribution"], masks=["all"]) as recorder:
            run()
        return recorder

    def settle(self, read: Tensor, returned: Tensor, x: Tensor) -> None:
        """Compare what block 2 reads, `x`, with what block 1 has read and returned; ends the pass if they differ."""
        if not same_tensor(x, returned) and x.shape == read.shape == returned.shape:
            held = passes_on(read, returned, x)
            if held in ("sum", "other"):
                raise _Outside if held == "sum" else _Between

    def before(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """The stream that a block reads."""
        return self._sum(self.given(args, kwargs))

    def _read(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        return hidden_state(args, kwargs, self._block)

    def after(self, args: tuple, kwargs: dict[str, Any], output: Any) -> Tensor:
        """The stream that a block passes on.

        Raises:
            NormlabError: it is in two parts, and which sum of them it is cannot be told.
        """
        x = self._read(args, kwargs)
        self._shape = x.shape
        if self._is_sum is None and like(output_tensor(output, x.shape), outputs_of(output)):
            raise _TwoTensors
        if not self._is_sum:
            _require_whole(x, (*args, *kwargs.values()), output)
        total = self.total(output)
        return self.before(args, kwargs) + total if self._is_outside else total

    def total(self, output: Any) -> Tensor:
        """What a block returns of the stream, of an output for which `after` was asked."""
        return self._sum(self.returned(output))

    def states(self, entered: Iterable[Tensor], outputs: Iterable[Any]) -> list[Tensor]:
        """h_0 .. h_L, of what entered block 1 and what the blocks returned."""
        states = [*entered, *map(self.total, outputs)]
        return list(accumulate(states)) if self._is_outside else states

    def through(self, args: tuple, kwargs: dict[str, Any], output: Any) -> tuple[Tensor, Tensor]:
        """The residual stream before and after a block, (batch, length, width).

        Raises:
            NormlabError: several streams, or one in two parts that cannot be told.
        """
        before, after = self.before(args, kwargs), self.after(args, kwargs, output)
        require_rows(before)
        require_one_stream(before, after)
        return before.to(after.device), after  # blocks may be on several devices, and be handed what they move

    def returned(self, output: Any) -> list[Tensor]:
        """The tensors of a block's output whose sum is the stream."""
        return self._parts(output_tensor(output, self._shape), outputs_of(output))

    def put(self, args: tuple, kwargs: dict[str, Any], output: Any, x: Tensor) -> Any:
        """A block's output with `x` for the stream that it passes on.

        Raises:
            NormlabError: it returns a tensor of the shape of `x` after one of another shape.
        """
        x = x - self.before(args, kwargs) if self._is_outside else x
        self._shape = x.shape
        parts = self.returned(output)
        if parts[0].shape != x.shape and like(x, outputs_of(output)):
            raise NormlabError(
                f"a block returns {' x '.join(map(str, parts[0].shape))} numbers before one of the stream's shape: "
                "which of them it passes on cannot be told"
            )
        return replaced(output, _in_place_of(parts, x))

    def handed(self, args: tuple, kwargs: dict[str, Any], x: Tensor) -> tuple[tuple, dict[str, Any]]:
        """A block's arguments with `x` for the stream that it reads."""
        changes = _in_place_of(self.given(args, kwargs), x)
        return replaced(args, changes), replaced(kwargs, changes)

    def copied(self, output: Any) -> Any:
        """A block's output with a copy of the stream: later blocks may write into it."""
        return replaced(output, [(part, part.clone()) for part in self.returned(output)])

    def copied_arguments(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """A block's arguments with a copy of the stream."""
        changes = [(part, part.clone()) for part in self.given(args, kwargs)]
        return replaced(args, changes), replaced(kwargs, changes)

    def pass_on(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Make a block the identity; a forward hook."""
        return self.put(args, kwargs, output, self.before(args, kwargs))

    def given(self, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors among a block's arguments whose sum is the stream that it reads."""
        return self._parts(self._read(args, kwargs), (*args, *kwargs.values()))

    def _parts(self, x: Tensor, values: Iterable[Any]) -> list[Tensor]:
        """The tensors among values whose sum is the stream; `x` is the first of them."""
        parts = [x, *like(x, values)] if self._is_sum else [x]
        if len(parts) > 2:
            raise NormlabError(
                f"a block is given or returns {len(parts)} tensors of the stream's shape: which two of them make up "
                "the residual stream cannot be told"
            )
        return parts

    @staticmethod
    def _sum(parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


class _After:
    """What modules read after the only block of a stream has run.

    A module that returns what it reads, such as a dropout, does not show that the block's output is the stream. Nor
    does one whose own output is then added to what the block has read.
    """

    def __init__(self, stream: Stream):
        self._stream = stream
        self._block = stream.sites.blocks[0].module
        self._read: Tensor | None = None  # by the block; these are copies, which may be written into later
        self._returned: Tensor | None = None
        self._made: list[Tensor] = []  # what modules have made of what the block returned
        self._readers: set[nn.Module] = set()  # that are given what the block returned
        self._is_sum_read = self._is_output_read = self._is_made_added = False

    @property
    def is_added(self) -> bool | None:
        """Whether the model adds what the block returns to what it has read; None where no module tells."""
        if self._is_sum_read:
            return True
        return None if self._is_made_added or not self._is_output_read else False

    @property
    def is_of_other_shape(self) -> bool:
        """True if the block reads and returns streams of different shapes, which cannot be added."""
        assert self._read is not None and self._returned is not None
        return self._read.shape != self._returned.shape

    def watching(self) -> AbstractContextManager[None]:
        """Hooks for one pass."""
        inside = {*self._block.modules()}
        outside = [module for module in self._stream.sites.model.modules() if module not in inside]
        return hooked(
            (self._block, self._leave),
            *((module, self._made_by) for module in outside),
            before=[(self._block, self._enter), *((module, self._given) for module in outside)],
            must_run=False,
        )

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._read = self._stream.before(args, kwargs).clone()

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self._returned = self._stream.total(output).clone()

    def _given(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            held = self._compared(self._returned, value)
            self._is_sum_read |= held == "sum"
            self._is_made_added |= any(self._compared(made, value) == "sum" for made in self._made)
            if held in ("same", None):
                self._readers.add(module)

    def _made_by(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if module in self._readers:
            self._readers.remove(module)
            made = find_output(output)
            if self._compared(self._returned, made) not in ("same", None):
                self._is_output_read = True
                if made is not None and self._returned is not None and made.shape == self._returned.shape:
                    self._made.append(made.clone())

    def _compared(self, returned: Tensor | None, x: Any) -> str | None:
        """`passes_on` of any value; what is no tensor of as many numbers is another."""
        read = self._read
        if read is None or returned is None or not is_activation(x):
            return "other"
        if read.shape != returned.shape or x.numel() != read.numel() or x.shape[-1] != read.shape[-1]:
            return "other"
        with torch._C.DisableTorchFunction():  # a look is no read of the model's
            return passes_on(read, returned, x.reshape(read.shape))


def _in_place_of(parts: Sequence[Tensor], x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What makes up the stream `x` in place of these parts, where they are: the widest is `x`, another is zero."""
    widest = max(parts, key=lambda part: part.element_size())
    return [(part, x.to(part) if part is widest else torch.zeros_like(part)) for part in parts]


def _require_whole(x: Tensor, values: Iterable[Any], output: Any) -> None:
    """Refuse a block that is given and returns two tensors of the stream's shape, both new: their sum may be it."""
    given = [x, *like(x, values)]
    new = [v for v in like(x, outputs_of(output)) if not any(same_tensor(v, one) for one in given)]
    if len(given) > 1 and len(new) > 1:
        raise NormlabError(
            "a block is given and passes on two tensors of the stream's shape, as where the residual is kept apart "
            "from what the last branch adds: which sum of them is the residual stream cannot be told"
        )


def require_rows(x: Tensor) -> None:
    """Refuse an input of a block that is not (batch, length, width)."""
    if x.ndim != 3:
        raise NormlabError(
            f"a block is given {' x '.join(map(str, x.shape))} numbers: several residual streams, or tokens that are "
            "not in rows; this compares one stream of (batch, length, width)"
        )


# -- what modules return instead -------------------------------------------------------------------------------------


def return_zero(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Make a branch add nothing; a forward hook."""
    return with_output(output, torch.zeros_like(output_tensor(output)))


def residual_in(args: tuple, kwargs: dict[str, Any], output: Any) -> Tensor | None:
    """The residual among the arguments of a branch that returns it with what it adds: the last of two activations."""
    shape = output_tensor(output).shape
    found = [v for v in (*args, *kwargs.values()) if is_activation(v) and v.shape == shape]  # it may be written into
    return found[-1] if 0 < len(found) < 3 else None


def return_residual(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Make a branch that returns the stream with itself added add nothing; a forward hook."""
    residual = residual_in(args, kwargs, output)
    assert residual is not None
    return with_output(output, residual)
