"""`record`: a context manager that measures a model's layers while the caller runs it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.accumulate import Accumulator, Measurer
from normlab.probes.block_trace import BlockTrace, KnownBlock
from normlab.probes.decomposition import NormRead
from normlab.probes.forward_call import Call, LossTokens, Place
from normlab.probes.layout import (
    features_last,
    find_input,
    find_output,
    hidden_state,
    is_activation,
    is_channels_first,
    output_tensor,
    same_tensor,
    stream_of,
    with_argument,
)
from normlab.probes.metrics import MASKS, Metric, resolve_metrics
from normlab.probes.sites import Block, Sites, sites
from normlab.probes.statistics import AttentionWatch, mixers_of, routing_of
from normlab.probes.stats import LayerStats, manifest

GRADIENTS = "gradients"  # in `absent`: why the loss does not tell over how many labels it averages


def record(
    model: nn.Module | Sites,
    metrics: Sequence[str] | None = None,
    *,
    loss_tokens: LossTokens = None,
    masks: Sequence[str] = tuple(MASKS),
) -> Recorder:
    """Measure a model's layers while it runs.

        with record(model, metrics=["token_l2_mean", "grad_l2_mean"]) as rec:
            loss = model(**batch).loss
            rec.backward(loss)              # or loss.backward(), in training
        table = rec.stats().to_pandas()     # site, layer, metric, mask, value

    Sites, with h_l = output of block l:

        block_out                                  layer 0 = the tensor that enters block 1, layers 1..L = h_l
        attn_norm_in, mlp_norm_in, ...             what the norms read (see `normlab.probes.decomposition`)
        final_norm_in                              layer L
        attn, cross, mixer, mlp, block             what the branches add
        block_in_grad                              layer l = dLoss/dh_{l-1}
        attn_norm_in_grad, final_norm_in_grad, ... with respect to the tensor that enters the norm: its whole gradient,
                                                   the residual path included

    Gradients are of the loss *summed* over labels: the gradient that arrives is multiplied by `loss_tokens`. Of a block
    that passes on several streams (it has an ``enter``), `block_out` is what the next block reads of them. A block that
    runs again in one call is a further layer.

    Only whole forward passes count: one that raises leaves no trace. The model's outputs are bit-identical and its
    hooks untouched. Metrics that do not apply have no rows, nor has what does not add up: `manifest["absent"]` says
    why.

    Args:
        model: a module, or `sites(model, ...)` where its parts had to be named. Inside the context compiled code runs
            uncompiled, because it ignores new hooks.
        metrics: names from `METRICS`; default: the cheap activation metrics.
        loss_tokens: how many labels the loss averages over: a number, or a function of the call's `CallInputs`.
            By default the returned loss is compared with its logits' cross-entropy. 1 for a loss that is a sum. For a
            scaled loss (fp16 scaler, gradient accumulation) divide by the scale.
        masks: which token masks to report: "all" (padding excluded), "no_first" (and the first real token of each row).

    Raises:
        NormlabError: unknown metric or mask; gradient metrics under no_grad, without countable labels, or without a
            backward pass.
    """
    unknown = [mask for mask in masks if mask not in MASKS]
    if unknown or not masks:
        raise NormlabError(f"unknown masks {list(masks)!r}: choose from {', '.join(MASKS)}")
    where = model if isinstance(model, Sites) else sites(model)
    return Recorder(where, resolve_metrics(metrics), loss_tokens, masks)


def in_backward() -> bool:
    """True while autograd runs a backward pass in this thread: a forward that runs then is a checkpoint's."""
    return torch._C._current_graph_task_id() != -1


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


class _Hook:
    """A hook of the model that does nothing in its copies and pickles."""

    def __init__(self, act: Callable | None = None):
        self._act = act

    def __call__(self, *call: Any) -> Any:
        return None if self._act is None else self._act(*call)

    def __deepcopy__(self, memo: dict) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple:
        return _Hook, ()


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


