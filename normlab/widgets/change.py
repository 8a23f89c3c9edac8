"""A change to a model, layer by layer: one description for Python and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from normlab.errors import NormlabError, first_fault
from normlab.figures.one_model import MEASURED, Answer
from normlab.norms.gain import gain_centre, gain_names
from normlab.probes import record, sites
from normlab.probes.layout import hidden_state, output_tensor, with_output
from normlab.probes.passes import device_of, evaluating
from normlab.probes.sites import Block, Sites

KINDS = {"attention": "attn", "mlp": "mlp"}  # a branch's name in a change, and in blocks and probes
SLOPES = {"lam": "λ", "alpha": "α"}  # the parameter in front of x inside a tanh or erf norm


class LayerChange(BaseModel):
    """The change to one block. The defaults change nothing.

    lam, kappa, gain: factors on the lambda (DyT, Derf: alpha), kappa and gamma of its norms. These stand beside its
    branches. Norms inside a branch, as those of queries and keys (Gemma 3, OLMo 2), stay as they are.
    exact: the MLP's norm reduces its own mean square, where BHyT carries the attention's.
    block, attention, mlp: dimmers. The block returns h + block (f(h) - h); a branch adds its share of its output. 0
    skips it. Where a rule takes only a branch's direction (nGPT, deep delta learning), the share is of the rule's step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lam: float = Field(1.0, gt=0, allow_inf_nan=False)
    kappa: float = Field(1.0, gt=0, allow_inf_nan=False)
    gain: float = Field(1.0, ge=0, allow_inf_nan=False)
    exact: bool = False
    block: float = Field(1.0, ge=0, le=1)
    attention: float = Field(1.0, ge=0, le=1)
    mlp: float = Field(1.0, ge=0, le=1)


class Change(LayerChange):
    """A change to all blocks, with exceptions by layer (from 1).

    >>> Change(kappa=0.5, layers={3: {"block": 0}})  # halve every kappa, skip block 3

    As JSON: {"kappa": 0.5, "layers": {"3": {"block": 0}}}. The page reads the same.

    Raises:
        NormlabError: a field that does not exist, or a value out of its range.
    """

    layers: Mapping[int, LayerChange] = Field(default_factory=dict)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise NormlabError(f"not a change: {first_fault(error)}") from None

    def at(self, layer: int) -> LayerChange:
        """The change to one block: its own fields where given, else those of all blocks."""
        fields = {name: getattr(self, name) for name in LayerChange.model_fields}
        own = self.layers.get(layer)
        given = {} if own is None else {name: getattr(own, name) for name in own.model_fields_set}
        return LayerChange(**fields | given)

    def to_json(self) -> dict[str, Any]:
        """The given fields, for `Change(**fields)` and for the page."""
        return self.model_dump(mode="json", exclude_unset=True)


def slope_of(norm: Any) -> str | None:
    """Name of the parameter in front of x inside a tanh or erf norm: "lam", "alpha", or None.

    It is one number. SeeDNorm's alpha, a number per feature, stands outside its tanh.
    """
    found = {name: getattr(norm, name, None) for name in SLOPES}
    return next((name for name, value in found.items() if isinstance(value, Tensor) and value.numel() == 1), None)


@contextmanager
def changed(model: nn.Module, change: Change) -> Iterator[Sites]:
    """The model with the change made; afterwards it is bit for bit what it was. Gives its sites, to record it there.

    Raises:
        NormlabError: a layer that the model lacks, or a branch that returns the stream with itself added.
    """
    where = sites(model)
    blocks, layers = where.blocks, where.layers
    if wrong := [layer for layer in change.layers if layer not in layers]:
        raise NormlabError(f"no block {wrong[0]} to change: the model has blocks {layers[0]} to {layers[-1]}")
    own = {layer: change.at(layer) for layer in layers}
    dims = any(one.attention != 1.0 or one.mlp != 1.0 for one in own.values())
    written = _written(model) if dims and not hasattr(blocks[0].module, "norm_at") else {}
    with ExitStack() as undo:
        for block in blocks:
            _change_block(block, own[block.layer], undo, written)
        yield where


