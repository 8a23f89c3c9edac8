"""Name what makes two models part at a site: weights first, then what the site computes, then trials.

`causes_of(evidence)` asks each rule in turn and returns sentences, the surest first.

A trial changes the block of model A as a known fault would, and runs it on what it read. It holds where A then agrees
with B at the site.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from normlab.differences.capture import (
    EMBEDDINGS,
    LOGITS,
    Capture,
    Roles,
    Site,
    capture,
    counted,
    head_name,
    relative_difference,
)
from normlab.probes.layout import hidden_state, with_argument

CLOSE = 1e-5  # relative difference below which two tensors in float64 are one
BETTER = 30.0  # by which a trial must bring the models together
_QUERY = r"(^|[._])q(_proj|_lin)?$|query$"
_QUERY_KEY = r"(^|[._])(q|k)(_proj|_lin)?$|query$|key$"


@dataclass
class Evidence:
    """Material for the search: both models in float64, their captures, what they are called with, the first site."""

    a: nn.Module
    b: nn.Module | None
    captured_a: Capture
    tensors_b: dict[Site, Tensor]
    modules_b: dict[Site, str]
    inputs_a: dict[str, Any]
    inputs_b: dict[str, Any]
    roles_a: Roles
    roles_b: Roles | None
    site: Site
    mask: Tensor | None

    @property
    def block(self) -> str | None:
        """Name of the site's block in A; None before and after the blocks."""
        blocks = self.roles_a.blocks
        return blocks[self.site.layer - 1] if 1 <= self.site.layer <= len(blocks) else None

    @property
    def entering(self) -> Tensor | None:
        """Tensor that the site's block reads in A."""
        before = self.site.layer - 1
        return self.captured_a.tensors.get(Site("block_out", before) if before else Site(EMBEDDINGS, 0))


def causes_of(evidence: Evidence) -> list[str]:
    """Sentences that say what differs at `evidence.site`; empty where no rule holds."""
    if evidence.site.name.endswith("_grad"):
        return ["every forward value agrees: a backward of its own, a detached tensor or a scaled gradient"]
    causes = [cause for rule in (_weights, _reads, _function, _trials) for cause in rule(evidence)]
    return list(dict.fromkeys(causes))[:5]


# --- weights ---------------------------------------------------------------------------------------------------------


def _weights(e: Evidence) -> list[str]:
    """Compare the parameters of the part of each model that computes the site."""
    if e.b is None:
        return []
    a, b = _tensors_at(e, e.a, e.captured_a.modules), _tensors_at(e, e.b, e.modules_b)
    pairs = _pairs(a, b)
    causes = [
        f"{_short(name)} {said}"
        for name, other in pairs.items()
        if (said := _how(a[name], b[other], name, a, _head_width(e.a))) is not None
    ]
    only_a, only_b = [n for n in a if n not in pairs], [n for n in b if n not in pairs.values()]
    is_known = e.site.name != EMBEDDINGS or not a.keys().isdisjoint(b)  # not a port's head
    if a and b and is_known and not (only_a and only_b):  # both: other forms of the same, as one matrix for three
        for name in (n for n in (*only_a, *only_b) if "inv_freq" not in n):
            kind = "bias" if "bias" in name else "parameter"
            causes.append(f"missing {kind}: {_short(name)} is only in {'A' if only_a else 'B'}")
    return _tied(e) + _by_other_block(e, a, b) + causes if causes else []


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


def _tied(e: Evidence) -> list[str]:
    """At the logits, B's head equal to B's token embeddings where A's are two matrices."""
    if e.site.name != LOGITS or not all(hasattr(model, "get_output_embeddings") for model in (e.a, e.b)):
        return []
    equal = []
    for model in cast(Any, (e.a, e.b)):
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        equal.append(head.shape == embedding.shape and torch.equal(head, embedding))
    return (
        [f"the head and the token embeddings are tied in {'A' if equal[0] else 'B'} only"]
        if equal[0] != equal[1]
        else []
    )


