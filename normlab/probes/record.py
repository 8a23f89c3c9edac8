"""`record`: a context manager that measures a model's layers while the caller runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from normlab.errors import NormlabError
from normlab.probes.accumulate import Measurer
from normlab.probes.attention_watch import IN_ONE_PIECE, AttentionWatch, runs_in_one_piece
from normlab.probes.block_trace import BlockTrace, KnownBlock, KnownTrace, Trace
from normlab.probes.call_inputs import CallInputs, LossTokens, TokenMask
from normlab.probes.call_tokens import NO_FIRST, TOKENS_OF
from normlab.probes.checkpoints import Checkpoints, in_backward, in_checkpoint
from normlab.probes.decomposition import NormRead
from normlab.probes.forward_call import GRADIENTS, Call, LastBlock, Place, Run
from normlab.probes.gradients import watch_logits, watch_loss
from normlab.probes.hooks import (
    EXPERIMENTS,
    RecorderHook,
    has_fake_tensors,
    is_dry_run,
    is_on_other_weights,
    is_running,
    uncompiled,
)
from normlab.probes.layer_stats import LayerStats, manifest
from normlab.probes.layout import (
    Refusal,
    features_last,
    find_input,
    find_output,
    hidden_state,
    is_channels_first,
    like,
    others,
    output_tensor,
    outputs_of,
    replaced,
    same_tensor,
    stream_of,
    takes_length_first,
)
from normlab.probes.metrics import GRADIENT_SITES, MASKS, Metric, resolve_metrics
from normlab.probes.returned_loss import unsettled
from normlab.probes.routing import Routing, routing_of
from normlab.probes.sites import Block, Sites, sites
from normlab.probes.statistics import mixers_of
from normlab.probes.tally import Tally

if TYPE_CHECKING:
    import pandas

NO_START = "what it reads is frozen, and a checkpoint would not repeat a graph that begins at it"
NO_GRADIENT = "no gradient came to it: what it reads needs none, or the loss does not depend on it"
NOTHING_NEEDS = (
    "nothing that the blocks read needs one: it is frozen, and they run in reentrant checkpoints or under no_grad"
)
# Keys of `absent`, or how they begin.
IDLE = "tokens of forward passes without a backward pass"
STREAM_AFTER = "stream after "  # a block, of whose output the next one reads another tensor


def record(
    model: nn.Module | Sites,
    metrics: Sequence[str] | None = None,
    *,
    loss_tokens: LossTokens = None,
    masks: Sequence[str] = tuple(MASKS),
    mask: TokenMask = None,
) -> Recorder:
    """Measure a model's layers while it runs.

        with record(model, metrics=["token_l2_mean", "grad_l2_mean"]) as rec:
            loss = model(**batch).loss
            rec.backward(loss)              # or loss.backward(), in training
        table = rec.stats().to_pandas()     # site, layer, metric, mask, value

    Sites, with h_l = output of block l:

        block_out                                  layer 0 = the tensor that enters block 1, layers 1..L = h_l
        attn_norm_in, mlp_norm_in, ...             what the norms read (see `normlab.probes.decomposition`)
        final_norm_in                              layer L, also in a call that skips the last blocks
        attn, cross, mixer, mlp, block             what the branches add
        block_in_grad                              layer l = dLoss/dh_{l-1}, with respect to what block l reads
        attn_norm_in_grad, final_norm_in_grad, ... with respect to the tensor that enters the norm: its whole gradient,
                                                   the residual path included

    Gradients are of the loss *summed* over labels. That of the returned loss is multiplied by the number of labels it
    averages over, and divided by what the loss was multiplied by before `backward`, such as a scale. Where a term of
    the returned logits is differentiated beside it, they are left out. With `loss_tokens` what arrives is multiplied by
    that. Gradients of several backward passes through one forward pass are summed. A pass that adds to no `.grad`
    counts if it is alone.

    Of a block that passes on several streams (it has an ``enter``), `block_out` is what the next block reads of them. A
    block that runs again in one call is a further layer, if it reads what comes from the last output. From other
    tokens (a second text, a part of the batch) it is another pass, with a mask of its own.

    Only whole forward passes count: one that raises leaves no trace, nor does one that had begun before. Those of an
    experiment, such as `skip_sensitivity`, do not count. The model's outputs are bit-identical and its hooks untouched;
    ours run after them. Metrics that do not apply have no rows: `stats().absent` names them. Nor has what does not add
    up, or fails: `manifest["absent"]` says why. Where a hook changes what a block returns, `block_out` is what is
    passed on, the norms in the block are measured, and what its branches add to it is left out where it does not tell.

    Args:
        model: a module, or `sites(model, ...)` where its parts had to be named. Inside the context compiled code runs
            uncompiled, because it ignores new hooks.
        metrics: names from `METRICS`; default: the cheap activation metrics.
        loss_tokens: of a loss that the model does not return, how many labels it averages over: a number, or a function
            of the call's `CallInputs`. 1 for a sum. For a scaled loss (fp16 scaler, gradient accumulation) divide by
            the scale. By default the returned loss is compared with its logits' cross-entropy.
        masks: which token masks to report: "all" (padding excluded), "no_first" (and the first real token of each row).
        mask: name of the argument that masks padding, where it is not a known one. The mask is (batch, length), with
            non-zero = a token; or additive, with nothing above 0 and 0 = a token. Or a function of the call's
            `CallInputs` that gives it.

    Raises:
        NormlabError: unknown metric or mask; as for `sites`; a model on the meta device; gradient metrics under
            no_grad, without countable labels, or without a backward pass.
    """
    unknown = [mask for mask in masks if mask not in MASKS]
    if unknown or not masks:
        raise NormlabError(f"unknown masks {list(masks)!r}: choose from {', '.join(MASKS)}")
    where = model if isinstance(model, Sites) else sites(model)
    if mask is not None:
        where = replace(where, mask=mask)
    return Recorder(where, resolve_metrics(metrics), loss_tokens, masks)


def _beside(x: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """A second activation of the shape of `x` among a norm's arguments: a residual to add, or a gate."""
    if len(args) + len(kwargs) == 1:
        return None
    return next(iter(like(x, (*args, *kwargs.values()))), None)


