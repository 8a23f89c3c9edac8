"""Statistics that a training step accumulates itself, in the code that it is compiled to.

`CompiledStatsCallback`  every step of a `transformers.Trainer`
`CompiledRecorder`       every step of any loop

Hooks that are there before the first compiled call are traced with the model. What they reduce is part of its graph,
forward and backward, so nothing runs twice and no graph breaks. They write into a few numbers per site on the layer's
device, which are read when the caller wants. Those tensors are no buffers of the model: they are not saved with it, and
DistributedDataParallel does not overwrite them with rank 0's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas
import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from normlab.errors import NormlabError, require_packages
from normlab.experimental.graph_sites import GraphSites, Watch, graph_sites, root_of
from normlab.probes import CallInputs, LayerStats, Metric, Sites, sites
from normlab.probes.accumulate import empty_moments, moments_table, with_batch
from normlab.probes.callback import DEFAULT, LayerStatsCallback, UpdateRatio, loss_scales
from normlab.probes.forward_call import LossTokens, Place
from normlab.probes.layout import hidden_state, output_tensor, read_by, token_masks
from normlab.probes.metrics import KIND_STATISTICS, METRICS, resolve_metrics
from normlab.probes.statistics import at_least_float32, row_statistics
from normlab.probes.stats import manifest

TORCH = "torch>=2.11"  # before, compiled code cannot be told to leave a hook alone in the way used below

# Why a kind of metric is not accumulated in a graph.
NOT_IN_GRAPH = {
    "branch": "branch outputs are matched by value at run time",
    "change": "it needs a block's input at the block's end, which compiled code need not keep",
    "attention": "fused attention never holds its scores",
    "bounded": "the argument of tanh is computed inside the norm, and would be computed twice",
    "tanh": "the argument of tanh is computed inside the norm, and would be computed twice",
    "carried": "it needs the exact statistic, which a carried one spares",
    "router": "the experts that a router takes are matched by value at run time",
    "load": "the experts that a router takes are matched by value at run time",
    "streams": "the mixing of streams is computed inside the rule, and would be computed twice",
    "spectrum": "it needs a product of matrices at every block",
    "coordinate": "it needs a maximum of every feature, another pass over each activation",
}
IN_GRAPH = tuple(name for name, metric in METRICS.items() if metric.kind not in NOT_IN_GRAPH)


def require_in_graph(metrics: Sequence[Metric]) -> None:
    """Raise `NormlabError` for a metric that a compiled step cannot accumulate, and for a PyTorch that is too old."""
    require_packages("compiled statistics", [TORCH], TORCH)
    for metric in metrics:
        if metric.kind in NOT_IN_GRAPH:
            raise NormlabError(
                f"{metric.name} cannot be accumulated in a compiled step: {NOT_IN_GRAPH[metric.kind]}; "
                f"choose from {', '.join(IN_GRAPH)}"
            )


def _alone_uncompiled(hook: Callable) -> Callable:
    """A hook that is traced with its module when that is inlined, and else runs uncompiled.

    Between parts that are compiled apart (blocks one by one, FSDP) a graph of the hook alone would not see the backward
    pass.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(hook.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return hook


@torch.fx.has_side_effect  # else the tracer drops a call whose result nobody reads
@torch.compiler.allow_in_graph  # Dynamo refuses hooks on intermediate tensors; AOTAutograd, after it, traces them
def _await_gradient(x: Tensor, state: Tensor, masks: Tensor, factor: Any) -> None:
    """Have the whole gradient at `x` reduced into `state` in the backward pass.

    No view of `x` is passed on, so gradients are summed in the order in which they always were.
    """

    def reduce(gradient: Tensor) -> None:
        with torch.no_grad():
            norms = torch.linalg.vector_norm(at_least_float32(gradient), dim=-1) * factor
            _accumulate(state, norms.reshape(1, -1), _per_token(masks, gradient))

    if x.requires_grad:
        x.register_hook(reduce)


def _accumulate(state: Tensor, values: Tensor, masks: Tensor) -> None:
    state.copy_(with_batch(state, values[None], masks))


def _per_token(masks: Tensor, x: Tensor) -> Tensor:
    """(masks, tokens) for a tensor of (batch, length, ..., features), from (masks, batch, length)."""
    shape = x.shape[:-1]
    return masks.reshape(*masks.shape, *(1,) * (len(shape) - 2)).expand(-1, *shape).reshape(len(masks), -1)


@dataclass(frozen=True)
class _Accumulator:
    """The running moments of one kind at one place: (4, 1, masks, statistics)."""

    kind: str
    place: Place
    width: int
    state: Tensor

    def clear(self) -> None:
        self.state[:3] = 0
        self.state[3] = -torch.inf


class CompiledRecorder:
    """Statistics of every training step of a model that is, or is about to be, compiled.

        recorder = CompiledRecorder(sites(model), resolve_metrics(["token_l2_mean", "grad_l2_mean"]))
        recorder.start()                     # before the first call of compiled
        compiled = torch.compile(model)
        ...                                  # steps: compiled(**batch).loss.backward()
        recorder.stats().to_pandas()         # of all calls since the last one

    Calls in evaluation mode are not counted. Values are those of `record` up to rounding.

    Args:
        where: the sites of the uncompiled model.
        metrics: rows of `IN_GRAPH`.
        loss_tokens: as for `record`; a function is traced with the model.
        masks: as for `record`.
    """

    def __init__(
        self,
        where: Sites,
        metrics: Sequence[Metric],
        loss_tokens: LossTokens = None,
        masks: Sequence[str] = ("all", "no_first"),
    ):
        require_in_graph(metrics)
        self.sites, self.metrics = where, tuple(metrics)
        self._mask_names, self._loss_tokens = tuple(masks), loss_tokens
        needed = {metric.statistic for metric in metrics}
        self._statistics = {
            kind: tuple(name for name in KIND_STATISTICS[kind] if name in needed) for kind in ("activation", "gradient")
        }
        self._gradient = bool(self._statistics["gradient"])
        self._handles: list[Any] = []
        self._accumulators: list[_Accumulator] = []
        self._arguments: dict[str, Any] = {}  # of the call that runs
        self._masks: Tensor | None = None  # of the call that runs: (masks, batch, length)
        self._factor: Any = None

    def start(self) -> None:
        """Find the tensors to measure and put the hooks there.

        What has been compiled in this process is compiled anew when it is called again.

        Raises:
            NormlabError: as `graph_sites`; gradients are asked for, and the loss is no mean or sum over labels.
        """
        if self._handles:
            raise NormlabError("these statistics are being taken already: stop them first")
        self._graph: GraphSites = graph_sites(self.sites)
        if self._gradient and self._loss_tokens is None and self._graph.averaging is None:
            raise NormlabError(
                "gradient metrics are of the summed token loss, and the returned loss is no mean over the labels of "
                "the returned logits' cross-entropy: pass loss_tokens=<number of labels that it is averaged over>"
            )
        # By default PyTorch takes code that was compiled without hooks, of this model or of another one of its class,
        # for code that has them.
        torch.compiler.reset()
        self._guards = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
        self._guards.__enter__()
        root = root_of(self.sites)
        self._accumulators.clear()
        self._names = list(inspect.signature(root.forward).parameters)
        device = next(root.parameters()).device
        # Of a call without and with num_items_in_batch: tensors, so that another value is no reason to compile again.
        self._calls, self._scales = torch.zeros((), device=device), torch.ones(2, device=device)
        self._loss_labels = torch.zeros((), device=device)
        static = [self._calls, self._scales, self._loss_labels]
        owner = self.sites.ancestors[-1]
        self._handles.append(root.register_forward_pre_hook(_alone_uncompiled(self._enter), with_kwargs=True))
        self._handles.append(owner.register_forward_pre_hook(_alone_uncompiled(self._begin)))
        for watch in self._graph.watches:
            layer_device = next((parameter.device for parameter in watch.module.parameters()), device)
            states: dict[str, Tensor] = {}
            for kind, place in (("activation", watch.place), ("gradient", watch.gradient)):
                if place is not None and (names := self._statistics[kind]):
                    state = states[kind] = empty_moments(1, len(self._mask_names), len(names), layer_device)
                    self._accumulators.append(_Accumulator(kind, place, watch.width, state))
            static += states.values()
            self._handles.append(self._hook(watch, states))
        for tensor in static:
            torch._dynamo.mark_static_address(tensor)  # else CUDA graphs would refuse a graph that writes to it
        self._handles.append(owner.register_forward_hook(_alone_uncompiled(self._end)))
        self._handles.append(root.register_forward_hook(_alone_uncompiled(self._leave)))

    def stop(self) -> None:
        """Take the hooks away: from then on the model is compiled anew, without them."""
        if self._handles:
            self._guards.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def scale_loss(self, without_items: float, with_items: float) -> None:
        """Set the factors of the number of labels, in calls without and with `num_items_in_batch`.

        Each is 1 over what the caller scales the returned loss by.
        """
        self._scales.copy_(torch.tensor([without_items, with_items]))

    # -- traced with the model ---------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the call's arguments. PyTorch does not compile a whole model with its hooks: nothing is computed."""
        self._arguments = dict(zip(self._names, args, strict=False)) | kwargs

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._arguments = {}

    def _begin(self, module: nn.Module, args: tuple) -> None:
        """Compute the masks and the gradients' factor, in the module that holds the blocks."""
        arguments = self._arguments
        if not module.training or not arguments:
            return
        like = arguments["inputs_embeds"] if arguments.get("input_ids") is None else arguments["input_ids"]
        batch, length = like.shape[:2]
        mask = arguments.get("attention_mask")
        flat = token_masks(mask, (batch, length), like.device, self._mask_names, cached=False)
        self._masks = flat.view(-1, batch, length)
        self._calls.add_(1)
        if self._gradient:
            has_items = arguments.get("num_items_in_batch") is not None
            self._factor = self._labels(arguments) * self._scales[1 if has_items else 0]
            self._loss_labels.add_(self._factor)

    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._masks = self._factor = None

    def _labels(self, arguments: dict[str, Any]) -> Any:
        if self._loss_tokens is None:
            assert self._graph.averaging is not None
            return self._graph.averaging.divisor(arguments)
        if not callable(self._loss_tokens):
            return self._loss_tokens
        inputs = CallInputs()
        inputs.arguments = arguments
        return self._loss_tokens(inputs)

    def _hook(self, watch: Watch, states: dict[str, Tensor]) -> Any:
        def entered(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            self._measure(watch, states, hidden_state(args, kwargs)[0])

        def left(module: nn.Module, args: tuple, output: Any) -> None:
            self._measure(watch, states, output_tensor(output))

        if watch.is_output:
            return watch.module.register_forward_hook(_alone_uncompiled(left))
        return watch.module.register_forward_pre_hook(_alone_uncompiled(entered), with_kwargs=True)

    def _measure(self, watch: Watch, states: dict[str, Tensor], x: Tensor) -> None:
        masks = self._masks
        if masks is None:  # outside of a training call, as when a checkpoint recomputes a block
            return
        if "activation" in states:
            with torch.no_grad():
                h = x.detach() if watch.reader is None else read_by(watch.reader, x.detach())
                values = row_statistics(h.reshape(-1, h.shape[-1]), self._statistics["activation"])
                _accumulate(states["activation"], values, _per_token(masks, h))
        if "gradient" in states:
            _await_gradient(x, states["gradient"], masks, self._factor)

    # -- results -----------------------------------------------------------------------------------------------------

    def stats(self, step: int | None = None) -> LayerStats:
        """The statistics of all calls since the last one.

        Raises:
            NormlabError: no call has been counted, or no gradient has arrived.
        """
        calls = int(self._calls)
        if calls == 0:
            raise NormlabError(
                "no training step was counted: call the model in training mode between start() and stats()"
            )
        absent = dict(self._graph.absent)
        tables = {kind: self._read(kind, absent) for kind, names in self._statistics.items() if names}
        if self._gradient and tables["gradient"].empty:
            raise NormlabError("grad_* metrics were asked for but no backward pass ran through the compiled blocks")
        details = manifest(self.sites, self.metrics, self._mask_names, calls)
        details |= {"layers": self.sites.depth, "absent": absent, "compiled": True}
        if self._gradient:
            details["loss_tokens"] = float(self._loss_labels)
        for accumulator in self._accumulators:
            accumulator.clear()
        self._calls.zero_()
        self._loss_labels.zero_()
        moments = pandas.concat(tables.values(), ignore_index=True)
        return LayerStats(moments, tuple(metric.name for metric in self.metrics), details, step)

    def _read(self, kind: str, absent: dict[str, str]) -> pandas.DataFrame:
        mine = [accumulator for accumulator in self._accumulators if accumulator.kind == kind]
        states = torch.cat([accumulator.state.cpu() for accumulator in mine], dim=1)
        counted = states[0].flatten(1).any(1).tolist()
        lost = [accumulator.place for accumulator, has_tokens in zip(mine, counted, strict=True) if not has_tokens]
        absent |= {f"{site} {layer}": "no gradient arrived here" for site, layer in lost}
        kept = [(i, accumulator) for i, accumulator in enumerate(mine) if counted[i]]
        places, widths = [each.place for _, each in kept], [each.width for _, each in kept]
        states = states[:, [i for i, _ in kept]]
        return moments_table(states, places, widths, self._mask_names, self._statistics[kind])


class CompiledStatsCallback(LayerStatsCallback):
    """`LayerStatsCallback` that measures every step, in the code that the step is compiled to.

        callback = CompiledStatsCallback(every=100)
        Trainer(model, TrainingArguments(..., torch_compile=True), callbacks=[callback]).train()
        callback.to_pandas()        # at step 99: means, maxima and norms over the tokens of steps 0 to 99

    Forward and backward, under DDP, gradient checkpointing and autocast too. For models of tokens whose activations are
    (batch, length, features), and for metrics that are sums or maxima over tokens: of activations and of gradients.
    Training begins with an uncompiled pass over a few random tokens, which tells sites and loss. What had been compiled
    in this process before is compiled anew. A checkpoint does not hold the accumulators: a resumed run begins with
    empty ones.

    Args:
        every: optimizer steps between readings.
        metrics: names from `IN_GRAPH`.
        blocks, loss_tokens, path: as for `LayerStatsCallback`.
        update_ratio: also measure the update ratios of the last step before a reading.

    Raises:
        NormlabError: as for `LayerStatsCallback`; a metric that cannot be accumulated; a PyTorch before 2.11.
    """

    def __init__(self, every: int = 100, metrics: Sequence[str] = DEFAULT, **options: Any):
        super().__init__(every, metrics, **options)
        require_in_graph(resolve_metrics(metrics))
        self._accumulated: CompiledRecorder | None = None
        self._has_steps = False  # since the last reading

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Put the hooks in place, before anything is compiled."""
        self._stop_accumulating()
        if model is not None:
            where = sites(model, self._blocks)
            self._accumulated = CompiledRecorder(where, resolve_metrics(self._metrics), self._loss_tokens)
            self._accumulated.start()

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Tell the recorder how the Trainer scales the loss."""
        self._ratio = None
        if self._accumulated is not None and self._loss_tokens is None:
            self._accumulated.scale_loss(*loss_scales(args, kwargs.get("optimizer")))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Remember the weights before a reading."""
        is_read = (state.global_step + 1) % self._every == 0
        if self._wants_ratio and model is not None and is_read:
            self._ratio = UpdateRatio(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Tabulate what has been accumulated."""
        self._has_steps = True
        if state.global_step % self._every == 0:
            self._read(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        """Tabulate the rest and write the table."""
        if self._has_steps:
            self._read(args, state)
        self._stop_accumulating()
        super().on_train_end(args, state, control, **kwargs)

    def _read(self, args: Any, state: Any) -> None:
        self._has_steps = False
        if self._accumulated is not None:
            step = state.global_step - 1
            self._readings.add(self._accumulated.stats(step=step).across_ranks().to_pandas())
            self._after_reading(args, state, step)

    def _stop_accumulating(self) -> None:
        if self._accumulated is not None:
            self._accumulated.stop()
        self._accumulated, self._has_steps = None, False
