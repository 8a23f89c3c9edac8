"""`record`: a context manager that measures a model's layers while the caller runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.accumulator import Accumulator
from normlab.probes.attention import AttentionWatch
from normlab.probes.calls import Call, LossTokens, Place, labels_are_shifted
from normlab.probes.measure import Measurer
from normlab.probes.metrics import GRADIENT_SITES, MASKS, Metric, resolve_metrics
from normlab.probes.reducers import at_least_float32
from normlab.probes.roles import BlockFlow, read_by, same_tensor
from normlab.probes.sites import Block, Sites, sites
from normlab.probes.stats import LayerStats, manifest


def in_backward() -> bool:
    """True while autograd runs a backward pass in this thread: a forward that runs then is a checkpoint's
    recomputation."""
    return torch._C._current_graph_task_id() != -1


def hidden_state(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, int | str]:
    """The activation among a module's arguments (the first float tensor of two dimensions or more) and where it was."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in named:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value, place
    raise NormlabError("a measured module was called without a float tensor: name its blocks with `blocks=`")


def with_argument(args: tuple, kwargs: dict[str, Any], place: int | str, x: Tensor) -> tuple[tuple, dict[str, Any]]:
    """A call's arguments with the one at `place` (as `hidden_state` gives it) replaced."""
    if isinstance(place, str):
        return args, {**kwargs, place: x}
    return (*args[:place], x, *args[place + 1 :]), kwargs


def output_tensor(output: Any) -> Tensor:
    """The activation a module returns: itself, or the first element of a tuple, or the first field of a ModelOutput."""
    return output if isinstance(output, Tensor) else output[0]


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it was compiled: PyTorch ignores hooks added after a compiled call."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


