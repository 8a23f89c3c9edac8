"""`KeptPass`: a pass of a model whose states are kept, so that later passes compute only what a change reaches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from normlab.probes.layout import find_output, output_tensor, outputs_of, with_output
from normlab.probes.passes import Hook, Make, Stream, hooked, instead, on_blocks
from normlab.probes.sites import Sites, stacks_of


class KeptPass:
    """A pass whose states are kept, one per block. Later passes compute only what a change reaches.

    A later pass is the model's own call. Embeddings, masks and head are the model's own. Blocks before the change
    return copies of their kept outputs. So does an encoder that had run before them. Skipped modules compute nothing.

    Two kinds of model compute everything. In one, a block reads what another made and did not return, such as shared
    keys and values. In the other, blocks do not run in the order in which they are listed.

    Args:
        stream: that of the blocks.

    Attributes:
        read_by: layer -> the layers that read what it made and did not return. 0 is the model outside its blocks.
    """

    def __init__(self, stream: Stream):
        self.read_by: dict[int, set[int]] | None = None  # None: it has not been looked for
        self._stream = stream
        self._blocks = {block.index: block.module for block in stream.sites.blocks}
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
        result, read_by = self._stream.watched(whole_pass, run)
        if self.read_by is None:
            if read_by:  # what a first pass makes for all later ones, such as a table of positions, is not shared
                result, read_by = whole_pass()
            self.read_by = read_by
        return result

    def _keep(
        self, run: Callable[[], Any], branches: Sequence[nn.Module], see: Hook | None
    ) -> tuple[Any, dict[int, set[int]]]:
        """What `run` returns, and `read_by` as this pass shows it; {} where it is known."""
        self._entered, self._kept, self._known = [], {}, {}
        watch = _SideReads() if self.read_by is None else None
        ran: set[nn.Module] = set()

        def start(number: int, args: tuple, kwargs: dict[str, Any]) -> None:
            if watch is not None:
                watch.running = number
            if number > 0 and not self._entered:
                self._entered.append(self._stream.before(args, kwargs))

        def leave(number: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if watch is not None:
                watch.returned(output)
            if number > 0:
                self._stream.after(args, kwargs, output)  # refuses one in parts
                if see is not None:
                    see(number, module, args, kwargs, output)
            elif self._entered or module in ran:  # it is not known to be the same in later passes
                self._kept.pop(module, None)
                return
            ran.add(module)
            self._kept[module] = self._copied(output)

        def measure(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            x = output_tensor(output)
            if _stand_alone(output, [x]):
                self._known[module] = with_output(output, x.new_zeros(()).expand(x.shape))

        beside = {module: -i for i, module in enumerate(self._beside, start=1)}
        with (
            hooked(
                *((module, partial(leave, number)) for module, number in beside.items()),
                before=[(m, lambda _, *call, number=number: start(number, *call)) for m, number in beside.items()],
                must_run=False,
            ),
            hooked(*((module, measure) for module in branches)),
            on_blocks(self._stream, leave, before=start),
            watch or nullcontext(),
        ):
            return run(), {} if watch is None else watch.read_by

    @property
    def _may_begin_late(self) -> bool:
        blocks = [module for module in self._kept if module not in self._beside]
        return not self.read_by and blocks == [*self._blocks.values()]

    def _copied(self, output: Any) -> Any:
        return output if find_output(output) is None else self._stream.copied(output)

    def _copy(self, module: nn.Module, *_: Any) -> Any:
        return self._copied(self._kept[module])

    def _begin_at(self, layer: int) -> list[tuple[nn.Module, Make]]:
        """The modules before a layer, each with a function that returns its kept output."""
        if not self._may_begin_late:
            return []
        known = [module for module in self._kept if module in self._beside]
        known += [module for index, module in self._blocks.items() if index < layer]
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

    def passing_on(self, h: Tensor) -> AbstractContextManager[None]:
        """While active, no block computes anything: each returns `h`, with what else it returned in the kept pass."""
        calls = [(module, partial(self._passed_on, module, h)) for module in self._blocks.values()]
        return instead(*calls)

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
        result = func(*args, **(kwargs or {}))
        in_place = getattr(func, "__name__", "").endswith("_")
        if not in_place and any(result is x for x in given):
            return result  # neither read nor new, as what is moved to where it is
        for x in given:
            of_x, maker = self._made.get(id(x), (None, self.running))
            if maker != self.running and of_x is not None and of_x() is x:
                self.read_by.setdefault(maker, set()).add(self.running)
        if self.running:
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


def _stand_alone(output: Any, parts: Sequence[Tensor]) -> bool:
    """True if a module returned these tensors and nothing else that it computed."""
    others = (leaf for leaf in tree_leaves(output) if not any(leaf is part for part in parts))
    return all(isinstance(leaf, int | float | str | None) for leaf in others)
