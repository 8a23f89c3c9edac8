"""Adam's updates and moments by block, read from the state of an optimizer: `Updates`, made before the step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from normlab.probes.sites import Sites
from normlab.probes.statistics import real_numbers, whole

METRICS = ("update_ratio", "first_moment", "second_moment")
SITE = "parameters"


class Updates:
    """What Adam or AdamW does in a step, made before it.

        updates = Updates(optimizer, where)     # before the backward pass
        loss.backward(); optimizer.step()
        rows, without = updates.measure(step); updates.close()

    Hooks note the state before a step is taken, so it may have been cleared or loaded, and the rate, the betas and eps
    with which it is taken, so a scheduler may step before `measure`. Of an optimizer that takes the steps of the one it
    wraps without calling its `step`, the state is as it stood when this was made, and the others as they stand in
    `measure`.
    """

    def __init__(self, optimizer: Any, where: Sites) -> None:
        self._kind, self._adam, self._where = type(optimizer).__name__, _adam_of(optimizer), where
        self._options: dict[Tensor, dict[str, Any]] = {}  # of the last step that was taken on each parameter
        # Steps taken before on each parameter; one without a gradient, as an idle expert's, lags behind.
        self._before: dict[Tensor, Any] = {}
        self._reached: set[Tensor] = set()  # parameters that were given a gradient
        self._handles: list[Any] = []
        if self._adam is not None:
            self._note_steps(self._adam)
            self._handles = [
                self._adam.register_step_pre_hook(self._note_steps),
                self._adam.register_step_post_hook(lambda adam, *call: self._options.update(_options(adam))),
            ]
            parameters = {p for block in self._parameters().values() for p in block}
            trainable = (p for p in parameters if p.requires_grad and p.is_leaf)
            self._handles += [p.register_post_accumulate_grad_hook(self._reached.add) for p in trainable]

    def _note_steps(self, adam: torch.optim.Adam | torch.optim.AdamW, *call: Any) -> None:
        """Note how many steps were taken on each parameter, without waiting for the device."""
        steps = {p: state["step"] for p, state in adam.state.items() if "step" in state}
        self._before = {p: step.detach().clone() if isinstance(step, Tensor) else step for p, step in steps.items()}

    def _parameters(self) -> dict[int, list[Tensor]]:
        """Each block's parameters, as the optimizer has them: those that FSDP2 holds whole at present are others."""
        sharded: dict[Tensor, Tensor] = {}
        for module in self._where.model.modules():
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            of_group = [p for group in groups for p in getattr(group, "fsdp_params", ())]
            sharded |= {p._unsharded_param: p.sharded_param for p in of_group if hasattr(p, "_unsharded_param")}
        return {block.layer: [sharded.get(p, p) for p in block.module.parameters()] for block in self._where.blocks}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def measure(self, step: int) -> tuple[list[tuple[Any, ...]], str | None]:
        """Rows (step, site, layer, metric, mask, value) of the last step taken, and why there are none, or fewer.

        With m and v the moments after t steps, of all numbers of a block that were trained,

            m' = m / (1 - beta1^t), v' = v / (1 - beta2^t)        v: the largest so far with amsgrad
            update_ratio = |lr m' / (sqrt(v') + eps)| / |w|       w after the step, lr of the step
            first_moment = sqrt(mean m'^2), second_moment = sqrt(mean v')

        Adam adds its weight decay to the gradient, so it is in m and v. Decoupled decay, as AdamW's, is in none of the
        three. The update is 0 where the step was not taken on a parameter, as where a gradient scaler skips it. A block
        has no rows if parameters of it have a gradient and are in none of the optimizer's groups: another one trains
        them. A complex number is two.
        """
        adam = self._adam
        if adam is None:
            return [], f"{self._kind} is neither Adam nor AdamW"
        options = _options(adam) | self._options
        rows, without, are_trained = [], None, False
        of_blocks = self._parameters()
        for block in self._where.blocks:
            parameters = of_blocks[block.layer]
            trained = [p for p in parameters if p in options and "exp_avg_sq" in adam.state.get(p, {})]
            others = _count(p for p in parameters if p in self._reached and p not in options)
            if others and without is None:
                count = _count(p for p in parameters if p in options and p.requires_grad)
                without = (
                    f"the optimizer has {count:,} of the {count + others:,} numbers of block {block.layer} that are "
                    "trained: the others are in none of its groups"
                )
            if not trained:
                continue
            are_trained = True
            squares = [_squares(p, options[p], adam.state[p], float(self._before.get(p, 0.0))).cpu() for p in trained]
            update, weight, first, second = torch.stack(squares).sum(0).sqrt().tolist()  # on all ranks alike
            if others:
                continue
            root = _count(trained) ** 0.5
            values = update / weight if weight else float("nan"), first / root, second / root
            rows += [(step, SITE, block.layer, name, "all", value) for name, value in zip(METRICS, values, strict=True)]
        return rows, without if are_trained else "the optimizer has taken no step on the blocks' parameters"


def _count(parameters: Iterable[Tensor]) -> int:
    """How many numbers parameters hold, of which a complex one is two."""
    return sum(p.numel() * (1 + p.is_complex()) for p in parameters)


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
    kept = state["exp_avg"], state.get("max_exp_avg_sq", state["exp_avg_sq"])
    parameter, first, second = (real_numbers(x.detach()).float() for x in (parameter, *kept))
    first, root = first / (1 - beta1**t), (second / (1 - beta2**t)).sqrt()
    update = (t > before) * options["lr"] * first / (root + options["eps"])
    return torch.stack([whole(x.square().sum()) for x in (update, parameter, first, root)])
