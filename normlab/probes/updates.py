"""Adam's updates and moments by block, read from the state of an optimizer: `updates(where, optimizer, step)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from normlab.probes.sites import Sites

METRICS = ("update_ratio", "first_moment", "second_moment")
SITE = "parameters"


def updates(where: Sites, optimizer: Any, step: int) -> tuple[list[tuple[Any, ...]], str | None]:
    """Rows (step, site, layer, metric, mask, value) of the last step that Adam or AdamW took, or why there are none.

    With m and v the moments after t steps, of all numbers of a block that were trained,

        m' = m / (1 - beta1^t), v' = v / (1 - beta2^t)        v: the largest so far with amsgrad
        update_ratio = |lr m' / (sqrt(v') + eps)| / |w|       w after the step, lr as it stands then, no weight decay
        first_moment = sqrt(mean m'^2), second_moment = sqrt(mean v')
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # in accelerate's wrapper
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return [], f"{type(optimizer).__name__} is neither Adam nor AdamW"
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    rows = []
    for block in where.blocks:
        trained = [p for p in block.module.parameters() if "exp_avg_sq" in optimizer.state.get(p, {})]
        if not trained:
            continue
        sums = torch.stack([_squares(p, groups[p], optimizer.state[p]).cpu() for p in trained]).sum(0).sqrt().tolist()
        update, weight, first, second = sums
        root = sum(p.numel() for p in trained) ** 0.5
        values = update / weight if weight else float("nan"), first / root, second / root
        rows += [(step, SITE, block.layer, name, "all", value) for name, value in zip(METRICS, values, strict=True)]
    return rows, None if rows else "the optimizer has taken no step on the blocks' parameters"


@torch.no_grad()
def _squares(parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """Sums of squares of a parameter's update, itself, m' and sqrt(v')."""
    t, (beta1, beta2) = float(state["step"]), group["betas"]
    first = state["exp_avg"].float() / (1 - beta1**t)
    root = (state.get("max_exp_avg_sq", state["exp_avg_sq"]).float() / (1 - beta2**t)).sqrt()
    update = group["lr"] * first / (root + group["eps"])
    sums = [x.float().square().sum() for x in (update, parameter, first, root)]
    return torch.stack([x.full_tensor() if isinstance(x, DTensor) else x for x in sums])
