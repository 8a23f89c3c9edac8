"""Bring the parameters of two models to one form: a LoRA layer as the weight that it acts as, fused projections split.

`merged(module, named)`   parameters in which LoRA layers are plain ones
`aligned(a, b, head)`     those of two models, where one has a matrix for q, k and v, or for gate and up
`places_of_change(...)`   the few rows, columns or entries in which alone two tensors differ
`relative`, `same`, `explains`  how far two tensors are apart
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

CLOSE = 1e-5  # relative difference below which two tensors in float64 are one
BETTER = 30.0  # by which a trial must bring the models together

# Last name of a fused projection -> those of the projections that it holds, in this order.
_FUSED = {
    r"(w?qkv|qkv_proj|query_key_value|c_attn)": [rf"(w?{x}|{x}_proj|{x}_lin|to_{x}|{word})" for x, word in
                                                 (("q", "query"), ("k", "key"), ("v", "value"))],
    r"(gate_up_proj|gate_up|w13)": ["(gate|gate_proj|w1)", "(up|up_proj|w3)"],
}  # fmt: skip


def merged(module: nn.Module, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of `module` with the weights that its LoRA layers act as: W + scaling B A, of active adapters.

    A LoRA layer has `base_layer`, `lora_A` and `lora_B`, each a matrix or one by adapter. Weights are (out, in).
    """
    plain = {n.replace("base_layer.", ""): x for n, x in named.items() if not re.search(r"(^|\.)lora_", n)}
    for name, layer in module.named_modules():
        weight = f"{name}.weight".removeprefix(".")
        if hasattr(layer, "base_layer") and hasattr(layer, "lora_A") and weight in plain:
            plain[weight] = plain[weight] + _update(layer)
    return plain


def _update(layer: Any) -> Any:
    a, b = layer.lora_A, layer.lora_B
    scaling: Any = getattr(layer, "scaling", 1.0)
    if not isinstance(a, nn.ModuleDict):
        return scaling * (getattr(b, "weight", b) @ getattr(a, "weight", a)).detach()
    active = () if layer.disable_adapters or layer.merged else layer.active_adapters
    return sum(scaling[name] * (b[name].weight @ a[name].weight).detach() for name in active if name in a)


def aligned(a: dict[str, Tensor], b: dict[str, Tensor], head: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both, with a fused projection of one split as the other has it. head: width of an attention head, 0 if unknown.

    Rows of a fused matrix may be one projection after another, or so within each head, group of heads or row.
    """
    return _split(a, b, head), _split(b, a, head)


def _split(fused: dict[str, Tensor], split: dict[str, Tensor], head: int) -> dict[str, Tensor]:
    result = {}
    for name, x in fused.items():
        *_, last, kind = ("", *name.split("."))[-2:]
        patterns = next((parts for pattern, parts in _FUSED.items() if re.fullmatch(pattern, last, re.I)), ())
        names = [next((n for n in split if re.search(rf"(^|\.){p}\.{kind}$", n, re.I)), "") for p in patterns]
        parts = [split[n] for n in names if n in split]
        sizes = [len(part) for part in parts]
        if not parts or len(parts) < len(names) or name in split or sum(sizes) != len(x):
            result[name] = x
            continue
        groups = [1, min(sizes), *([sizes[1] // head] if head and sizes[1] % head == 0 else [])]
        ways = [_rows(x, sizes, n) for n in groups if not any(size % n for size in sizes)]
        off = [sum(float((y - z).detach().norm()) for y, z in zip(way, parts, strict=True)) for way in ways]
        best = off.index(min(off)) if min(off) < off[0] / 2 else 0
        result |= dict(zip(names, ways[best], strict=True))
    return result


def _rows(x: Tensor, sizes: list[int], groups: int) -> list[Tensor]:
    pieces = x.unflatten(0, (groups, -1)).split([size // groups for size in sizes], 1)
    return [piece.flatten(0, 1) for piece in pieces]


def places_of_change(a: Tensor, b: Tensor, heads: Sequence[int]) -> str | None:
    """The rows or columns of two matrices, or entries of two vectors, in which alone they differ, in words.

    None where they are more than a quarter, or than half if they are whole heads. They count from 0.

    Args:
        heads: width of a head in rows, and in columns; 0 where these are of none.
    """
    for dim, word in ((0, "row"), (1, "column")) if a.ndim == 2 else ((0, "entry"),) if a.ndim == 1 else ():
        x, y = ((t if dim == 0 else t.T).reshape(a.shape[dim], -1) for t in (a, b))
        sizes = (y - x).norm(dim=1)
        is_changed = sizes > CLOSE * sizes.max()
        changed = is_changed.nonzero().flatten().tolist()
        head = heads[dim]
        by_head = is_changed.unflatten(0, (-1, head)) if head and len(x) % head == 0 else None
        is_heads = by_head is not None and bool((by_head.all(1) == by_head.any(1)).all())
        if len(changed) * (2 if is_heads else 4) > len(x):
            continue
        runs: list[list[int]] = []
        for place in changed:
            if runs and place == runs[-1][-1] + 1:
                runs[-1].append(place)
            else:
                runs.append([place])
        many = {"row": "rows", "column": "columns", "entry": "entries"}[word]
        where = f"{word if len(changed) == 1 else many} " + ", ".join(
            f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs
        )
        if len(runs) > 4:
            where = f"{len(changed)} of {len(x)} {many}"
        count = len(changed) // head if is_heads else 0
        kind = f", {'one head' if count == 1 else f'{count} heads'}" if count else ""
        return f"{where} alone{kind}{', zero there in B' if not bool(y[is_changed].any()) else ''}"
    return None


def same(x: Tensor, y: Tensor) -> bool:
    """True if two tensors are one but for rounding."""
    return relative(x, y) < CLOSE


def explains(guess: Tensor, a: Tensor, b: Tensor) -> bool:
    """True if a guess made from a is b, and much closer to it than a is."""
    return relative(b, guess) < min(CLOSE, relative(a, b) / BETTER)


def relative(x: Tensor, y: Tensor) -> float:
    """The size of x - y over that of x."""
    return float((x - y).norm() / x.norm().clamp_min(1e-300))


def rank_of_change(a: Tensor, b: Tensor) -> int | None:
    """The rank of b - a, two matrices, where it is at most a quarter of full and 64; None where it is larger."""
    change = (b - a).double()
    most = min(64, min(change.shape) // 4)
    generator = torch.Generator().manual_seed(0)
    sketch = change @ torch.randn(change.shape[1], most + 1, dtype=change.dtype, generator=generator).to(change.device)
    basis = torch.linalg.qr(sketch).Q
    inside = basis.T @ change
    sizes = torch.linalg.svdvals(inside)
    rank = int((sizes > 1e-5 * sizes[0]).sum())
    return rank if rank <= most and float((change - basis @ inside).norm()) < 1e-5 * float(change.norm()) else None
