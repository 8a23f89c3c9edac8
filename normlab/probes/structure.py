"""What a module is, told by what it holds and by the field's words for it: norms, branches, stacks of blocks.

`is_norm`, `kind_of`   a norm; attention, cross-attention, a mixer or an MLP
`branches_of`          the working parts of a block, each with what it adds and the norms beside it
`stacks_of`            every stack of residual blocks of a model by name, stages of a hierarchical model flattened
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

KINDS = ("attn", "cross", "mixer", "mlp")
_CROSS = re.compile(r"cross|encoder_?attn|encoder_?decoder|encdec")
_MIXER = re.compile(
    r"mamba|ssm|conv|recurrent|rwkv|time_?mix|mixer|fourier|delta|retention|lstm|hyena|linear_?att|lightning|pooling|focal|"
    r"modulation"
)
_ATTENTION = re.compile(r"attn|attention")
_MLP = re.compile(r"mlp|ffn?\d?$|ffn|feed_?forward|moe|experts?$|channel_?mix|dense")
_NO_NORM = re.compile(r"scal|gate|bias|posi|embed|token|dropout|identity|router|mask|rotary|rope")
_ACTIVATION = re.compile(r"\bact|activation|relu|silu|swish|sigmoid|tanh")
_DROPS = re.compile(r"drop|identity")
_INERT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Identity)


@dataclass(frozen=True, eq=False)
class Branch:
    """A working part of a block. `module`'s output is what it adds; `whole` is the part that holds it and its norms."""

    kind: str
    name: str
    module: nn.Module
    whole: nn.Module


def has_matrix(module: nn.Module) -> bool:
    """True when the module or one below it holds a weight of two dimensions or more."""
    return any(parameter.ndim >= 2 for parameter in module.parameters())


def shell_content(module: nn.Module) -> nn.Module | None:
    """The one child that a wrapper wraps, or None. A wrapper has no parameter of its own, and one child in which every
    other that has some is found again (TransformerLens's bridge names the parts of a block beside the block)."""
    if any(True for _ in module.parameters(recurse=False)):
        return None
    bearing = [child for child in module.children() if any(True for _ in child.parameters()) or is_norm(child)]
    return next((child for child in bearing if set(bearing) <= set(child.modules())), None)


def _required(module: nn.Module) -> list[str]:
    """The arguments that a module's forward must be given."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


def is_norm(module: nn.Module) -> bool:
    """True for a module that holds vectors or scalars and no matrix (RMSNorm, LayerNorm, DyT ...), a parameter-free
    LayerNorm, or a wrapper around one of these and nothing else. Per-channel scales (`LayerScale`), gates and biases
    normalise nothing and are left out. A module may say what it is: its ``probe_role`` is "norm", or anything else."""
    if (role := getattr(module, "probe_role", None)) is not None:
        return role == "norm"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    name = type(module).__name__.lower()
    if any(True for _ in module.children()):
        content = shell_content(module)
        if len(_required(module)) > 1:  # it adds the residual itself (FNet): what its content reads is another tensor
            return False
        others = [child for child in module.children() if child is not content]
        return content is not None and is_norm(content) and all(isinstance(child, _INERT) for child in others)
    parameters = list(module.parameters(recurse=False))
    if not parameters:
        return "norm" in name
    return all(parameter.ndim <= 1 for parameter in parameters) and ("norm" in name or not _NO_NORM.search(name))


def is_activation(name: str, module: nn.Module) -> bool:
    """True for a nonlinearity without parameters, by its words."""
    words = f"{name} {type(module).__name__}".lower()
    return not any(True for _ in module.parameters()) and bool(_ACTIVATION.search(words))


def norms_below(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost norms inside `module`, itself left out."""
    for child in module.children():
        if is_norm(child):
            yield child
        else:
            yield from norms_below(child)


