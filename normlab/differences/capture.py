"""Capture the tensors of the decomposition: what each norm, branch and sum of a model returns on a batch.

`roles_of(model, batch)`  which module is which norm or branch, by what the stream shows
`capture(model, batch)`   the tensors by site, in the order in which the model computes them
`read_arrays(path)`       the same, written by another framework to a file
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from normlab.errors import NormlabError, in_one_line
from normlab.probes import record
from normlab.probes.call_inputs import TokenMask
from normlab.probes.call_tokens import PADDING_BY
from normlab.probes.forward_call import Call
from normlab.probes.layout import find_input, find_output, others, outputs_of, replaced, with_output
from normlab.probes.passes import called, evaluating, forwards, hooked
from normlab.probes.sites import Sites, sites, stacks

EMBEDDINGS, LOGITS, FINAL = "embeddings", "logits", "final_norm"
WORDS = {
    "embeddings": "embeddings",
    "attn_norm_in": "input of the attention norm",
    "attn_norm_out": "attention norm",
    "attn_in": "input of attention",
    "attn_out": "attention",
    "cross_norm_in": "input of the cross-attention norm",
    "cross_norm_out": "cross-attention norm",
    "cross_out": "cross-attention",
    "mixer_out": "mixer",
    "attn_post_norm_in": "attention, before its output norm",
    "attn_post_norm_out": "norm of attention's output",
    "mlp_post_norm_in": "MLP, before its output norm",
    "mlp_post_norm_out": "norm of the MLP's output",
    "mlp_norm_in": "sum before the MLP norm",
    "mlp_norm_out": "MLP norm",
    "mlp_in": "input of the MLP",
    "mlp_out": "MLP",
    "block_out": "sum at the block's end",
    "final_norm_in": "input of the final norm",
    "final_norm_out": "final norm",
    "logits": "logits",
    "block_in_grad": "gradient at the block's input",
}


class Site(NamedTuple):
    """A place of the decomposition: its name and its block, from 1; 0 holds the embeddings, depth + 1 what follows."""

    name: str
    layer: int

    def words(self) -> str:
        """The site in words, without its block."""
        return WORDS.get(self.name, self.name.replace("_", " "))


@dataclass(frozen=True)
class Roles:
    """Names of modules by role, on one batch. `norms` and `branches` map a module's name to its kind, `wholes` that of
    a branch's output to that of the whole branch. `mask_name` is the model's argument that masks padding, if any.

    `mask` is what `record` reads of it, of the shape of the tokens that the blocks hold, non-zero = a token; None where
    all count. `notes` say why all do, or what may be a mask.
    """

    blocks: tuple[str, ...] = ()
    norms: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    final_norms: tuple[str, ...] = ()
    wholes: dict[str, str] = field(default_factory=dict)
    mask_name: str | None = None
    mask: Tensor | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Capture:
    """Tensors by site in order of computation, and the name of the module that returned each.

    `last` ends the pass. `given` are values that the model goes on with in place of its own, once these are kept.
    `copies`: the model writes into tensors that it has returned, so that copies are kept.
    """

    tensors: dict[Site, Tensor] = field(default_factory=dict)
    modules: dict[Site, str] = field(default_factory=dict)
    last: Site | None = None
    given: Mapping[Site, Tensor] = field(default_factory=dict)
    copies: bool = False
    _before: dict[Site, tuple[int, Tensor]] = field(default_factory=dict)  # writes counted until then, and a token

    @property
    def depth(self) -> int:
        """The layers that ran: the blocks, or more where they run again."""
        return max((site.layer for site in self.tensors if site.name == "block_out"), default=0)

    def keep(self, site: Site, value: Any, module: str) -> Tensor | None:
        """Keep the value that a site holds first; returns what is given in its place."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or site in self.tensors:
            return None
        x = value.detach()
        self.tensors[site] = x.clone() if self.copies else x
        self._before[site] = x._version, _last_token(x).clone()
        self.modules[site] = module
        if site == self.last:
            raise _Reached
        given = self.given.get(site)
        return None if given is None or given.shape != value.shape else given.to(value, copy=True)

    @property
    def is_overwritten(self) -> bool:
        """True if the model has written into what was kept and not copied; PyTorch does not count every write."""
        return not self.copies and any(
            x._version != count or not torch.equal(_last_token(x), token)
            for x, (count, token) in ((x, self._before[site]) for site, x in self.tensors.items())
        )

    def forget(self) -> None:
        """Begin anew."""
        for kept in (self.tensors, self.modules, self._before):
            kept.clear()


