"""Compare two models on the same tokens, site by site, and say where they part.

`diff(a, b, batch)` returns a `Difference`: a verdict of one line, a table of all sites, the causes found.

Two copies in float64, with the weights of both rounded to the coarser dtype of the two, settle whether the models
compute the same function. Their difference is compared with how far rounding in float32 moves the same sites. Then each
model is compared with its own copy, to tell rounding as expected from a part computed in a coarser dtype.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from normlab.differences.added import COLUMNS, Row, added_by_blocks, compare_sites, explained_parts
from normlab.differences.capture import (
    FINAL,
    LOGITS,
    Capture,
    Site,
    capture,
    counted,
    read_arrays,
    relative_difference,
    roles_of,
)
from normlab.differences.cause import Cause, in_words
from normlab.differences.causes import Evidence, Side, around_norm, causes_of
from normlab.errors import NormlabError
from normlab.probes.call_inputs import TokenMask
from normlab.probes.passes import device_of, evaluating, unwrapped
from normlab.probes.sites import stacks_of

LEAST = 2.0**-22  # relative: below it two float64 copies with parts in float32 are not told apart
WITHOUT_FLOAT64 = 3e-5  # relative: beyond it two float32 copies are told apart, where float64 overflows
COARSER = 64.0  # times the rounding expected of its dtype, beyond which a model computes a part in a coarser one


@dataclass
class Difference:
    """The result of `diff`. `table` has one row per site: site, layer, difference, noise, ratio, parts.

    `compared` says between what its difference and its noise are.

    `added` has one row per block (`added_by_blocks`): layer, difference, noise, ratio, parts, logits. It is empty where
    the models are equal, and of arrays.
    """

    verdict: str
    first: Site | None
    causes: list[str]
    table: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    added: pd.DataFrame = field(default_factory=partial(pd.DataFrame, columns=COLUMNS))
    compared: str = ""

    @property
    def equal(self) -> bool:
        """True where no site differs beyond rounding."""
        return self.first is None

    def __str__(self) -> str:
        rest = [*self.causes[1:], *self.notes]  # the verdict ends with the first cause
        return "\n".join([self.verdict, *(f"  {line}" for line in rest)])


def diff(
    a: nn.Module,
    b: nn.Module | str | Path,
    batch: dict[str, Any],
    *,
    blocks: str | None = None,
    gradients: bool = False,
    dtype: torch.dtype | None = None,
    mask: TokenMask = None,
) -> Difference:
    """Find the first site at which models `a` and `b` differ beyond rounding.

    Args:
        a: any model that `record` measures; the reference.
        b: another model with the same stream, or a file of arrays that one wrote (`read_arrays`).
        batch: what both are called with, such as `input_ids` and `attention_mask`, each (batch, length). Padding is not
            compared; masks are read as `record` reads them, and count where one of the two takes them. A note says
            where one does not tell padding, so that all tokens are compared.
        blocks: a pattern over module names such as "layers.*", where structure does not show the blocks (`sites`).
        gradients: also compare the gradients that arrive at the blocks' inputs.
        dtype: in which the arrays of a file were computed; default: the coarser of theirs and the model's.
        mask: what masks padding, where it has no known name, as `record` takes it: the name of an argument, or a
            function of the `CallInputs` of `a`, with all of `batch` among its arguments. Without it all tokens are
            compared, and a note names what may be one.

    The difference of a site is the root mean square over tokens of |x_a - x_b| / |x_a|. Its noise is the same between a
    float32 and a float64 copy of `a`. Memory: copies of both models in float64, and of `a` in float32
    if it is in another dtype.

    Raises:
        NormlabError: no stack of blocks was found; depths differ; no site is in both; a model does not run on the
            batch; `mask` names nothing, or is a function that fails or gives no tensor.
    """
    if not hasattr(batch, "items"):
        raise NormlabError("batch must be a dict of the models' arguments, such as {'input_ids': ...}")
    batch = {name: value for name, value in batch.items() if name != "labels"} | {"use_cache": False}
    if not isinstance(b, nn.Module | str | Path):
        raise NormlabError(f"{b!r:.80} is not compared: give a model, or a file of arrays")
    a = unwrapped(a)
    for model in (a, b):
        if isinstance(model, nn.Module) and any(x.is_meta for x in model.parameters()):
            raise NormlabError("weights are offloaded or on the meta device, and diff copies them: load them")
    with evaluating(a), torch.autocast(device_of(a).type, enabled=False):  # it would round the copies in float32
        if not isinstance(b, nn.Module):
            return _diff_arrays(a, read_arrays(b), batch, blocks, dtype, mask)
        b = unwrapped(b)
        with evaluating(b):
            return _diff_models(a, b, batch, blocks, gradients, mask)


def _diff_models(
    a: nn.Module, b: nn.Module, batch: dict[str, Any], blocks: str | None, gradients: bool, given_by: TokenMask
) -> Difference:
    models = (a, b)
    inputs = [_accepted(model, batch) for model in models]
    roles = [roles_of(a, inputs[0], blocks, given_by, batch)] * 2
    mask = roles[0].mask
    if [name for name, _ in a.named_modules()] != [name for name, _ in b.named_modules()]:
        roles[1] = replace(roles_of(b, inputs[1], blocks), mask=mask)
    depth = len(roles[0].blocks)
    if depth != len(roles[1].blocks):
        raise NormlabError(f"the models have {depth} and {len(roles[1].blocks)} blocks: compare equal depths")
    dtypes = [_dtype(model) for model in models]
    coarser = max(dtypes, key=_eps)
    buffers = _coarser_buffers(a, b)

    def run(i: int, dtype: torch.dtype) -> Side:
        """A (0) or B (1) in `dtype`, weights and buffers rounded, and what its sites hold. Copied if it differs."""
        is_own = dtype is dtypes[i] is coarser and dtype is not torch.float64 and not gradients  # float64 is tried on
        model = models[i] if is_own else _rounded(models[i], coarser, dtype, buffers)
        given = _in_dtype(inputs[i], dtype)
        return Side(capture(model, given, roles[i], gradients=gradients), model, given, roles[i])

    @cache
    def tensors(i: int, dtype: torch.dtype) -> dict[Site, Tensor]:
        return run(i, dtype).tensors

    single = tensors(0, torch.float32)
    notes = [*roles[0].notes, *_unequal_buffers(a, b)]
    others = [name for name, found in stacks_of(a).items() if roles[0].blocks[0] not in found]
    notes += [f"{name} is not compared: what differs there shows where it reaches these blocks" for name in others]
    try:
        side_a, side_b = run(0, torch.float64), run(1, torch.float64)
        exact = _all_finite(side_a.tensors, mask) or not _all_finite(single, mask)
    except (NormlabError, RuntimeError):  # a kernel that has no float64, or a dtype written into the code
        exact = False
    if not exact:
        notes.append("compared in float32: a copy does not run in float64")
        side_a, side_b = run(0, torch.float32), run(1, torch.float32)
    noise, least = torch.float32, LEAST if exact else WITHOUT_FLOAT64
    rows = compare_sites(side_a.tensors, side_b.tensors, single, least, mask)
    first, causes = _explained(side_a, side_b, rows, mask)
    casts = [cause for cause in causes if cause.cast is coarser]
    in_buffer = any(cause.of_rotary for cause in casts)
    if first is not None and exact and casts and not (in_buffer and dtypes[0] is dtypes[1]):
        # The dtype of the models, written into the code of one: what counts is beyond its rounding.
        if not in_buffer:  # which a note names
            part = f"{first.words()} of block {first.layer}, in {_code_of(side_b, first)}"
            notes.append(f"{part}, is in {in_words(coarser)} whatever the model's dtype")
        noise, least = coarser, _eps(coarser)
        rows = compare_sites(side_a.tensors, side_b.tensors, tensors(dtypes.index(coarser), coarser), least, mask)
        first, causes = _explained(side_a, side_b, rows, mask)
    exactly = "float64" if exact else "float32"
    compared = f"The difference is between the two models in {exactly}"
    compared += (
        f", the noise between the first one in {in_words(noise)} and in float64."
        if exact
        else f". Without float64 the noise is not known: more than {WITHOUT_FLOAT64:g} counts."
    )
    added = pd.DataFrame(columns=COLUMNS)
    beyond: list[str] = []
    if first is not None and not first.name.endswith("_grad"):
        evidence = Evidence(side_a, side_b, first, mask)
        try:
            added, causes, beyond = _beyond(evidence, causes, run(0, noise), least)
        except NormlabError as error:
            beyond = [f"what each block adds is not known: {error}"]
    if first is None and exact:
        own = [tensors(i, dtypes[i]) for i in (0, 1)]
        rows = _rounding_rows(rows, own, [side_a.tensors, side_b.tensors], dtypes, mask)
        first = _first(rows)
        if first is not None:
            compared = (
                f"The difference is between the first model in {in_words(dtypes[0])} and the second in "
                f"{in_words(dtypes[1])}, the noise what the one that rounds less leads to expect in the coarser dtype."
            )
            causes = [
                Cause(f"{'AB'[i]} is not finite in {in_words(dtypes[i])}, which ends at {torch.finfo(dtypes[i]).max:g}")
                for i in (0, 1)
                if not _all_finite({first: own[i][first]}, mask)
            ] or [Cause("a part is computed in a coarser dtype than the model's: a cast")]
    if first is not None:
        notes.append(f"B computes it in {_code_of(side_b, first)}")
    return replace(_result(rows, first, causes, side_a.captured.depth, [*notes, *beyond], added), compared=compared)


def _beyond(
    evidence: Evidence, causes: list[Cause], rounded: Side, least: float
) -> tuple[pd.DataFrame, list[Cause], list[str]]:
    """What each block adds, the causes with their extent, and notes on the block that adds most."""
    added = added_by_blocks(evidence.a, evidence.b, rounded, least, evidence.mask)
    if added.empty:
        return added, causes, []
    most = added[added["parts"]].sort_values("difference", kind="stable")["layer"].iloc[-1:].tolist()
    other = next((int(layer) for layer in most if layer != evidence.site.layer), None)
    cause, notes = explained_parts(evidence, next(iter(causes), None), rounded, least, other)
    return added, [cause, *causes[1:]] if cause is not None else causes, notes


def _explained(a: Side, b: Side, rows: list[Row], mask: Tensor | None) -> tuple[Site | None, list[Cause]]:
    """The first site that differs, and its causes."""
    first = _first(rows)
    return first, [] if first is None else causes_of(Evidence(a, b, first, mask))


def _code_of(side: Side, site: Site) -> str:
    """The module that computes a site, its class, the file and line of its code. Sums and inputs are the block's; what
    the final norm reads is of the module beside it, or of the one around it."""
    is_blocks = site.name == "block_out" or site.name.endswith(("_in", "_grad"))
    name = side.captured.modules.get(site, "")
    if 1 <= site.layer <= len(side.roles.blocks) and (is_blocks or not name):
        name = side.roles.blocks[site.layer - 1]
    elif site.name == f"{FINAL}_in" and name:
        norm, name = name, name.rpartition(".")[0]
        children = dict(side.model.get_submodule(name).named_children())
        beside = [n for n in (f"{name}.{child}".lstrip(".") for child in children) if n != norm]
        if around_norm(norm, side.roles) is not None and len(beside) == 1:
            name = beside[0]
    module = side.model.get_submodule(name)
    words = f"{name or 'the model'}, {type(module).__name__}"
    try:
        return f"{words}, {inspect.getsourcefile(type(module))}:{inspect.getsourcelines(module.forward)[1]}"
    except (OSError, TypeError):  # typed into a console
        return words


def _first(rows: list[Row]) -> Site | None:
    return next((row.site for row in rows if row.parts), None)


def _diff_arrays(
    a: nn.Module,
    arrays: dict[Site, Tensor],
    batch: dict[str, Any],
    blocks: str | None,
    dtype: torch.dtype | None,
    given_by: TokenMask,
) -> Difference:
    inputs = _accepted(a, batch)
    roles = roles_of(a, inputs, blocks, given_by, batch)
    exact = _rounded(a, _dtype(a), torch.float64)
    given = _in_dtype(inputs, torch.float64)
    in_a = capture(exact, given, roles)
    depth = in_a.depth
    ends = {LOGITS, f"{FINAL}_in", f"{FINAL}_out"}  # an array named without a layer is here, or before the blocks
    places = {site: (depth + 1 if site.name in ends else 0) if site.layer < 0 else site.layer for site in arrays}
    arrays = {Site(site.name, places[site]): x for site, x in arrays.items()}
    computed = dtype or max((_dtype(a), *(x.dtype for x in arrays.values())), key=_eps)
    rounded = capture(_rounded(a, _dtype(a), computed), _in_dtype(inputs, computed), roles).tensors
    mask = roles.mask
    rows = compare_sites(in_a.tensors, arrays, rounded, _eps(computed), mask)
    if all(in_a.tensors[row.site].shape != arrays[row.site].shape for row in rows):
        known = ", ".join(f"{site.name}.{site.layer}" for site in list(in_a.tensors)[:8])
        raise NormlabError(f"the file has no site of this model in its shape: name arrays as {known} ...")
    first = _first(rows)
    side_a, side_b = Side(in_a, exact, given, roles), Side(Capture(arrays))
    causes = [] if first is None else causes_of(Evidence(side_a, side_b, first, mask))
    compared = (
        "The difference is between the first model in float64 and the arrays, "
        f"the noise between the first model in {in_words(computed)} and in float64."
    )
    return replace(_result(rows, first, causes, depth, list(roles.notes)), compared=compared)


def _rounding_rows(
    rows: list[Row],
    own: list[dict[Site, Tensor]],
    exact: list[dict[Site, Tensor]],
    dtypes: list[torch.dtype],
    mask: Tensor | None,
) -> list[Row]:
    """Compare how far each model is from its float64 copy, in roundings of its dtype."""
    result = []
    for site, *_ in rows:
        sizes = [relative_difference(exact[i][site], own[i][site], mask) / _eps(dtypes[i]) for i in (0, 1)]
        difference = relative_difference(own[0][site], own[1][site], mask)
        expected = max(min(sizes), 0.25)
        result.append(Row(site, difference, expected * max(map(_eps, dtypes)), max(sizes) > COARSER * expected))
    return result


def _all_finite(tensors: dict[Site, Tensor], mask: Tensor | None) -> bool:
    rows = (counted(x, mask) for x in tensors.values())
    return all(bool(x.isfinite().all()) for x in rows if x is not None)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _result(
    rows: list[Row],
    first: Site | None,
    causes: list[Cause],
    depth: int,
    notes: list[str],
    added: pd.DataFrame | None = None,
) -> Difference:
    if not rows:
        raise NormlabError("the models have no site in common: check that both are decoders with blocks")
    table = pd.DataFrame(
        [(*row.site, row.difference, row.noise, row.ratio, bool(row.parts)) for row in rows],
        columns=["site", "layer", "difference", "noise", "ratio", "parts"],
    )
    if first is None:
        known = table.dropna(subset="difference")
        if known.empty:
            raise NormlabError("no site's shape tells padding from tokens: compare on a batch without padding")
        worst = known.loc[known["difference"].idxmax()]
        verdict = f"equal: {len(known)} sites agree within rounding; the largest difference is {worst.difference:.1e}"
        return Difference(verdict, None, [], table, notes)
    row = table[(table.site == first.name) & (table.layer == first.layer)].iloc[0]
    because = f": {causes[0]}" if causes else ""
    size = "differs"
    if math.isfinite(row.difference):
        size += f" by {row.difference:.1e}" + (f", {row.ratio:.0f} times rounding" if row.noise else "")
    added = pd.DataFrame(columns=COLUMNS) if added is None else added
    verdict = f"parts at {_place(first.layer, depth)}, {first.words()} ({size}){because}"
    sentences = [str(cause) for cause in causes]
    return Difference(verdict + _clause(added, first.layer, depth), first, sentences, table, notes, added)


def _place(layer: int, depth: int) -> str:
    return f"block {layer}" if 1 <= layer <= depth else "the embeddings" if layer < 1 else "the end"


def _clause(added: pd.DataFrame, first: int, depth: int) -> str:
    """What the verdict says of the errors that blocks add."""
    adding = added[added["parts"].astype(bool)]
    if adding.empty:
        return ""
    most, ruins = (int(adding.loc[adding[name].fillna(0).idxmax(), "layer"]) for name in ("difference", "logits"))
    if len(adding) == 1 and most == first:
        return "; nothing else adds error"
    moves = f", {_place(ruins, depth)} moves the logits most" if ruins != most else ""
    return f"; {_place(most, depth)} adds most{moves}"


def _dtype(model: nn.Module) -> torch.dtype:
    """The floating dtype of most weights."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
    most = counts.most_common(1)
    return most[0][0] if most and most[0][1] else torch.float32


