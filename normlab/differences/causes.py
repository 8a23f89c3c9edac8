"""Name what makes two models part at a site: weights first, then what the site computes, then trials.

`causes_of(evidence)` asks each rule in turn and returns what it finds, the surest first. B's weights are put into A:
those that explain nothing come last.

A trial changes the block of model A as a known fault would, and runs it on what it read. It holds where A then agrees
with B at the site.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from normlab.differences.capture import (
    EMBEDDINGS,
    FINAL,
    LOGITS,
    WORDS,
    Capture,
    Roles,
    Site,
    capture_until,
    counted,
    head_name,
    relative_difference,
)
from normlab.differences.cause import Cause, in_words
from normlab.differences.forms import (
    BETTER,
    CLOSE,
    aligned,
    explains,
    merged,
    places_of_change,
    rank_of_change,
    relative,
    same,
)
from normlab.differences.norm_outputs import norm_causes
from normlab.probes.layout import hidden_state, replaced

CAST = 0.25  # relative difference beyond which values that fit a coarser dtype were not rounded to it
_QUERY = r"(^|[._])q(_proj|_lin)?$|query$"
_HEADS = (  # of matrices whose rows, and of those whose columns are of heads
    r"(^|[._])(w?[qkv]|query|key|value)(_proj|_lin)?\.weight$",
    r"(^|[._])(w?o|out)(_proj|_lin)?\.weight$",
)
_QUERY_KEY = r"(^|[._])(q|k)(_proj|_lin)?$|query$|key$"


@dataclass(frozen=True)
class Side:
    """One of the two models: what it is called with, the roles of its modules, what its sites hold.

    Of arrays from a file there is no more than the last.
    """

    captured: Capture
    model: Any = field(default_factory=nn.Module)
    inputs: dict[str, Any] = field(default_factory=dict)
    roles: Roles = Roles()

    @property
    def tensors(self) -> dict[Site, Tensor]:
        """The values at the sites."""
        return self.captured.tensors


class Evidence(NamedTuple):
    """Material for the search: both models in float64, the first site at which they part, the padding."""

    a: Side
    b: Side
    site: Site
    mask: Tensor | None

    @property
    def block(self) -> str:
        """Name of the site's block in A; empty before and after the blocks."""
        blocks = self.a.roles.blocks
        return blocks[self.site.layer - 1] if 1 <= self.site.layer <= len(blocks) else ""

    @property
    def entering(self) -> Tensor | None:
        """Tensor that the site's block reads in A."""
        before = self.site.layer - 1
        return self.a.tensors.get(Site("block_out", before) if before else Site(EMBEDDINGS, 0))


def causes_of(evidence: Evidence) -> list[Cause]:
    """What differs at `evidence.site`, at most 5; empty where no rule holds."""
    a, b = (tuple(side.tensors[evidence.site].shape) for side in (evidence.a, evidence.b))
    if a != b:
        return [Cause(f"its shape is {a} in A and {b} in B")]
    if evidence.site.name.endswith("_grad"):
        return [Cause("every forward value agrees: a custom backward, a detached tensor or a scaled gradient")]
    weights, unneeded = _ranked_weights(evidence)
    causes = [cause for rule in (_reads, _function, _trials) for cause in rule(evidence)]
    return list(dict.fromkeys([*weights, *causes, *unneeded]))[:5]


def has_cause(evidence: Evidence, cause: Cause) -> bool:
    """True if `cause`, that of another site, explains this one too, in whatever size."""
    found = (one for rule in (_weights, _function, partial(_trials, only=cause)) for one in rule(evidence))
    return any(one.words == cause.words for one in found)


# --- weights ---------------------------------------------------------------------------------------------------------


class _Weights(NamedTuple):
    """Parameters that compute a site in A and in B, A's names with B's, and what is said of those that differ."""

    a: dict[str, Tensor]
    b: dict[str, Tensor]
    pairs: dict[str, str]
    said: dict[str, Cause]  # by A's name, or B's of what A does not have


def _weights(e: Evidence) -> list[Cause]:
    """Compare the parameters of the part of each model that computes the site."""
    found = _compared(e)
    return _of_all(e, found) + list(found.said.values())


def _ranked_weights(e: Evidence) -> tuple[list[Cause], list[Cause]]:
    """The causes among the weights: those with which A's part agrees with B, then those that explain nothing.

    What cannot be put into A is among the first, if the rest does not explain B.
    """
    found = _compared(e)
    changes = _changes_to_b(e, found)
    try:
        needed = _fewest_that_explain(e, found, changes)
    except Exception:  # the model's own code: a copy that does not run tells nothing
        return _of_all(e, found) + list(found.said.values()), []
    first = needed or [name for name in found.said if name not in changes]
    ranked = [[said for n, said in found.said.items() if (n in first) is is_first] for is_first in (True, False)]
    whole = _of_all(e, found)
    return (whole + ranked[0], ranked[1]) if needed or not changes else (ranked[0], whole + ranked[1])


