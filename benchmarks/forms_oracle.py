"""What each function of normlab should give for a model and a batch: plain hooks and formulas in float64.

Nothing here knows how normlab finds it. Every right value comes as (value, scale): rounding is relative to `scale`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

Batch = dict[str, Any]
Right = dict[tuple, tuple[float, float]]  # where -> (value, scale)
IGNORED = -100
LARGE = 2.5  # times a layer's median: what counts as massive here, as tiny models have nothing larger
JUDGED = 3  # queries below which a token is not judged as a sink
PROBES = 2
# Where a branch ends: the last matrix of attention, of an MLP. A mixture ends with the module that holds its experts.
ATTENTION_END = re.compile(
    r"(?:.*\.)?(?:self_attn|attn|attention|self_attention|SelfAttention|temporal_block)(?:\.\w+)*?\.(?:output\.)?"
    r"(?:o_proj|out_proj|c_proj|dense|out_lin|o|wo|Wo|final_linear|linear_out)"
)
MLP_END = re.compile(
    r"(?!.*(?:attn|attention|mixer|conv))(?:.*\.)?"
    r"(?:down_proj|c_proj|fc2|fc_out|dense_4h_to_h|wo|Wo|w2|lin2|output\.dense|dense_4h_to_h|full_layer_layer_norm)"
)
EXPERTS = re.compile(r"(?:.*\.)?experts")
GATE = re.compile(r"(?:.*\.)?(?:gate|router|router\.layer|router\.classifier|gate\.wg)")


class Unchecked(Exception):
    """There is no second reading of this."""


def first_float(values: Any) -> Tensor:
    """The first activation among a module's arguments or outputs."""
    if isinstance(values, Tensor):
        return values
    items = values.values() if isinstance(values, dict) else values
    return next(x for x in items if isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2)


def replaced(output: Any, x: Tensor) -> Any:
    """The output with its first activation replaced."""
    if isinstance(output, Tensor):
        return x
    old = first_float(output)
    return type(output)(x if item is old else item for item in output)


