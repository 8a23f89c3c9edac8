"""`KeptPass`: a pass of a model whose states are kept, so that later passes compute only what a change reaches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from normlab.probes.layout import find_output, output_tensor, outputs_of, replaced, with_output
from normlab.probes.passes import Hook, Make, Stream, hooked, instead, on_blocks
from normlab.probes.sites import Sites, stacks_of


class KeptPass:
    """A pass whose states are kept, one per block. Later passes compute only what a change reaches.

    A later pass is the model's own call. Embeddings, masks and head are the model's own. Blocks before the change
    return copies of their kept outputs. So does an encoder that had run before them. Skipped modules compute nothing.

    Two kinds of model compute everything. In one, a block reads what another made and kept, such as shared keys and
    values or a list of earlier outputs. In the other, blocks do not run in the order in which they are listed.

    Args:
        stream: that of the blocks.

    Attributes:
        read_by: layer -> the layers that read what it made, apart from the stream that they are handed. 0 is the model
            outside its blocks, which reads what a block kept.
    """

    def __init__(self, stream: Stream):
        self.read_by: dict[int, set[int]] | None = None  # None: it has not been looked for
        self._reads_what_is_kept = False
        self._stream = stream
        self._blocks = {block.layer: block.module for block in stream.sites.blocks}
        self._beside = _beside(stream.sites)
        self._entered: list[Tensor] = []
        self._kept: dict[nn.Module, Any] = {}  # what modules returned, in the order in which they did
        self._known: dict[nn.Module, Any] = {}  # what branches return, by shape: the activation is zero

    @property
    def states(self) -> list[Tensor]:
        """h_0 .. h_L of the kept pass: what entered block 1, what the blocks returned."""
        return self._stream.states(self._entered, [self._kept[module] for module in self._blocks.values()])

    def readers(self, layers: Collection[int]) -> list[int]:
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
            NormlabError: a block runs twice or not at all, or the residual stream is in two parts that cannot be told.
        """
        whole_pass = partial(self._keep, run, list(branches), see)
        result, watch = self._stream.watched(whole_pass, run)
        if watch is not None:
            if watch.is_kept:  # what a first pass makes for all later ones, such as a table of positions, is not shared
                result, watch = whole_pass()
            self.read_by, self._reads_what_is_kept = watch.read_by, watch.is_kept
        return result

    def _keep(
        self, run: Callable[[], Any], branches: Sequence[nn.Module], see: Hook | None
    ) -> tuple[Any, _SideReads | None]:
        """What `run` returns, and what this pass shows of reads; None where they are known."""
        self._entered, self._kept, self._known = [], {}, {}
        watch = _SideReads() if self.read_by is None else None
        ran: set[nn.Module] = set()

        def start(number: int, args: tuple, kwargs: dict[str, Any]) -> None:
            if not self._entered:
                self._entered.append(self._stream.before(args, kwargs))

        def enter(number: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if watch is not None:
                watch.enter(number, self._stream.given(args, kwargs) if number > 0 else ())

        def leave(number: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
            if watch is not None and number > 0:
                output = watch.leave(output, self._stream.returned(output))
            elif watch is not None:
                watch.leave_beside(output)
            if number > 0:
                self._stream.after(args, kwargs, output)  # refuses one in parts
                if see is not None:
                    see(number, module, args, kwargs, output)
            elif self._entered or module in ran:  # it is not known to be the same in later passes
                self._kept.pop(module, None)
                return None
            ran.add(module)
            self._kept[module] = self._copied(output)
            return output

        def measure(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            x = output_tensor(output)
            if _stand_alone(output, [x]):
                self._known[module] = with_output(output, x.new_zeros(()).expand(x.shape))

        beside = {module: -i for i, module in enumerate(self._beside, start=1)}
        numbered = beside | {module: layer for layer, module in self._blocks.items()}
        with (
            hooked(*((module, partial(leave, number)) for module, number in beside.items()), must_run=False),
            hooked(*((module, measure) for module in branches)),
            on_blocks(self._stream, leave, before=start),
            hooked(before=[(m, partial(enter, number)) for m, number in numbered.items()], must_run=False),
            watch or nullcontext(),
        ):
            return run(), watch

    @property
    def _may_begin_late(self) -> bool:
        blocks = [module for module in self._kept if module not in self._beside]
        return not self._reads_what_is_kept and blocks == [*self._blocks.values()]

    def _copied(self, output: Any) -> Any:
        return output if find_output(output) is None else self._stream.copied(output)

    def _copy(self, module: nn.Module, *_: Any) -> Any:
        return self._copied(self._kept[module])

    def _begin_at(self, layer: int) -> list[tuple[nn.Module, Make]]:
        """The modules before a layer, each with a function that returns its kept output."""
        if not self._may_begin_late:
            return []
        known = [module for module in self._kept if module in self._beside]
        known += [module for other, module in self._blocks.items() if other < layer]
        return [(module, partial(self._copy, module)) for module in known]

    @contextmanager
    def changed(self, first: int, changes: Iterable[tuple[nn.Module, Hook]]) -> Iterator[None]:
        """While active, forward hooks change what blocks or branches return, from block `first` on.

        Neither what comes before nor the changed modules are computed. So hooks must not read what a module returned.
        """
        calls, hooks = self._begin_at(first), []
        for module, hook in changes:
            kept = self._kept.get(module, self._known.get(module))
            # What else a block returns is as it was if the blocks before it are.
            is_known = kept is not None and (
                module is self._blocks[first]
                or module in self._known
                or _stand_alone(kept, self._stream.returned(kept))
            )
            if is_known and self._may_begin_late:
                calls.append((module, partial(_hooked_alone, hook, module, kept)))
            else:
                hooks.append((module, hook))
        with instead(*calls), self._overridden(hooks):
            yield

    def passing_on(self, states: Iterable[Tensor]) -> AbstractContextManager[None]:
        """While active, no block computes anything.

        Each passes on its one of `states`, with what else it returned in the kept pass.
        """
        blocks = zip(self._blocks.values(), states, strict=True)
        return instead(*((module, partial(self._passed_on, module, h)) for module, h in blocks))

    def _passed_on(self, module: nn.Module, h: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self._stream.put(args, kwargs, self._kept[module], h.clone())

    @contextmanager
    def _overridden(self, hooks: Sequence[tuple[nn.Module, Hook]]) -> Iterator[None]:
        """Forward hooks that are given the stream as it entered, though their module may have written into it."""
        given: dict[nn.Module, tuple[tuple, dict[str, Any]]] = {}

        def start(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            given[module] = self._stream.copied_arguments(args, kwargs)

        def end(hook: Hook, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
            return hook(module, *given.pop(module), output)

        ends = [(module, partial(end, hook)) for module, hook in hooks]
        with hooked(*ends, before=[(module, start) for module, _ in hooks]):
            yield


def _hooked_alone(hook: Hook, module: nn.Module, kept: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return hook(module, args, kwargs, kept)


def _beside(where: Sites) -> list[nn.Module]:
    """The modules that hold other stacks: an encoder, a vision tower."""
    mine = {block.module for block in where.blocks}
    children = (child for above in where.ancestors for child in above.children() if child not in where.ancestors)
    return [child for child in children if mine.isdisjoint(child.modules()) and stacks_of(child)]


class _SideReads(TorchFunctionMode):
    """Finds blocks that read what another block made, apart from the stream that they are handed.

    What a block returns is handed to the model under another name. So what the model hands on is told from what blocks
    keep in a list or a buffer. Who made a number is known by its place in memory.

    Attributes:
        read_by: number -> the numbers of those that read what it made; 0 is outside of blocks.
        is_kept: something was read that the maker did not return, or written over after it was returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read_by: dict[int, set[int]] = {}
        self.is_kept = False
        self._running = 0
        self._stream: set[StorageWeakRef | None] = set()  # what the running block is handed as its stream
        self._made: dict[StorageWeakRef | None, int | Tensor] = {}  # who made it: one block, or each number's
        self._handed: dict[int, _Handed] = {}  # by id, which is used again after a tensor's end
        self._beside: set[StorageWeakRef | None] = set()  # what was returned besides the stream

    def enter(self, number: int, stream: Iterable[Tensor] = ()) -> None:
        """A block, or a module beside the blocks, begins."""
        with torch._C.DisableTorchFunction():  # a look at a tensor is no read
            self._running, self._stream = number, {_memory(x) for x in stream}

    def leave(self, output: Any, stream: Sequence[Tensor]) -> Any:
        """The running block ends: its output under other names, of which `stream` is the stream."""
        with torch._C.DisableTorchFunction():
            for x in _tensors_in(output):
                if not any(x is part for part in stream):
                    self._beside.add(_memory(x))
                    self.is_kept |= self._name_of(x) is None and bool(self._makers(x))  # others wrote into it
            changes = [(x, x.view_as(x)) for x in outputs_of(output) if isinstance(x, Tensor)]
        for x, renamed in changes:
            handed = self._name_of(x)  # what is passed on has been made by others
            makers = frozenset() if handed is None else handed.makers
            self._hand(renamed, any(x is part for part in stream), makers)
        for inner in outputs_of(output):
            for x in _tensors_in(inner) if isinstance(inner, tuple) else ():
                self._hand(x)
        self._running = 0
        return replaced(output, changes)

    def leave_beside(self, output: Any) -> None:
        """A module beside the blocks ends: what it returns is the same in later passes."""
        with torch._C.DisableTorchFunction():
            for x in _tensors_in(output):
                self._made.pop(_memory(x), None)
        self._running = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        read, index = [*_tensors_in(args), *_tensors_in({k: v for k, v in kwargs.items() if k != "out"})], ...
        made, written = list(_tensors_in(result)), list(_tensors_in(kwargs.get("out")))
        if name == "__setitem__":
            (target, index), read = args[:2], list(_tensors_in(args[1:]))
            written = [target]
        elif made and args and made[0] is args[0] and (name.endswith("_") or kwargs.get("inplace")):
            written = made
        if not written:
            memory = {_memory(x): x for x in read}
            views = [(x, memory[_memory(x)]) for x in made if _memory(x) in memory]
            for x, of in views:
                if (handed := self._name_of(of)) is not None and x is not of:
                    self._handed[id(x)] = handed._replace(tensor=weakref.ref(x))
            if name == "__get__" or (made and len(views) == len(made)):
                return result  # neither read nor new: a view, a shape, or what is moved to where it is
        makers = frozenset().union(*(self._read(x) for x in read))
        for x in written:
            self._write(x, index)
        for x in made if not written else ():
            self._make(x, makers)
        return result

    def _name_of(self, x: Tensor) -> _Handed | None:
        """What is known of a tensor that blocks returned, or of a view of it; None for any other."""
        handed = self._handed.get(id(x))
        return handed if handed is not None and handed.tensor() is x else None

    def _hand(self, x: Tensor, is_stream: bool = False, makers: frozenset[int] = frozenset()) -> None:
        self._handed[id(x)] = _Handed(weakref.ref(x), is_stream, makers)

    def _makers(self, x: Tensor) -> frozenset[int]:
        made = self._made.get(_memory(x), 0)
        makers = _place_in(made, x).unique().tolist() if isinstance(made, Tensor) else [made]
        return frozenset(makers) - {0, self._running}

    def _read(self, x: Tensor) -> frozenset[int]:
        """Note a read; what is made of `x` outside of blocks is made by these."""
        handed = self._name_of(x)
        makers = self._makers(x) | (handed.makers if handed is not None else frozenset())
        if handed is not None and handed.is_stream and (self._running <= 0 or _memory(x) in self._stream):
            return frozenset()
        if handed is None or self._running > 0:
            for maker in makers:
                self.read_by.setdefault(maker, set()).add(self._running)
            self.is_kept |= bool(makers) and handed is None
        return makers

    def _write(self, x: Tensor, index: Any) -> None:
        memory = _memory(x)
        self.is_kept |= memory in self._beside
        if not self._running or memory is None:
            return
        count, made = x.untyped_storage().nbytes() // x.element_size(), self._made.get(memory, 0)
        if index is ... and x.numel() == count:
            self._made[memory] = self._running
            return
        if not isinstance(made, Tensor):
            made = self._made[memory] = torch.full((count,), made, dtype=torch.int16, device=x.device)
        part = _place_in(made, x)
        part[index if part.shape == x.shape else ...] = self._running

    def _make(self, x: Tensor, makers: frozenset[int]) -> None:
        if self._running and (memory := _memory(x)) is not None:
            self._made[memory] = self._running
        elif makers:
            self._hand(x, makers=makers)


class _Handed(NamedTuple):
    """A tensor that the model has from a block's output."""

    tensor: weakref.ref[Tensor]
    is_stream: bool
    makers: frozenset[int]  # besides those of its memory


def _memory(x: Tensor) -> StorageWeakRef | None:
    """The memory of a tensor, as a key that no other memory will have; None where it has none of its own."""
    try:
        return StorageWeakRef(x.untyped_storage())
    except RuntimeError:  # sparse, or wrapped as by vmap
        return None


def _place_in(made: Tensor, x: Tensor) -> Tensor:
    """Of what is noted for each number of a memory, that of `x`; all of it where it was noted for another dtype."""
    if made.numel() * x.element_size() != x.untyped_storage().nbytes():
        return made
    return made.as_strided(x.shape, x.stride(), x.storage_offset())


_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)  # what most arguments are, besides tensors


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors_in(inner)
    elif not isinstance(value, _PLAIN) and (isinstance(value, Mapping) or is_dataclass(value)):
        for inner in outputs_of(value):
            yield from _tensors_in(inner)


def _stand_alone(output: Any, parts: Sequence[Tensor]) -> bool:
    """True if a module returned these tensors and nothing else that it computed."""
    others = (leaf for leaf in tree_leaves(output) if not any(leaf is part for part in parts))
    return all(isinstance(leaf, int | float | str | None) for leaf in others)