def _tensors_at(e: Evidence, model: nn.Module, modules: dict[Site, str]) -> dict[str, Tensor]:
    """Parameters and buffers of the site's module by their name below it; of the embeddings those before the blocks."""
    skip: tuple[str, ...] = ()
    if not modules.get(e.site) and e.site.name != EMBEDDINGS:  # a head that is not known
        return {}
    if e.site.name == EMBEDDINGS:
        roles = e.roles_a if model is e.a else e.roles_b
        after = (*roles.blocks, *roles.final_norms, head_name(model) or "lm_head") if roles else ()
        module, skip = model, tuple(f"{name}." for name in after)
    elif e.site.name == "block_out":
        module = model.get_submodule(modules[e.site])
    else:
        module = model.get_submodule(_whole(e, model, modules.get(e.site, "")))
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    result = {n: x.detach() for n, x in named if x.is_floating_point() and not (skip and n.startswith(skip))}
    for name, inner in module.named_modules():
        weight = f"{name}.weight".removeprefix(".")
        if type(inner).__name__ == "Conv1D" and weight in result:  # GPT-2's linear layer, of shape (in, out)
            result[weight] = result[weight].T
    if e.site.name.startswith(("attn", "mixer")) and e.site.name.endswith("_out"):
        rotary = [(n, x) for n, x in model.named_buffers() if n.endswith("inv_freq") and "original" not in n]
        result |= {f"rotary.{n.split('.')[-1]}": x for n, x in rotary}
    return result


def _whole(e: Evidence, model: nn.Module, name: str) -> str:
    """Name of the part that computes the site: the whole branch, also where a norm follows its output."""
    roles = e.roles_a if model is e.a or e.roles_b is None else e.roles_b
    kind = e.site.name.split("_")[0]
    if e.site.name.endswith("_post_norm_in"):
        block = roles.blocks[e.site.layer - 1]
        name = next((n for n, k in roles.branches.items() if k == kind and n.startswith(f"{block}.")), name)
    return roles.wholes.get(name, name)


def _how(a: Tensor, b: Tensor, name: str, others: dict[str, Tensor], head: int) -> str | None:
    """Say how b differs from a; None where it does not."""
    if a.shape == b.shape and torch.equal(a, b):
        return None
    if a.shape != b.shape:
        return f"has shape {tuple(b.shape)}, not {tuple(a.shape)}"
    if "inv_freq" in name:
        return _rotary(a, b)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        if torch.equal(a.to(dtype).to(a.dtype), b):
            return f"is rounded to {str(dtype).removeprefix('torch.')}: a cast"
    if a.ndim == 2 and a.shape[0] == a.shape[1] and _same(a.T, b):
        return "is transposed"
    if float(b.abs().max()) == 0:
        return "is zero in B" + (": a missing bias" if name.endswith("bias") else "")
    if float(a.abs().max()) == 0:
        return "is zero in A only"
    twin = next(
        (n for n, x in others.items() if n != name and x.shape == b.shape and a.ndim > 1 and torch.equal(x, b)), None
    )
    if twin is not None:
        return f"holds A's {_short(twin)}: swapped, or tied"
    offset = (b - a).flatten()
    if float((offset - offset.mean()).abs().max()) < 1e-6 * float(offset.mean().abs()):
        return f"is A's {'+' if offset.mean() > 0 else '-'} {abs(float(offset.mean())):g}: a gain of 1 + w?"
    scale = float((a * b).sum() / a.square().sum())
    if _same(scale * a, b):
        return f"is A's times {scale:.6g}: scaled"
    return _permuted(a, b, head) or f"has other values (relative difference {_relative(a, b):.1e})"