def _compared(e: Evidence) -> _Weights:
    head = _head_width(e.a.model)
    a, b = aligned(_tensors_at(e.site, e.a), _tensors_at(e.site, e.b), head)
    pairs = _pairs(a, b)
    weights = {n for n, _ in _stored_at(e.site, e.a)[0].named_parameters(remove_duplicate=False)}
    causes = {
        name: said._replace(words=f"{_short(name)} {said.words}", of_rotary="freq" in name and name not in weights)
        for name, other in pairs.items()
        if (said := _how(a[name], b[other], name, a, head)) is not None
    }
    only_a, only_b = [n for n in a if n not in pairs], [n for n in b if n not in pairs.values()]
    is_known = e.site.name != EMBEDDINGS or not a.keys().isdisjoint(b)  # not a port's head
    if a and b and is_known and not (only_a and only_b):  # both: other forms of the same, as one matrix for three
        for name in (n for n in (*only_a, *only_b) if "inv_freq" not in n):
            x = a[name] if only_a else b[name]
            identity = _identity(name, x)
            if identity is None or not torch.equal(x, identity):
                kind = "bias" if "bias" in name else "parameter"
                causes[name] = Cause(f"missing {kind}: {_short(name)} is only in {'A' if only_a else 'B'}")
    return _Weights(a, b, pairs, causes)


def _of_all(e: Evidence, found: _Weights) -> list[Cause]:
    """What all weights together show."""
    return _tied(e) + _by_other_block(e, found.a, found.b) if found.said else []


def _identity(name: str, x: Tensor) -> Tensor | None:
    """The values of a bias, or of factors, that change nothing."""
    return torch.zeros_like(x) if "bias" in name else torch.ones_like(x) if x.ndim <= 1 else None


def _changes_to_b(e: Evidence, found: _Weights) -> dict[str, Tensor]:
    """By name, what to add to A's tensors to have B's, of those that differ; what A has no place for is left out."""
    changes: dict[str, Tensor] = {}
    for name in found.said:
        own = found.a.get(name)
        if own is None:
            if _without(e.a.model.get_submodule(_part(e.site, e.a)[0] or ""), name) is not None:
                changes[name] = found.b[name]
            continue
        other = found.b[found.pairs[name]] if name in found.pairs else _identity(name, own)
        if other is not None and other.shape == own.shape:
            changes[name] = other.to(own) - own
    return changes


def _without(module: nn.Module, name: str) -> nn.Module | None:
    """The inner module whose parameter, `name`, is None."""
    owner, _, leaf = name.rpartition(".")
    with contextlib.suppress(AttributeError):
        inner = module.get_submodule(owner)
        return inner if leaf in inner._parameters and inner._parameters[leaf] is None else None
    return None


def _fewest_that_explain(e: Evidence, found: _Weights, changes: dict[str, Tensor]) -> list[str]:
    """The fewest of the changes, of those that are largest, with which A agrees with B; empty where it never does."""
    b, here = e.b.tensors[e.site], e.a.tensors
    before = relative_difference(here[e.site], b, e.mask)
    given = {s: x for s, x in here.items() if s.layer == e.site.layer and s.name != "block_out" and s != e.site}

    def size(name: str) -> float:
        return float(changes[name].norm() / found.a[name].norm().clamp_min(1e-300)) if name in found.a else 1.0

    ranked = sorted(changes, key=size, reverse=True)

    def agrees(count: int) -> bool:
        model = _moved(e, {name: changes[name] for name in ranked[:count]})
        with _entered(e, model):
            after = capture_until(e.site, model, e.a.inputs, e.a.roles, given)
        return relative_difference(after, b, e.mask) * BETTER < before

    if not ranked or not agrees(len(ranked)):
        return []
    return ranked[: bisect_left(range(1, len(ranked)), True, key=agrees) + 1]


def _moved(e: Evidence, changes: dict[str, Tensor]) -> nn.Module:
    """A copy of A whose tensors at the site are moved by `changes`, which have the form in which they are compared.

    The derivative of that form by what is stored takes changes back through transposed, split and LoRA matrices.
    """
    own = {id(x): x for x in _stored_at(e.site, e.a)[1].values()}
    shared = (x for x in (*e.a.model.parameters(), *e.a.model.buffers()) if id(x) not in own)
    memo: dict[int, Any] = {id(x): x for x in shared}
    with torch.inference_mode(False), torch.enable_grad():
        model = copy.deepcopy(e.a.model, memo).eval()  # which also drops what blocks have kept of the old values
        stored = [memo[key].requires_grad_() for key in own]
        compared = _tensors_at(e.site, replace(e.a, model=model), detached=False)
        values = aligned(compared, _tensors_at(e.site, e.b), _head_width(model))[0]
        known = [name for name in changes if name in values]
        outputs, moves = [values[name] for name in known], [changes[name] for name in known]
        ones = [torch.ones_like(x[(slice(1),) * x.ndim]).expand_as(x) for x in moves]
        pulled = [
            torch.autograd.grad(outputs, stored, x, allow_unused=True, retain_graph=True) if known else ()
            for x in (moves, ones)  # a tensor of several names is moved once
        ]
    with torch.no_grad():
        for x, move, count in zip(stored, *pulled, strict=bool(known)):
            if move is not None and count is not None:
                x += move / count.clamp_min(1)
    for x in stored:
        x.requires_grad_(False)
    for name in changes.keys() - set(known):
        inner = _without(model.get_submodule(_part(e.site, e.a)[0] or ""), name)
        if inner is not None:
            setattr(inner, name.rpartition(".")[2], nn.Parameter(changes[name].clone(), requires_grad=False))
    return model