class _Running(threading.local):
    """What runs in a thread: the call and the block's trace, the modules entered on the way to the blocks."""

    call: Call | None = None
    trace: Trace | None = None
    is_left_out = False  # the call is not measured

    def __init__(self) -> None:
        self.entered: list[nn.Module] = []


class Recorder:
    """One recording and its hooks. Made by `record`; `stats()` gives the result at any time, also after the context.

    Attributes:
        sites: where is measured.
        metrics: what is measured.
        norm_sites: norm -> (site, layer), once the model has run.
        branches: (kind, layer) -> {a module whose output is added: how}, once the model has run.
        absent: what could not be measured, and why.
        latest: the latest call of the model: its arguments by the names that inner modules know, its mask.
        known: the blocks, as earlier calls have shown them.
        settled: how the loss averages its labels, as far as they have.
        training_only: leave out calls of the model without gradients, such as an evaluation between two steps. None:
            from the first call with gradients on, and forget the calls before it.
        forgives: leave out what was asked and cannot be measured, instead of an error. So are gradients of calls whose
            loss does not say how many labels it averages over.
        is_open: the model is watched.
        has_own_weights: no call that was measured was of other weights than the model's.
    """

    training_only: bool | None = False
    forgives = is_open = False
    has_own_weights = True

    def __init__(self, where: Sites, metrics: Sequence[Metric], loss_tokens: LossTokens, masks: Sequence[str]):
        self.sites = where
        self.metrics = tuple(metrics)
        self.norm_sites: dict[nn.Module, Place] = {}
        self.absent: dict[str, str] = {}
        self._measurer = Measurer(metrics)
        self.branches = self._measurer.branches
        self._masks = tuple(masks)
        self._tally = Tally(self._masks, self._measurer.statistics)
        self._has_gradients = "gradient" in self._measurer.kinds
        self._loss_tokens = loss_tokens
        self._handles: list[Any] = []
        self._first: list[Any] = []  # of the hooks that run before all others
        self._eager: AbstractContextManager = nullcontext()
        self._experiments = 0  # those under way when it was opened
        self._local = _Running()
        self._lock = threading.Lock()
        self._roots: list[Any] = []  # where `backward` ends, of each pass in a call
        self.latest: Call | None = None
        self.known: dict[nn.Module, KnownBlock] = {}
        self.settled = unsettled()
        self._checkpoints = Checkpoints(self.absent)
        self._has_failed = False  # something could not be measured
        self._weights: list[Tensor] = []  # of the blocks, when it was opened

    # -- the context ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        if self._handles:
            raise NormlabError("this recording is already running: make another one with record(model)")
        self._experiments = EXPERIMENTS.running
        self._weights = [weight for block in self.sites.blocks for weight in block.module.parameters()]
        self._eager = uncompiled(self.sites.model)
        self._eager.__enter__()
        try:
            self._attach()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.is_open = True
        return self

    def _are_exchanged(self) -> bool:
        """True if the blocks hold other weights than when the recording was opened."""
        present = [weight for block in self.sites.blocks for weight in block.module.parameters()]
        pairs = zip(self._weights, present, strict=False)
        return len(present) != len(self._weights) or any(not same_tensor(own, weight) for own, weight in pairs)

    def __exit__(self, *exception: Any) -> None:
        self.is_open = False
        for handle in (*self._first, *self._handles):
            handle.remove()
        self._first.clear()
        self._handles.clear()
        self._eager.__exit__(*exception)
        self._eager = nullcontext()
        if self._call is not None:
            self._call.stop_watching()
        self._roots = []
        self._local = _Running()
        self._checkpoints.forget_running()

    def _attach(self) -> None:
        kinds, measurer = self._measurer.kinds, self._measurer
        for module in self.sites.ancestors:
            self._before(module, self._enter_call)
            self._called(module, partial(self._leave_call, module), always=True)
        for block in self.sites.blocks:
            self._before(block.module, partial(self._block_in, block))
            returned = RecorderHook(self, partial(self._block_returned, block))
            self._first.append(block.module.register_forward_hook(returned, with_kwargs=True, prepend=True))
            self._called(block.module, partial(self._block_out, block), always=measurer.watches_attention)
            for norm in dict.fromkeys((*block.norms, *block.inner_norms, *block.activations)):
                self._before(norm, partial(self._norm_in, block))
                self._called(norm, partial(self._norm_out, block, norm))
            for branch in block.branches:
                self._read(block, branch.module, lambda trace, x, branch: trace.branch_starts(x, branch), branch)
                for module in dict.fromkeys((branch.module, branch.whole)):
                    self._returned(block, module, lambda trace, x, branch: trace.branch_done(x, branch), branch)
                routing = routing_of(branch.whole) if branch.kind == "mlp" and {"router", "load"} & kinds else None
                if routing is not None:
                    self._called(routing.scorer, partial(self._router_out, block, routing))
                    for module in routing.takers:
                        every = lambda args, kwargs: [*args, *kwargs.values()]  # noqa: E731
                        self._read(block, module, measurer.experts, routing, find=every)
                        self._returned(block, module, measurer.experts, routing, find=lambda output: output)
            for attention in (m for m in block.module.modules() if isinstance(m, nn.MultiheadAttention)):
                self._read(block, attention, self._attention_reads, attention)
            for kind, rule in mixers_of(block.module) if "streams" in kinds else ():
                self._read(block, rule, measurer.streams, rule, kind, find=lambda args, kwargs: args[0])
        for norm in self.sites.outer_norms:
            self._before(norm, self._outer_norm_in)
        inside = {module for block in self.sites.blocks for module in block.module.modules()}
        for module in self.sites.model.modules():
            if isinstance(module, nn.Embedding) and module not in inside:
                self._before(module, self._look_up)

    def _before(self, module: nn.Module, act: Callable) -> None:
        self._handles.append(module.register_forward_pre_hook(RecorderHook(self, act), with_kwargs=True))

    def _called(self, module: nn.Module, act: Callable, always: bool = False) -> None:
        """Call `act(args, kwargs, output)` after a module."""
        hook = RecorderHook(self, lambda m, args, kwargs, output: act(args, kwargs, output))
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True, always_call=always))

    def _read(self, block: Block, module: nn.Module, act: Callable, *what: Any, find: Callable = find_input) -> None:
        """Call `act(trace, x, *what)` with what a module reads while its block runs."""
        self._before(module, lambda m, args, kwargs: self._in_block(block, act, find(args, kwargs), what))

    def _returned(
        self, block: Block, module: nn.Module, act: Callable, *what: Any, find: Callable = find_output
    ) -> None:
        """Call `act(trace, x, *what)` with what a module returns while its block runs."""
        self._called(module, lambda args, kwargs, output: self._in_block(block, act, find(output), what))

    def _in_block(self, block: Block, act: Callable, x: Any, what: tuple) -> None:
        trace = self._trace_of(block)
        if trace is not None and x is not None:
            act(trace, x, *what)

    def _go_last(self) -> None:
        """Have our hooks run after all others, which may change what a module reads or returns."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None:
                hooks.move_to_end(handle.id)

    def lose(self, module: nn.Module, error: Exception) -> None:
        """Note that something at a module could not be measured."""
        name = self.sites.names.get(module) or type(module).__name__
        why = str(error) if isinstance(error, NormlabError) else f"{type(error).__name__}: {error}".splitlines()[0]
        call = self._call
        (self.absent if call is None else call.absent)[name] = why
        self._has_failed = True

    # -- the model's call ----------------------------------------------------------------------------------------

    @property
    def _call(self) -> Call | None:
        return None if self._local.is_left_out else self._local.call

    @property
    def joins(self) -> bool:
        """True if each block that ran returns two tensors whose sum is the stream."""
        return bool(self.known) and all(known.joins for known in self.known.values())

    def _leaves_out(self, module: nn.Module) -> bool:
        """True where a call begins that is not to be measured."""
        if self.training_only and not torch.is_grad_enabled():
            return True
        if EXPERIMENTS.running > self._experiments or is_dry_run():
            return True
        if has_fake_tensors():
            self.absent["calls of fake tensors"] = "they have shapes and no values"
            return True
        if torch._C._are_functorch_transforms_active():
            self.absent["calls inside torch.func"] = "its tensors have no values of their own: use torch.autograd"
            return True
        if is_running(set(self.sites.ancestors) - {module}):
            self.absent["calls under way"] = "they had begun when the recording was opened"
            return True
        return False

    def _trace_of(self, block: Block) -> Trace | None:
        """The run of a block, in a forward pass of the caller's; a checkpoint's recomputation is none."""
        local = self._local
        trace = local.trace
        if trace is None or trace.block is not block or trace.call is not local.call or local.is_left_out:
            return None
        return None if in_backward() else trace

    def _enter_call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if in_backward():
            return
        local = self._local
        if module in local.entered:  # its last call was interrupted
            local.entered, local.call, local.trace = [], None, None
        if not local.entered:
            local.entered, local.is_left_out = [], self._leaves_out(module)
            self._go_last()
        local.entered.append(module)
        if local.is_left_out:
            return
        call = self._call
        if call is not None and call.runs and not call.implicit:  # for more blocks, or another text
            call.entered.append((module, args, kwargs))
            return
        if call is None or call.implicit:
            call = self._open_call()
        try:
            call.inputs.add(module, args, kwargs)
        except Exception:
            local.is_left_out, local.call, local.trace = True, None, None  # its padding is not known
            raise

    def _open_call(self, implicit: bool = False, inputs: CallInputs | None = None) -> Call:
        if self._has_gradients and not torch.is_grad_enabled():
            raise Refusal(
                "gradient metrics need a forward pass with gradients: "
                "leave no_grad/inference_mode, or drop the grad_* metrics"
            )
        if self.training_only is None and torch.is_grad_enabled():
            self._forget()
            self.training_only = True
        self.has_own_weights &= not (is_on_other_weights() and self._are_exchanged())
        self._flush()
        self._local.call = self.latest = call = Call(self._masks, implicit, inputs)
        call.inputs.mask, call.inputs.settled = self.sites.mask, self.settled
        return call

    def _leave_call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        entered = self._local.entered
        if in_backward() or not entered or entered[-1] is not module:  # else it was not seen to begin
            return
        entered.pop()
        call = self._call
        self._local.is_left_out &= bool(entered)
        if call is None:
            return
        is_of_all = not entered or not call.earlier  # of a module inside it is the loss of one text
        if self._has_gradients and output is not None and is_of_all:
            call.inputs.compare(output)
        if not entered:
            self._end_call(call, complete=output is not None)

    def _end_call(self, call: Call, complete: bool) -> None:
        self._local.call = self._local.trace = None
        passes = [*call.earlier, call]
        try:
            if complete:
                self._end_pass(call)
                for one in passes:
                    one.inputs.labels_averaged, one.inputs.unknown = call.inputs.labels_averaged, call.inputs.unknown
                    if one.layer:
                        self._resolve_loss(one)
                counting = [one for one in passes if one.counts_labels]
                watch_loss(call.inputs.loss, counting)
                self._watch_logits(call, counting)
        finally:
            for one in passes:
                one.inputs.loss = one.inputs.logits = None  # which hold the graph
            call.close()
        if complete:
            with self._lock:
                for one in passes:
                    self._tally.end(one)
                    if one.waits:
                        self._checkpoints.wait_for(one)

    def _watch_logits(self, call: Call, counting: Sequence[Call]) -> None:
        try:
            watch_logits(call.inputs.logits, call.inputs.loss, counting)
        except Exception as error:  # then it is not seen what else is differentiated
            call.absent["logits"] = f"{type(error).__name__}: {error}".splitlines()[0]

    def _end_pass(self, call: Call) -> None:
        if call.is_added_to and call.last is not None:  # no norm has shown what is added to
            call.forget(call.layer)
            reason = "its residual is added after it, and no norm reads the sum"
            call.absent |= {f"block_out {call.layer}": reason, f"block {call.layer}": reason}
        is_looped = any(len(runs) > 1 for runs in call.runs.values())
        final = call.layer if is_looped else self.sites.blocks[-1].layer  # also where the last blocks are skipped
        for read in call.final:
            if read.layer == call.layer:
                read.layer = final
                self.norm_sites[read.norm] = ("final_norm_in", final)
            else:
                read.site = None  # it read an earlier block's output: no final norm
        call.close()

    def _next_pass(self, call: Call) -> Call:
        """Begin another pass of the blocks in the same call of the model; one that was interrupted is dropped."""
        is_whole, inputs = call.running is None, call.inputs.following(call.entered, call.looked_up)
        call.inputs.loss = call.inputs.logits = None  # of one text
        self._end_pass(call)
        new = self._open_call(inputs=inputs)
        new.earlier = [*call.earlier, *([call] if is_whole else [])]
        return new

    def _look_up(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the tokens that a table outside the blocks is asked for."""
        call = self._call
        if call is not None:
            where = call if call.runs else call.inputs
            where.looked_up += [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]

    def _resolve_loss(self, call: Call) -> None:
        """Fix the factor to the summed loss's gradient; without one there are no gradients, or an error."""
        if not self._has_gradients:
            return
        try:
            call.resolve_loss(self._loss_tokens)
        except NormlabError as error:
            if not self.forgives:
                raise Refusal(str(error)) from error
            call.absent[GRADIENTS] = str(error)

    # -- blocks --------------------------------------------------------------------------------------------------

    def _block_call(self, block: Block) -> Call | None:
        """The call that a block is about to run in, opened by the first block where none is open."""
        call = self._call
        is_first = block is self.sites.blocks[0]
        if self._local.is_left_out or (call is not None and not (call.implicit and is_first)):
            return call
        if self._local.entered or self._leaves_out(block.module):
            return None
        if not is_first:
            self.absent[block.name] = "it ran without the blocks before it"
            return None
        self._go_last()
        call = self._open_call(implicit=True)  # blocks run one by one: no padding is known
        self._resolve_loss(call)
        return call

    def _block_in(self, block: Block, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        x = hidden_state(args, kwargs, module)
        if in_backward():  # a checkpoint runs the block again
            repeated = self._checkpoints.find(block, x, begins=True)
            if repeated is not None:
                place, channels_first = ("block_in", repeated.run.layer), self.known[module].channels_first
                self._measurer.gradient(repeated.call, place, x, channels_first, repeated=repeated)
            return None
        call = self._block_call(block)
        if call is None:
            return None
        known = self.known.get(module)
        if known is None:
            channels_first = is_channels_first(module, x, call.tokens.possible_rows())
            known = self.known.setdefault(module, KnownBlock(channels_first, takes_length_first(module)))
        if not x.numel():
            call.absent["calls without tokens"] = "they hold nothing to measure"
            return None
        if call.runs and call.is_another_pass(module, x):
            call = self._next_pass(call)
        for one in call.entered:
            call.inputs.add(*one)
        call.go_on()
        is_first, changed = not call.runs, None
        given = (*args, *kwargs.values())
        run = call.begin_layer(module, block.layer, x, any(v.ndim == x.ndim == 3 for v in others(x, given)))
        if is_first:
            call.tokens.find_rows(x, known.takes_length_first, known.length_first, known.rearranges)
        if is_first and self._has_gradients:
            # `x` may be written to, and be another then; of a view autograd sees that in what it views.
            base = x._base if x._is_view() and x._base is not None and x._base.requires_grad else x
            root = get_gradient_edge(base) if base.requires_grad else base
            if torch.is_grad_enabled() and not x.requires_grad and in_checkpoint():
                call.lose_gradient(("block_in_grad", run.layer), NO_START)
            elif torch.is_grad_enabled() and not x.requires_grad:  # frozen: gradients must start here
                read, root = x, x.detach().requires_grad_()
                x = root.clone()  # a leaf may not be written to in place, its copy may
                changed = tuple(replaced(values, [(read, x)]) for values in (args, kwargs))
            self._roots = [*self._roots, root] if call.earlier else [root]
        entered = stream_of(module, x, known.channels_first)
        call.running = run
        trace = self._local.trace = self._begin_trace(call, block, run, entered, known)
        if not is_first:
            self._compare_with_last(trace, x, given)
        self._measurer.block_start(trace, x, self.sites.blocks[0].layer - 1 if is_first else None)
        if self._measurer.watches_attention:
            if runs_in_one_piece(module):
                call.absent[f"attention {run.layer}"] = IN_ONE_PIECE
            else:
                call.watch = AttentionWatch(block)
                call.watch.__enter__()
        return changed

    def _begin_trace(self, call: Call, block: Block, run: Run, entered: Tensor, known: KnownBlock) -> Trace:
        """Trace a block: branches until the norms' sites are known, or always if what they add is measured."""
        keeps_branches = "branch" in self._measurer.kinds
        if known.sites is not None and not keeps_branches:
            return KnownTrace(call, block, run, entered, known)
        return BlockTrace(call, block, run, entered, known, keeps_branches)

    def _compare_with_last(self, trace: Trace, x: Tensor, given: tuple) -> None:
        """Compare what a block reads with what the block before it returned."""
        call, last = trace.call, trace.call.last
        if last is None:
            return
        self._checkpoints.mark(x, call, last.run)
        if self._settle_other(last, x, trace.entered, call):
            return
        if not last.is_passed_on(x):
            if self._settle_update(last, x, trace.entered, call):
                return
            reason = f"{trace.block.name} reads another tensor than the one returned, of which is block_out"
            call.absent[f"{STREAM_AFTER}block {last.run.layer}"] = reason
        elif last.beside is not None and any(value is last.beside for value in given):
            trace.pair = last

    def _block_returned(
        self, block: Block, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note what a block itself returns, which other hooks may change."""
        trace = self._trace_of(block)
        if not isinstance(trace, BlockTrace):
            return
        x = find_output(output, hidden_state(args, kwargs, module).shape)
        if x is not None:  # else a hook may find the stream in it
            trace.note_returned(stream_of(self._after(block).module, x, trace.known.channels_first))

    def _block_out(self, block: Block, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if in_backward():
            repeated = self._checkpoints.running
            if repeated is not None and output is not None:
                repeated.end(self._passed_on(block, args, kwargs, output))
            return
        trace = self._trace_of(block)
        if trace is None:
            return
        call = trace.call
        watch, call.running, self._local.trace = call.stop_watching(), None, None
        if output is None:
            return
        call.tokens.rows_are_told()
        x = self._passed_on(block, args, kwargs, output)
        returned = others(x, outputs_of(output))
        beside = next(iter(like(x, returned)), None)
        following = self._after(block)
        stream, is_joined = x, False
        if beside is not None:
            total = x.detach() + beside.detach()
            trace.known.joins |= trace.is_joined or (not trace.adds_up_to(x) and trace.adds_up_to(total))
            is_joined = trace.known.joins
            stream = total if is_joined else x
        out = stream_of(following.module, stream, trace.known.channels_first)
        layer = call.layer = trace.layer
        trace.forget_measured()
        self._measurer.activation(call, ("block_out", layer), out)
        call.out, call.node = ref(x), x.grad_fn
        others_returned = [ref(value) for value in returned]
        call.last = LastBlock(block.module, trace.run, trace.entered, x, beside, is_joined, others_returned)
        self._checkpoints.mark(x, call, trace.run)
        trace.finish(out, is_joined)
        self.norm_sites |= {norm: (site, layer) for (norm, _), site in trace.sites.items()}
        call.absent |= {f"{site} {layer}": reason for site, reason in trace.lost.items()}
        self._measurer.block_end(trace, out)
        if watch is not None:
            self._measurer.attention(trace, watch)
        trace.release()
        if call.implicit and block is self.sites.blocks[-1]:
            self._end_call(call, complete=True)

    def _after(self, block: Block) -> Block:
        """The block that reads what a block returns; for the last one itself."""
        return self.sites.blocks[min(block.layer - self.sites.blocks[0].layer + 1, self.sites.depth - 1)]

    @staticmethod
    def _passed_on(block: Block, args: tuple, kwargs: dict[str, Any], output: Any) -> Tensor:
        """The stream among what a block has returned."""
        is_one = isinstance(output, Tensor)
        return output if is_one else output_tensor(output, hidden_state(args, kwargs, block.module).shape)

    def _settle_other(self, last: LastBlock, x: Tensor, view: Tensor, call: Call) -> bool:
        """True if the stream `x` is another tensor of a block than the one measured, of another shape."""
        is_other = last.returned_too(x)
        if is_other:
            call.forget(last.run.layer)
            self._measurer.activation(call, ("block_out", last.run.layer), view)
            call.absent[f"block {last.run.layer}"] = "which tensor it passes on is shown by the next block only"
        return is_other

    def _settle_update(self, last: LastBlock, x: Tensor, view: Tensor, call: Call) -> bool:
        """True if the stream `x` is what a block has read and returned, added by the model."""
        if not last.is_update_of(x):
            return False
        call.is_added_to = True
        self._measure_after(last, view, call)
        return True

    def _measure_after(self, last: LastBlock, stream: Tensor, call: Call) -> None:
        """Measure what comes after a block as its output, in place of what it returned."""
        call.forget(last.run.layer)
        self._measurer.activation(call, ("block_out", last.run.layer), stream)
        call.absent[f"block {last.run.layer}"] = "its residual is added after it, which only the next one shows"

    def _settle_pair(self, last: LastBlock, x: Tensor, call: Call) -> bool:
        """True if the stream is the sum of a block's two outputs, by the first norm that reads it: `x`.

        Blocks that add their residual at the next one's beginning return the branch and the residual apart.
        """
        rows, second = last.rows, last.beside_rows
        read = None if rows is None else rows.of(x)
        if rows is None or read is None or second is None:
            return False
        rows.note_rounding(x)
        is_first = rows.same(read, rows.first)
        is_sum = rows.same(read, rows.first + second) and not is_first
        self.known[last.block].joins = is_sum
        if is_sum and not last.is_joined:
            self._measure_after(last, x, call)
        elif not is_sum and (last.is_joined or not (is_first or rows.same(read, second))):
            call.forget(last.run.layer)
            reason = "the block returns two tensors of the stream's shape, and what reads them does not tell the stream"
            call.absent |= {f"block_out {last.run.layer}": reason, f"block {last.run.layer}": reason}
        return is_sum

    @staticmethod
    def _attention_reads(trace: Trace, x: Tensor, attention: nn.MultiheadAttention) -> None:
        """Find out by what PyTorch's attention reads how the first block holds its rows."""
        if trace.call.tokens.awaits_attention:
            known = trace.known
            known.length_first, known.rearranges = trace.call.tokens.attention_reads(x, not attention.batch_first)

    # -- inside a block ------------------------------------------------------------------------------------------

    def _norm_in(self, block: Block, norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        trace, x = self._trace_of(block), find_input(args, kwargs)
        if x is None:
            return
        residual = _beside(x, args, kwargs)
        if residual is None:
            self._norm_reads(block, norm, x, kwargs)
        elif trace is not None:
            trace.note_sum(norm, x, residual)

    def _norm_out(self, block: Block, norm: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        trace = self._trace_of(block)
        if isinstance(trace, KnownTrace) and norm not in trace.known.adding:
            return
        x, out = find_input(args, kwargs), find_output(output)
        if x is None or out is None:
            return
        if _beside(x, args, kwargs) is not None:
            returned = next(iter(like(out, outputs_of(output))), None)
            is_sum = returned is not None and (trace is None or trace.is_sum(norm, returned))
            self._norm_reads(block, norm, returned if is_sum and returned is not None else x, kwargs)
        if trace is not None:
            trace.norm_done(out, norm)

    def _norm_reads(self, block: Block, norm: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> None:
        """Measure what a norm reads: one that adds two tensors reads the sum that it returns."""
        trace = self._trace_of(block)
        known = self.known.get(block.module)
        if known is None:
            return
        channels_first = known.channels_first
        if trace is not None:
            view = trace.view(x, norm)
            if trace.pair is not None and norm not in block.activations:
                pair, trace.pair = trace.pair, None
                if self._settle_pair(pair, view, trace.call):
                    trace.enter_sum(view)
            read = trace.norm_starts(norm, view)
            if read is not None:
                self._measurer.norm_input(trace.call, read, x, view, kwargs.get("mean_square"), channels_first)
        elif in_backward():
            repeated = self._checkpoints.find(block, x, begins=False)
            site = None if repeated is None or repeated.block is not block else repeated.norm_starts(norm)
            if repeated is not None and site is not None:
                place = (site, repeated.run.layer)
                self._measurer.gradient(repeated.call, place, x, channels_first, norm, repeated=repeated)

    def _router_out(self, block: Block, routing: Routing, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        trace, x = self._trace_of(block), find_input(args, kwargs)
        if trace is not None and x is not None:
            self._measurer.router(trace, x, output, routing)

    # -- outside the blocks --------------------------------------------------------------------------------------

    def _outer_norm_in(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        call, x = self._call, find_input(args, kwargs)
        if call is None or call.last is None or call.running is not None or x is None or in_backward():
            return
        last_module, last = self.sites.blocks[-1].module, call.last
        joins_streams = hasattr(last_module, "enter")  # then the norm reads one stream, made of several
        known = self.known.get(last_module)  # None for a norm between two stages
        channels_first = x.ndim > 3 and known is not None and known.channels_first
        view = features_last(x, channels_first, norm)
        if last.beside is not None and not joins_streams:
            residual = next((value for value in others(x, (*args, *kwargs.values())) if value is last.beside), None)
            if residual is not None:  # it adds them itself, so that no tensor of the model is their sum
                x = view = (x + residual).detach()
            is_read = self._settle_pair(last, view, call) or last.is_read_by(x)
        else:
            is_read = joins_streams or last.is_read_by(x) or self._settle_other(last, x, view, call)
            is_read = is_read or self._settle_update(last, x, view, call)
        self._checkpoints.mark(x, call, last.run)
        if is_read:
            read = NormRead(norm, call.layer, site="final_norm_in")
            call.final.append(read)
            self._measurer.norm_input(call, read, x, view, kwargs.get("mean_square"), channels_first)
            call.last = None

    # -- results -------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss` for the gradient metrics only: no parameter's `.grad` is made or changed.

        Runs `torch.autograd.grad` from `loss` to the tensor that enters block 1 in the latest forward. Reentrant
        gradient checkpointing does not allow that; call `loss.backward()` there.

        Raises:
            NormlabError: there is no such forward.
        """
        if not self._roots:
            raise NormlabError(
                "no forward to differentiate: ask for a grad_* metric and run the model inside record() first"
            )
        if any(isinstance(root, Tensor) and not root.requires_grad for root in self._roots):
            raise NormlabError("the tensor that enters block 1 needs no gradient: call loss.backward()")
        torch.autograd.grad(loss, self._roots, allow_unused=len(self._roots) > 1)
        self._roots = []

    def stats(self, step: int | None = None) -> LayerStats:
        """Everything recorded so far. One transfer from each device. `step` becomes the table's `step` column.

        Raises:
            NormlabError: nothing ran, or gradient metrics were asked for and no backward pass ran.
        """
        self._flush(is_last=True)
        tally = self._tally
        kinds = tally.accumulator.kinds
        if self.absent and (tally.calls == 0 or not kinds):
            places = sorted(self.absent, key=lambda place: not place.startswith(TOKENS_OF))
            raise NormlabError(f"nothing could be measured: {self.absent[places[0]]}")
        if tally.calls == 0:
            why = "call the model (and backward, for grad_* metrics) inside record()"
            if tally.idle_calls:
                first = self.sites.blocks[0].name
                why = (
                    f"the model ran, but no block like {first!r} did: take another stack from stacks(model), "
                    "and run the model outside of compiled functions"
                )
            raise NormlabError(f"nothing was recorded: {why}")
        has_reason = self._has_failed or GRADIENTS in self.absent or bool(tally.lost)
        if self._has_gradients and "gradient" not in kinds and not (tally.awaited or has_reason) and self.forgives:
            self.absent[GRADIENTS] = NOTHING_NEEDS
        elif self._has_gradients and "gradient" not in kinds and not has_reason:
            raise NormlabError(
                "grad_* metrics were asked for but no backward pass ran through these blocks: call loss.backward() or "
                "rec.backward(loss), of a loss that depends on them"
            )
        if "gradient" in kinds:
            self._note_what_no_gradient_reached()
        moments, arrays = tally.accumulator.results()
        moments = moments[~self._is_of_some_passes(moments)]
        if NO_FIRST not in self.absent:
            for site, layer, mask in tally.accumulator.without_tokens():
                if f"{site} {layer}" in self.absent:
                    continue
                self.absent[f"{site} {layer}, {mask}"] = "no token counted: all are padding, or the first of their row"
        names = tuple(metric.name for metric in self.metrics)
        details = manifest(self.sites, self.metrics, self._masks, tally.calls)
        details |= {"layers": tally.layers, "absent": dict(self.absent)}
        if self._has_gradients:
            details["loss_tokens"] = float(tally.loss_labels)
        return LayerStats(moments, names, details, step, arrays)

    def _is_of_some_passes(self, moments: pandas.DataFrame) -> pandas.Series:
        """Which gradients lack passes: a checkpoint repeated a block, and its input did not tell in which pass."""
        inside = [site for of, site in GRADIENT_SITES.items() if of not in ("block_in", "final_norm_in")]
        return moments["layer"].isin(self._checkpoints.lost) & moments["site"].isin(inside)

    def _note_what_no_gradient_reached(self) -> None:
        """Give the reason where blocks have run and have no gradient, and note calls that no backward pass reached."""
        tally = self._tally
        self.absent.pop(IDLE, None)
        if tally.awaited and tally.reached:
            words = "one that is skipped, is detached or is an evaluation with gradients counts as one of training"
            self.absent[IDLE] = f"{tally.awaited} of {tally.awaited + tally.reached} had none: {words}"
        if GRADIENTS in self.absent:
            return
        read = {("block_in", layer) for layer in tally.layers_run} | {*self.norm_sites.values()}
        found = tally.accumulator.places("gradient")
        for site, layer in sorted(read):
            place = GRADIENT_SITES.get(site), layer
            if place[0] is not None and place not in found and layer not in self._checkpoints.lost:
                self.absent.setdefault(f"{place[0]} {layer}", NO_GRADIENT)

    def _forget(self) -> None:
        """Drop what was recorded so far."""
        with self._lock:
            self._tally = Tally(self._masks, self._measurer.statistics)
            self._checkpoints.lost.clear()
            self.absent.clear()
            self.has_own_weights = True

    def _flush(self, is_last: bool = False) -> None:
        """Merge what finished calls measured, and the gradients that have arrived, into the running statistics.

        A gradient to which a further backward pass may add waits, unless this `is_last`.
        """
        with self._lock:
            for call in self._tally.take_finished():
                self._tally.merge(call, self._has_gradients)
                self.absent |= call.absent
            for call, gradients in self._measurer.take_gradients(with_open=is_last).items():
                self._tally.merge_gradients(call, gradients)
                self.absent |= call.absent
