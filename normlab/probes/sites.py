"""Where to measure: blocks, their attention and MLP, and norms, found in any model by structure.

`sites(model)` looks for the module list that holds the residual stack, and inside each block for its norms (modules
that hold vectors and scalars but no matrix), its attention and its MLP. Roles that depend on what runs when (does a
norm feed attention, or does it follow attention's residual sum?) are decided while the model runs, in
`normlab.probes.roles`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from normlab.errors import NormlabError

SECOND_STACK_SHARE = 0.1  # a second stack with this share of the first one's parameters makes the choice ambiguous


@dataclass(frozen=True)
class Block:
    """One residual block. `index` counts from 1; the output of `attention` and of `mlp` is what each adds to the
    residual stream."""

    index: int
    name: str
    module: nn.Module
    attention: nn.Module | None = None
    mlp: nn.Module | None = None
    norms: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Sites:
    """What `sites` found: the blocks in order, norms outside them, and the modules from the root down to the blocks'
    owner."""

    blocks: tuple[Block, ...]
    outer_norms: tuple[nn.Module, ...]
    ancestors: tuple[nn.Module, ...]
    names: dict[nn.Module | None, str] = field(repr=False, default_factory=dict)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

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
        return tuple(kind for kind, found in has.items() if not found)

    def __str__(self) -> str:
        lines = [f"{self.depth} blocks"]
        for block in dict.fromkeys((self.blocks[0], self.blocks[-1])):
            parts = [f"attention {self.names.get(block.attention, '-')}", f"mlp {self.names.get(block.mlp, '-')}"]
            parts += [f"norm {self.names[norm]}" for norm in block.norms]
            lines.append(f"  block {block.index} {block.name}: " + ", ".join(parts))
        lines += [f"  outside: norm {self.names[norm]}" for norm in self.outer_norms]
        return "\n".join(lines + [f"  not found: {kind}" for kind in self.missing])


def sites(
    model: nn.Module,
    blocks: str | Sequence[nn.Module] | None = None,
    *,
    attention: str | None = None,
    mlp: str | None = None,
    norms: Sequence[str] | None = None,
) -> Sites:
    """Find the places to measure in `model`.

    Args:
        model: any torch module; wrappers (DDP, PEFT, `torch.compile`, a TransformerLens bridge) are looked through.
        blocks: the residual blocks, when they are to be told: modules in order, or a pattern over module names such as
            `"encoder.layers.*"` (`*` stands for one name or index).
        attention, mlp, norms: names inside a block ("self_attn", "ff.out", ["norm1", "norm2"]) instead of what
            structure suggests.

    Raises:
        NormlabError: no stack of blocks was found, or several (the message names likely candidates).
    """
    names: dict[nn.Module | None, str] = {module: name for name, module in model.named_modules()}
    if blocks is None:
        chosen = _find_stack(model)
    elif isinstance(blocks, str):
        chosen = [module for name, module in model.named_modules() if _matches(name, blocks)]
        if not chosen:
            raise NormlabError(f"no module is named like {blocks!r}: {_candidates(model)}")
    else:
        chosen = list(blocks)
        if not chosen or any(module not in names for module in chosen):
            raise NormlabError("`blocks` must be a non-empty list of modules that belong to the model")
    found = []
    for index, module in enumerate(chosen, start=1):
        block = _block(index, names[module], module)
        told_norms = block.norms if norms is None else tuple(_inside(block, name) for name in norms)
        told_attention = block.attention if attention is None else _inside(block, attention)
        found.append(
            Block(
                index, block.name, module, told_attention, block.mlp if mlp is None else _inside(block, mlp), told_norms
            )
        )
    inside = {module for block in chosen for module in block.modules()}
    outer = tuple(module for module in _norms_below(model) if module not in inside)
    return Sites(tuple(found), outer, _ancestors(model, names[chosen[0]]), names)


def _inside(block: Block, name: str) -> nn.Module:
    try:
        return block.module.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(child for child, _ in block.module.named_children())
        raise NormlabError(f"block {block.name} has no module {name!r}: it has {known}") from error


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


# -- what a module is, by what it holds ------------------------------------------------------------------------------


def has_matrix(module: nn.Module) -> bool:
    """True when the module or one below it holds a weight of two dimensions or more."""
    return any(parameter.ndim >= 2 for parameter in module.parameters())


def shell_content(module: nn.Module) -> nn.Module | None:
    """The one child that a wrapper wraps (it has no parameter of its own and a single child that does), or None."""
    if any(True for _ in module.parameters(recurse=False)):
        return None
    bearing = [child for child in module.children() if any(True for _ in child.parameters()) or is_norm(child)]
    return bearing[0] if len(bearing) == 1 else None


def is_norm(module: nn.Module) -> bool:
    """True for a module that holds vectors or scalars and no matrix (RMSNorm, LayerNorm, DyT ...), a parameter-free
    LayerNorm, or a wrapper around one of these. Per-channel scales (`LayerScale`) normalise nothing and are left
    out. A module may say what it is: its ``probe_role`` is "norm", or anything else."""
    if (role := getattr(module, "probe_role", None)) is not None:
        return role == "norm"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    name = type(module).__name__.lower()
    if any(True for _ in module.children()):
        content = shell_content(module)
        return content is not None and is_norm(content)
    parameters = list(module.parameters(recurse=False))
    if not parameters:
        return "norm" in name
    return all(parameter.ndim <= 1 for parameter in parameters) and not re.search("scale(?!norm)", name)


def _norms_below(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if is_norm(child):
            yield child
        else:
            yield from _norms_below(child)


def _is_attention(name: str, module: nn.Module) -> bool:
    """Attention is told by the word, in the attribute or the class: no shape tells it from a gated MLP."""
    words = (name + " " + type(module).__name__).lower()
    return "attn" in words or "attention" in words


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The named parts of a block, looking through wrappers and lists."""
    content = shell_content(module)
    if content is not None and not is_norm(module) and any(True for _ in content.children()):
        return _parts(content)
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        found += _parts(child) if isinstance(child, nn.ModuleList) and not is_norm(child) else [(name, child)]
    return found