def _last_token(x: Tensor) -> Tensor:
    return x[(slice(-1, None),) * (x.ndim - 1)]


class _Reached(BaseException):
    """Ends a pass whose rest nobody reads; no `except Exception` of a model stops it."""


def roles_of(
    model: nn.Module,
    batch: dict[str, Any],
    blocks: str | None = None,
    mask: TokenMask = None,
    given: Mapping[str, Any] | None = None,
) -> Roles:
    """Find the role of each module by recording one forward pass. `blocks` is a pattern as `sites` takes it, `mask` is
    what `record` takes. `given` is what the caller gave, of which `batch` is the part that the model takes.

    Raises NormlabError where no stack of blocks is found, and for a `mask` that is none.
    """
    where = _stack_that_runs(model, batch) if blocks is None else sites(model, blocks)
    recorder = record(where, metrics=["relative_contribution"], masks=["all"])
    with torch.no_grad(), recorder, _running_among([block.module for block in where.blocks]) as ran:
        _called(model, batch)
    names = {module: name for name, module in model.named_modules()}
    # Of several of a kind in a block the last is compared.
    branches = {names[[*modules][-1]]: kind for (kind, _), modules in recorder.branches.items()}
    outer = set(where.outer_norms)
    read = {norm: site for norm, (site, _) in recorder.norm_sites.items() if norm not in outer}
    norms = {names[norm]: site.removesuffix("_norm_in") for norm, site in read.items()}
    for block in where.blocks:
        for norm in block.norms:  # of a branch's output, or one that the stream did not show
            name = names[norm]
            own = f"{branches[name]}_post" if name in branches else name.removeprefix(f"{block.name}.")
            norms.setdefault(name, own)
        for branch in block.branches:
            name = names[branch.module]
            inside = any(n == name or n.startswith(f"{names[branch.whole]}.") for n in branches)
            # Parts of a bare branch stand in the block itself, such as the two projections of OPT's MLP.
            is_bare = sum(other.kind == branch.kind for other in block.branches) > 1
            if branch.kind != "other" and not inside and not is_bare:
                branches[name] = branch.kind
    branches = {name: kind for name, kind in branches.items() if name not in norms}
    final = tuple(names[norm] for norm in where.outer_norms)
    wholes = {names[branch.module]: names[branch.whole] for block in where.blocks for branch in block.branches}
    # Blocks that the batch does not reach, such as Mllama's for images, hold nothing to compare.
    names_of_blocks = tuple(block.name for block in where.blocks if block.module in ran or not ran)
    roles = Roles(names_of_blocks, norms, branches, final, wholes)
    return _with_mask(roles, recorder.latest or Call(["all"]), batch, given or batch, mask)


def _with_mask(
    roles: Roles, latest: Call, batch: Mapping[str, Any], given: Mapping[str, Any], mask: TokenMask
) -> Roles:
    """Roles with the mask of all that is given, of which the model may take a part; of several texts the first's."""
    call = (latest.earlier or [latest])[0]
    call.tokens.look_for_mask(given, mask)
    found = _found(call, given, mask)
    named = found if callable(mask) else call.inputs.arguments.get(call.tokens.mask_name or "")
    name = next((n for n, x in batch.items() if x is not None and x is named), None)
    if name is None and callable(mask) and isinstance(found, Tensor):
        name = next((n for n, x in batch.items() if isinstance(x, Tensor) and _is_like(x, found)), None)
    read, notes = found, []
    if found is None:
        call.tokens.counted_as_held()  # which notes what may be a mask
        if mask is None:
            places = [PADDING_BY + name for name in call.tokens.unknown_masks]
            notes = [f"{place}: {call.absent[place]}" for place in places]
        elif not call.inputs.is_text:
            notes = ["all tokens are compared: the blocks hold no text, whose padding mask= tells"]
    elif not call.tokens.is_by_row or not isinstance(found, Tensor) or found.ndim != 2:
        read = call.tokens.counted_as_held() if isinstance(found, Tensor) else None
        if read is None:
            notes = [f"all tokens are compared: {name or 'the mask'} does not tell which are padding"]
    if read is not None and latest.earlier:
        notes = ["the blocks run on several texts, and the mask of the first counts for all: compare them one by one"]
    return replace(roles, mask_name=name, mask=read, notes=tuple(notes))


