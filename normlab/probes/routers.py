"""Routers of mixture-of-experts blocks: what scores the experts, how sure it is, and which experts it takes.

`routing_of`      the experts of a branch and the matrix that scores them, by shape: as many rows as there are experts
`router_entropy`  per-token entropy of the softmax of those scores
`expert_counts`   how often each expert was taken
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normlab.probes.structure import has_matrix


@dataclass(frozen=True, eq=False)
class Routing:
    """A branch that is made of experts: `scorer` holds `scores` (experts, features); what `takers` are given or return
    tells the experts that were taken."""

    experts: int
    scorer: nn.Module
    scores: nn.Parameter
    takers: tuple[nn.Module, ...]


def _expert_lists(branch: nn.Module) -> Iterator[tuple[nn.Module, int, set[int]]]:
    """Modules that hold experts, how many, and the sizes of their matrices: a list of modules, or matrices stacked in
    one parameter (a convolution's weight or a scale a channel is none)."""
    for module in branch.modules():
        stacked = [p.shape for p in module.parameters(recurse=False) if p.ndim == 3 and min(p.shape) > 1]
        if isinstance(module, nn.ModuleList) and len(module) > 1 and all(has_matrix(item) for item in module):
            yield module, len(module), {size for p in module[0].parameters() if p.ndim == 2 for size in p.shape}
        elif stacked and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            yield module, stacked[0][0], {size for shape in stacked for size in shape[1:]}


def routing_of(branch: nn.Module) -> Routing | None:
    """The routing of a branch, or None where it is no mixture of experts."""
    for holder, experts, sizes in _expert_lists(branch):
        inside = set(holder.modules()) - {holder}
        outer = [module for module in branch.modules() if module not in inside]
        for module in outer:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 2 and parameter.shape[0] == experts and parameter.shape[1] in sizes:
                    around = [m for m in outer if m is not branch and (m is holder or module in set(m.modules()))]
                    return Routing(experts, module, parameter, tuple(around))
    return None


def router_entropy(routing: Routing, x: Tensor) -> Tensor:
    """(tokens,) in nats: entropy of softmax(W x + b) over the experts, in float32. `x`: (..., features)."""
    bias = routing.scorer.bias if isinstance(routing.scorer, nn.Linear) else None
    scores = functional.linear(x.float(), routing.scores.float(), None if bias is None else bias.float())
    return torch.special.entr(scores.softmax(-1)).sum(-1).reshape(-1)


def taken(values: Any, tokens: int) -> Tensor | None:
    """The (tokens, k) indices of the experts that were taken, among a module's arguments or outputs; None if they are
    not there."""
    items = values if isinstance(values, tuple | list) else (values,)
    found = (v for v in items if isinstance(v, Tensor) and v.dtype in (torch.int32, torch.int64) and v.ndim >= 2)
    return next((v.reshape(tokens, -1) for v in found if v.numel() % tokens == 0), None)


def expert_counts(chosen: Tensor, mask: Tensor, experts: int) -> Tensor:
    """(experts,) float64: how many counted tokens took each expert. `chosen`: (tokens, k); `mask`: (tokens,)."""
    return torch.bincount(chosen[mask].reshape(-1), minlength=experts)[:experts].double()
