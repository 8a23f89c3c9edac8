"""Adam's updates and moments by block, read from the state of an optimizer: `steps_taken`, then `updates`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from normlab.probes.sites import Sites

METRICS = ("update_ratio", "first_moment", "second_moment")
SITE = "parameters"


def steps_taken(optimizer: Any) -> dict[Tensor, float]:
    """How many steps Adam has taken on each parameter; one without a gradient, as an idle expert's, lags behind."""
    adam = _adam_of(optimizer)
    return {} if adam is None else {p: float(state["step"]) for p, state in adam.state.items() if "step" in state}


def updates(
    where: Sites, optimizer: Any, step: int, before: Mapping[Tensor, float]
) -> tuple[list[tuple[Any, ...]], str | None]:
    """Rows (step, site, layer, metric, mask, value) of the last step that Adam or AdamW took, or why there are none.

    With m and v the moments after t steps, of all numbers of a block that were trained,

        m' = m / (1 - beta1^t), v' = v / (1 - beta2^t)        v: the largest so far with amsgrad
        update_ratio = |lr m' / (sqrt(v') + eps)| / |w|       w after the step, lr as it stands then, no weight decay
        first_moment = sqrt(mean m'^2), second_moment = sqrt(mean v')

    The update is 0 where the step was not taken on a parameter: `before` has the steps taken until then.
    """
    adam = _adam_of(optimizer)
    if adam is None:
        return [], f"{type(optimizer).__name__} is neither Adam nor AdamW"
    groups = {parameter: group for group in adam.param_groups for parameter in group["params"]}
    rows = []
    for block in where.blocks:
        trained = [p for p in block.module.parameters() if "exp_avg_sq" in adam.state.get(p, {})]
        if not trained:
            continue
        squares = [_squares(p, groups[p], adam.state[p], before.get(p, 0.0)).cpu() for p in trained]
        sums = torch.stack(squares).sum(0).sqrt().tolist()
        update, weight, first, second = sums
        root = sum(p.numel() for p in trained) ** 0.5
        values = update / weight if weight else float("nan"), first / root, second / root
        rows += [(step, SITE, block.layer, name, "all", value) for name, value in zip(METRICS, values, strict=True)]
    return rows, None if rows else "the optimizer has taken no step on the blocks' parameters"


def _adam_of(optimizer: Any) -> torch.optim.Adam | torch.optim.AdamW | None:
    """The optimizer, out of accelerate's wrapper, if it is Adam or AdamW."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Adam | torch.optim.AdamW) else None


@torch.no_grad()
def _squares(parameter: Tensor, group: dict[str, Any], state: dict[str, Any], before: float) -> Tensor:
    """Sums of squares of a parameter's update since step `before`, itself, m' and sqrt(v')."""
    t, (beta1, beta2) = float(state["step"]), group["betas"]
    first = state["exp_avg"].float() / (1 - beta1**t)
    root = (state.get("max_exp_avg_sq", state["exp_avg_sq"]).float() / (1 - beta2**t)).sqrt()
    update = (t > before) * group["lr"] * first / (root + group["eps"])
    sums = [x.float().square().sum() for x in (update, parameter, first, root)]
    return torch.stack([x.full_tensor() if isinstance(x, DTensor) else x for x in sums])