def _accepted(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """The part of a batch that the model's forward takes, on its device. Tokens go to its first parameter, unless one
    is called `input_ids`."""
    takes = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    device = device_of(model)
    kept = {name: value for name, value in batch.items() if name in takes or (open_ended and name != "use_cache")}
    if "input_ids" in batch and "input_ids" not in kept:
        kept[next(iter(takes))] = batch["input_ids"]
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in kept.items()}


def _in_dtype(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Inputs for a copy in `dtype`: images and embeddings are in it too."""
    return {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}


def _shared_buffers(a: nn.Module, b: nn.Module) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """The dtypes that buffers have in the two models, by name, where both are floats."""
    of_b = dict(b.named_buffers())
    pairs = {name: (x.dtype, of_b[name].dtype) for name, x in a.named_buffers() if name in of_b}
    return {name: pair for name, pair in pairs.items() if all(dtype.is_floating_point for dtype in pair)}


def _coarser_buffers(a: nn.Module, b: nn.Module) -> dict[str, torch.dtype]:
    """By name, the coarser of the dtypes that a buffer has in the two models.

    Frequencies are left as they are: what rounding does to them grows with the positions that they are multiplied by.
    """
    pairs = {name: pair for name, pair in _shared_buffers(a, b).items() if "freq" not in name}
    return {name: max(pair, key=_eps) for name, pair in pairs.items()}


def _unequal_buffers(a: nn.Module, b: nn.Module) -> list[str]:
    """Sentences that name buffers of another dtype, one for all of a name."""
    unequal = {}
    for name, (of_a, of_b) in _shared_buffers(a, b).items():
        if of_a is not of_b:
            unequal[name.split(".")[-1], of_a, of_b] = name
    pairs = [(name, in_words(of_a), in_words(of_b)) for (_, of_a, of_b), name in unequal.items()]
    return [f"{name} is in {of_a} in A and in {of_b} in B" for name, of_a, of_b in pairs]


def _rounded(
    model: nn.Module, to: torch.dtype, dtype: torch.dtype, buffers: dict[str, torch.dtype] | None = None
) -> nn.Module:
    """A copy in `dtype`, its weights rounded to `to` first and its buffers to their dtype in `buffers`."""
    memo: dict[int, Any] = {}
    result = copy.deepcopy(model, memo)
    for module, copied in zip(model.modules(), result.modules(), strict=True):
        compiled = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
        if compiled is not None:  # a function is not copied: it would run the original
            copied.forward = copy.deepcopy(compiled, memo)
    kept: list[tuple[Tensor, torch.dtype]] = [(x, to) for x in result.parameters() if x.is_floating_point()]
    kept += [(x, buffers[name]) for name, x in result.named_buffers() if buffers and name in buffers]
    with torch.no_grad():
        for tensor, coarse in kept:
            rounded = tensor.to(coarse).to(tensor.dtype)
            tensor.copy_(rounded.where(rounded.isfinite(), tensor))  # one that overflows is no rounding
    for module in result.modules():  # grouped products of experts have no kernel in float64
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    return result.to(dtype)
