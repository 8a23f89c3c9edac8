"""Find where to measure: the blocks of any model, their branches and norms, by structure.

A norm holds vectors and scalars but no matrix. A branch is attention, cross-attention, a mixer or an MLP; the words of
its attribute or class tell which. What a branch adds, and which norm is which, is checked while the model runs
(`normlab.probes.decomposition`).
"""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from normlab.errors import NormlabError

SECOND_STACK_SHARE = 0.1  # a second stack with this share of the first one's parameters makes the choice ambiguous
_CROSS = re.compile(r"cross|encoder_?attn|encoder_?decoder|encdec")
_KINDS = (  # in the order in which a name is compared with them
    (
        "mixer",
        re.compile(
            r"mamba|ssm|conv|recurrent|rwkv|time_?mix|mixer|fourier|delta|retention|lstm|hyena|linear_?att|lightning|"
            r"pooling|focal|(?<!ln_)modulation"
        ),
    ),
    ("attn", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|ffn?\d?$|ffn|feed_?forward|moe|experts?$|channel_?mix|dense")),
)
_ATTENTION = _KINDS[1][1]
_ANY_MIXER = re.compile(r"(^|\.)mixer(\.\d+)?$")  # may hold any kind, as Nemotron-H's; not token_mixer
_NO_NORM = re.compile(r"scal|gate|bias|posi|embed|token|dropout|identity|router|mask|rotary|rope")
_ACTIVATION = re.compile(r"\bact|activation|relu|silu|swish|sigmoid|tanh")
_DROPS = re.compile(r"drop|identity")
_INERT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Identity)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # without a forward of their own
_TABLE = re.compile(r"posi|embed|rotary|rope|mask|cache|index")


@dataclass(frozen=True, eq=False)
class Branch:
    """A working part of a block. `module`'s output is what it adds; `whole` is the part that holds it and its norms."""

    kind: str
    name: str
    module: nn.Module
    whole: nn.Module


@dataclass(frozen=True)
class Block:
    """One residual block.

    Args:
        layer: its place in the whole model, from 1: of some blocks, as in a stage of a pipeline, by the numbers in
            their names, where they are consecutive.
        name, module: the block.
        norms: the norms at the branches' sides.
        branches: all working parts.
        inner_norms: norms inside the branches; they count where they read the stream.
        activations: nonlinearities outside the branches, which may bend the sum itself (ResNet).
    """

    layer: int
    name: str
    module: nn.Module
    norms: tuple[nn.Module, ...] = ()
    branches: tuple[Branch, ...] = ()
    inner_norms: tuple[nn.Module, ...] = ()
    activations: tuple[nn.Module, ...] = ()

    @property
    def attention(self) -> nn.Module | None:
        """The module whose output is added to the residual stream, as far as structure tells."""
        return next((branch.module for branch in self.branches if branch.kind == "attn"), None)

    @property
    def mlp(self) -> nn.Module | None:
        """The same of the MLP; a bare one ends in its down projection."""
        return next((branch.module for branch in reversed(self.branches) if branch.kind == "mlp"), None)


@dataclass(frozen=True)
class Sites:
    """The blocks in order, the norms outside them, and the modules from the root down to the blocks' owner."""

    blocks: tuple[Block, ...]
    outer_norms: tuple[nn.Module, ...]
    ancestors: tuple[nn.Module, ...]
    names: dict[nn.Module | None, str] = field(repr=False, default_factory=dict)
    mask: Any = None  # what masks padding: an argument's name, or a function of the call (see `record`)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def layers(self) -> range:
        """The places of the blocks in the whole model."""
        return range(self.blocks[0].layer, self.blocks[-1].layer + 1)

    @property
    def stream_layers(self) -> range:
        """The layers of h_0 .. h_L: the one before the blocks, and theirs."""
        return range(self.layers.start - 1, self.layers.stop)

    @property
    def model(self) -> nn.Module:
        """The module that `sites` was given."""
        return self.ancestors[0]

    @property
    def missing(self) -> tuple[str, ...]:
        """The kinds of site that no block has, e.g. ("attention",) in a state-space model."""
        has = {
            "attention": any(block.attention is not None for block in self.blocks),
            "mlp": any(block.mlp is not None for block in self.blocks),
            "norm in a block": any(block.norms for block in self.blocks),
            "norm after the blocks": bool(self.outer_norms),
        }
        return tuple(kind for kind, present in has.items() if not present)

    def __str__(self) -> str:
        lines = [f"{self.depth} blocks"]
        for block in dict.fromkeys((self.blocks[0], self.blocks[-1])):
            parts = [f"attention {self.names.get(block.attention, '-')}", f"mlp {self.names.get(block.mlp, '-')}"]
            others = [branch for branch in block.branches if branch.kind in ("cross", "mixer")]
            parts += [f"{branch.kind} {self.names.get(branch.module, branch.name)}" for branch in others]
            parts += [f"norm {self.names[norm]}" for norm in block.norms]
            lines.append(f"  block {block.layer} {block.name}: " + ", ".join(parts))
        lines += [f"  outside: norm {self.names[norm]}" for norm in self.outer_norms]
        return "\n".join(lines + [f"  not found: {kind}" for kind in self.missing])