def _found(call: Call, given: Mapping[str, Any], mask: TokenMask) -> Any:
    """The call's mask as `record` reads it. Raises NormlabError where what the caller says of it is none."""
    if isinstance(mask, str) and mask not in given and mask not in call.inputs.arguments:
        names = ", ".join(name for name, x in call.inputs.arguments.items() if isinstance(x, Tensor))
        raise NormlabError(f"mask={mask!r} names nothing that is given: choose from {names}")
    try:
        found = call.tokens.attention_mask
    except Exception as error:
        if not callable(mask):
            raise
        raise NormlabError(f"the function given as mask fails: {in_one_line(error)}") from error
    if mask is not None and not isinstance(found, Tensor | None):
        raise NormlabError(f"mask gives {found!r:.60}: it must give a tensor, or None where all tokens count")
    return found


def _is_like(x: Tensor, mask: Tensor) -> bool:
    """True if `x` has two values, one at padding and one at tokens."""
    if x.shape != mask.shape or len(x.unique()) != 2:
        return False
    padding = (mask == 0).to(x.device)
    return torch.equal(x == 0, padding) or torch.equal(x == 0, ~padding)


def _stack_that_runs(model: nn.Module, batch: dict[str, Tensor]) -> Sites:
    """The largest stack of blocks that the batch reaches."""
    *larger, smallest = stacks(model).values()
    for where in larger:
        ran: list[bool] = []
        handle = where.blocks[0].module.register_forward_pre_hook(lambda module, args, ran=ran: ran.append(True))
        try:
            with torch.no_grad():
                _called(model, batch)
        finally:
            handle.remove()
        if ran:
            return where
    return smallest