class Recorder:
    """One recording and its hooks. Made by `record`; `stats()` gives the result at any time, also after the context.

    Attributes:
        sites: where is measured.
        metrics: what is measured.
        norm_sites: norm -> (site, layer), once the model has run.
        branches: (kind, layer) -> (the module whose output is added, how), once the model has run.
        absent: what could not be measured, and why.
        training_only: leave out calls of the model without gradients, such as an evaluation between two steps.
        training_first: once there is a call with gradients, do so, and forget the calls before it.
        trains: whether a call with gradients was measured.
        forgives: leave out the gradients of calls whose loss does not say how many labels it averages over, instead of
            an error.
    """

    training_only = training_first = trains = forgives = False

    def __init__(self, where: Sites, metrics: Sequence[Metric], loss_tokens: LossTokens, masks: Sequence[str]):
        self.sites = where
        self.metrics = tuple(metrics)
        self.norm_sites: dict[nn.Module, Place] = {}
        self.absent: dict[str, str] = {}
        self._measurer = Measurer(metrics)
        self.branches = self._measurer.branches
        self._accumulator = Accumulator(masks, self._measurer.statistics)
        self._has_gradients = "gradient" in self._measurer.kinds
        self._loss_tokens = loss_tokens
        self._handles: list[Any] = []
        self._eager: AbstractContextManager = nullcontext()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._root: Tensor | None = None  # where `backward` ends
        self._latest: Call | None = None
        self._known: dict[nn.Module, KnownBlock] = {}
        self._finished: list[Call] = []
        self._calls = 0
        self._idle_calls = 0
        self._layers = 0
        self._loss_labels: float | Tensor = 0.0

    # -- the context ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        if self._handles:
            raise NormlabError("this recording is already running: make another one with record(model)")
        if _runs_compiled(self.sites.model):
            self._eager = _UNCOMPILED
            self._eager.__enter__()
        try:
            self._attach()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._eager.__exit__(*exception)
        self._eager = nullcontext()
        if self._call is not None:
            self._call.stop_watching()
        self._root = None
        self._local = threading.local()

    def _attach(self) -> None:
        kinds, measurer = self._measurer.kinds, self._measurer
        for module in self.sites.ancestors:
            self._before(module, self._enter_call)
            self._after(module, self._leave_call, always=True)
        for block in self.sites.blocks:
            self._before(block.module, partial(self._block_in, block))
            self._after(block.module, partial(self._block_out, block), always="attention" in kinds)
            for norm in (*block.norms, *block.inner_norms, *block.activations):
                self._before(norm, partial(self._norm_in, block))
                self._returned(norm, BlockTrace.norm_done, norm)
            for branch in block.branches:
                self._read(branch.module, BlockTrace.branch_starts, branch)
                for module in dict.fromkeys((branch.module, branch.whole)):
                    self._returned(module, BlockTrace.branch_done, branch)
                routing = routing_of(branch.whole) if branch.kind == "mlp" and {"router", "load"} & kinds else None
                if routing is not None:
                    self._called(routing.scorer, measurer.router, routing)
                    for module in routing.takers:
                        self._read(
                            module, measurer.experts, routing, find=lambda args, kwargs: [*args, *kwargs.values()]
                        )
                        self._returned(module, measurer.experts, routing, find=lambda output: output)
            for kind, rule in mixers_of(block.module) if "streams" in kinds else ():
                self._read(rule, measurer.streams, rule, kind, find=lambda args, kwargs: args[0])
        for norm in self.sites.outer_norms:
            self._before(norm, self._outer_norm_in)

    def _before(self, module: nn.Module, act: Callable) -> None:
        self._handles.append(module.register_forward_pre_hook(_Hook(act), with_kwargs=True))

    def _after(self, module: nn.Module, act: Callable, always: bool = False) -> None:
        hook = _Hook(lambda m, args, output: act(output))
        self._handles.append(module.register_forward_hook(hook, always_call=always))

    def _read(self, module: nn.Module, act: Callable, *what: Any, find: Callable = find_input) -> None:
        """Call `act(trace, x, *what)` with what a module of the running block reads."""
        self._before(module, lambda m, args, kwargs: self._in_block(act, find(args, kwargs), what))

    def _returned(self, module: nn.Module, act: Callable, *what: Any, find: Callable = find_output) -> None:
        """Call `act(trace, x, *what)` with what a module of the running block returns."""
        self._after(module, lambda output: self._in_block(act, find(output), what))

    def _called(self, module: nn.Module, act: Callable, *what: Any) -> None:
        """Call `act(trace, x, output, *what)` with what a module of the running block has read and returns."""
        hook = _Hook(lambda m, args, kwargs, output: self._in_block(act, find_input(args, kwargs), (output, *what)))
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _in_block(self, act: Callable, x: Any, what: tuple) -> None:
        trace = self._trace
        if trace is not None and x is not None:
            act(trace, x, *what)

    # -- the model's call ----------------------------------------------------------------------------------------

    @property
    def mask_name(self) -> str | None:
        """The argument that masks padding among the tokens of the latest call; None for what is no text."""
        return None if self._latest is None else self._latest.mask_name

    @property
    def _call(self) -> Call | None:
        return None if self._left_out else getattr(self._local, "call", None)

    @property
    def _left_out(self) -> int:
        """Depth of the caller in a call that is not measured; 0 outside of one."""
        return getattr(self._local, "left_out", 0)

    def _leaves_out(self) -> bool:
        """True in such a call, and where one begins."""
        return self._left_out > 0 or (self.training_only and self._call is None and not torch.is_grad_enabled())

    @property
    def _trace(self) -> BlockTrace | None:
        """The block that runs in a forward pass of the caller's; a checkpoint's recomputation is none."""
        call = self._call
        return None if call is None or in_backward() else call.trace

    def _enter_call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if in_backward():
            return
        if self._leaves_out():
            self._local.left_out = self._left_out + 1
            return
        call = self._call
        if call is None or call.implicit:
            call = self._open_call()
        call.depth += 1
        call.inputs.add(module, args, kwargs)

    def _open_call(self, implicit: bool = False) -> Call:
        if self._has_gradients and not torch.is_grad_enabled():
            raise NormlabError(
                "gradient metrics need a forward pass with gradients: "
                "leave no_grad/inference_mode, or drop the grad_* metrics"
            )
        if self.training_first and not self.trains and torch.is_grad_enabled():
            self._forget()
            self.training_only = True
        self.trains |= torch.is_grad_enabled()
        self._flush()
        self._local.call = self._latest = call = Call(self._accumulator.masks, implicit)
        return call

    def _leave_call(self, output: Any) -> None:
        if in_backward():
            return
        if self._left_out:
            self._local.left_out -= 1
        call = self._call
        if call is None:
            return
        call.depth -= 1
        if self._has_gradients and output is not None:
            call.inputs.compare(output)
        if call.depth == 0:
            self._end_call(call, complete=output is not None)

    def _end_call(self, call: Call, complete: bool) -> None:
        self._local.call = None
        if complete and call.layer:
            for read in call.final:
                if read.layer == call.layer:
                    self.norm_sites[read.norm] = ("final_norm_in", call.layer)
                else:
                    read.site = None  # it read an earlier block's output: no final norm
            if self._has_gradients:
                try:
                    call.resolve_loss(self._loss_tokens)
                except NormlabError as error:
                    if not self.forgives:
                        call.close()
                        raise
                    call.absent[GRADIENTS] = str(error)
        call.close()
        if complete:
            with self._lock:
                if call.layer:
                    self._finished.append(call)
                    self._calls += 1
                    self._layers = max(self._layers, call.layer)
                else:
                    self._idle_calls += 1

    # -- blocks --------------------------------------------------------------------------------------------------

    def _block_in(self, block: Block, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        x, name = hidden_state(args, kwargs)
        known = self._known.get(module)
        if known is None:
            known = self._known.setdefault(module, KnownBlock(is_channels_first(module, x)))
        if in_backward():  # a checkpoint runs the block again
            latest = self._latest
            layer = self._local.recomputed = None if latest is None else latest.recomputed_layer(module, x)
            if layer is not None:
                self._measurer.gradient(latest, ("block_in", layer), x, known.channels_first, is_recomputed=True)
            return None
        if self._leaves_out():
            return None
        call = self._call
        if call is None or (call.implicit and block.index == 1):  # blocks run one by one: no padding is known
            call = self._open_call(implicit=True)
            if self._has_gradients:
                call.resolve_loss(self._loss_tokens)
        is_first, replaced = not call.runs, None
        others = (v for v in (*args, *kwargs.values()) if is_activation(v) and v.ndim == x.ndim == 3 and v is not x)
        layer = call.begin_layer(module, block.index, x, any(True for _ in others))
        if is_first and self._has_gradients:
            self._root = x
            if torch.is_grad_enabled() and not x.requires_grad:  # frozen: gradients must start here
                self._root = x.detach().requires_grad_()
                x = self._root.clone()  # a leaf may not be written to in place, its copy may
                replaced = with_argument(args, kwargs, name, x)
        entered = stream_of(module, x, known.channels_first)
        call.trace = BlockTrace(call, block, layer, entered, known, "branch" in self._measurer.kinds)
        self._measurer.block_start(call.trace, x, is_first)
        if "attention" in self._measurer.kinds:
            call.watch = AttentionWatch()
            call.watch.__enter__()
        return replaced

    def _block_out(self, block: Block, output: Any) -> None:
        call = self._call
        if call is None or in_backward():
            return
        watch = call.stop_watching()
        trace, call.trace = call.trace, None
        if output is None or trace is None:
            return
        x = output_tensor(output)
        following = self.sites.blocks[min(block.index, self.sites.depth - 1)]  # for the last one itself
        out = stream_of(following.module, x, trace.known.channels_first)
        layer = call.layer = trace.layer
        self._measurer.activation(call, ("block_out", layer), out)
        trace.finish(out)
        self.norm_sites |= {norm: (site, layer) for norm, site in trace.sites.items()}
        call.absent |= {f"{site} {layer}": reason for site, reason in trace.lost.items()}
        self._measurer.block_end(trace, out)
        if watch is not None:
            self._measurer.attention(trace, watch)
        trace.release()
        call.last_out = x
        if call.implicit and block.index == self.sites.depth:
            self._end_call(call, complete=True)

    # -- inside a block ------------------------------------------------------------------------------------------

    def _norm_in(self, block: Block, norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        trace, x = self._trace, find_input(args, kwargs)
        if x is None:
            return
        if trace is not None:
            view = trace.view(x, norm)
            read = trace.norm_starts(norm, view)
            if read is not None:
                ms, channels_first = kwargs.get("mean_square"), trace.known.channels_first
                self._measurer.norm_input(trace.call, read, x, view, ms, channels_first)
        elif in_backward() and norm in self.norm_sites:
            site, layer = self.norm_sites[norm]
            layer = getattr(self._local, "recomputed", None) or layer
            channels_first = self._known[block.module].channels_first
            self._measurer.gradient(self._latest, (site, layer), x, channels_first, norm, is_recomputed=True)

    # -- outside the blocks --------------------------------------------------------------------------------------

    def _outer_norm_in(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        call, x = self._call, find_input(args, kwargs)
        if call is None or call.last_out is None or x is None or in_backward():
            return
        last = self.sites.blocks[-1].module
        joins_streams = hasattr(last, "enter")  # then the norm reads one stream, made of several
        if same_tensor(x, call.last_out) or joins_streams:
            known = self._known.get(last)  # None for a norm between two stages
            channels_first = x.ndim > 3 and known is not None and known.channels_first
            read = NormRead(norm, call.layer, site="final_norm_in")
            call.final.append(read)
            view = features_last(x, channels_first, norm)
            self._measurer.norm_input(call, read, x, view, kwargs.get("mean_square"), channels_first)
            call.last_out = None

    # -- results -------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss` for the gradient metrics only: no parameter's `.grad` is made or changed.

        Runs `torch.autograd.grad` from `loss` to the tensor that enters block 1 in the latest forward. Reentrant
        gradient checkpointing does not allow that; call `loss.backward()` there.

        Raises:
            NormlabError: there is no such forward.
        """
        if self._root is None:
            raise NormlabError(
                "no forward to differentiate: ask for a grad_* metric and run the model inside record() first"
            )
        torch.autograd.grad(loss, self._root)
        self._root = None

    def stats(self, step: int | None = None) -> LayerStats:
        """Everything recorded so far. One transfer from each device. `step` becomes the table's `step` column.

        Raises:
            NormlabError: nothing ran, or gradient metrics were asked for and no backward pass ran.
        """
        self._flush()
        kinds = self._accumulator.kinds
        if self._calls == 0:
            why = "call the model (and backward, for grad_* metrics) inside record()"
            if self._idle_calls:
                first = self.sites.blocks[0].name
                why = (
                    f"the model ran, but no block like {first!r} did: take another stack from stacks(model), "
                    "and run the model outside of compiled functions"
                )
            raise NormlabError(f"nothing was recorded: {why}")
        if not kinds and self.absent:
            raise NormlabError(f"nothing could be measured: {next(iter(self.absent.values()))}")
        if self._has_gradients and "gradient" not in kinds and GRADIENTS not in self.absent:
            raise NormlabError(
                "grad_* metrics were asked for but no backward pass ran through these blocks: call loss.backward() or "
                "rec.backward(loss), of a loss that depends on them"
            )
        moments, arrays = self._accumulator.results()
        names = tuple(metric.name for metric in self.metrics)
        details = manifest(self.sites, self.metrics, self._accumulator.masks, self._calls)
        details |= {"layers": self._layers, "absent": dict(self.absent)}
        if self._has_gradients:
            details["loss_tokens"] = float(self._loss_labels)
        return LayerStats(moments, names, details, step, arrays)

    def _forget(self) -> None:
        """Drop what was recorded so far."""
        with self._lock:
            self._finished, self._calls, self._idle_calls, self.absent = [], 0, 0, {}
            self._accumulator = Accumulator(self._accumulator.masks, self._measurer.statistics)

    def _flush(self) -> None:
        """Merge what finished calls measured, and the gradients that have arrived, into the running statistics."""
        with self._lock:
            calls, self._finished = self._finished, []
            for call in calls:
                self._accumulator.add(call, call.staged)
                if self._has_gradients and call.loss_tokens is not None:
                    self._loss_labels = self._loss_labels + call.loss_tokens
                self.absent |= call.absent
                call.staged = []
            for call, gradients in self._measurer.take_gradients().items():
                self._accumulator.add(call, gradients)
                self.absent |= call.absent