def kind_of(name: str, module: nn.Module) -> str | None:
    """The kind of branch by the words of its attribute, or else of its class: no shape tells attention from a gated
    MLP. None for words that say nothing."""
    for words in (name.lower(), type(module).__name__.lower()):
        if _ATTENTION.search(words) and _CROSS.search(words):
            return "cross"
        for kind, pattern in (("mixer", _MIXER), ("attn", _ATTENTION), ("mlp", _MLP)):
            if pattern.search(words):
                return kind
    return None


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The named parts of a block, looking through wrappers and lists; a list's items keep the list's name."""
    content = shell_content(module)
    if content is not None and not is_norm(module) and any(True for _ in content.children()):
        return parts_of(content)
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and not is_norm(child):
            found += [(f"{name}.{inner}", part) for inner, part in parts_of(child)]
        else:
            found.append((name, child))
    return found


def _split(module: nn.Module) -> nn.Module:
    """What a branch adds, where it contains the norm of its own residual sum (BERT, T5): the module with a matrix that
    stands alone beside that norm. Else the branch itself. (A query or key norm stands beside several.)"""
    for below in module.modules():
        parts = [child for _, child in parts_of(below)]
        beside = [child for child in parts if has_matrix(child)]
        own = [child for child in parts if is_norm(child)]
        if own and len(beside) == 1 and below is not beside[0] and shell_content(below) is None:
            return beside[0]
    return module


def branches_of(block: nn.Module) -> list[Branch]:
    """The working parts of a block: those with a matrix, and those without that its words call a mixer or attention.

    Where no part is called an MLP, those whose words say nothing are one (a bare MLP's projections are such parts, its
    last one what it adds); elsewhere they are `other`, which may add to the stream but is no site.
    """
    found: list[Branch] = []
    for name, part in parts_of(block):
        kind = kind_of(name, part)
        works = has_matrix(part) or (kind in ("mixer", "attn") and not _DROPS.search(type(part).__name__.lower()))
        if hasattr(part, "probe_role") or is_norm(part) or "norm" in name.lower() or not works:
            continue
        found.append(Branch(kind or "other", name, _split(part), part))
    if any(branch.kind == "mlp" for branch in found):
        return found
    return [replace(branch, kind="mlp") if branch.kind == "other" else branch for branch in found]


# -- where the blocks are --------------------------------------------------------------------------------------------


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _has_norm(module: nn.Module) -> bool:
    return any(True for _ in norms_below(module))


def _inner_stack(stage: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The blocks of a stage: its list of blocks of one class with a norm in each, when nothing beside it is a branch
    of a residual block; None when the item is itself a block."""
    if isinstance(stage, nn.ModuleList):  # no forward of its own, so no block
        return list(stage.named_children())
    for name, child in stage.named_modules():
        if not name or not _is_list(child) or not len(child):
            continue
        items = list(child)
        same = len({type(item) for item in items}) == 1
        if not same or not all(has_matrix(item) and _has_norm(item) and any(item.children()) for item in items):
            continue
        inside = set(child.modules())
        outside = [
            m
            for n, m in stage.named_modules()
            if n
            and m not in inside
            # An activation beside the list bends the sum of a block (ResNet).
            and (kind_of(n.split(".")[-1], m) in ("attn", "cross") or is_activation(n.split(".")[-1], m))
        ]
        if not outside:
            return [(f"{name}.{inner}", item) for inner, item in child.named_children()]
    return None


def _flattened(name: str, items: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    blocks = []
    for inner, item in items:
        below = _inner_stack(item)
        own = f"{name}.{inner}" if name else inner
        blocks += [(own, item)] if below is None else _flattened(own, below)
    return [(n, m) for n, m in blocks if has_matrix(m)]


def stacks_of(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """Module lists whose items all hold a matrix and have parts, outermost only, as (name, block) pairs with stages
    flattened; those with most parameters first."""
    found: dict[str, list[tuple[str, nn.Module]]] = {}
    size: dict[str, int] = {}
    for name, module in model.named_modules():
        if not _is_list(module) or len(module) == 0:
            continue
        if not all(has_matrix(item) and any(True for _ in item.children()) for item in module):
            continue
        if not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = _flattened(name, list(module.named_children()))
            size[name] = sum(parameter.numel() for parameter in module.parameters())
    return dict(sorted(found.items(), key=lambda pair: -size[pair[0]]))