Written = Mapping[tuple[str, int], Mapping[nn.Module, str]]  # (kind, layer) -> modules and how their outputs count


def _written(model: nn.Module) -> Written:
    """The modules whose outputs join the stream of a model that is not ours, as a few tokens show."""
    # Several, as one may be padding, whose vector is 0.
    tokens = torch.arange(4, device=device_of(model))[None]
    with torch.no_grad(), evaluating(model), record(model, ["rms", "relative_contribution"], masks=["all"]) as recorder:
        model(tokens)
    return recorder.branches


def _change_block(block: Block, own: LayerChange, undo: ExitStack, written: Written) -> None:
    """Change a block until `undo` closes.

    written: of a block that is not ours, the modules that a dimmer acts on.
    """
    if own.gain != 1.0 and not block.norms:
        raise NormlabError(f"block {block.layer} has no norm whose gain could change")
    for norm in block.norms:
        change_norm(norm, own, undo)
        if own.exact and getattr(norm, "takes_mean_square", False):
            undo.callback(norm.register_forward_pre_hook(_reduce_own, with_kwargs=True).remove)
    for part, share in (("attention", own.attention), ("mlp", own.mlp)):
        if share != 1.0 and _takes_direction(block, part):
            _dim_step(block.module, KINDS[part], share, undo)
        elif share != 1.0:
            for module in _writers(block, part, written):
                undo.callback(module.register_forward_hook(partial(_dim_branch, share)).remove)
    if own.block != 1.0:
        hook = partial(_dim_block, own.block)
        undo.callback(block.module.register_forward_hook(hook, with_kwargs=True).remove)


def change_norm(norm: Any, own: LayerChange, undo: ExitStack) -> None:
    """Put other values in the place of a norm's gains, slope and kappa until `undo` closes.

    Raises:
        NormlabError: a factor on the gain of a norm in which none is found.
    """
    if own.gain != 1.0:
        gains = gain_names(norm)
        if not gains:
            raise NormlabError(f"no gain was found in the norm {type(norm).__name__}: its gamma cannot be changed")
        centres = [gain_centre(norm, name) for name in gains]
        for name, centre in zip(gains, centres, strict=True):
            _multiply(norm, name, own.gain, centre, undo)
    if own.lam != 1.0 and (slope := slope_of(norm)):
        _multiply(norm, slope, own.lam, 0.0, undo)
    if isinstance(getattr(norm, "kappa", None), float) and own.kappa != 1.0:
        undo.callback(setattr, norm, "kappa", norm.kappa)
        norm.kappa = norm.kappa * own.kappa


def _multiply(norm: nn.Module, path: str, factor: float, centre: float, undo: ExitStack) -> None:
    """Put a parameter or buffer, plus its centre, times a factor in its place until `undo` closes."""
    inside, _, name = path.rpartition(".")
    owner = norm.get_submodule(inside)
    held: Any = owner._buffers if owner._buffers.get(name) is not None else owner._parameters  # fixed ones are buffers
    value = held.get(name)
    if value is None:
        raise NormlabError(f"{path} of the norm {type(norm).__name__} is computed: it cannot be changed")
    undo.callback(held.__setitem__, name, value)
    held[name] = (value.detach() + centre) * factor - centre