class Recorder:
    """Owns the hooks of one recording. Made by `record`; `stats()` gives the result at any time, also after the
    context."""

    def __init__(self, where: Sites, metrics: Sequence[Metric], loss_tokens: LossTokens, masks: Sequence[str]):
        self.sites = where
        self.metrics = tuple(metrics)
        self._measurer = Measurer(metrics)
        self._accumulator = Accumulator(masks, self._measurer.statistics)
        self._gradient = "gradient" in self._measurer.kinds
        self._watches_attention = "attention" in self._measurer.kinds
        self._loss_tokens = loss_tokens
        self._handles: list[Any] = []
        self._eager: AbstractContextManager = nullcontext()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._root: Tensor | None = None
        self._latest: Call | None = None
        self.norm_sites: dict[nn.Module, Place] = {}  # which norm was found at which site, once the model has run
        self._finished: list[Call] = []
        self._arrived: list[tuple[Call, list[Place], Tensor, int]] = []
        self._calls = 0
        self._loss_labels: float | Tensor = 0.0

    # -- the context ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        if self._handles:
            raise NormlabError("this recording is already running: make another one with record(model)")
        if is_compiled(self.sites.model):
            self._eager = torch.compiler.set_stance("force_eager")
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
        self._stop_watching(self._call)
        self._root = None
        self._local = threading.local()

    def _attach(self) -> None:
        for module in self.sites.ancestors:
            self._before(module, self._enter_call)
            self._after(module, self._leave_call, always=True)
        for block in self.sites.blocks:
            self._before(block.module, self._block_in, block)
            self._after(block.module, self._block_out, block, always=self._watches_attention)
            for norm in block.norms:
                self._before(norm, self._norm_in, block)
                if self._measurer.needs_branches:
                    self._after(norm, self._norm_out, norm)
            for branch in ("attention", "mlp"):
                if (module := getattr(block, branch)) is not None:
                    self._after(module, self._branch_out, branch)
        for norm in self.sites.outer_norms:
            self._before(norm, self._outer_norm_in)

    def _before(self, module: nn.Module, act: Callable, *extra: Any) -> None:
        self._handles.append(
            module.register_forward_pre_hook(lambda m, args, kwargs: act(m, args, kwargs, *extra), with_kwargs=True)
        )

    def _after(self, module: nn.Module, act: Callable, *extra: Any, always: bool = False) -> None:
        self._handles.append(
            module.register_forward_hook(lambda m, args, output: act(output, *extra), always_call=always)
        )

    # -- the model's call ----------------------------------------------------------------------------------------

    @property
    def _call(self) -> Call | None:
        return getattr(self._local, "call", None)

    def _enter_call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if in_backward():
            return
        call = self._call
        if call is None or call.implicit:
            call = self._open_call()
        call.depth += 1
        call.inputs.add(module, args, kwargs)

    def _open_call(self) -> Call:
        if self._gradient and not torch.is_grad_enabled():
            raise NormlabError(
                "gradient metrics need a forward pass with gradients: "
                "leave no_grad/inference_mode, or drop the grad_* metrics"
            )
        self._flush()
        call = Call(self._accumulator.masks)
        self._local.call = self._latest = call
        return call

    def _leave_call(self, output: Any) -> None:
        call = self._call
        if call is None or in_backward():
            return
        call.depth -= 1
        if call.depth == 0:
            self._end_call(call, complete=output is not None)

    def _end_call(self, call: Call, complete: bool) -> None:
        self._local.call = None
        call.close()
        if complete:
            with self._lock:
                self._finished.append(call)
                self._calls += 1

    def _resolve_loss_tokens(self, call: Call) -> None:
        given = self._loss_tokens
        found = given(call.inputs) if callable(given) else given
        if found is None:
            found = call.inputs.loss_tokens(labels_are_shifted(self.sites.ancestors))
        if found is None:
            raise NormlabError(
                "gradient metrics are of the summed token loss and this call has no countable labels: "
                "pass loss_tokens=<number of labels the loss is averaged over, 1 if it is summed>"
            )
        call.loss_tokens = found

    # -- what the hooks do ---------------------------------------------------------------------------------------

    def _block_in(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], block: Block):
        x, place = hidden_state(args, kwargs)
        if in_backward():
            self._watch_gradient(x, ("block_in", block.index), self._latest)
            return None
        call = self._call
        if call is None or (
            call.implicit and block.index == 1
        ):  # blocks run one by one: measure, with no padding known
            call = self._open_call()
            call.implicit = True
        replaced = None
        if block.index == 1:
            call.tokens = tuple(x.shape[:-1])
            self._measurer.activation(call, ("block_out", 0), x)
            if self._gradient:
                self._resolve_loss_tokens(call)
                self._root = x
                if torch.is_grad_enabled() and not x.requires_grad:  # frozen: gradients must start here
                    self._root = x.detach().requires_grad_()
                    x = self._root.clone()  # a leaf may not be written to in place, its copy may
                    replaced = with_argument(args, kwargs, place, x)
        call.flow = BlockFlow(block, read_by(module, x), self._measurer.needs_branches)
        self._watch_gradient(x, ("block_in", block.index), call)
        if self._watches_attention:
            call.watch = AttentionWatch()
            call.watch.__enter__()
        return replaced

    def _block_out(self, output: Any, block: Block) -> None:
        call = self._call
        if call is None or in_backward():
            return
        watch = self._stop_watching(call)
        flow, call.flow = call.flow, None
        if output is None or flow is None:
            return
        x = output_tensor(output)
        following = self.sites.blocks[min(block.index, self.sites.depth - 1)]  # the last one's own, after the last
        seen = read_by(following.module, x)
        self._measurer.activation(call, ("block_out", block.index), seen)
        self._measurer.block_end(call, flow, seen)
        if watch is not None:
            self._measurer.attention(call, block.index, watch)
        if block.index == self.sites.depth:
            call.last_out = x
            if call.implicit:
                self._end_call(call, complete=True)

    def _stop_watching(self, call: Call | None) -> AttentionWatch | None:
        if call is None or call.watch is None:
            return None
        watch, call.watch = call.watch, None
        watch.__exit__(None, None, None)
        return watch

    def _norm_in(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any], block: Block) -> None:
        x, _ = hidden_state(args, kwargs)
        if in_backward():
            if norm in self.norm_sites:
                self._watch_gradient(x, self.norm_sites[norm], self._latest)
            return
        call = self._call
        if call is None or call.flow is None:
            return
        place = self.norm_sites[norm] = (getattr(norm, "probe_site", "") or call.flow.norm_site(x), block.index)
        self._measurer.norm_input(call, place, norm, x, kwargs.get("mean_square"))
        self._watch_gradient(x, place, call)

    def _norm_out(self, output: Any, norm: nn.Module) -> None:
        call = self._call
        if call is not None and call.flow is not None and not in_backward():
            call.flow.norm_done(self.norm_sites[norm][0], output_tensor(output))

    def _branch_out(self, output: Any, branch: str) -> None:
        call = self._call
        if call is not None and call.flow is not None and not in_backward():
            call.flow.branch_done(branch, output_tensor(output))

    def _outer_norm_in(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        call = self._call
        if call is None or call.last_out is None or in_backward():
            return
        x, _ = hidden_state(args, kwargs)
        joined = hasattr(self.sites.blocks[-1].module, "enter")  # the norm reads one stream, made of several
        if same_tensor(x, call.last_out) or joined:
            place = ("final_norm_in", self.sites.depth)
            self._measurer.norm_input(call, place, norm, x, kwargs.get("mean_square"))
            self._watch_gradient(x, place, call)
            call.last_out = None

    def _watch_gradient(self, x: Tensor, place: Place, call: Call | None) -> None:
        if not self._gradient or call is None or place[0] not in GRADIENT_SITES or not x.requires_grad:
            return
        place = (GRADIENT_SITES[place[0]], place[1])
        if (
            in_backward() and place in call.watched
        ):  # a checkpoint hands the recomputation a tensor that has its hook already
            return
        call.watched.add(place)
        if call.hooked is not None and call.hooked[0] is x:
            call.hooked[1].append(place)
            return
        places = [place]
        call.hooked = (x, places)

        def reduce(gradient: Tensor) -> None:
            with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
                norms = torch.linalg.vector_norm(at_least_float32(gradient), dim=-1) * call.loss_tokens
            with self._lock:
                self._arrived.append((call, places, norms.reshape(1, -1), gradient.shape[-1]))

        x.register_hook(reduce)

    # -- results -------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Gradients of `loss` for the gradient metrics only: no parameter's `.grad` is made or changed.

        Runs `torch.autograd.grad` from `loss` to the tensor that enters block 1 in the latest forward. (Reentrant
        gradient checkpointing does not allow that; call `loss.backward()` there.) Raises `NormlabError` when there is
        no such forward.
        """
        if self._root is None:
            raise NormlabError(
                "no forward to differentiate: ask for a grad_* metric and run the model inside record() first"
            )
        torch.autograd.grad(loss, self._root)
        self._root = None

    def stats(self, step: int | None = None) -> LayerStats:
        """Everything recorded so far. One transfer from each device. `step` becomes the table's `step` column.

        Raises `NormlabError` when nothing ran, or gradient metrics were asked for and no backward pass ran.
        """
        self._flush()
        kinds = self._accumulator.kinds
        if self._calls == 0:
            raise NormlabError(
                "nothing was recorded: call the model (and backward, for grad_* metrics) inside record()"
            )
        if self._gradient and "gradient" not in kinds:
            raise NormlabError(
                "grad_* metrics were asked for but no backward pass ran: call loss.backward() or rec.backward(loss)"
            )
        moments, arrays = self._accumulator.results()
        names = tuple(metric.name for metric in self.metrics)
        about = manifest(self.sites, self.metrics, self._accumulator.masks, self._calls)
        if self._gradient:
            about["loss_tokens"] = float(self._loss_labels)
        return LayerStats(moments, names, about, step, arrays)

    def _flush(self) -> None:
        """Merge what finished calls measured, and the gradients that have arrived, into the running statistics."""
        with self._lock:
            calls, self._finished = self._finished, []
            arrived, self._arrived = self._arrived, []
            for call in calls:
                self._accumulator.add(call, call.values)
                self._accumulator.add_arrays(call.arrays)
                self._loss_labels = self._loss_labels + call.loss_tokens
                call.values, call.arrays = [], []
            for call in dict.fromkeys(item[0] for item in arrived):
                items = [(p, norms, width) for c, places, norms, width in arrived if c is call for p in places]
                self._accumulator.add(call, [("gradient", place, norms, width) for place, norms, width in items])


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

    Sites (h_l = output of block l): `block_out` layer 0 = the tensor that enters block 1, 1..L = h_l; `attn_norm_in`,
    `mlp_norm_in` (see `normlab.probes.roles`); `final_norm_in` (layer L); `attn`, `mlp`, `block` for what the branches
    add. Gradients: `block_in_grad` layer l = dLoss/dh_{l-1}; `attn_norm_in_grad`, `mlp_norm_in_grad`,
    `final_norm_in_grad` with respect to the tensor that enters the norm (its whole gradient, the residual path
    included), for the loss *summed* over labels: the gradient that arrives is multiplied by `loss_tokens`.

    Args:
        model: a module, or `sites(model, ...)` when its parts had to be told. Of a compiled model the original modules
            are run, uncompiled, inside the context, because compiled code ignores new hooks.
        metrics: names from `METRICS`; default: the cheap activation metrics.
        loss_tokens: how many labels the loss averages over: a number, or a function of the call's `CallInputs`.
            Default: counted from the model's `labels` (or `num_items_in_batch`) argument. 1 for a loss that is a sum
            already; for a scaled loss (fp16 scaler, gradient accumulation) divide by the scale.
        masks: which token masks to report: "all" (padding excluded), "no_first" (and the first real token of each row).

    Of a block that passes on several streams (it has an ``enter``), `block_out` is what the next block reads of them.

    Only whole forward passes count: one that raises leaves no trace. The model's outputs are bit-identical, its own
    hooks untouched. Metrics that do not apply (saturation without a tanh norm ...) have no rows; the manifest lists
    them as absent.

    Raises:
        NormlabError: unknown metric or mask; gradient metrics under no_grad, without countable labels, or without a
        backward.
    """
    unknown = [mask for mask in masks if mask not in MASKS]
    if unknown or not masks:
        raise NormlabError(f"unknown masks {list(masks)!r}: choose from {', '.join(MASKS)}")
    where = model if isinstance(model, Sites) else sites(model)
    return Recorder(where, resolve_metrics(metrics), loss_tokens, masks)