def sites(
    model: nn.Module,
    blocks: str | Sequence[nn.Module] | None = None,
    *,
    attention: str | None = None,
    mlp: str | None = None,
    norms: Sequence[str] | None = None,
    mask: Any = None,
) -> Sites:
    """Find the places to measure in `model`.

    Args:
        model: any torch module. Wrappers (DDP, PEFT, `torch.compile`, a TransformerLens bridge) are looked through.
        blocks: the residual blocks, where structure does not show them: modules in order, or a pattern over module
            names such as `"encoder.layers.*"`. `*` is one name or index.
        attention, mlp, norms: names inside a block ("self_attn", "ff.out", ["norm1", "norm2"]) instead of what
            structure suggests.
        mask: as for `record`.

    Raises:
        NormlabError: not a module; no stack of blocks, or several. The message names likely candidates;
            `stacks(model)` gives them all.
    """
    if not isinstance(model, nn.Module):
        raise NormlabError(f"there are no blocks in {model!r:.80}: give a torch module")
    if blocks is None:
        chosen = _largest_stack(model)
    elif isinstance(blocks, str):
        chosen = [module for name, module in model.named_modules() if _matches(name, blocks)]
        if not chosen:
            raise NormlabError(f"no module is named like {blocks!r}: {_candidates(model)}")
    else:
        chosen = list(blocks)
        if not chosen or any(module not in set(model.modules()) for module in chosen):
            raise NormlabError("`blocks` must be a non-empty list of modules that belong to the model")
    return replace(_sites(model, chosen, {"attn": attention, "mlp": mlp}, norms), mask=mask)


def stacks(model: nn.Module) -> dict[str, Sites]:
    """Find every stack of residual blocks of `model`: its sites by the stack's name, the largest first.

    Record one with `record(stacks(model)["decoder.block"])`; two recordings may run at once.

    Raises:
        NormlabError: no stack of blocks.
    """
    return {name: _sites(model, list(blocks.values())) for name, blocks in _required_stacks(model).items()}


def _sites(
    model: nn.Module,
    chosen: list[nn.Module],
    branches: Mapping[str, str | None] = MappingProxyType({}),
    norms: Sequence[str] | None = None,
) -> Sites:
    """The sites of the chosen blocks; `branches`, by kind, and `norms` are those that the caller named."""
    names: dict[nn.Module | None, str] = {module: name for name, module in model.named_modules()}
    blocks = []
    first = _blocks_before(model, [names[module] for module in chosen])
    for layer, module in enumerate(chosen, start=first + 1):
        named = {kind: _inside(module, names, name) for kind, name in branches.items() if name}
        own = None if norms is None else [_inside(module, names, name) for name in norms]
        blocks.append(_block(layer, names[module], module, named, own))
    inside = {module for block in chosen for module in block.modules()}
    mine = [names[block] for block in chosen]
    others = [name for stack in stacks_of(model).values() if not inside & set(stack.values()) for name in stack]
    outer = tuple(norm for path, norm in _norms_outside(model, set(chosen)) if _is_for(path, mine, others))
    above = mine[0].split(".")[:-1]
    path = [model.get_submodule(".".join(above[:i])) for i in range(len(above) + 1)]
    ancestors = [m for m in path if m is model or not isinstance(m, _CONTAINERS)]
    return Sites(tuple(blocks), outer, tuple(ancestors), names)