def _split_branch(module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """A branch that contains the norm of its own residual sum (BERT, T5) as (what it adds, its norms); else itself and
    no norm.

    Such a norm stands beside exactly one module with a matrix; a query or key norm stands beside several.
    """
    for below in module.modules():
        beside = [child for _, child in _parts(below) if has_matrix(child)]
        own = [child for _, child in _parts(below) if is_norm(child)]
        if own and len(beside) == 1 and below is not beside[0] and shell_content(below) is None:
            return beside[0], own
    return module, []


def _block(index: int, name: str, module: nn.Module) -> Block:
    parts = _parts(module)
    norms = [child for _, child in parts if is_norm(child)]
    rest = [(child_name, child) for child_name, child in parts if not hasattr(child, "probe_role")]
    working = [(child_name, child) for child_name, child in rest if not is_norm(child) and has_matrix(child)]
    branches: dict[str, nn.Module | None] = {"attention": None, "mlp": None}
    for kind in branches:
        of_kind = [child for child_name, child in working if _is_attention(child_name, child) == (kind == "attention")]
        if of_kind:
            chosen = (
                of_kind[0] if kind == "attention" else of_kind[-1]
            )  # cross-attention follows; a bare MLP ends in its down projection
            branches[kind], own = _split_branch(chosen)
            norms += own
    return Block(index, name, module, branches["attention"], branches["mlp"], tuple(norms))


# -- where the blocks are --------------------------------------------------------------------------------------------


def _stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList | nn.Sequential]]:
    """Module lists whose items all hold a matrix and have parts, outermost only, those with most parameters first."""
    found: list[tuple[str, nn.ModuleList | nn.Sequential]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) == 0:
            continue
        if not all(has_matrix(item) and any(True for _ in item.children()) for item in module):
            continue
        if not any(name.startswith(f"{outer}.") or not outer for outer, _ in found):
            found.append((name, module))
    return sorted(found, key=lambda pair: -_parameters(pair[1]))


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _find_stack(model: nn.Module) -> list[nn.Module]:
    stacks = _stacks(model)
    if not stacks:
        raise NormlabError(f"no stack of blocks was found in {type(model).__name__}: {_candidates(model)}")
    rivals = [name for name, stack in stacks[1:] if _parameters(stack) > SECOND_STACK_SHARE * _parameters(stacks[0][1])]
    if rivals:
        choices = " or ".join(f"blocks='{name}.*'" for name in [stacks[0][0], *rivals])
        raise NormlabError(f"{type(model).__name__} has several stacks of blocks: choose one with {choices}")
    return list(stacks[0][1])


def _candidates(model: nn.Module) -> str:
    lists = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential) and name
    ]
    likely = [f"{name}.*" for name in lists] or [name for name, module in model.named_children() if has_matrix(module)]
    return f"pass blocks='<pattern>' (likely: {', '.join(likely[:5]) or 'none, it has no parts with weights'})"


def _ancestors(model: nn.Module, block_name: str) -> tuple[nn.Module, ...]:
    path, module = [model], model
    for part in block_name.split(".")[:-1]:
        module = getattr(module, part)
        if not isinstance(module, nn.ModuleList):
            path.append(module)
    return tuple(path)
