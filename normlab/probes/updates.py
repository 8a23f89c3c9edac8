"""Adam's updates and moments by block, read from the state of an optimizer: `Updates`, made before the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from normlab.probes.sites import Sites

METRICS = ("update_ratio", "first_moment", "second_moment")
SITE = "parameters"


class Updates:
    """What Adam or AdamW does in a step, made before it.

        updates = Updates(optimizer); optimizer.step(); rows, without = updates.measure(where, step); updates.close()

    A hook notes the rate, the betas and eps with which a step is taken, so a scheduler may step before `measure`. Of an
    optimizer that takes the steps of the one it wraps without calling its `step`, they are as they stand in `measure`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._kind, self._adam = type(optimizer).__name__, _adam_of(optimizer)
        self._options: dict[Tensor, dict[str, Any]] = {}  # of the last step that was taken on each parameter
        # Steps taken before on each parameter; one without a gradient, as an idle expert's, lags behind.
        self._before: dict[Tensor, float] = {}
        self._handle: Any = None
        if self._adam is not None:
            self._before = {p: float(state["step"]) for p, state in self._adam.state.items() if "step" in state}
            self._handle = self._adam.register_step_post_hook(lambda adam, *call: self._options.update(_options(adam)))

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def measure(self, where: Sites, step: int) -> tuple[list[tuple[Any, ...]], str | None]:
        """Rows (step, site, layer, metric, mask, value) of the last step taken, or why there are none.

        With m and v the moments after t steps, of all numbers of a block that were trained,

            m' = m / (1 - beta1^t), v' = v / (1 - beta2^t)        v: the largest so far with amsgrad
            update_ratio = |lr m' / (sqrt(v') + eps)| / |w|       w after the step, lr of the step, no weight decay
            first_moment = sqrt(mean m'^2), second_moment = sqrt(mean v')

        The update is 0 where the step was not taken on a parameter, as where a gradient scaler skips it.
        """
        adam = self._adam
        if adam is None:
            return [], f"{self._kind} is neither Adam nor AdamW"
        options = _options(adam) | self._options
        rows = []
        for block in where.blocks:
            trained = [p for p in block.module.parameters() if "exp_avg_sq" in adam.state.get(p, {})]
            if not trained:
                continue
            squares = [_squares(p, options[p], adam.state[p], self._before.get(p, 0.0)).cpu() for p in trained]
            sums = torch.stack(squares).sum(0).sqrt().tolist()
            update, weight, first, second = sums
            root = sum(p.numel() for p in trained) ** 0.5
            values = update / weight if weight else float("nan"), first / root, second / root
            rows += [(step, SITE, block.layer, name, "all", value) for name, value in zip(METRICS, values, strict=True)]
        return rows, None if rows else "the optimizer has taken no step on the blocks' parameters"


def _options(adam: torch.optim.Adam | torch.optim.AdamW) -> dict[Tensor, dict[str, Any]]:
    """The rate, betas and eps of each parameter as they stand; a scheduler writes into a rate that is a tensor."""
    found: dict[Tensor, dict[str, Any]] = {}
    for group in adam.param_groups:
        options = {name: group[name] for name in ("lr", "betas", "eps")}
        if isinstance(options["lr"], Tensor):
            options["lr"] = options["lr"].detach().clone()
        found |= dict.fromkeys(group["params"], options)
    return found


def _adam_of(optimizer: Any) -> torch.optim.Adam | torch.optim.AdamW | None:
    """The optimizer, out of accelerate's wrapper, if it is Adam or AdamW."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Adam | torch.optim.AdamW) else None


@torch.no_grad()
def _squares(parameter: Tensor, options: dict[str, Any], state: dict[str, Any], before: float) -> Tensor:
    """Sums of squares of a parameter's update since step `before`, itself, m' and sqrt(v')."""
    t, (beta1, beta2) = float(state["step"]), options["betas"]
    first = state["exp_avg"].float() / (1 - beta1**t)
    root = (state.get("max_exp_avg_sq", state["exp_avg_sq"]).float() / (1 - beta2**t)).sqrt()
    update = (t > before) * options["lr"] * first / (root + options["eps"])
    sums = [x.float().square().sum() for x in (update, parameter, first, root)]
    return torch.stack([x.full_tensor() if isinstance(x, DTensor) else x for x in sums])