def _permuted(a: Tensor, b: Tensor, head: int) -> str | None:
    """Rows or columns in another order: of heads, within heads, or of all."""
    for dim, word in ((0, "rows"), (1, "columns")) if a.ndim == 2 else ((0, "entries"),) if a.ndim == 1 else ():
        x, y = (t if dim == 0 else t.T for t in (a, b))
        order = _order(x.reshape(len(x), -1), y.reshape(len(y), -1))
        if order is None:
            continue
        index = torch.arange(len(order))
        if head and len(order) % head == 0:
            if torch.equal(order // head, index // head):
                return f"has {word} in another order within each head: the layout of the rotary embedding?"
            if torch.equal(order % head, index % head):
                return f"has heads permuted ({word})"
        return f"has {word} permuted"
    return None


def _order(x: Tensor, y: Tensor) -> Tensor | None:
    """The permutation p with y = x[p], or None."""
    keys = {row.numpy().tobytes(): i for i, row in enumerate(x.cpu())}
    places = [keys.get(row.numpy().tobytes(), -1) for row in y.cpu()]
    return torch.tensor(places) if sorted(places) == list(range(len(x))) else None


def _rotary(a: Tensor, b: Tensor) -> str:
    if len(a) == len(b) and len(a) > 1 and float(b.min()) > 0:
        step = -torch.diff(b.log())
        base = math.exp(float(step.mean()) * len(b))
        if float((step - step.mean()).abs().max()) < 1e-3 * float(step.mean().abs() + 1e-12) and _relative(a, b) > 1e-6:
            return f"has another base: a rotary base of about {base:.4g} in B"
    scale = float((b / a).mean())
    if _same(a * scale, b):
        return f"is A's times {scale:.4g}: rotary positions are scaled"
    return "differs: another rotary embedding"


def _by_other_block(e: Evidence, a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Block of A whose weights B has at this block."""
    module, here = e.captured_a.modules.get(e.site, ""), e.block
    if here is None or not module.startswith(here):
        return []
    for layer, block in enumerate(e.roles_a.blocks, start=1):
        path = _whole(e, e.a, block + module.removeprefix(here))
        with contextlib.suppress(AttributeError):
            other = dict(e.a.get_submodule(path).named_parameters())
            matrices = [n for n in other if other[n].ndim > 1 and n in b and n in a and not torch.equal(a[n], b[n])]
            if layer != e.site.layer and matrices and all(torch.equal(other[n], b[n]) for n in matrices):
                return [f"B has the weights of A's block {layer} here"]
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


def _reads(e: Evidence) -> list[str]:
    """A tensor of another site of A that B has at this one."""
    b = e.tensors_b[e.site]
    for site, x in e.captured_a.tensors.items():
        if site != e.site and x.shape == b.shape and relative_difference(x, b, e.mask) < CLOSE:
            where = f" of block {site.layer}" if 1 <= site.layer <= len(e.roles_a.blocks) else ""
            return [f"B holds A's {site.words()}{where} here: the wrong hidden state, or a part left out"]
    return []


def _function(e: Evidence) -> list[str]:
    """Compare the outputs as functions of what both sites read."""
    x, y = (counted(tensors[e.site].double(), e.mask) for tensors in (e.captured_a.tensors, e.tensors_b))
    if x is None or y is None or x.shape != y.shape or torch.equal(x, y):
        return []
    if not bool(y.isfinite().all()):
        return ["B is not finite here"]
    causes = _rounding(x, y)
    if e.site.name.endswith("norm_out"):
        reads = e.captured_a.tensors.get(Site(e.site.name.replace("_out", "_in"), e.site.layer))
        rows = None if reads is None else counted(reads.double(), e.mask)
        if rows is not None:
            bias = getattr(e.a.get_submodule(e.captured_a.modules[e.site]), "bias", None)
            return causes + _norm(rows, x, y, torch.zeros_like(x[0]) if bias is None else bias.detach())
    scale = float((x * y).sum() / x.square().sum())
    if _same(scale * x, y) and abs(scale - 1) > 1e-3:
        root = math.sqrt(x.shape[-1])
        known = next(
            (w for w, v in (("sqrt(width)", root), ("1/sqrt(width)", 1 / root)) if abs(scale / v - 1) < 1e-3), ""
        )
        causes.append(f"ratio {scale:.6g}{f' = {known}' if known else ''} everywhere: scaled")
    by_token = (x * y).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
    if not causes and _same(by_token * x, y):
        module = e.a.get_submodule(e.captured_a.modules.get(e.site, ""))
        experts = any("expert" in name for name, _ in module.named_modules())
        why = "the experts' weights are not normalized, or twice" if experts else "another norm or scale"
        causes.append(f"each token is scaled by {float(by_token.min()):.3g} to {float(by_token.max()):.3g}: {why}")
    return causes + _sum(e, x, y)


def _rounding(x: Tensor, y: Tensor) -> list[str]:
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(y.to(dtype).double(), y) and not torch.equal(x.to(dtype).double(), x):
            return [f"all values are rounded to {str(dtype).removeprefix('torch.')}: a cast"]
    return []


def _norm(reads: Tensor, x: Tensor, y: Tensor, bias: Tensor) -> list[str]:
    """Two outputs of a norm that read the same rows; `bias` is A's."""
    closeness = min(CLOSE, _relative(x, y) / BETTER)

    def fits(z: Tensor) -> bool:
        return _relative(y, z) < closeness

    kept = x.abs() > 1e-3 * x.abs().mean()
    ratio = (y / x).where(kept, torch.nan)
    by_channel, by_row = ratio.nanmedian(0).values, ratio.nanmedian(1).values
    if fits(x * by_channel):
        gain = _gain_of(reads, x)
        other = gain * by_channel
        if float((by_channel - by_channel.nanmean()).abs().nan_to_num().max()) < 1e-6 * float(
            by_channel.nanmean().abs()
        ):
            scale = float(by_channel.nanmean())
            plus = ": a gain of 1 + w?" if abs(float((other - gain).nanmean()) - 1) < 1e-3 else ": scaled"
            return [f"ratio {scale:.6g} in every channel{plus}"]
        for shift in (1.0, -1.0):
            if float((other - gain - shift).abs().nan_to_num().median()) < 1e-3:
                return [f"the gain is A's {'+' if shift > 0 else '-'} 1: a gain of 1 + w?"]
        if float((other - 1).abs().nan_to_num().median()) < 1e-3:
            return ["B applies no gain"]
        return ["ratio differs by channel: another gain"]
    if fits(x * by_row[:, None]):
        size = reads.square().mean(1)
        centred = (reads - reads.mean(1, keepdim=True)).square().mean(1)
        for ms in (size, centred):
            larger = ms * (by_row**-2 - 1)
            if float((larger - larger.median()).abs().median()) < 0.1 * float(larger.median().abs()):
                return [f"another eps: B's is larger by {float(larger.median()):.2g}"]
        if fits(x * (size / centred).sqrt()[:, None]) or fits(x * (centred / size).sqrt()[:, None]):
            return ["another statistic: variance in place of the mean square, or the reverse"]
        return ["the ratio differs by row: another statistic, or another order of norm and scale"]
    offset = (y - x).median(0).values
    if fits(x + offset):
        return ["an offset by channel: a missing or additional bias"]
    mean = reads.mean(1, keepdim=True)
    x, y = x - bias, y - bias
    for sign, words in ((1, "does not subtract the mean"), (-1, "subtracts the mean")):
        moved = x + sign * mean * (x / (reads - (mean if sign > 0 else 0))).nan_to_num()
        direction = torch.nn.functional.cosine_similarity(moved, y, dim=-1)
        if float(direction.min()) > 1 - 1e-6:
            return [f"B {words}: LayerNorm or RMSNorm"]
    if fits(reads):
        return ["B applies no norm here"]
    return []


def _gain_of(reads: Tensor, x: Tensor) -> Tensor:
    """The gain by channel of an RMS norm or a LayerNorm without bias, whichever explains the output better."""
    gains = []
    for rows in (reads, reads - reads.mean(1, keepdim=True)):
        unit = rows * rows.square().mean(1, keepdim=True).rsqrt()
        gain = (x / unit).where(unit.abs() > 0.1, torch.nan).nanmedian(0).values
        gains.append((_relative(x, unit * gain.nan_to_num()), gain))
    return min(gains, key=lambda pair: pair[0])[1]


def _sum(e: Evidence, x: Tensor, y: Tensor) -> list[str]:
    """A sum of the stream and a branch with other coefficients."""
    if not (e.site.name.endswith("norm_in") or e.site.name == "block_out"):
        return []
    layer = e.site.layer
    parts = {
        "the residual": e.entering,
        "the attention norm's output": e.captured_a.tensors.get(Site("attn_norm_out", layer)),
    }
    for kind, words in (("attn", "attention"), ("mlp", "the MLP")):
        normed = e.captured_a.tensors.get(Site(f"{kind}_post_norm_out", layer))
        parts[words] = e.captured_a.tensors.get(Site(f"{kind}_out", layer)) if normed is None else normed
    rows = {}
    for words, part in parts.items():
        tokens = None if part is None else counted(part.double(), e.mask)
        if tokens is not None and tokens.shape == x.shape:
            rows[words] = tokens.flatten()
    if len(rows) < 2:
        return []
    basis = torch.stack(list(rows.values()), 1)
    solved = [torch.linalg.lstsq(basis, z.flatten()[:, None]).solution[:, 0] for z in (x, y)]
    if not _same(basis @ solved[1], y.flatten()):
        return []
    before, after = ([round(c, 6) + 0.0 for c in coefficients.tolist()] for coefficients in solved)
    return [
        f"{words} enters the sum times {new:.5g}, not {old:.5g}" if new else f"{words} is left out of the sum"
        for words, old, new in zip(rows, before, after, strict=True)
        if abs(old - new) > 1e-4
    ]


# --- trials ----------------------------------------------------------------------------------------------------------


Trial = Iterator[tuple[str, nn.Module, dict[str, Any]]]  # cause, changed model, what it is called with


def _trials(e: Evidence) -> list[str]:
    """Change A as known faults would and see whether it then agrees with B."""
    b = e.tensors_b[e.site]
    before = relative_difference(e.captured_a.tensors[e.site], b, e.mask)
    for words, make in _TRIALS:
        for cause, model, inputs in make(e):
            with contextlib.suppress(Exception), _entered(e, model):
                after = capture(model, inputs, e.roles_a).tensors[e.site]
                if relative_difference(after, b, e.mask) * BETTER < before:
                    return [f"{words}{cause}"]
    return _sees_later(e)


@contextlib.contextmanager
def _entered(e: Evidence, model: nn.Module) -> Iterator[None]:
    """Have the site's block read what it read in A, whatever else was changed before it."""

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        x, name = hidden_state(args, kwargs)
        kept = e.entering
        return with_argument(args, kwargs, name, x if kept is None or kept.shape != x.shape else kept)

    handle = model.get_submodule(e.block).register_forward_pre_hook(enter, with_kwargs=True) if e.block else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _shifted(e: Evidence) -> Trial:
    read = next(iter(e.captured_a.tensors.values()))
    rows, length = read.shape[:2]
    choices = {f" by {shift}": (torch.arange(length) + shift).clamp_min(0).expand(rows, -1) for shift in (1, -1, 2)}
    if e.mask is not None:
        choices[": counted with the padding"] = torch.arange(length).expand(rows, -1)
        choices[": counted without the padding"] = (e.mask.cumsum(1) - 1).clamp_min(0)
    choices[": all are 0, as without a rotary embedding"] = torch.zeros(rows, length, dtype=torch.long)
    for words, positions in choices.items():
        yield words, e.a, e.inputs_a | {"position_ids": positions}


def _scaled_tokens(e: Evidence) -> Trial:
    if e.site.name != EMBEDDINGS or not hasattr(e.a, "get_input_embeddings"):
        return
    width = e.captured_a.tensors[e.site].shape[-1]
    for factor, words in ((math.sqrt(width), "sqrt(width)"), (1 / math.sqrt(width), "1/sqrt(width)")):
        model = copy.deepcopy(e.a)
        with torch.no_grad():
            cast(Any, model).get_input_embeddings().weight.mul_(factor)
        yield f" by {words}", model, e.inputs_a


def _unmasked(e: Evidence) -> Trial:
    if e.mask is not None:
        yield "", e.a, {name: value for name, value in e.inputs_a.items() if name != "attention_mask"}


def _changed(e: Evidence, changes: Mapping[str, Callable[[nn.Module], Any]]) -> Trial:
    """A copy of A with the site's block changed, for each change, in words; none where it finds nothing to change."""
    name = e.block
    for words, change in changes.items() if name is not None else ():
        model = copy.deepcopy(e.a)
        with torch.no_grad():
            has_changed = change(model.get_submodule(cast(str, name)))
        if has_changed:
            yield words, model, e.inputs_a


def _projections(block: nn.Module, pattern: str) -> list[nn.Linear]:
    return [m for n, m in block.named_modules() if isinstance(m, nn.Linear) and re.search(pattern, n)]


def _rows(linear: nn.Linear, order: Tensor) -> None:
    linear.weight.copy_(linear.weight[order])
    if linear.bias is not None:
        linear.bias.copy_(linear.bias[order])


def _rotary_layout(e: Evidence) -> Trial:
    head = _head_width(e.a)
    if head < 2 or head % 2:
        return
    pairs = torch.arange(head).reshape(-1, 2).T.flatten()

    def reorder(block: nn.Module, order: Tensor) -> bool:
        changed = _projections(block, _QUERY_KEY)
        if any(linear.out_features % head for linear in changed):
            return False
        for linear in changed:
            starts = head * torch.arange(linear.out_features // head)[:, None]
            _rows(linear, (order[None] + starts).flatten())
        return bool(changed)

    orders = {": interleaved pairs": pairs, ": halves": pairs.argsort()}
    yield from _changed(e, {words: partial(reorder, order=order) for words, order in orders.items()})


def _key_value_repeat(e: Evidence) -> Trial:
    config, head = _config(e.a), _head_width(e.a)
    heads, groups = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0)
    if not (heads and groups and head and 1 < groups < heads):
        return
    order = torch.arange(heads).reshape(heads // groups, groups).T.flatten()  # A's head that takes B's place
    columns = (order[:, None] * head + torch.arange(head)).flatten()

    def change(block: nn.Module) -> bool:
        queries, outs = _projections(block, _QUERY), _projections(block, r"o_proj$|out_proj$|dense$")
        outs = [o for o in outs if o.in_features == len(columns)]
        if not queries or not outs or queries[0].out_features != len(columns):
            return False
        _rows(queries[0], columns)
        outs[0].weight.copy_(outs[0].weight[:, columns])
        return True

    yield from _changed(e, {"": change})


def _softmax_scale(e: Evidence) -> Trial:
    width = max(_head_width(e.a), 1)
    root = math.sqrt(width)

    def set_to(block: nn.Module, scale: float) -> bool:
        scaled = [m for m in block.modules() if isinstance(getattr(m, "scaling", None), float)]
        for module in cast(list[Any], scaled):
            module.scaling = scale
        return bool(scaled)

    def times(block: nn.Module, factor: float) -> bool:
        queries = _projections(block, _QUERY)
        for tensor in (t for linear in queries for t in (linear.weight, linear.bias) if t is not None):
            tensor.mul_(factor)
        return bool(queries)

    scales = {"1/d_head": 1 / width, "none": 1.0, "1/sqrt(d_head)": 1 / root}
    factors = {"1/d_head in place of 1/sqrt(d_head)": 1 / root, "none in place of 1/sqrt(d_head)": root}
    changes = {f": {words}": partial(times, factor=factor) for words, factor in factors.items()}
    changes |= {f": {words}": partial(set_to, scale=scale) for words, scale in scales.items()}
    yield from _changed(e, changes)


def _rotary_base(e: Evidence) -> Trial:
    buffers = [n for n, _ in e.a.named_buffers() if n.endswith("inv_freq") and "original" not in n]
    bases = (10_000.0, 500_000.0, 1_000_000.0, 100_000.0, 50_000.0, 20_000.0, 5_000.0, 1_000.0) if buffers else ()
    whole = _head_width(e.a) // 2
    for base, is_whole in [(base, False) for base in bases] + [(base, True) for base in bases[:1]]:
        model = copy.deepcopy(e.a)
        for name in buffers:
            owner, _, leaf = name.rpartition(".")
            old = getattr(model.get_submodule(owner), leaf)
            count = whole if is_whole else len(old)
            setattr(model.get_submodule(owner), leaf, base ** (-torch.arange(count, dtype=old.dtype) / count))
        yield f" of {base:g}{', of all features of a head' if is_whole else ''}", model, e.inputs_a


# Attribute of a block's modules or of the configuration -> the values that a port may have in its place, in words.
_SETTINGS: dict[str, dict[Any, str]] = {
    "attn_logit_softcapping": {None: "no soft cap of the attention scores", 50.0: "a soft cap of the scores of 50"},
    "final_logit_softcapping": {None: "no soft cap of the logits", 30.0: "a soft cap of the logits of 30"},
    "sliding_window": {1: "an attention window one longer", -1: "an attention window one shorter", 10**6: "no window"},
}


def _settings(e: Evidence) -> Trial:
    for name, values in _SETTINGS.items():
        for value, words in values.items():
            model = copy.deepcopy(e.a)
            holders = [_config(model), *(model.get_submodule(e.block).modules() if e.block else ())]
            holders = [holder for holder in holders if hasattr(holder, name)]
            for holder in holders:
                old = getattr(holder, name)
                with contextlib.suppress(Exception):  # a configuration that checks its values
                    setattr(holder, name, old + value if name == "sliding_window" and old else value)
            if holders:
                yield words, model, e.inputs_a
    types = getattr(_config(e.a), "layer_types", None) or ()
    for kind in set(types) if e.block else ():
        model = copy.deepcopy(e.a)
        with contextlib.suppress(AttributeError):  # a property
            _config(model).layer_types = [kind] * len(types)
        yield f"{kind.replace('_', ' ')} in this layer, by another window", model, e.inputs_a


def _norms_of_heads(e: Evidence) -> Trial:
    def without(block: nn.Module, leaf: str) -> bool:
        found = [name for name, _ in block.named_modules() if re.search(rf"(^|\.){leaf}$", name)]
        for name in found:
            block.set_submodule(name, nn.Identity())
        return bool(found)

    kinds = {"queries": "q_norm", "keys": "k_norm", "queries and keys": "[qk]_norm"}
    yield from _changed(e, {words: partial(without, leaf=leaf) for words, leaf in kinds.items()})


def _gate_and_up(e: Evidence) -> Trial:
    def change(block: nn.Module) -> bool:
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

    yield from _changed(e, {"": change})


_ACTIVATIONS = {
    "gelu": nn.GELU(),
    "gelu with tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
    "tanh": nn.Tanh(),
}


def _activation(e: Evidence) -> Trial:
    def put(block: nn.Module, function: nn.Module) -> bool:
        pattern = r"(^|\.)(act|act_fn|activation\w*|gelu_impl)$"
        named = [name for name, _ in block.named_modules() if re.search(pattern, name)]
        for name in named:
            owner, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(owner), leaf, function)
        return bool(named)

    yield from _changed(e, {f": {words}": partial(put, function=function) for words, function in _ACTIVATIONS.items()})


_TRIALS: tuple[tuple[str, Callable[[Evidence], Trial]], ...] = (
    ("token embeddings are scaled", _scaled_tokens),
    ("positions are off", _shifted),
    ("B ignores the padding mask", _unmasked),
    ("another layout of the rotary embedding", _rotary_layout),
    ("keys and values are repeated in another order", _key_value_repeat),
    ("another scale of the softmax", _softmax_scale),
    ("a rotary base", _rotary_base),
    ("B has ", _settings),
    ("B has no norm of ", _norms_of_heads),
    ("gate and up projections are swapped", _gate_and_up),
    ("another activation", _activation),
)


def _sees_later(e: Evidence) -> list[str]:
    """Change each row's last token: outputs at earlier tokens move in a model without a causal mask."""
    ids = e.inputs_a.get("input_ids")
    if e.b is None or e.roles_b is None or ids is None:
        return []
    mask = torch.ones_like(ids) if e.mask is None else e.mask
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    rows = torch.arange(len(ids))
    changed = ids.clone()
    changed[rows, last] = torch.where(ids[rows, last] == ids.max(), ids.min(), ids.max())
    earlier = (torch.arange(ids.shape[1])[None] < last[:, None]) & mask.bool()
    moves = []
    sides = ((e.a, e.inputs_a, e.roles_a, e.captured_a.tensors), (e.b, e.inputs_b, e.roles_b, e.tensors_b))
    for model, inputs, roles, before in sides:
        inputs = {n: changed if isinstance(x, Tensor) and torch.equal(x, ids) else x for n, x in inputs.items()}
        after = capture(model, inputs, roles).tensors[e.site]
        if after.shape[:2] != ids.shape:
            return []
        moves.append(bool((after - before[e.site])[earlier].abs().max() > 1e-9))
    if moves == [False, True]:
        return ["B attends to later tokens: a wrong mask"]
    return ["A attends to later tokens and B does not: a wrong mask"] if moves == [True, False] else []


def _same(x: Tensor, y: Tensor) -> bool:
    return _relative(x, y) < CLOSE


def _relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / x.norm().clamp_min(1e-300))