def _norms_outside(module: nn.Module, blocks: set[nn.Module], above: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, norm) of the outermost norms that are in none of the blocks. The blocks may use the same ones."""
    for name, child in module.named_children():
        if is_norm(child):
            yield above + name, child
        elif child not in blocks:
            yield from _norms_outside(child, blocks, f"{above}{name}.")


def _blocks_before(model: nn.Module, names: list[str]) -> int:
    """How many blocks stand before the first: by the number in its name, which in a stage of a pipeline is not 0.

    What stands there and is no block does not count: in a `Sequential` modules of another type, else layers without
    parts, such as an embedding. 0 where the names do not differ in one number that counts on, and where the blocks of a
    model that embeds its own tokens are numbered from 1. Of one block it is the last number.
    """
    parts = [name.split(".") for name in names]
    numbers = [(place, word) for place, word in enumerate(parts[0]) if word.isdecimal()]
    for place, number in numbers if len(parts) > 1 else numbers[-1:]:
        begin = int(number)
        if begin and all(
            part == [*parts[0][:place], str(begin + i), *parts[0][place + 1 :]] for i, part in enumerate(parts)
        ):
            container = model.get_submodule(".".join(parts[0][:place]))
            beside = dict(container.named_children())
            before = [beside.get(str(i)) for i in range(begin)]  # None: of an earlier stage
            if isinstance(container, nn.Sequential):
                return sum(one is None or type(one) is type(beside[number]) for one in before)
            layers = sum(one is not None and has_matrix(one) and not has_parts(one) for one in before)
            embeds = any(isinstance(module, nn.Embedding) for module in model.modules())
            return begin - layers - ("0" not in beside and "1" in beside and embeds)
    return 0


def _is_for(norm: str, mine: list[str], others: list[str]) -> bool:
    """True if the nearest module above a norm that holds any stack's blocks holds mine.

    The final norm of an encoder is none of its decoder's.
    """
    parents = norm.split(".")[:-1]
    for cut in range(len(parents), -1, -1):
        above = "".join(f"{part}." for part in parents[:cut])
        if any(block.startswith(above) for block in mine):
            return True
        if any(block.startswith(above) for block in others):
            return False
    return True


def _block(
    layer: int, name: str, module: nn.Module, named: dict[str, nn.Module], norms: list[nn.Module] | None
) -> Block:
    """Sort a block's parts. `named` and `norms` are those that the caller gave by name."""
    given = set(named.values())
    branches = [b for b in branches_of(module) if b.kind not in named and not {b.module, b.whole} & given]
    branches += [Branch(kind, kind, part, part) for kind, part in named.items()]
    inner: list[nn.Module] = []
    if norms is None:
        norms = [part for _, part in parts_of(module) if is_norm(part)]
        inside = {norm for branch in branches for norm in norms_below(branch.module)}
        for branch in branches:
            if branch.module is not branch.whole:  # the norm of its residual sum is in the branch, as in BERT
                norms += [norm for norm in norms_below(branch.whole) if norm not in inside]
        inner = [norm for norm in norms_below(module) if norm not in norms]
    return Block(
        layer,
        name,
        module,
        tuple(norms),
        tuple(branches),
        tuple(inner),
        tuple(part for part_name, part in module.named_children() if is_nonlinearity(part_name, part)),
    )


def _inside(block: nn.Module, names: dict[nn.Module | None, str], name: str) -> nn.Module:
    try:
        return block.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(child for child, _ in block.named_children())
        raise NormlabError(f"block {names[block]} has no module {name!r}: it has {known}") from error


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _required_stacks(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    result = stacks_of(model)
    if not result:
        raise NormlabError(f"no stack of blocks was found in {type(model).__name__}: {_candidates(model)}")
    return result


def _largest_stack(model: nn.Module) -> list[nn.Module]:
    stacks = _required_stacks(model)
    first, *rest = stacks
    sizes = {name: sum(map(_size, blocks.values())) for name, blocks in stacks.items()} if rest else {}
    if rivals := [name for name in rest if sizes[name] > SECOND_STACK_SHARE * sizes[first]]:
        patterns = [re.sub(r"(?<![^.])\d+(?![^.])", "*", next(iter(stacks[name]))) for name in (first, *rivals)]
        choices = " or ".join(f"blocks='{pattern}'" for pattern in patterns)
        raise NormlabError(
            f"{type(model).__name__} has several stacks of blocks: choose one with {choices}, or from stacks(model)"
        )
    return list(stacks[first].values())


def _candidates(model: nn.Module) -> str:
    lists = [n for n, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential) and n]
    parts = [(n, m) for n, m in model.named_children() if has_matrix(m) and has_parts(m)]
    names = [f"{name}.*" if isinstance(part, _CONTAINERS) else name for name, part in parts]
    likely = [f"{name}.*" for name in lists] or names
    return f"pass blocks='<pattern>' (likely: {', '.join(likely[:5]) or 'none, it has no parts with weights'})"


# -- what a module is ------------------------------------------------------------------------------------------------


