"""Rules with one stream: weighted sums, and a step on the sphere."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.residuals.base import Map, Residual


class Scaled(Residual):
    """norm(keep x + add f), two constants.

    DeepNorm (2203.00555): keep = (2L)^(1/4) for L layers of a decoder. Keel (2601.19895): keep = 2L. CompleteP
    (2505.01618): add = 1/L.
    """

    operations = 2.0

    def __init__(self, keep: float = 1.0, add: float = 1.0) -> None:
        super().__init__()
        self.keep, self.add = keep, add

    def join(self, state: Tensor, branch: Tensor, norm: Map) -> Tensor:
        return norm(self.keep * state + self.add * branch)

    def extra_repr(self) -> str:
        return f"keep={self.keep:.4g}, add={self.add:.4g}"


class LearnedScale(Residual):
    """norm(x + scale f), ``scale`` (n,) learned: a scalar (n = 1) or one a channel (n = d).

    Args:
        channels: n.
        start: what scale starts at. LayerScale (2103.17239): 0.1 to 1e-6 by depth; SkipInit (2002.10444): 0.
        biased: Fixup's scalars (1901.09321): f is given x + ``bias_in``, and ``bias_out`` is added to scale f; both
            start at 0.
    """

    operations = 2.0

    def __init__(self, channels: int, start: float, biased: bool = False) -> None:
        super().__init__()
        self.start = start
        self.scale = nn.Parameter(torch.empty(channels))
        self.bias_in = nn.Parameter(torch.empty(1)) if biased else None
        self.bias_out = nn.Parameter(torch.empty(1)) if biased else None
        if biased:
            self.numbers, self.operations = 5.0, 4.0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.start)
        for bias in (self.bias_in, self.bias_out):
            if bias is not None:
                nn.init.zeros_(bias)

    def enter(self, state: Tensor) -> Tensor:
        return state if self.bias_in is None else state + self.bias_in

    def join(self, state: Tensor, branch: Tensor, norm: Map) -> Tensor:
        update = self.scale * branch
        return norm(state + (update if self.bias_out is None else update + self.bias_out))


class GradientPreserving(Residual):
    """s - silu(a) stop_gradient(s), s = norm(x + f): activations shrink, their gradients do not; ``gate`` = a, one
    scalar a sublayer, starts at 0, where this is plain addition.

    Source: Gradient-Preserving Activation Scaling (2506.22049).
    """

    operations = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gate)

    def join(self, state: Tensor, branch: Tensor, norm: Map) -> Tensor:
        total = norm(state + branch)
        return total - F.silu(self.gate) * total.detach()


class Progressive(Residual):
    """norm(x + a_l(t) f), a_l(t) = min(1, t / (T0 l)) after t optimizer steps in layer l: deeper branches are switched
    on later, and all stay on. ``alpha`` is a saved buffer: a checkpoint goes on where it was.

    Args:
        layer: l, counted from 1.
        warmup: T0, steps of the first layer.

    A training loop tells the time by ``model.after_step``; without it the branches stay off.
    Source: progressive residual warm-up, linear schedule (2603.05369).
    """

    operations = 2.0
    alpha: Tensor

    def __init__(self, layer: int, warmup: int) -> None:
        super().__init__()
        self.steps = layer * warmup
        self.register_buffer("alpha", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)

    def at_step(self, step: int, total: int) -> None:
        self.alpha.fill_(min(1.0, step / self.steps))

    def join(self, state: Tensor, branch: Tensor, norm: Map) -> Tensor:
        return norm(state + self.alpha * branch)


class BlockInput(Residual):
    """Post-LN with the block's input added before its last norm: m = norm(x + attention(x)), norm'(m + MLP(m) + x).

    The state between the two sublayers is (m, x).

    Args:
        width: d.
        last: the block's second sublayer.

    Source: B2T connection (2206.00330).
    """

    def __init__(self, width: int, last: bool) -> None:
        super().__init__()
        self.width, self.last = width, last
        self.numbers, self.operations = (4.0, 2.0) if last else (3.0, 1.0)

    def enter(self, state: Tensor) -> Tensor:
        return state[..., : self.width]

    def join(self, state: Tensor, branch: Tensor, norm: Map) -> Tensor:
        if not self.last:
            return torch.cat([norm(state + branch), state], -1)
        middle, entered = state.split(self.width, -1)
        return norm(middle + branch + entered)


def unit_length(x: Tensor) -> Tensor:
    """x / ||x|| over the last axis, taken in float32; shape and type of x."""
    return F.normalize(x.float(), dim=-1, eps=1e-12).to(x.dtype)


class Spherical(Residual):
    """u(x + a (u(f) - x)), u(x) = x/||x||: a step of rate a towards the branch's direction on the unit sphere.

    a = |``rate``| start sqrt(d), per channel; the parameter starts at 1/sqrt(d), so that a starts at `start` and learns
    as fast as other numbers of that size.

    Source: nGPT (2410.01131).
    """

    operations = 9.0

    def __init__(self, width: int, start: float = 0.05) -> None:
        super().__init__()
        self.start = start
        self.rate = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.rate, self.rate.numel() ** -0.5)

    def join(self, state: Tensor, branch: Tensor, norm: Map) -> Tensor:
        step = self.rate.abs() * self.start * self.rate.numel() ** 0.5
        return norm(unit_length(state + step * (unit_length(branch) - state)))
