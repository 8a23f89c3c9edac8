"""Routers of mixtures of experts: where one is, how it scores the experts, and which it took."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normlab.probes.sites import has_matrix

SAME = 0.02  # relative distance of a router's scores from ours: several roundings of bfloat16


@dataclass(frozen=True, eq=False)
class Routing:
    """A branch that is made of experts.

    Args:
        experts: how many.
        scorer: the module that holds `scores`, (experts, features).
        scores: the matrix that scores the experts.
        takers: modules whose arguments or outputs may hold the experts that were taken.
    """

    experts: int
    scorer: nn.Module
    scores: nn.Parameter
    takers: tuple[nn.Module, ...]


def _expert_lists(branch: nn.Module) -> Iterator[tuple[nn.Module, int, set[int]]]:
    """(module that holds experts, how many, sizes of their matrices).

    A list or dict of modules that are alike, or matrices stacked in one parameter. A convolution's weight is none.
    """
    for module in branch.modules():
        items = list(module.children()) if isinstance(module, nn.ModuleList | nn.ModuleDict) else []
        stacked = [p.shape for p in module.parameters(recurse=False) if p.ndim == 3 and min(p.shape) > 1]
        if len(items) > 1 and all(has_matrix(item) and type(item) is type(items[0]) for item in items):
            yield module, len(items), {size for p in items[0].parameters() if p.ndim == 2 for size in p.shape}
        elif stacked and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            yield module, stacked[0][0], {size for shape in stacked for size in shape[1:]}


def routing_of(branch: nn.Module) -> Routing | None:
    """Find the matrix with one row per expert that scores a branch's experts; None without experts."""
    for holder, experts, sizes in _expert_lists(branch):
        inside = set(holder.modules()) - {holder}
        outer = [module for module in branch.modules() if module not in inside]
        for module in outer:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 2 and parameter.shape[0] == experts and parameter.shape[1] in sizes:
                    around = [m for m in outer if m is not branch and (m is holder or module in set(m.modules()))]
                    return Routing(experts, module, parameter, tuple(around))
    return None


def router_scores(routing: Routing, x: Tensor) -> Tensor:
    """(tokens, experts): W x + b, in float32. `x`: (..., features); b is a parameter `bias` of one number an expert."""
    bias = getattr(routing.scorer, "bias", None)
    own = bias.float() if isinstance(bias, Tensor) and bias.shape == (routing.experts,) else None
    scores = functional.linear(x.float(), routing.scores.float(), own)
    return scores.reshape(-1, routing.experts)


def router_entropy(scores: Tensor) -> Tensor:
    """(tokens,) in nats: entropy of softmax(scores) over the experts. `scores`: (tokens, experts)."""
    return torch.special.entr(scores.softmax(-1)).sum(-1)


def why_no_router_scores(scores: Tensor, returned: Any) -> str:
    """Say why `scores` cannot be taken for a router's own; empty if what it returns shows that they are.

    It returns them, or their softmax or sigmoid, of all experts; or of those whose indices it returns too. Of these
    they may add up to 1.
    """
    tokens, experts = scores.shape
    items = returned if isinstance(returned, tuple | list) else (returned,)
    rows = [x.detach().reshape(tokens, -1) for x in items if isinstance(x, Tensor) and is_by_token(x, tokens, experts)]
    readings = [scores, scores.softmax(-1), scores.sigmoid()]
    pairs = [(x.to(scores), y) for x in rows if x.is_floating_point() and x.shape == scores.shape for y in readings]
    for chosen in (x for x in rows if not x.is_floating_point() and bool(((x >= 0) & (x < experts)).all())):
        few = [y.gather(1, chosen.long()) for y in readings]
        few += [y / y.sum(-1, keepdim=True) for y in few[1:] if chosen.shape[1] > 1]
        pairs += [(x.to(scores), y) for x in rows if x.is_floating_point() and x.shape == chosen.shape for y in few]
    if any(bool((x - y).norm() <= SAME * y.norm()) for x, y in pairs):
        return ""
    if not pairs:
        return "the router returns no scores by which its weight times what it reads, plus its bias, can be checked"
    return "the router's scores are not its weight times what it reads, plus its bias"


def is_by_token(x: Tensor, tokens: int, most: int) -> bool:
    """True if a tensor holds one to `most` numbers for each token."""
    return x.ndim >= 2 and 0 < x.shape[-1] <= most and math.prod(x.shape[:-1]) == tokens


def taken_experts(values: Any, tokens: int, experts: int) -> Tensor | None:
    """The (tokens, k) indices of the experts taken, from a module's arguments or outputs; None without them.

    Of a dispatch mask, 1 where an expert takes a token, they are the columns; `experts` stands for those not taken.
    """
    items = values if isinstance(values, tuple | list) else (values,)
    whole = (v for v in items if isinstance(v, Tensor) and v.dtype in (torch.int32, torch.int64))
    rows = (v.reshape(tokens, -1) for v in whole if is_by_token(v, tokens, experts))
    taken = next((v for v in rows if bool(((v >= 0) & (v < experts)).all())), None)
    if taken is None or taken.shape[1] != experts or experts < 3 or bool(((taken != 0) & (taken != 1)).any()):
        return taken
    return torch.where(taken == 1, torch.arange(experts, device=taken.device), experts)