@contextlib.contextmanager
def hooks(*pairs: tuple[nn.Module, Callable, Callable | None]) -> Iterator[None]:
    """(module, after, before): `after(args, kwargs, output)` and `before(args, kwargs)` around a module."""
    handles = []
    for module, after, before in pairs:
        handles.append(
            module.register_forward_hook(lambda _, a, k, out, after=after: after(a, k, out), with_kwargs=True)
        )
        if before is not None:
            handles.append(
                module.register_forward_pre_hook(lambda _, a, k, before=before: before(a, k), with_kwargs=True)
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- attention by a function of our own ------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What one attention call computed, (batch, heads, queries, keys)."""

    scores: Tensor | None
    weights: Tensor


class Routed:
    """The scores of a block's router, (tokens, experts), and the experts that were taken, (tokens, k)."""

    scores: Tensor
    taken: Tensor | None = None


_CALLS: list[Seen] = []


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float = 0.0,
    dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    columns = scores
    if s_aux is not None:  # a learned sink, a column of its own
        columns = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = columns.softmax(-1)[..., : scores.shape[-1]]
    _CALLS.append(Seen(scores.detach().double(), weights.detach().double()))
    return (weights @ value).transpose(1, 2).contiguous(), weights


transformers.AttentionInterface.register("audit", _attention)
transformers.AttentionMaskInterface.register("audit", transformers.masking_utils.eager_mask)


# -- the right values ------------------------------------------------------------------------------------------------


class Oracle:
    """The right values of one stack of a model on one batch.

    Args:
        model: in evaluation mode; it is not changed.
        blocks: the modules of the stack.
        batch: with `labels`.
        counted: (batch, length) bool, the tokens of the stack that are no padding.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module], batch: Batch, counted: Tensor):
        self.model, self.blocks, self.batch, self.counted = model, blocks, batch, counted.bool()
        first = (self.counted.cumsum(1) == 1) & self.counted
        self.masks = {"all": self.counted, "no_first": self.counted & ~first}
        self._skipped: dict[tuple[tuple[str, int], ...], Tensor] = {}

    # -- passes ----------------------------------------------------------------------------------------------------

    def _runs(self) -> tuple[list[tuple[Tensor, Tensor]], Any]:
        """What entered and left each block, run by run, and what the model returned."""
        runs: list[tuple[Tensor, Tensor]] = []
        entered: list[Tensor] = []

        def before(args: tuple, kwargs: dict) -> None:
            entered.append(first_float([*args, *kwargs.values()]).detach().clone())

        def after(args: tuple, kwargs: dict, output: Any) -> None:
            runs.append((entered.pop(), first_float(output).detach().clone()))

        with hooks(*((block, after, before) for block in self.blocks)), torch.no_grad():
            output = self.model(**self.batch)
        return runs, output

    @cached_property
    def _pass(self) -> tuple[list[tuple[Tensor, Tensor]], Any]:
        return self._runs()

    @cached_property
    def is_turned(self) -> bool:
        """The stream is (length, batch, width)."""
        return self._pass[0][0][0].shape[:2] == self.counted.T.shape

    def rows(self, x: Tensor) -> Tensor:
        """The stream as (batch, length, width) in float64."""
        x = x.transpose(0, 1) if self.is_turned else x
        if x.shape[:-1] != self.counted.shape:
            raise Unchecked(f"the stream is {tuple(x.shape)}")
        return x.double()

    @cached_property
    def states(self) -> list[Tensor]:
        """h_0 .. h_L."""
        runs = self._pass[0]
        return [self.rows(runs[0][0]), *(self.rows(out) for _, out in runs)]

    @cached_property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """What entered and left each block."""
        return [(self.rows(x), self.rows(out)) for x, out in self._pass[0]]

    @cached_property
    def logits(self) -> Tensor:
        return self._pass[1].logits.double()

    @cached_property
    def labels(self) -> Tensor:
        """(batch, length): the label of each position's prediction, by the loss that the model returns."""
        loss, given = float(self._pass[1].loss), self.batch["labels"]
        for labels in (functional.pad(given[:, 1:], (0, 1), value=IGNORED), given):
            if abs(float(self._loss(self.logits, labels)) - loss) < 1e-5 * abs(loss):
                return labels
        raise Unchecked("the model's loss is another one")

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def _mean(self, values: Tensor, mask: str = "all") -> float:
        return float(values[self.masks[mask]].mean())

    # -- what `record` measures ------------------------------------------------------------------------------------

    def activations(self) -> Right:
        right: Right = {}
        for layer, h in enumerate(self.states):
            right |= self._activation(h, ("block_out", layer))
        return right

    def _activation(self, h: Tensor, place: tuple) -> Right:
        right: Right = {}
        for mask, kept in self.masks.items():
            x = h[kept]
            centred = x - x.mean(1, keepdim=True)
            variance = centred.square().mean(1)
            values = {
                "token_l2_mean": x.square().sum(1).sqrt().mean(),
                "feature_var_mean": variance.mean(),
                "rms": x.square().mean().sqrt(),
                "max_abs": x.abs().max(),
                "kurtosis": (centred.pow(4).mean(1) / variance.square()).mean(),
            }
            right |= {(*place, metric, mask): (float(v), float(v)) for metric, v in values.items()}
        return right

    def norm_inputs(self, norms: dict[nn.Module, tuple[str, int]]) -> Right:
        """Of what each norm reads, at the place that it is said to be."""
        read: dict[nn.Module, Tensor] = {}

        def keep(norm: nn.Module, args: tuple, kwargs: dict) -> None:
            read[norm] = first_float([*args, *kwargs.values()]).detach()  # of a shared one, its last run

        pairs = [(n, lambda *_: None, lambda a, k, n=n: keep(n, a, k)) for n in norms]
        with hooks(*pairs), torch.no_grad():
            self.model(**self.batch)
        if not read:
            raise Unchecked("no norm was named")
        right: Right = {}
        for norm, x in read.items():
            right |= self._activation(self.rows(x), norms[norm])
        return right

    def changes(self) -> Right:
        right: Right = {}
        for layer, (h, out) in enumerate(self.layers, start=1):
            cosine = functional.cosine_similarity(h, out, dim=-1)
            half = (functional.normalize(h, dim=-1) - functional.normalize(out, dim=-1)).square().sum(-1) / 2
            for mask, kept in self.masks.items():
                place = ("block", layer)
                right[*place, "block_influence", mask] = (self._mean(half, mask), 1e-3)
                right[*place, "update_cosine", mask] = (self._mean(cosine, mask), 1.0)
                s = torch.linalg.svdvals((out - h)[kept])
                p = s / s.sum()
                rank = float(torch.special.entr(p).sum().exp())
                right[*place, "update_effective_rank", mask] = (rank, 100 * rank)
                peak = out[kept].abs().amax(0)
                ratio = float(peak.max() / peak.median())
                right["block_out", layer, "massive_activation_ratio", mask] = (ratio, ratio)
        return right

    def branches(self, modules: dict[tuple[str, int], nn.Module]) -> Right:
        """Where the block is its input plus what these modules return: their size and direction against the stream."""
        self._require_single_runs()
        found: dict[nn.Module, Tensor] = {}
        read: list[list[tuple[nn.Module, Tensor, Tensor]]] = [[] for _ in self.blocks]

        def reads(i: int, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            given = [x.detach().clone() for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 3]
            with contextlib.suppress(StopIteration, Unchecked):
                read[i] += [(module, self.rows(x), self.rows(first_float(output).detach().clone())) for x in given[:1]]

        pairs: list = [
            (m, lambda a, k, out, m=m: found.__setitem__(m, first_float(out).detach().clone()), None)
            for m in dict.fromkeys(modules.values())
        ]
        for i, block in enumerate(self.blocks):
            inner = (m for m in block.modules() if m is not block)
            pairs += [(m, lambda a, k, out, i=i, m=m: reads(i, m, a, k, out), None) for m in inner]
        with hooks(*pairs), torch.no_grad():
            self.model(**self.batch)
        right: Right = {}
        for layer, (h, out) in enumerate(self.layers, start=1):
            parts = {k: self.rows(found[m]) for (k, n), m in modules.items() if n == layer and m in found}
            ordered = [(kind, parts[kind]) for kind in ("attn", "cross", "mixer", "mlp") if kind in parts]
            for way in ("on the sum", "on its norm", "side by side"):
                last, added = self._added(way, h, ordered, read[layer - 1])
                if ordered and self._is(last, out):
                    break
            else:
                continue
            for kind, stream, adds in added:
                right |= self._branch((kind, layer), stream, adds)
            total = sum(adds for _, _, adds in added)
            size = total.norm(dim=-1) / h.norm(dim=-1)
            for mask in self.masks:
                right["block", layer, "relative_contribution", mask] = (self._mean(size, mask), 1e-3)
        if not right:
            raise Unchecked("no block is its input plus what its two branches return")
        return right

    def _added(self, way: str, h: Tensor, parts: list, read: list) -> tuple[Tensor, list]:
        """The stream after branches, and (kind, the stream that it is added to, what is added) of each."""
        stream, added = h, []
        for kind, adds in parts:
            added.append((kind, h if way == "side by side" else stream, adds))
            stream = stream + adds
            if way == "on its norm":
                norms = (y for m, x, y in read if "norm" in type(m).__name__.lower() and self._is(x, stream))
                stream = next(norms, stream)
        return stream, added

    def _require_single_runs(self) -> None:
        if len(self._pass[0]) != len(self.blocks):
            raise Unchecked("a block runs more than once")

    def _is(self, y: Tensor, stream: Tensor) -> bool:
        return y.shape == stream.shape and bool((y.double() - stream).norm() <= 1e-6 * stream.norm())

    def _branch(self, place: tuple[str, int], h: Tensor, adds: Tensor) -> Right:
        ratio, cosine = adds.norm(dim=-1) / h.norm(dim=-1), functional.cosine_similarity(adds, h, dim=-1)
        right: Right = {}
        for mask in self.masks:
            size = self._mean(ratio, mask)
            right[*place, "relative_contribution", mask] = (size, size)
            right[*place, "update_cosine", mask] = (self._mean(cosine, mask), 1.0)
        return right

    def gradients(self) -> Right:
        """Of the summed loss at each block's input."""
        grads: list[Tensor | None] = []

        def before(args: tuple, kwargs: dict) -> None:
            x, i = first_float([*args, *kwargs.values()]), len(grads)
            grads.append(None)
            if x.requires_grad:
                x.register_hook(lambda g: grads.__setitem__(i, g.detach()))

        with hooks(*((block, lambda *_: None, before) for block in self.blocks)):
            self.model(**self.batch).loss.backward()
        self.model.zero_grad(set_to_none=True)
        count = int((self.labels != IGNORED).sum())
        right: Right = {}
        for layer, g in enumerate(grads, start=1):
            if g is None:
                raise Unchecked("no gradient comes to a block")
            sizes = self.rows(g).norm(dim=-1) * count
            for mask, kept in self.masks.items():
                values = {"grad_l2_mean": sizes[kept].mean(), "grad_l2_total": sizes[kept].norm()}
                right |= {("block_in_grad", layer, m, mask): (float(v), float(v)) for m, v in values.items()}
        return right

    # -- attention and routers -------------------------------------------------------------------------------------

    @cached_property
    def attention(self) -> dict[int, Seen]:
        """The first attention call of each block, by layer: by our own function, or as the model returns it."""
        model = copy.deepcopy(self.model)
        twins = dict(zip(self.model.modules(), model.modules(), strict=True))
        for module in model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, transformers.PretrainedConfig):
                config._attn_implementation = "audit"
        starts: list[int] = []
        _CALLS.clear()
        blocks = [(twins[block], lambda *_: None, lambda *_: starts.append(len(_CALLS))) for block in self.blocks]
        with hooks(*blocks), torch.no_grad():
            logits = model(**self.batch).logits
        calls, ends = list(_CALLS), [*starts[1:], len(_CALLS)]
        if calls and (logits.double() - self.logits).abs().max() < 1e-4 * self.logits.abs().max():
            places = zip(starts, ends, strict=True)
            return {layer: calls[a] for layer, (a, b) in enumerate(places, start=1) if b > a}
        with torch.no_grad():
            output = self.model(**self.batch, output_attentions=True)
        weights = output.get("decoder_attentions") or output.get("attentions") or ()
        found = {n: Seen(None, w.double()) for n, w in enumerate(weights, start=1) if isinstance(w, Tensor)}
        if not found or len(weights) != len(self.blocks):
            raise Unchecked("the model returns no attention, and takes none of ours")
        return found

    def _square(self, seen: Seen) -> Seen:
        batch, length = self.counted.shape
        if seen.weights.ndim != 4 or (seen.weights.shape[0], *seen.weights.shape[2:]) != (batch, length, length):
            raise Unchecked(f"attention is {tuple(seen.weights.shape)}")
        return seen

    def attention_entropy(self) -> Right:
        right: Right = {}
        for layer, seen in self.attention.items():
            weights = self._square(seen).weights
            entropy = torch.special.entr(weights / weights.sum(-1, keepdim=True)).sum(-1).mean(1)
            for mask in self.masks:
                right["attn", layer, "attention_entropy", mask] = (self._mean(entropy, mask), 1.0)
        return right

    def attention_logit_max(self) -> Right:
        right: Right = {}
        for layer, seen in self.attention.items():
            if seen.scores is None:
                raise Unchecked("the model takes no attention function of ours, which would see its scores")
            largest = self._square(seen).scores.amax((1, 3))  # type: ignore[union-attr]
            for mask, kept in self.masks.items():
                right["attn", layer, "attention_logit_max", mask] = (float(largest[kept].max()), 1.0)
        return right

    @cached_property
    def _routed(self) -> dict[int, Routed]:
        found: dict[int, Routed] = {}
        pairs: list = []
        for layer, block in enumerate(self.blocks, start=1):
            names = dict(block.named_modules())
            holders = [name for name in names if EXPERTS.fullmatch(name)]
            gates = [m for name, m in names.items() if GATE.fullmatch(name) and getattr(m, "weight", None) is not None]
            if holders and gates:
                pairs += self._watched(gates[0], names[holders[0]], found.setdefault(layer, Routed()))
        if not pairs:
            raise Unchecked("no router")
        with hooks(*pairs), torch.no_grad():
            self.model(**self.batch)
        return found

    def _watched(self, gate: Any, experts: nn.Module, routed: Routed) -> list:
        """Hooks that keep what a router scores, and the first experts that it or their holder is handed."""

        def indices(values: Any) -> None:
            taken = [x for x in values if isinstance(x, Tensor) and x.dtype == torch.int64 and x.ndim == 2]
            if routed.taken is None and taken:
                routed.taken = taken[0]

        def scored(args: tuple, kwargs: dict, output: Any) -> None:
            x, bias = first_float([*args, *kwargs.values()]).double(), getattr(gate, "bias", None)
            scores = x.reshape(-1, x.shape[-1]) @ gate.weight.double().T
            routed.scores = scores if bias is None or bias.shape != scores.shape[1:] else scores + bias
            indices(output if isinstance(output, tuple) else ())

        pairs: list = [(gate, scored, None)]
        if not isinstance(experts, nn.ModuleList):
            pairs.append((experts, lambda *_: None, lambda args, kwargs: indices([*args, *kwargs.values()])))
        return pairs

    def _by_token(self, x: Tensor) -> Tensor:
        return x.view(*self.counted.shape, -1)

    def router_entropy(self) -> Right:
        right: Right = {}
        for layer, routed in self._routed.items():
            entropy = torch.special.entr(self._by_token(routed.scores).softmax(-1)).sum(-1)
            for mask in self.masks:
                right["mlp", layer, "router_entropy", mask] = (self._mean(entropy, mask), 1.0)
        return right

    def expert_load(self) -> Right:
        right: Right = {}
        for layer, routed in self._routed.items():
            if routed.taken is None:
                raise Unchecked("the experts that are taken are not handed on")
            for mask, kept in self.masks.items():
                chosen = self._by_token(routed.taken)[kept].flatten().tolist()
                shares = [chosen.count(e) / len(chosen) for e in range(routed.scores.shape[-1])]
                right["mlp", layer, "expert_load_max", mask] = (max(shares) * len(shares), 1.0)
        return right

    # -- experiments -----------------------------------------------------------------------------------------------

    def _without(self, *parts: tuple[str, int]) -> Tensor:
        """The logits without these parts of these layers."""
        if parts not in self._skipped:
            pairs: list = []
            for part, layer in parts:
                block = self.blocks[layer - 1]
                pairs += [_identity(block)] if part == "block" else [_zero(m) for m in self._ends(block, part)]
            with hooks(*pairs), torch.no_grad():
                self._skipped[parts] = self.model(**self.batch).logits.double()
        return self._skipped[parts]

    def _ends(self, block: nn.Module, part: str) -> list[nn.Module]:
        names = {name: m for name, m in block.named_modules() if name}
        if part == "attention":
            return [m for name, m in names.items() if ATTENTION_END.fullmatch(name)][-1:]
        experts = [name for name in names if EXPERTS.fullmatch(name)]
        if experts:
            holder = experts[0].rpartition(".")[0]
            return [names[holder]] if holder else []
        return [m for name, m in names.items() if MLP_END.fullmatch(name)][-1:]

    def skip(self, part: str, span: int = 1) -> Right:
        self._require_single_runs()
        base, counted = float(self._loss(self.logits, self.labels)), self.labels != IGNORED
        right: Right = {}
        for first in range(1, len(self.blocks) - span + 2):
            if part != "block" and not self._ends(self.blocks[first - 1], part):
                continue
            logits = self._without(*((part, first + i) for i in range(span)))
            delta = float(self._loss(logits, self.labels)) - base
            kl = _kl(self.logits, logits)[counted].mean()
            right[part, first, "skip_delta_loss"] = (delta, base)
            right[part, first, "output_kl"] = (float(kl), base)
            right[part, first, "loss"] = (base, base)
        if not right:
            raise Unchecked(f"no {part} has a name that is known here")
        return right

    def delta(self, *parts: tuple[str, int]) -> float:
        """What the loss gains without these parts of these layers."""
        self._require_single_runs()
        return float(self._loss(self._without(*parts), self.labels) - self._loss(self.logits, self.labels))

    @property
    def branches_named(self) -> list[tuple[str, int]]:
        """Attention and MLP of all blocks whose names are known here."""
        every = [(part, layer) for part in ("attention", "mlp") for layer in range(1, len(self.blocks) + 1)]
        return [(part, layer) for part, layer in every if self._ends(self.blocks[layer - 1], part)]

    def void(self) -> Right:
        """Of both rules, by comparing each token's norms one after the other."""
        norms = torch.stack([h.norm(dim=-1)[self.masks["all"]] for h in self.states])
        changes = torch.stack([(out - h).norm(dim=-1)[self.masks["all"]] for h, out in self.layers])
        right: Right = {}
        for layer in range(1, len(norms)):
            void = [0.0, 0.0]
            for token in range(norms.shape[1]):
                grown = [float(norms[k, token] - norms[k - 1, token]) for k in range(1, layer + 1)]
                grown = [g if abs(g) >= 1e-3 * float(norms[layer, token]) else 0.0 for g in grown]
                void[0] += grown[-1] < 0.8 * (max(grown[:-1], default=0) - min(grown[:-1], default=0))
                void[1] += float(changes[layer - 1, token]) < 0.1 * float(norms[layer - 1, token])
            for rule, count in zip(("void", "small"), void, strict=True):
                right[rule, layer] = (count / norms.shape[1], 1.0)
        return right

    def angles(self) -> Right:
        right: Right = {}
        units = [functional.normalize(h, dim=-1) for h in self.states]
        for i, a in enumerate(units):
            for j, b in enumerate(units[i:], start=i):
                angle = 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) / math.pi
                right[i, j] = (self._mean(angle), 1e-3)
        return right

    def jacobian(self) -> Right:
        """||J^T v - v|| of the same random vectors, block by block."""
        generator, right = torch.Generator().manual_seed(0), {}
        inside: list[int] = []
        counted = (self.counted.T if self.is_turned else self.counted)[..., None]

        def after(layer: int, args: tuple, kwargs: dict, output: Any) -> None:
            if inside:
                return
            inside.append(1)
            leaf = first_float([*args, *kwargs.values()]).detach().clone().requires_grad_()
            old = first_float([*args, *kwargs.values()])
            with torch.enable_grad():
                out = first_float(
                    self.blocks[layer - 1](
                        *(leaf if x is old else x for x in args),
                        **{name: leaf if x is old else x for name, x in kwargs.items()},
                    )
                )
            total = 0.0
            for _ in range(PROBES):
                v = torch.randn(leaf.shape, generator=generator) * counted
                pulled = torch.autograd.grad(out, leaf, v, retain_graph=True)[0]
                total += float((pulled.double() - v.double()).square().sum())
            right[layer,] = (math.sqrt(total / PROBES / int(counted.sum()) / leaf.shape[-1]), 1.0)
            inside.clear()

        pairs = [(b, lambda a, k, out, n=n: after(n, a, k, out), None) for n, b in enumerate(self.blocks, start=1)]
        with hooks(*pairs), torch.no_grad():
            self.model(**self.batch)
        return right

    def lens(self) -> Right:
        right: Right = {}
        runs = self._pass[0]
        for layer, h in enumerate([runs[0][0], *(out for _, out in runs)]):
            with hooks((self.blocks[-1], lambda a, k, out, h=h: replaced(out, h), None)), torch.no_grad():
                logits = self.model(**self.batch).logits.double()
            if logits.shape[:2] != self.counted.shape:
                raise Unchecked(f"the logits are {tuple(logits.shape)}")
            right[layer,] = (self._mean(_kl(logits, self.logits)), 5.0)
        return right

    def massive(self) -> Right:
        right: Right = {}
        for layer, h in enumerate(self.states):
            size = h.abs()
            median = size[self.counted].median()
            for row, position, feature in ((size > LARGE * median) & self.counted[..., None]).nonzero().tolist():
                value = float(h[row, position, feature])
                right[layer, row, position, feature, "value"] = (value, abs(value))
                right[layer, row, position, feature, "ratio"] = (abs(value) / float(median), 1.0)
        return right

    @cached_property
    def _sink_weights(self) -> dict[int, tuple[Tensor, Tensor]]:
        """(batch, heads, keys) mean attention that each token gets, and from how many queries, by layer."""
        found = {}
        for layer, seen in self.attention.items():
            sees = (self._square(seen).weights > 0) & self.counted[:, None, :, None]
            count = sees.sum(2)
            found[layer] = ((seen.weights * sees).sum(2) / count.clamp(min=1), count)
        return found

    @cached_property
    def threshold(self) -> float:
        """A share of attention that nine in ten are below, and none is near."""
        weights = torch.cat([w.flatten() for w, _ in self._sink_weights.values()]).sort().values
        upper = weights[int(0.9 * len(weights)) :]
        gap = int((upper[1:] - upper[:-1]).argmax())
        return float(upper[gap : gap + 2].mean())

    def sinks(self) -> Right:
        right: Right = {}
        for layer, (weight, count) in self._sink_weights.items():
            sink = (weight > self.threshold) & (count >= JUDGED) & self.counted[:, None]
            for row, position in sink.any(1).nonzero().tolist():
                heads, mean = sink[row, :, position].double().mean(), weight[row, :, position].mean()
                right[layer, row, position, "heads"] = (float(heads), 1.0)
                right[layer, row, position, "weight"] = (float(mean), 1.0)
        return right

    def future_effect(self) -> Right:
        right: Right = {}
        updates = [after - before for before, after in self.layers]
        for skipped in range(1, len(self.blocks)):
            with hooks(_identity(self.blocks[skipped - 1])):
                runs, _ = self._runs()
            for layer in range(skipped + 1, len(self.blocks) + 1):
                before, after = (self.rows(x) for x in runs[layer - 1])
                u = updates[layer - 1]
                change = (after - before - u).norm(dim=-1) / u.norm(dim=-1)
                right[skipped, layer] = (self._mean(change), 1.0)
        return right


def _identity(block: nn.Module) -> tuple[nn.Module, Callable, Callable]:
    """Hooks that make a block return its input."""
    entered: list[Tensor] = []

    def before(args: tuple, kwargs: dict) -> None:
        entered.append(first_float([*args, *kwargs.values()]).clone())

    return block, lambda a, k, out: replaced(out, entered.pop()), before


def _zero(module: nn.Module) -> tuple[nn.Module, Callable, None]:
    return module, lambda a, k, out: replaced(out, torch.zeros_like(first_float(out))), None


def _kl(p: Tensor, q: Tensor) -> Tensor:
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