def _reduce_own(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args[:1], {**kwargs, "mean_square": None}


def _writers(block: Block, part: str, written: Written) -> list[nn.Module]:
    """The modules whose outputs join the stream: output norms of "attention" or "mlp", or those branches themselves."""
    norm_at, kind = getattr(block.module, "norm_at", None), KINDS[part]
    forms = written.get((kind, block.layer), {})
    if norm_at is not None:
        branch = norm_at(f"{kind}_out") or getattr(block, part)
        forms = {} if branch is None else {branch: "added"}
    if "contained" in forms.values():
        raise NormlabError(f"block {block.layer}'s {part} returns the stream with itself added: it cannot be dimmed")
    if not forms:
        raise NormlabError(f"block {block.layer} has no {part} to dim")
    return [*forms]


def _takes_direction(block: Block, part: str) -> bool:
    """True if the block's rule for "attention" or "mlp" ignores the size of the branch's output."""
    rule_at = getattr(block.module, "rule_at", None)
    return rule_at is not None and rule_at(KINDS[part]).takes_direction


def _dim_step(block: Any, kind: str, share: float, undo: ExitStack) -> None:
    """Let one sublayer of a block with rules take only a share of its step until `undo` closes."""
    sublayer = block._sublayer

    def dimmed(part: str, state: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        after: Tensor = sublayer(part, state, branch)
        return _mixed(share, state, after) if part == kind else after

    undo.callback(_restore, block, block.__dict__.get("_sublayer"))
    block._sublayer = dimmed


def _restore(block: Any, sublayer: Any) -> None:
    """Undo one `_dim_step`; None: the block had its class's method."""
    if sublayer is None:
        del block._sublayer
    else:
        block._sublayer = sublayer


def _dim_branch(share: float, _: nn.Module, args: tuple, output: Any) -> Any:
    return with_output(output, output_tensor(output) * share)


def _dim_block(share: float, _: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """The block's output with only a share of what the block adds to its input."""
    return with_output(output, _mixed(share, hidden_state(args, kwargs), output_tensor(output)))


def _mixed(share: float, before: Tensor, after: Tensor) -> Tensor:
    """A share of the way from one state to the next."""
    if share == 0.0:
        return before
    if before.shape != after.shape:
        raise NormlabError("a block that opens several streams can be skipped, not dimmed")
    return before + share * (after - before)


def ask(model: nn.Module, tokens: Tensor, change: Change, row: int = 0, token: int | None = None) -> Answer:
    """Run the changed model on `tokens` (batch, length) and measure every layer.

    Args:
        row, token: after which token of which row the next one's probabilities are asked for, from 0. None: the last.
    """
    output, table = _run(model, tokens, change)
    token = tokens.shape[1] - 1 if token is None else token
    chances = torch.softmax(output.logits[row, token].float(), dim=-1).cpu().numpy()
    return Answer(float(output.loss), chances, table, row, token)


def ask_row(model: nn.Module, tokens: list[int], change: Change, position: int) -> dict[str, Any]:
    """The answer of `static/model.js` to the same question, from a model in the kernel."""
    row = torch.tensor([tokens], device=device_of(model))
    output, table = _run(model, row, change)
    logits = output.logits[0].float().cpu()
    losses = nn.functional.cross_entropy(logits[:-1], row[0, 1:].cpu(), reduction="none")
    rows = table[table["mask"] == "all"].set_index(["metric", "site", "layer"])["value"].to_dict()
    depth = int(table["layer"].max())

    def by_layer(metrics: Sequence[str], site: str, first: int = 1) -> list[float | None]:
        metric = next((name for name in metrics if (name, site, depth) in rows), metrics[0])
        return _finite(rows.get((metric, site, layer), math.nan) for layer in range(first, depth + 1))

    parts = {"attn": "attn_norm_in", "mlp": "mlp_norm_in"}
    return {
        "loss": _finite([float(losses.mean())])[0],
        "losses": _finite(losses.tolist()),
        "sizes": by_layer(["token_l2_mean"], "block_out", 0),
        "shares": {part: by_layer(["saturation", "saturation_95"], site) for part, site in parts.items()},
        "bounds": {part: by_layer(["saturation_bound"], site) for part, site in parts.items()},
        "logits": _finite(logits[position].tolist()),
    }


def _finite(values: Iterable[float]) -> list[float | None]:
    """JSON has no other numbers: None for those."""
    return [value if math.isfinite(value) else None for value in values]


def _run(model: nn.Module, tokens: Tensor, change: Change) -> tuple[Any, Any]:
    """The changed model's output, and its layers' statistics."""
    with evaluating(model), changed(model, change) as where, torch.no_grad(), record(where, list(MEASURED)) as recorder:
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
    return output, recorder.stats().to_pandas()