def has_parts(module: nn.Module) -> bool:
    """True when the module holds others."""
    return next(module.children(), None) is not None


def has_matrix(module: nn.Module) -> bool:
    """True when the module or one below it holds a weight of two dimensions or more, or a packed one."""
    return any(parameter.ndim >= 2 for parameter in module.parameters()) or any(map(_is_packed, module.modules()))


def _is_packed(module: nn.Module) -> bool:
    """True for a quantized layer: a module without parts that holds its matrix in buffers, as GPTQ's and AWQ's do.

    A table of positions or a mask is none.
    """
    if "_packed_params" in module._modules or "_packed_params" in vars(module):
        return True
    if not module._buffers or module._modules or _TABLE.search(type(module).__name__.lower()):
        return False
    return any(
        buffer.ndim >= 2 and min(buffer.shape) > 1 and buffer.dtype != torch.bool and not _TABLE.search(name)
        for name, buffer in module.named_buffers(recurse=False)
    )


def _has_weights(module: nn.Module, recurse: bool = True) -> bool:
    if next(module.parameters(recurse), None) is not None:
        return True
    return any(map(_is_packed, module.modules() if recurse else (module,)))


def shell_content(module: nn.Module) -> nn.Module | None:
    """The one child that a wrapper wraps, or None.

    A wrapper holds no parameter itself. Every child that holds some is found again in the wrapped one, because
    TransformerLens's bridge names the parts of a block next to the block.
    """
    if _has_weights(module, recurse=False):
        return None
    bearing = [child for child in module.children() if _has_weights(child) or is_norm(child)]
    return next((child for child in bearing if set(bearing) <= set(child.modules())), None)


def is_norm(module: nn.Module) -> bool:
    """True for a norm: RMSNorm, LayerNorm, DyT and the like, or a wrapper around one, or around copies of one.

    A norm holds vectors or scalars and no matrix, or is a LayerNorm without parameters. Scales per channel
    (`LayerScale`), gates and biases normalize nothing. A module may say what it is: its ``probe_role`` is "norm", or
    anything else.
    """
    if (role := getattr(module, "probe_role", None)) is not None:
        return role == "norm"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    name = type(module).__name__.lower()
    if isinstance(module, _CONTAINERS) or _is_packed(module):
        return False
    if has_parts(module):
        shell = shell_content(module)
        if (content := shell or _copied(module)) is None:
            return False
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = inspect.signature(module.forward).parameters.values()
        if sum(a.kind in named and a.default is inspect.Parameter.empty for a in arguments) > 1:
            return False  # it adds the residual (FNet): its content reads another tensor
        others = [c for c in module.children() if c is not shell and not (shell is None and _has_weights(c))]
        return is_norm(content) and all(isinstance(child, _INERT) for child in others)
    parameters = list(module.parameters(recurse=False))
    if not parameters:
        return "norm" in name
    return all(parameter.ndim <= 1 for parameter in parameters) and ("norm" in name or not _NO_NORM.search(name))


def _copied(module: nn.Module) -> nn.Module | None:
    """The norm of which a wrapper holds copies, of which one is used (PEFT's `modules_to_save`); None if it is none."""
    children = list(module.children())
    if not any(isinstance(child, _CONTAINERS) for child in children) or _has_weights(module, recurse=False):
        return None
    held = chain.from_iterable(child.children() if isinstance(child, _CONTAINERS) else (child,) for child in children)
    parts = [part for part in held if _has_weights(part)]
    alike = {(type(part), *(weight.shape for weight in part.parameters())) for part in parts}
    return parts[0] if len(alike) == 1 else None


def is_nonlinearity(name: str, module: nn.Module) -> bool:
    """True for a nonlinearity without parameters, by its words."""
    words = f"{name} {type(module).__name__}".lower()
    return not _has_weights(module) and bool(_ACTIVATION.search(words))