def _pairs(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, str]:
    """A's names of parameters with B's: those of one name, then of equal values, then matrices of a shape in order."""
    pairs = {name: name for name in a if name in b}

    def pair(is_pair: Callable[[Tensor, Tensor], bool], *, as_many: bool = False) -> None:
        for name, x in a.items():
            free = [n for n, y in b.items() if n not in pairs.values() and is_pair(x, y)]
            rivals = [n for n, y in a.items() if n not in pairs and is_pair(x, y)]
            if name not in pairs and free and (len(free) == len(rivals) or not as_many):
                pairs[name] = free[0]

    pair(lambda x, y: x.shape == y.shape and torch.equal(x, y))
    pair(lambda x, y: x.shape == y.shape and x.ndim > 1, as_many=True)
    return pairs


def _short(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _tied(e: Evidence) -> list[Cause]:
    """At the logits, B's head equal to B's token embeddings where A's are two matrices."""
    models = (e.a.model, e.b.model)
    if e.site.name != LOGITS or not all(hasattr(model, "get_output_embeddings") for model in models):
        return []
    pairs = [(m.get_output_embeddings().weight, m.get_input_embeddings().weight) for m in models]
    a, b = (head.shape == embedding.shape and torch.equal(head, embedding) for head, embedding in pairs)
    return [Cause(f"the head and the token embeddings are tied in {'A' if a else 'B'} only")] if a != b else []


def _tensors_at(site: Site, side: Side, *, detached: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers that compute a site, by their name below its module, in the form that is compared."""
    module, stored = _stored_at(site, side)
    result = {n: x.detach() if detached else x for n, x in stored.items()}
    for name, inner in module.named_modules():
        weight = f"{name}.weight".removeprefix(".")
        if type(inner).__name__ == "Conv1D" and weight in result:  # GPT-2's linear layer, of shape (in, out)
            result[weight] = result[weight].T
    return merged(module, result)


def _stored_at(site: Site, side: Side) -> tuple[nn.Module, dict[str, Tensor]]:
    """The module that computes a site, and its parameters and buffers. With a norm that is given a statistic come the
    block's own, with attention the tables of rotary frequencies."""
    name, skip = _part(site, side)
    if name is None:
        return nn.Module(), {}
    module = side.model.get_submodule(name)
    below = tuple(f"{inner.removeprefix(f'{name}.')}." for inner in skip)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    result = {n: x for n, x in named if x.is_floating_point() and not n.startswith(below)}
    if site.name == "mlp_norm_out" and getattr(module, "takes_mean_square", False):
        block = side.model.get_submodule(_block_of(site, side.roles))
        direct = [*block.named_parameters(recurse=False), *block.named_buffers(recurse=False)]
        result = {n: x for n, x in direct if x.is_floating_point()} | result
    if site.name.startswith(("attn", "mixer")) and site.name.endswith("_out"):
        result |= {f"rotary.{n.split('.')[-1]}": x for n, x in _rotary_buffers(side.model).items()}
    return module, result


def _block_of(site: Site, roles: Roles) -> str:
    return roles.blocks[site.layer - 1] if 1 <= site.layer <= len(roles.blocks) else ""


def _part(site: Site, side: Side) -> tuple[str | None, tuple[str, ...]]:
    """Name of the module that computes a site, and of those in it that do not. None: it is not known.

    The input of a part is computed by what holds the part: the block without norms and branches.
    """
    name, roles = side.captured.modules.get(site, ""), side.roles
    if site.name == EMBEDDINGS:
        return "", (*roles.blocks, *roles.final_norms, head_name(side.model) or "lm_head")
    if not name:  # a head that is not known
        return None, ()
    if site.name == "block_out":
        return name, ()
    if not site.name.endswith("_in") or site.name.endswith("_post_norm_in"):
        return _whole(site, roles, name), ()
    if site.name == f"{FINAL}_in":
        return around_norm(name, roles), (name,)
    wholes = [roles.wholes.get(n, n) for n in roles.branches]
    inner = None if site.name in WORDS else next((n for n in wholes if name.startswith(f"{n}.")), None)
    if inner is not None:  # such as attention's norm of queries
        return inner, (name,)
    return _block_of(site, roles), (*roles.norms, *wholes)


def around_norm(name: str, roles: Roles) -> str | None:
    """Name of the module around a final norm; None where that holds the blocks too."""
    around = name.rpartition(".")[0]
    return None if any(block.startswith(f"{around}.".lstrip(".")) for block in roles.blocks) else around


def rotary_tables(model: nn.Module) -> int:
    """Count the tables of rotary frequencies."""
    return len(_rotary_buffers(model))


def _rotary_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {n: x for n, x in model.named_buffers() if n.endswith("inv_freq") and "original" not in n}


def _whole(site: Site, roles: Roles, name: str) -> str:
    """Name of the part that computes the site: the whole branch, also where a norm follows its output."""
    if site.name.endswith("_post_norm_in"):
        block, kind = roles.blocks[site.layer - 1], site.name.split("_")[0]
        name = next((n for n, k in roles.branches.items() if k == kind and n.startswith(f"{block}.")), name)
    return roles.wholes.get(name, name)


def _how(a: Tensor, b: Tensor, name: str, others: dict[str, Tensor], head: int) -> Cause | None:
    """How b differs from a; None where it does not."""
    if a.shape == b.shape and torch.equal(a, b):
        return None
    if a.shape != b.shape:
        return Cause("has shape", f"{tuple(b.shape)}, not {tuple(a.shape)}")
    if a.isfinite().all() and not b.isfinite().all():
        largest = float(a.abs().max())
        is_over = largest > 65504  # float16's
        return Cause(f"overflows in B: it is {largest:.3g} in A" if is_over else "is not finite in B")
    if float(b.abs().max()) == 0:
        return Cause("is zero in B: " + ("a missing bias" if name.endswith("bias") else "not loaded?"))
    if b.numel() > 1 and _is_constant(b) and not _is_constant(a):
        value = float(b.flatten()[0])
        return Cause(f"is {'all ones' if value == 1 else f'{value:g} everywhere'} in B: not loaded?")
    some = b.flatten()[:: max(1, b.numel() // 4096)]
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        if torch.equal(a.to(dtype).to(a.dtype), b) and len(some.unique()) > 2:  # fewer are alike by chance
            return Cause(f"is rounded to {in_words(dtype)}: a cast", cast=dtype)
    if "inv_freq" in name:
        return Cause(_rotary(a, b))
    if a.ndim == 2 and a.shape[0] == a.shape[1] and same(a.T, b):
        return Cause("is transposed")
    if float(a.abs().max()) == 0:
        return Cause("is zero in A only")
    twin = next(
        (n for n, x in others.items() if n != name and x.shape == b.shape and a.ndim > 1 and torch.equal(x, b)), None
    )
    if twin is not None:
        return Cause(f"holds A's {_short(twin)}: swapped, or tied")
    offset = (b - a).flatten()
    by = float(offset.mean())
    is_offset = float((offset - by).abs().max()) < 1e-6 * abs(by)
    plus = f"is A's {'+' if by > 0 else '-'} {abs(by):g}"
    if is_offset and abs(abs(by) - 1) < 1e-6 and a.ndim == 1 and len(a) > 1 and "bias" not in name:
        return Cause(f"{plus}: a gain of 1 + w?")
    scale = float((a * b).sum() / a.square().sum())
    if explains(scale * a, a, b):
        return Cause(f"is A's times {scale:.6g}: scaled")
    if is_offset:
        return Cause(plus)
    if (permuted := _permuted(a, b, head)) is not None:
        return permuted
    size = f"(relative difference {relative(a, b):.1e})"
    heads = [head if re.search(pattern, name) else 0 for pattern in _HEADS]
    if (places := places_of_change(a, b, heads)) is not None:
        return Cause(f"differs in {places}", size)
    rank = rank_of_change(a, b) if a.ndim == 2 else None
    return Cause("has other values" if rank is None else f"has a change of rank {rank}: a LoRA?", size)


def _is_constant(x: Tensor) -> bool:
    return bool((x == x.flatten()[0]).all())


def _permuted(a: Tensor, b: Tensor, head: int) -> Cause | None:
    """Rows or columns in another order: of heads, within heads, or of all."""
    for dim, word in ((0, "rows"), (1, "columns")) if a.ndim == 2 else ((0, "entries"),) if a.ndim == 1 else ():
        x, y = (t if dim == 0 else t.T for t in (a, b))
        order = _order(x.reshape(len(x), -1), y.reshape(len(y), -1))
        if order is None:
            continue
        index = torch.arange(len(order))
        if head and len(order) % head == 0:
            if torch.equal(order // head, index // head):
                return Cause(f"has {word} in another order within each head: the layout of the rotary embedding?")
            if torch.equal(order % head, index % head):
                return Cause("has heads permuted", f"({word})")
        return Cause(f"has {word} permuted")
    return None


def _order(x: Tensor, y: Tensor) -> Tensor | None:
    """The permutation p with y = x[p], or None."""
    keys = {row.numpy().tobytes(): i for i, row in enumerate(x.cpu())}
    places = [keys.get(row.numpy().tobytes(), -1) for row in y.cpu()]
    return torch.tensor(places) if sorted(places) == list(range(len(x))) else None


def _rotary(a: Tensor, b: Tensor) -> str:
    scale = float((b / a).mean())
    if same(a * scale, b):
        by = f"{scale:.4g}" if scale > 1 else f"1/{1 / scale:.4g}"
        return f"is A's times {by}: rotary positions are scaled"
    of_a, of_b = _base(a), _base(b)
    if of_a is not None and of_b is not None:
        return f"has another base: a rotary base of about {of_b:.4g} in B, {of_a:.4g} in A"
    if of_a is not None or of_b is not None:
        scaled, plain = ("B", "A") if of_b is None else ("A", "B")
        return f"is scaled in {scaled}, by another factor at each frequency as in YaRN, and not in {plain}"
    return "differs: another rotary embedding"


def _base(frequencies: Tensor) -> float | None:
    """The base of rotary frequencies that fall by the same factor from each to the next; None of others."""
    if len(frequencies) < 2 or float(frequencies.min()) <= 0:
        return None
    step = -torch.diff(frequencies.double().log())
    is_even = float((step - step.mean()).abs().max()) < 1e-3 * float(step.mean().abs())
    return math.exp(float(step.mean()) * len(frequencies)) if is_even else None


def _by_other_block(e: Evidence, a: dict[str, Tensor], b: dict[str, Tensor]) -> list[Cause]:
    """Block of A whose weights B has at this block."""
    module, here = _part(e.site, e.a)[0], e.block
    if not here or module is None or not module.startswith(here):
        return []
    for layer, block in enumerate(e.a.roles.blocks, start=1):
        path = block + module.removeprefix(here)
        with contextlib.suppress(AttributeError):
            other = dict(e.a.model.get_submodule(path).named_parameters())
            changed = [n for n in other if n in b and n in a and not torch.equal(a[n], b[n])]
            is_told = any(len(other[n].unique()) > 1 for n in changed)  # not a gain of ones
            if layer != e.site.layer and is_told and all(torch.equal(other[n], b[n]) for n in changed):
                return [Cause(f"B has the weights of A's block {layer} here")]
    return []


def _config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _head_width(model: nn.Module) -> int:
    config = _config(model)
    heads, hidden = getattr(config, "num_attention_heads", 0), getattr(config, "hidden_size", 0)
    width = getattr(config, "head_dim", None)
    return width if isinstance(width, int) else hidden // heads if heads and hidden else 0


# --- what is read, and what is computed from it ----------------------------------------------------------------------


def _reads(e: Evidence) -> list[Cause]:
    """A tensor of another site of A that B has at this one."""
    b = e.b.tensors[e.site]
    closeness = min(CLOSE, relative_difference(e.a.tensors[e.site], b, e.mask) / BETTER)
    for site, x in e.a.tensors.items():
        if site != e.site and x.shape == b.shape and relative_difference(x, b, e.mask) < closeness:
            where = f" of block {site.layer}" if 1 <= site.layer <= len(e.a.roles.blocks) else ""
            return [Cause(f"B holds A's {site.words()}{where} here: the wrong hidden state, or a part left out")]
    return []


def _function(e: Evidence) -> list[Cause]:
    """Compare the outputs as functions of what both sites read."""
    x, y = (counted(side.tensors[e.site].double(), e.mask) for side in (e.a, e.b))
    if x is None or y is None or x.shape != y.shape or torch.equal(x, y):
        return []
    if not bool(y.isfinite().all()):
        return [Cause("B is not finite here")]
    if not bool(y.any()):
        return [Cause("B is zero here")]
    causes = [
        Cause(f"all values are rounded to {in_words(dtype)}: a cast", cast=dtype)
        for dtype in (torch.bfloat16, torch.float16)
        if torch.equal(y.to(dtype).double(), y) and not torch.equal(x.to(dtype).double(), x) and relative(x, y) < CAST
    ][:1]
    if e.site.name.endswith("norm_out"):
        reads = e.a.tensors.get(Site(e.site.name.replace("_out", "_in"), e.site.layer))
        rows = None if reads is None else counted(reads.double(), e.mask)
        if rows is not None:
            norm = e.a.model.get_submodule(e.a.captured.modules[e.site])
            bias = getattr(norm, "bias", None)
            bias = torch.zeros_like(x[0]) if bias is None else bias.detach()
            return causes + norm_causes(rows, x, y, bias, _eps(norm))
    scale = float((x * y).sum() / x.square().sum())
    if explains(scale * x, x, y) and abs(scale - 1) > 1e-3:
        root = math.sqrt(x.shape[-1])
        known = [w for w, v in ((" = sqrt(width)", root), (" = 1/sqrt(width)", 1 / root)) if abs(scale / v - 1) < 1e-3]
        causes.append(Cause(f"ratio {scale:.6g}{''.join(known)} everywhere: scaled"))
    by_token = (x * y).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
    if not causes and explains(by_token * x, x, y):
        module = e.a.model.get_submodule(e.a.captured.modules.get(e.site, ""))
        experts = any("expert" in name for name, _ in module.named_modules())
        why = "the experts' weights are not normalized, or twice" if experts else "another norm or scale"
        factors = f"{float(by_token.min()):.3g} to {float(by_token.max()):.3g}"
        causes.append(Cause(f"each token is scaled by {factors}: {why}"))
    return causes + _sum(e, x, y)


def _eps(norm: nn.Module) -> float | None:
    """The eps of a norm, where it is an attribute."""
    names = ("eps", "variance_epsilon", "epsilon", "norm_eps")
    values = (getattr(module, name, None) for module in norm.modules() for name in names)
    return next((value for value in values if isinstance(value, float) and value > 0), None)


def _sum(e: Evidence, x: Tensor, y: Tensor) -> list[Cause]:
    """A sum of the stream and a branch with other coefficients."""
    if not (e.site.name.endswith("norm_in") or e.site.name == "block_out"):
        return []
    layer = e.site.layer
    parts = {
        "the residual": e.entering,
        "the attention norm's output": e.a.tensors.get(Site("attn_norm_out", layer)),
    }
    for kind, words in (("attn", "attention"), ("mlp", "the MLP")):
        normed = e.a.tensors.get(Site(f"{kind}_post_norm_out", layer))
        parts[words] = e.a.tensors.get(Site(f"{kind}_out", layer)) if normed is None else normed
    rows = {}
    for words, part in parts.items():
        tokens = None if part is None else counted(part.double(), e.mask)
        if tokens is not None and tokens.shape == x.shape:
            rows[words] = tokens.flatten()
    if len(rows) < 2:
        return []
    basis = torch.stack(list(rows.values()), 1)
    solved = [torch.linalg.lstsq(basis, z.flatten()[:, None]).solution[:, 0] for z in (x, y)]
    if not same(basis @ solved[1], y.flatten()):
        return []
    before, after = ([round(c, 6) + 0.0 for c in coefficients.tolist()] for coefficients in solved)
    return [
        Cause(f"{words} enters the sum times {new:.5g}, not {old:.5g}" if new else f"{words} is left out of the sum")
        for words, old, new in zip(rows, before, after, strict=True)
        if abs(old - new) > 1e-4
    ]


# --- trials ----------------------------------------------------------------------------------------------------------


def _trials(e: Evidence, only: Cause | None = None) -> list[Cause]:
    """Change A as known faults would, or as `only` this one, and see whether it then agrees with B."""
    if e.site.name.endswith("norm_out"):  # of a norm that reads what A's reads, which no trial changes
        return []
    b = e.b.tensors[e.site]
    before = relative_difference(e.a.tensors[e.site], b, e.mask)
    for cause, model, inputs in _changed(e, only):
        with contextlib.suppress(Exception), _entered(e, model):
            after = capture_until(e.site, model, inputs, e.a.roles)
            if relative_difference(after, b, e.mask) * BETTER < before:
                return [cause]
    return _sees_later(e) if only is None and not _is_mlp(e.site) else []


@contextlib.contextmanager
def _entered(e: Evidence, model: nn.Module) -> Iterator[None]:
    """Have the site's block read what it read in A, whatever else was changed before it."""

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        x, kept = hidden_state(args, kwargs, module), e.entering
        return tuple(replaced(v, [(x, x if kept is None or kept.shape != x.shape else kept)]) for v in (args, kwargs))

    handle = model.get_submodule(e.block).register_forward_pre_hook(enter, with_kwargs=True) if e.block else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _other_inputs(e: Evidence) -> Iterator[tuple[Cause, dict[str, Any]]]:
    rows, length = next(iter(e.a.tensors.values())).shape[:2]
    device = next(x.device for x in e.a.inputs.values() if isinstance(x, Tensor))
    order = torch.arange(length, device=device)
    choices = {f" by {shift}": (order + shift).clamp_min(0).expand(rows, -1) for shift in (1, -1, 2)}
    if e.mask is not None:
        choices[": counted with the padding"] = order.expand(rows, -1)
        choices[": counted without the padding"] = (e.mask.to(device).cumsum(1) - 1).clamp_min(0)
    choices[": all are 0, as without a rotary embedding"] = torch.zeros(rows, length, dtype=torch.long, device=device)
    for words, positions in choices.items():
        yield Cause(f"positions are off{words}"), e.a.inputs | {"position_ids": positions}
    if e.mask is not None and e.a.roles.mask_name is not None:
        rest = {name: value for name, value in e.a.inputs.items() if name != e.a.roles.mask_name}
        yield Cause("B ignores the padding mask"), rest


# Attribute of a block's modules or of the configuration -> the values that a port may have in its place, in words.
_SETTINGS: dict[str, dict[Any, str]] = {
    "attn_logit_softcapping": {None: "no soft cap of the attention scores", 50.0: "a soft cap of the scores of 50"},
    "final_logit_softcapping": {None: "no soft cap of the logits", 30.0: "a soft cap of the logits of 30"},
    "sliding_window": {1: "an attention window one longer", -1: "an attention window one shorter", 10**6: "no window"},
}
_BASES = (10_000.0, 500_000.0, 1_000_000.0, 100_000.0, 50_000.0, 20_000.0, 5_000.0, 1_000.0)
_ACTIVATIONS = {
    "gelu": nn.GELU(),
    "gelu with tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
    "tanh": nn.Tanh(),
}
_ACTIVATION = r"(^|\.)(act|act_fn|activation\w*|gelu_impl)$"
# Changes a model, or a block of it, in place; False where it finds nothing to change.
Change = Callable[[Any], bool]


def _changed(e: Evidence, only: Cause | None) -> Iterator[tuple[Cause, nn.Module, dict[str, Any]]]:
    """Causes, or `only` one, each with A changed by it and what that is called with."""
    places = [(e.block, _mlp_changes())] if e.block else []
    if not _is_mlp(e.site):
        for cause, inputs in _other_inputs(e):
            if only in (None, cause):
                yield cause, e.a.model, inputs
        places = [("", _model_changes(e)), *([(e.block, _attention_changes(e))] if e.block else []), *places]
    for where, changes in places:
        model = None  # a copy that no change has found anything in is still A
        for cause, change in changes:
            if only not in (None, cause):
                continue
            if model is None:
                model = _copy_to_change(e.a.model, where)
            with torch.no_grad():
                has_changed = change(model.get_submodule(where))
            if has_changed:
                yield cause, model, e.a.inputs
                model = None


def _is_mlp(site: Site) -> bool:
    """True at the output of an MLP that reads what A's reads: nothing outside it can be the cause."""
    return site.name in ("mlp_out", "mlp_post_norm_in")


def _copy_to_change(model: nn.Module, where: str) -> nn.Module:
    """A copy of a model, to change at a block, or else at its token embeddings. It shares all other tensors, and what
    stands beside the block."""
    embeds = hasattr(model, "get_input_embeddings")
    changed: Any = model.get_submodule(where) if where else cast(Any, model).get_input_embeddings() if embeds else None
    own = set() if changed is None else {id(x) for x in changed.parameters()}
    shared: list[Any] = [x for x in (*model.parameters(), *model.buffers()) if id(x) not in own]
    if where:
        path = {where[:end] for end in (0, *(i for i, letter in enumerate(where) if letter == "."), len(where))}
        shared += [m for name, m in model.named_modules() if name not in path and not name.startswith(f"{where}.")]
    return copy.deepcopy(model, {id(x): x for x in shared})


def _model_changes(e: Evidence) -> Iterator[tuple[Cause, Change]]:
    root = math.sqrt(e.a.tensors[e.site].shape[-1])
    if e.site.name == EMBEDDINGS and hasattr(e.a.model, "get_input_embeddings"):
        for words, factor in (("sqrt(width)", root), ("1/sqrt(width)", 1 / root)):
            yield Cause(f"token embeddings are scaled by {words}"), partial(_scale_tokens, factor=factor)
    own = next(iter(_rotary_buffers(e.a.model).values()), None)
    unscaled = None if own is None or float(own[0]) == 1 else _base(own)  # A's positions are scaled by one factor
    for base in _BASES:
        is_own = unscaled is not None and abs(unscaled / base - 1) < 1e-3
        words = "rotary positions are scaled in A, and not in B" if is_own else f"a rotary base of {base:g}"
        yield Cause(words, of_rotary=True), partial(_set_rotary_base, base=base)
    for factor in sorted({1.0, *_rotary_factors(e.b.model)}):
        words = f"cosines and sines are multiplied by {factor:g} in B: another attention factor, as of YaRN"
        yield Cause(words, of_rotary=True), partial(_set_rotary_factor, factor=factor)
    words, whole = f"a rotary base of {_BASES[0]:g}, of all features of a head", _head_width(e.a.model) // 2
    yield Cause(words, of_rotary=True), partial(_set_rotary_base, base=_BASES[0], count=whole)
    for name, values in _SETTINGS.items():
        for value, words in values.items():
            yield Cause(f"B has {words}"), partial(_set, block=e.block, name=name, value=value)
    types = getattr(_config(e.a.model), "layer_types", None) or ()
    for kind in set(types) if e.block else ():
        words = f"B has {kind.replace('_', ' ')} in this layer, by another window"
        yield Cause(words), partial(_set, block="", name="layer_types", value=[kind] * len(types))


def _attention_changes(e: Evidence) -> Iterator[tuple[Cause, Change]]:
    config, head = _config(e.a.model), _head_width(e.a.model)
    pairs = torch.arange(head // 2 * 2).reshape(-1, 2).T.flatten()
    if head > 1 and head % 2 == 0:
        for words, order in (("interleaved pairs", pairs), ("halves", pairs.argsort())):
            cause = Cause(f"another layout of the rotary embedding: {words}", of_rotary=True)
            yield cause, partial(_reorder_heads, order=order)
    heads, groups = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0)
    if heads and groups and head and 1 < groups < heads:
        order = torch.arange(heads).reshape(heads // groups, groups).T.flatten()  # A's head that takes B's place
        columns = (order[:, None] * head + torch.arange(head)).flatten()
        yield Cause("keys and values are repeated in another order"), partial(_move_heads, columns=columns)
    yield from _softmax_changes(e, head)
    for words, leaf in (("queries", "q_norm"), ("keys", "k_norm"), ("queries and keys", "[qk]_norm")):
        yield Cause(f"B has no norm of {words}"), partial(_put, pattern=rf"(^|\.){leaf}$", module=nn.Identity())


def _softmax_changes(e: Evidence, head: int) -> Iterator[tuple[Cause, Change]]:
    """Other scales of the softmax. Where A's attention does not show its own, they are known by their ratio to it."""
    root = math.sqrt(max(head, 1))
    names = {1 / root: "1/sqrt(d_head)", 1 / root**2: "1/d_head", 1.0: "none"}

    def named(scale: float) -> str:
        return next((words for known, words in names.items() if math.isclose(scale, known, rel_tol=1e-6)), f"{scale:g}")

    own = _scales(e.a.model.get_submodule(e.block))
    if not own:
        for words, factor in (("1/sqrt(d_head)", 1 / root), ("sqrt(d_head)", root)):
            yield Cause(f"another scale of the softmax: A's times {words}"), partial(_scale_queries, factor=factor)
        return
    block = _block_of(e.site, e.b.roles)
    of_b = _scales(e.b.model.get_submodule(block)) if block else []
    for scale in dict.fromkeys((1 / root**2, 1.0, 1 / root, own[0] / root, own[0] * root, *of_b)):
        if not math.isclose(scale, own[0], rel_tol=1e-6):
            cause = Cause(f"another scale of the softmax: {named(scale)} in place of {named(own[0])}")
            yield cause, partial(_scale_queries, factor=scale / own[0])
            yield cause, partial(_set_scaling, scale=scale)  # queries may have a norm


def _mlp_changes() -> Iterator[tuple[Cause, Change]]:
    yield Cause("gate and up projections are swapped"), _swap_gate_and_up
    for words, function in _ACTIVATIONS.items():
        yield Cause(f"another activation: {words}"), partial(_put, pattern=_ACTIVATION, module=function)


def _scale_tokens(model: Any, factor: float) -> bool:
    model.get_input_embeddings().weight.mul_(factor)
    return True


def _set_rotary_base(model: nn.Module, base: float, count: int | None = None) -> bool:
    buffers = _rotary_buffers(model)
    for name, old in buffers.items():
        owner, _, leaf = name.rpartition(".")
        n = len(old) if count is None else count
        setattr(model.get_submodule(owner), leaf, base ** (-torch.arange(n, dtype=old.dtype, device=old.device) / n))
    return bool(buffers)


def _rotary_factors(model: nn.Module) -> set[float]:
    factors = (getattr(module, "attention_scaling", None) for module in model.modules())
    return {float(factor) for factor in factors if isinstance(factor, int | float)}


def _set_rotary_factor(model: nn.Module, factor: float) -> bool:
    """Set what the cosines and sines of rotary embeddings are multiplied by, where it is another."""
    changed: list[Any] = [m for m in model.modules() if getattr(m, "attention_scaling", factor) != factor]
    for module in changed:
        module.attention_scaling = factor
    return bool(changed)


def _set(model: nn.Module, block: str, name: str, value: Any) -> bool:
    """Set an attribute of the configuration and of a block's modules, where they have it; a window by a step."""
    holders = [_config(model), *(model.get_submodule(block).modules() if block else ())]
    holders = [holder for holder in holders if hasattr(holder, name)]
    for holder in holders:
        old = getattr(holder, name)
        with contextlib.suppress(Exception):  # a property, or a configuration that checks its values
            setattr(holder, name, old + value if name == "sliding_window" and old else value)
    return bool(holders)


def _projections(block: nn.Module, pattern: str) -> list[nn.Linear]:
    return [m for n, m in block.named_modules() if isinstance(m, nn.Linear) and re.search(pattern, n)]


def _reorder(linear: nn.Linear, order: Tensor) -> None:
    linear.weight.copy_(linear.weight[order])
    if linear.bias is not None:
        linear.bias.copy_(linear.bias[order])


def _reorder_heads(block: nn.Module, order: Tensor) -> bool:
    """Reorder the features of each head of queries and keys."""
    changed, head = _projections(block, _QUERY_KEY), len(order)
    if any(linear.out_features % head for linear in changed):
        return False
    for linear in changed:
        starts = head * torch.arange(linear.out_features // head)[:, None]
        _reorder(linear, (order[None] + starts).flatten())
    return bool(changed)


def _move_heads(block: nn.Module, columns: Tensor) -> bool:
    """Move heads of queries, and of the output with them."""
    queries, outs = _projections(block, _QUERY), _projections(block, r"o_proj$|out_proj$|dense$")
    outs = [o for o in outs if o.in_features == len(columns)]
    if not queries or not outs or queries[0].out_features != len(columns):
        return False
    _reorder(queries[0], columns)
    outs[0].weight.copy_(outs[0].weight[:, columns])
    return True


def _scale_queries(block: nn.Module, factor: float) -> bool:
    queries = _projections(block, _QUERY)
    for tensor in (t for linear in queries for t in (linear.weight, linear.bias) if t is not None):
        tensor.mul_(factor)
    return bool(queries)


def _scaled(block: nn.Module) -> list[Any]:
    """Modules with the softmax's scale; that of a LoRA layer is another."""
    modules = (m for m in block.modules() if not hasattr(m, "lora_A"))
    return [m for m in modules if isinstance(getattr(m, "scaling", None), float)]


def _scales(block: nn.Module) -> list[float]:
    return [module.scaling for module in _scaled(block)]


def _set_scaling(block: nn.Module, scale: float) -> bool:
    scaled = _scaled(block)
    for module in scaled:
        module.scaling = scale
    return bool(scaled)


def _put(block: nn.Module, pattern: str, module: nn.Module) -> bool:
    """Put a module in place of those with such a name."""
    found = [name for name, _ in block.named_modules() if re.search(pattern, name)]
    for name in found:
        block.set_submodule(name, module)
    return bool(found)


def _swap_gate_and_up(block: nn.Module) -> bool:
    named = dict(block.named_parameters())
    gates = [(x, named.get(n.replace("gate_proj", "up_proj"))) for n, x in named.items() if "gate_proj" in n]
    for gate, up in gates:
        if up is not None:
            kept = gate.clone()
            gate.copy_(up)
            up.copy_(kept)
    fused = [x for n, x in named.items() if "gate_up_proj" in n]
    for x in fused:
        x.copy_(x.roll(x.shape[-2] // 2, -2) if x.ndim > 1 else x.roll(len(x) // 2))
    return bool(gates or fused)


def _sees_later(e: Evidence) -> list[Cause]:
    """Change each row's last token: outputs at earlier tokens move in a model without a causal mask."""
    ids = e.a.inputs.get("input_ids")
    if not e.b.inputs or ids is None or ids.ndim != 2 or (e.mask is not None and e.mask.shape != ids.shape):
        return []
    mask = torch.ones_like(ids) if e.mask is None else e.mask.to(ids)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    rows = torch.arange(len(ids), device=ids.device)
    changed = ids.clone()
    changed[rows, last] = torch.where(ids[rows, last] == ids.max(), ids.min(), ids.max())
    earlier = (torch.arange(ids.shape[1], device=ids.device)[None] < last[:, None]) & mask.bool()
    if not bool(earlier.any()):  # one token a row
        return []
    moves = []
    for side in (e.a, e.b):
        inputs = {n: changed if isinstance(x, Tensor) and torch.equal(x, ids) else x for n, x in side.inputs.items()}
        after = capture_until(e.site, side.model, inputs, side.roles)
        if after.shape[:2] != ids.shape:
            return []
        moves.append(bool((after - side.tensors[e.site])[earlier].abs().max() > 1e-9))
    if moves == [False, True]:
        return [Cause("B attends to later tokens: a wrong mask")]
    return [Cause("A attends to later tokens and B does not: a wrong mask")] if moves == [True, False] else []