@contextlib.contextmanager
def _running_among(modules: Sequence[nn.Module]) -> Iterator[set[nn.Module]]:
    """While active, notes which modules run: as modules, or by `module.forward`, which no hook sees."""
    ran: set[nn.Module] = set()

    def noted(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ran.add(module)
        return forward(*args, **kwargs)

    with forwards({module: partial(noted, module, module.forward) for module in modules}):
        yield ran


class _FixedEps(TorchFunctionMode):
    """RMS norms without an eps take float32's, in copies in float64 too.

    PyTorch takes that of the dtype it computes in, which is float32 for half precision.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.rms_norm, functional.rms_norm) and len(args) < 4 and kwargs.get("eps") is None:
            kwargs = kwargs | {"eps": torch.finfo(torch.float32).eps}
        return func(*args, **kwargs)


def _called(model: nn.Module, batch: dict[str, Any]) -> Any:
    """The model's output. NormlabError where it does not run on the batch."""
    try:
        with _FixedEps():
            return called(model, batch)
    except NormlabError:
        raise
    except Exception as error:  # the model's own code: what it raises cannot be known
        given = ", ".join(f"{n} {tuple(x.shape)}" for n, x in batch.items() if isinstance(x, Tensor)) or "no tensor"
        raise NormlabError(f"{type(model).__name__} does not run on {given}: {in_one_line(error)}") from error


def capture_until(
    site: Site, model: nn.Module, batch: dict[str, Any], roles: Roles, given: Mapping[Site, Tensor] | None = None
) -> Tensor:
    """Run `model`, a copy, until it holds `site`; returns that. KeyError where it does not. `given` as in `capture`."""
    result = Capture(last=site, given=given or {})
    with contextlib.suppress(_Reached):
        _captured(result, model, batch, roles, gradients=False)
    return result.tensors[site]


def capture(
    model: nn.Module,
    batch: dict[str, Any],
    roles: Roles,
    *,
    gradients: bool = False,
    given: Mapping[Site, Tensor] | None = None,
) -> Capture:
    """Run `model` once and keep what each site holds.

    gradients: also run backward, of the summed cross-entropy of the next `input_ids`. The gradient that arrives at each
    block's input is kept, from the last block to the first.
    given: values by site, of the same shape. What follows a site reads these in place of the model's own.

    Raises NormlabError where the model does not run on the batch, and where a block hands on more than what is given.
    """
    result = Capture(given=given or {})
    _captured(result, model, batch, roles, gradients)
    return result


def _captured(result: Capture, model: nn.Module, batch: dict[str, Any], roles: Roles, gradients: bool) -> None:
    arrived = Capture()
    mask = roles.mask
    with (
        _hooks(model, roles, result, mask, arrived if gradients else None),
        torch.inference_mode(False),  # whose tensors count no writes
        torch.set_grad_enabled(gradients),
    ):
        output = _called(model, batch)
        is_whole = not result.is_overwritten
        if is_whole:
            logits = output.logits if hasattr(output, "logits") else find_output(output)
            result.keep(Site(LOGITS, result.depth + 1), logits, head_name(model))
            if gradients and logits is not None:
                if not logits.requires_grad or "input_ids" not in batch:
                    raise NormlabError("gradients=True needs input_ids, and parameters that are not frozen")
                labels = batch["input_ids"][:, 1:]
                if mask is not None:  # what padding predicts depends on the attention's implementation
                    mask = mask.to(labels.device)
                    labels = labels.masked_fill((mask[:, 1:] == 0) | (mask[:, :-1] == 0), -100)
                flat = logits[:, :-1].flatten(0, 1)
                functional.cross_entropy(flat, labels.flatten(), reduction="sum").backward()
    if is_whole:
        result.tensors |= arrived.tensors
        result.modules |= arrived.modules
        return
    del output
    result.forget()
    result.copies = True
    _captured(result, model, batch, roles, gradients)


def counted(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """The tokens of `x` that are not padding, (tokens, features); None where its shape does not tell them.

    All of it where it has one row per sequence, such as the scores of a classifier.
    """
    if mask is None or bool(mask.all()) or (x.ndim == 2 and len(x) == len(mask)):
        return x.reshape(-1, x.shape[-1])
    mask = mask.bool().to(x.device)
    length = mask.shape[1]
    for shaped in (x, x.movedim(0, -2) if x.ndim == 4 else x):  # several streams come first
        extra = shaped.shape[1] - length if shaped.ndim > 2 and len(shaped) == len(mask) else -1
        if extra >= 0:  # streams one after another, or positions of the model's own before the tokens
            whole = (
                mask.repeat(1, 1 + extra // length)
                if extra % length == 0
                else functional.pad(mask, (extra, 0), value=True)
            )
            return shaped[whole].reshape(-1, x.shape[-1])
    return x[mask.flatten()] if x.ndim == 2 and len(x) == mask.numel() else None


def relative_difference(x: Tensor, y: Tensor, mask: Tensor | None) -> float:
    """Root mean square over tokens of |x - y| / |x|.

    Infinite where shapes differ, or only one is finite. NaN where the shape does not tell padding from tokens.
    """
    if x.shape != y.shape:
        return float("inf")
    a, b = counted(x.double(), mask), counted(y.double().to(x.device), mask)
    if a is None or b is None:
        return float("nan")
    if not math.isfinite(float(a.sum()) + float(b.sum())):
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return float("inf")
        a, b = a.where(finite, 0), b.where(finite, 0)
    size = a.norm(dim=-1)
    size = size.clamp_min(1e-6 * float(size.square().mean().sqrt()) + 1e-300)
    return float(((a - b).norm(dim=-1) / size).square().mean().sqrt())


def head_name(model: nn.Module) -> str:
    """Name of the module that computes the logits; empty where it is not known."""
    head = cast(Any, model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return next((name for name, module in model.named_modules() if module is head), "")


@contextlib.contextmanager
def _hooks(
    model: nn.Module, roles: Roles, result: Capture, mask: Tensor | None, arrived: Capture | None
) -> Iterator[None]:
    modules = dict(model.named_modules())
    layer = 0

    def before(name: str, act: Any) -> tuple[nn.Module, Any]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            x = find_input(args, kwargs, module if name in roles.blocks else None)
            given = act(name, x)
            return None if x is None or given is None else tuple(replaced(v, [(x, given)]) for v in (args, kwargs))

        return modules[name], hook

    def after(name: str, act: Any) -> tuple[nn.Module, Any]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
            read = find_input(args, kwargs, module) if name in roles.blocks else None
            x = find_output(output, None if read is None else read.shape)
            given = act(name, x)
            if x is None or given is None:
                return None
            if name in roles.blocks and any(other.shape == x.shape for other in others(x, outputs_of(output))):
                raise NormlabError("blocks hand on several tensors, and one of them is given")
            return replaced(output, [(x, given)])

        return modules[name], hook

    def block_in(name: str, x: Any) -> Tensor | None:
        nonlocal layer
        layer += 1
        if arrived is not None and isinstance(x, Tensor) and x.requires_grad:
            site = Site("block_in_grad", layer)
            x.register_hook(lambda gradient: arrived.keep(site, gradient, name))
        return result.keep(Site(EMBEDDINGS, 0), x, "") if layer == 1 else None

    def keep(site: str) -> Any:
        return lambda name, x: result.keep(Site(site, layer), x, name)

    def keep_final(site: str) -> Any:
        return lambda name, x: result.keep(Site(site, layer + 1), x, name) if layer else None

    def finite(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        return _finite_padding(output, mask)

    parts = []
    for name, kind in roles.norms.items():
        parts.append((before(name, keep(f"{kind}_norm_in")), after(name, keep(f"{kind}_norm_out"))))
    for name, kind in roles.branches.items():
        parts.append((before(roles.wholes.get(name, name), keep(f"{kind}_in")), after(name, keep(f"{kind}_out"))))
    for name in roles.final_norms:
        parts.append((before(name, keep_final(f"{FINAL}_in")), after(name, keep_final(f"{FINAL}_out"))))
    with (
        hooked(
            *(hook for name in roles.blocks for hook in ((modules[name], finite), after(name, keep("block_out")))),
            before=[hook for name in roles.blocks for hook in ((modules[name], _finite_mask), before(name, block_in))],
        ),
        hooked(*(ends for _, ends in parts), before=[starts for starts, _ in parts], must_run=False),
    ):
        yield


def _finite_mask(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Raise float64's least value in an additive mask to float32's: with a score added it would overflow."""

    def raised(value: Any) -> Any:
        is_mask = isinstance(value, Tensor) and value.dtype is torch.float64 and value.ndim == 4
        return value.clamp_min(torch.finfo(torch.float32).min) if is_mask else value

    return tuple(map(raised, args)), {name: raised(value) for name, value in kwargs.items()}


def _finite_padding(output: Any, mask: Tensor | None) -> Any:
    """Set values at padded tokens that are not finite to zero.

    A row without a key to attend to may be NaN where a model makes its mask inside a block. It would spread.
    """
    x = find_output(output)
    if mask is None or x is None or x.shape[:2] != mask.shape or bool(x.isfinite().all()):
        return output
    return with_output(output, x.where(mask.bool().to(x.device)[..., None] | x.isfinite(), 0))


def read_arrays(path: str | Path) -> dict[Site, Tensor]:
    """Read `NAME.LAYER` arrays, (batch, length, features), from an .npz or .safetensors file.

    Names are those of `WORDS`: `embeddings`, `attn_norm_out.3`, `attn_out.3`, `block_out.3`, `final_norm_out`,
    `logits`. Blocks count from 1. Any subset will do. What precedes or follows the blocks needs no number.

    Raises NormlabError for a file that cannot be read, holds an unknown name, numbers that are no floats, or no array.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            arrays = dict(load_file(path))
        else:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    except Exception as error:
        raise NormlabError(f"{path} cannot be read as .npz or .safetensors: {error}") from error
    result = {}
    for name, array in arrays.items():
        site, _, number = name.partition(".")
        if site not in WORDS or not re.fullmatch("[0-9]{0,6}", number):
            named = ', '.join(WORDS)
            raise NormlabError(f"{path} holds {name!r:.80}: name arrays SITE.BLOCK, with SITE one of {named}")
        if not array.is_floating_point():
            raise NormlabError(f"{path} holds {name:.80} in {array.dtype}: write activations in a floating dtype")
        result[Site(site, int(number) if number else -1)] = array
    if not result:
        raise NormlabError(f"{path} holds no array")
    return result


def write_arrays(model: nn.Module, batch: dict[str, Tensor], path: str | Path) -> None:
    """Write what each site of `model` holds on `batch` to a .safetensors file, for `read_arrays` elsewhere.

    The model runs in evaluation mode.
    """
    from safetensors.torch import save_file

    with evaluating(model):
        captured = capture(model, batch, roles_of(model, batch))
    named = {f"{site.name}.{site.layer}": x.contiguous().clone() for site, x in captured.tensors.items()}
    save_file({name: x for name, x in named.items() if name.split(".")[0] in WORDS}, path)
