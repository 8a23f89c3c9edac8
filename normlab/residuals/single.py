"""Rules with one stream: weighted sums, gates, and a step on the sphere."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.residuals.base import Map, Residual, unit_length, without_autocast


class Scaled(Residual):
    """``norm(keep * x + add * f)`` with two constants.

    DeepNorm (2203.00555): keep = (2L)^(1/4) for a decoder of L layers. Keel (2601.19895): keep = 2L. CompleteP
    (2505.01618): add = 2/L. Beam: sqrt((k-1)/k) and sqrt(1/k) at the (k-1)th sublayer.
    """

    operations = 2.0

    def __init__(self, keep: float = 1.0, add: float = 1.0) -> None:
        super().__init__()
        self.keep, self.add = keep, add

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        return norm(self.keep * state + self.add * branch)

    def extra_repr(self) -> str:
        return f"keep={self.keep:.4g}, add={self.add:.4g}"


class NormalizedInput(Residual):
    """``norm(keep * r + f(r))``, where r is the normalized x that the branch read. The stream keeps r instead of x.

    Source: MiniMax-01 (2501.08313) and its code. keep = (2L)^(1/4), DeepNorm's, with f unweighted.
    """

    operations = 2.0
    keeps_read = True

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.keep = keep

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        return norm(self.keep * read + branch)

    def extra_repr(self) -> str:
        return f"keep={self.keep:.4g}"


class LearnedScale(Residual):
    """``norm(x + scale * f)`` with a learned ``scale`` ``(n,)``: a scalar (n = 1) or one number per channel (n = d).

    Args:
        channels: n.
        start: start of scale. LayerScale (2103.17239): 0.1 to 1e-6 by depth. SkipInit (2002.10444): 0. Fixup
            (1901.09321): 1.
    """

    operations = 2.0
    scale: nn.Parameter

    def __init__(self, channels: int, start: float) -> None:
        super().__init__()
        self.add_parameter("scale", channels, start)

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        return norm(state + self.scale * branch)


class GradientPreserving(Residual):
    """``s - silu(a) * stop_gradient(s)`` with ``s = norm(x + f)``: activations shrink, gradients do not.

    ``gate`` = a is one scalar per block. It starts at 0, where this is plain addition.

    Source: Gradient-Preserving Activation Scaling (2506.22049).
    """

    operations = 3.0
    gate: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.add_parameter("gate", 1, 0.0)

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        total = norm(state + branch)
        return total - F.silu(self.gate) * total.detach()


class Progressive(Residual):
    """``norm(x + a_l(t) * f)`` with ``a_l(t) = min(1, t / (T0 l))`` after t optimizer steps in layer l.

    Deeper branches are switched on later, and all stay on. The saved buffer ``alpha`` holds a_l. Call
    ``model.after_step(step, total)`` after each step; without it the branches stay off.

    Args:
        layer: l, counted from 1.
        warmup: T0, steps of the first layer.

    Source: progressive residual warm-up, linear schedule (2603.05369).
    """

    operations = 2.0
    alpha: Tensor

    def __init__(self, layer: int, warmup: int) -> None:
        super().__init__()
        self.steps = layer * warmup
        self.add_buffer("alpha", (), 0.0)

    def at_step(self, step: int, total: int) -> None:
        self.alpha.fill_(min(1.0, step / self.steps))

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        return norm(state + self.alpha * branch)


class BlockInput(Residual):
    """``m = norm(x + attention(x))``, ``norm'(m + MLP(m) + x)``: Post-LN with the block's input added once more.

    Between the two sublayers the state is (m, x).

    Args:
        width: d.
        last: whether this is the block's second sublayer.

    Source: B2T connection (2206.00330).
    """

    def __init__(self, width: int, last: bool) -> None:
        super().__init__()
        self.width, self.last = width, last
        self.numbers, self.operations = (4.0, 2.0) if last else (3.0, 1.0)

    def enter(self, state: Tensor) -> Tensor:
        return state[..., : self.width]

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        if not self.last:
            return torch.cat([norm(state + branch), state], -1)
        middle, entered = state.split(self.width, -1)
        return norm(middle + branch + entered)


class Spherical(Residual):
    """``u(x + a (u(f) - x))`` with ``u(x) = x/||x||``: a step of rate a towards f's direction on the unit sphere.

    ``a = |rate| * start * sqrt(d)`` per channel. The parameter ``rate`` starts at 1/sqrt(d). So a starts at `start` and
    learns as fast as other numbers of that size.

    Source: nGPT (2410.01131).
    """

    operations = 9.0
    takes_direction = True
    rate: nn.Parameter

    def __init__(self, width: int, start: float = 0.05) -> None:
        super().__init__()
        self.start = start
        self.add_parameter("rate", width, width**-0.5)

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        step = self.rate.abs() * self.start * self.rate.numel() ** 0.5
        return norm(unit_length(state + step * (unit_length(branch) - state)))


class Gated(Residual):
    """``norm(sqrt(1 - s^2) * x + s * f)`` with ``s = sigmoid(w/T)`` per channel.

    Where x and f are independent and equally large, so is the sum. ``gate`` = w ``(d,)`` starts at 0, so s starts at
    1/2. That start is ours: the code draws w around 0, as it draws matrices. T is 0.3, and 1 - s^2 is at least 0.001.

    Source: Muse Spark's residual gate, as in transformers.
    """

    operations = 4.0
    temperature = 0.3
    least = 1e-3
    gate: nn.Parameter

    def __init__(self, width: int) -> None:
        super().__init__()
        self.add_parameter("gate", width, 0.0)

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        s = (self.gate.float() / self.temperature).sigmoid()
        keep = (1 - s.square()).clamp(min=self.least).sqrt()
        return norm(keep.to(state.dtype) * state + s.to(state.dtype) * branch)


class Mixed(Residual):
    """``norm(sqrt(1 - b/L) * x + sqrt(b/L) * f)`` with ``b = softplus(logit)``.

    Where x and f are uncorrelated and equally large, so is the sum. ``logit`` ``(1,)`` starts at 0, so b starts at
    log 2. b/L is at most 0.999.

    Args:
        depth: L, blocks of the model.

    Source: marin's norm-preserving learned residual mixing (marin-community/marin#8860). It caps b "just below L"; the
    number is ours.
    """

    operations = 3.0
    most = 0.999
    logit: nn.Parameter

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.add_parameter("logit", 1, 0.0)

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        share = (F.softplus(self.logit.float()) / self.depth).clamp(max=self.most)
        return norm((1 - share).sqrt().to(state.dtype) * state + share.sqrt().to(state.dtype) * branch)

    def extra_repr(self) -> str:
        return f"depth={self.depth}"


class ScaledSum(Residual):
    """``a * norm(x + f)`` with one scalar a = ``scale`` ``(1,)`` from 1: it acts on the stream, not on the branch.

    Source: ``layer_scalar`` of Gemma 4, as in transformers. There a comes with a checkpoint and is not trained. From 1
    it would stay 1, so here it is.
    """

    operations = 2.0
    scale: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.add_parameter("scale", 1, 1.0)

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        return self.scale * norm(state + branch)


class Delta(Residual):
    """``norm(x + beta * k (v - k.x))``: x's part along the branch's direction ``k = f/||f||`` is moved to v.

    beta is ``2 sigmoid(r . step + step_bias)`` for r, what the branch read. v is ``4 sigmoid(x . value + value_bias)``.
    All four parameters start at 0, where beta = 1 and v = 2. That start is ours: the code draws them.

    Source: Deep Delta Learning (2601.00417), the form with one value per token, and the released code's defaults.
    """

    numbers = 4.0
    operations = 10.0
    keeps_read = True
    takes_direction = True
    smallest = 1e-5  # of ||f||
    step: nn.Parameter
    value: nn.Parameter
    step_bias: nn.Parameter
    value_bias: nn.Parameter

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, size in (("step", width), ("value", width), ("step_bias", 1), ("value_bias", 1)):
            self.add_parameter(name, size, 0.0)

    @without_autocast
    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        x, f, r = state.float(), branch.float(), read.float()
        k = f * torch.rsqrt(f.square().sum(-1, keepdim=True) + self.smallest**2)
        beta = 2 * (r @ self.step.float() + self.step_bias.float()).sigmoid()
        value = 4 * (x @ self.value.float() + self.value_bias.float()).sigmoid()
        move = beta * (value - (k * x).sum(-1))
        return norm((x + move[..., None] * k).to(state.dtype))