def norms_below(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost norms inside `module`, without itself."""
    for child in module.children():
        if is_norm(child):
            yield child
        else:
            yield from norms_below(child)


def kind_of(name: str, module: nn.Module) -> str | None:
    """The kind of branch by the words of its attribute, else of its class; None for words that say nothing.

    An attribute that is only called a mixer says less than its class. No shape tells attention from a gated MLP.
    """
    said = [name.lower(), type(module).__name__.lower()]
    for words in reversed(said) if _ANY_MIXER.search(said[0]) else said:
        if _ATTENTION.search(words) and _CROSS.search(words):
            return "cross"
        for kind, pattern in _KINDS:
            if pattern.search(words):
                return kind
    return None


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The named parts of a block, through wrappers and lists; a list's items keep the list's name."""
    content = shell_content(module)
    if content is not None and not is_norm(module) and has_parts(content):
        return parts_of(content)
    parts: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            parts += [(f"{name}.{inner}", part) for inner, part in parts_of(child)]
        else:
            parts.append((name, child))
    return parts


def _adding_module(module: nn.Module) -> nn.Module:
    """The module whose output a branch adds: the one before the norm of its residual sum (BERT, T5), else itself.

    That is the only module with a matrix next to a norm. A query or key norm is next to several.
    """
    for below in module.modules():
        parts = [child for _, child in parts_of(below)]
        matrices = [child for child in parts if has_matrix(child)]
        norms = [child for child in parts if is_norm(child)]
        if norms and len(matrices) == 1 and below is not matrices[0] and shell_content(below) is None:
            return matrices[0]
    return module


def branches_of(block: nn.Module) -> list[Branch]:
    """The working parts of a block: those with a matrix, and mixers or attention without one.

    Where no part is called an MLP, those whose words say nothing are one. The projections of a bare MLP are such parts;
    the last one is what it adds. Elsewhere they are `other`, which may add to the stream but is no site.
    """
    branches: list[Branch] = []
    for name, part in parts_of(block):
        kind = kind_of(name, part)
        works = has_matrix(part) or (kind in ("mixer", "attn") and not _DROPS.search(type(part).__name__.lower()))
        if hasattr(part, "probe_role") or is_norm(part) or "norm" in name.lower() or not works:
            continue
        branches.append(Branch(kind or "other", name, _adding_module(part), part))
    if any(branch.kind == "mlp" for branch in branches):
        return branches
    return [replace(branch, kind="mlp") if branch.kind == "other" else branch for branch in branches]


# -- where the blocks are --------------------------------------------------------------------------------------------


def _is_list(module: nn.Module) -> bool:
    """True for a list, and for a dict whose names are numbers: a pipeline's stage has some of a model's blocks."""
    if isinstance(module, nn.ModuleDict):
        return len(module) > 0 and all(name.isdecimal() for name in module)
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _is_block_list(module: nn.Module) -> bool:
    """True for a list of modules of one class with a matrix and a norm in each."""
    items = list(module.children()) if _is_list(module) else []
    return len({type(item) for item in items}) == 1 and all(
        has_matrix(item) and next(norms_below(item), None) is not None for item in items
    )


def _blocks_of_stage(stage: nn.Module) -> dict[str, nn.Module] | None:
    """The blocks of a stage by name; None when the item is itself a block.

    A stage has a list of blocks, and nothing next to the list is a branch of a residual block.
    """
    if isinstance(stage, _CONTAINERS) and _is_list(stage):  # no forward of its own, so no block
        return dict(stage.named_children())
    for name, child in stage.named_modules():
        if not name or not _is_block_list(child):
            continue
        inside = set(child.modules())
        outside = [(n.split(".")[-1], m) for n, m in stage.named_modules() if n and m not in inside]
        # A nonlinearity outside the list bends the sum of a block (ResNet).
        if not any(kind_of(n, m) in ("attn", "cross") or is_nonlinearity(n, m) for n, m in outside):
            return {f"{name}.{inner}": item for inner, item in child.named_children()}
    return None


def _flattened(name: str, items: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}
    for inner, item in items.items():
        below = _blocks_of_stage(item)
        full_name = f"{name}.{inner}" if name else inner
        blocks |= {full_name: item} if below is None else _flattened(full_name, below)
    return {name: block for name, block in blocks.items() if has_matrix(block)}


def _size(module: nn.Module) -> int:
    packed = (buffer for part in module.modules() if _is_packed(part) for buffer in part.buffers(recurse=False))
    return sum(weight.numel() for weight in chain(module.parameters(), packed))


def stacks_of(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Module lists whose items all hold a matrix and have parts, outermost only, those with most parameters first.

    Returns the blocks of each by name, with stages flattened.
    """
    stacks: dict[str, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if not _is_list(module) or len(module) == 0:
            continue
        if not all(has_matrix(item) and has_parts(item) for item in module.children()):
            continue
        if not any(name.startswith(f"{outer}.") or not outer for outer in stacks):
            stacks[name] = _flattened(name, dict(module.named_children()))
    if len(stacks) > 1:
        stacks = dict(sorted(stacks.items(), key=lambda pair: -_size(model.get_submodule(pair[0]))))
    return stacks
