"""Norms whose statistics are kept from step to step: TaperNorm, PowerNorm and Unified Normalization.

A forward or backward pass changes no statistic. It records what it saw, and `at_step` takes the mean over the parts of
an accumulated batch and over ranks. So a pass can be repeated, as gradient checkpointing does. A training loop calls
``model.after_step(step, total)`` after each step; without it the statistics keep their start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from normlab.norms.base import Norm, StartingMap
from normlab.norms.base import mean_square as exact_mean_square


def _ranks() -> int:
    """Number of ranks of a distributed training, else 1."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


class TaperNorm(Norm):
    """``y = g * gamma * x / sqrt(mean(x^2) + eps) + (1 - g) * c * gamma' * x``: RMSNorm at g = 1, a gain at g = 0.

    While g = 1, running means are kept of ``|gamma x|^2 / rms`` and of ``|gamma x|^2`` (momentum 0.99). Their quotient
    is c, so that both branches have one size along the output. When g leaves 1, gamma' = ``fixed_weight`` becomes a
    copy of gamma and is trained from there. The gate g falls along half a cosine.

    gamma = ``weight`` and gamma' have shape ``(d,)``. The scalars are ``gate`` and c = ``inverse_rms``. ``seen``
    ``(3,)`` holds the two running means and their number of steps. A step that saw what is not finite is left out.

    Args:
        hidden_size: d.
        eps: added to the mean square.
        start, end: shares of all steps where g leaves 1 and reaches 0. Ours; the paper tunes them.

    Source: TaperNorm (2602.10408): the gate, its cosine, the calibration and the fixed branch's gain.
    """

    momentum = 0.99
    gains = ("weight", "fixed_weight")
    shown = ("eps", "start", "end")
    fixed_weight: nn.Parameter
    gate: Tensor
    inverse_rms: Tensor
    seen: Tensor
    noted: Tensor

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, start: float = 0.25, end: float = 0.75) -> None:
        super().__init__(hidden_size)
        self.eps, self.start, self.end = eps, start, end
        self.add_parameter("weight", hidden_size, 1.0)
        self.add_parameter("fixed_weight", hidden_size, 1.0)
        self.add_buffer("gate", (), 1.0)
        self.add_buffer("inverse_rms", (), 1.0)
        self.add_buffer("seen", 3, 0.0)
        self.add_buffer("noted", 3, 0.0, persistent=False)  # the two sums over tokens, and the number of tokens

    @property
    def gain_name(self) -> str:  # type: ignore[override]
        return "fixed_weight" if self.gate == 0 else "weight"

    def starting_map(self) -> StartingMap:
        return StartingMap(eps=self.eps)

    @torch.no_grad()
    def at_step(self, step: int, total: int) -> None:
        if self.noted[2] > 0:
            self._update()
        done = (step / max(total, 1) - self.start) / (self.end - self.start)
        if done > 0 and self.gate == 1:
            self.fixed_weight.copy_(self.weight)
        self.gate.fill_(0.5 + 0.5 * math.cos(math.pi * min(max(done, 0.0), 1.0)))

    def _update(self) -> None:
        if _ranks() > 1:
            torch.distributed.all_reduce(self.noted)
        if self.gate == 1:
            means = self.noted[:2] / self.noted[2]
            if means.isfinite().all():
                self.seen[:2].lerp_(means.to(self.seen.dtype), 1.0 if self.seen[2] == 0 else 1 - self.momentum)
                self.seen[2] += 1
                self.inverse_rms.copy_(self.seen[0] / self.seen[1])
        self.noted.zero_()

    @torch.no_grad()
    def fix(self, scale: Tensor | float) -> None:
        """Make the norm ``y = scale * gamma * x`` with its present gamma."""
        self.fixed_weight.copy_(self.weight)
        self.inverse_rms.fill_(float(scale))
        self.gate.zero_()

    def fixed_gain(self) -> Tensor:
        """``c * gamma'``, ``(d,)``: the norm at gate 0."""
        return (self.fixed_weight + self.centre) * self.inverse_rms

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        inverse = torch.rsqrt(exact_mean_square(x32) + self.eps)
        if self.training:
            self._note(x32, inverse)
        tapered = self.gate * self.gamma() * (x32 * inverse).to(x.dtype)
        return (tapered + (1 - self.gate) * self.fixed_gain() * x).to(x.dtype)

    @torch.no_grad()
    def _note(self, x: Tensor, inverse: Tensor) -> None:
        size = (self.gamma() * x).float().square().sum(-1, keepdim=True)
        count = size.new_tensor(float(size.numel()))
        self.noted = self.noted + torch.stack([(size * inverse).sum(), size.sum(), count]).to(self.noted.dtype)


class _Divided(torch.autograd.Function):
    """``z = x / divisor`` per feature, with the gradient ``(g - psi z) / divisor``.

    The gradient through a batch's divisor would have ``mean(g z)`` for psi. Here ``choose(mean(g z), mean(z^2))`` gives
    psi.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: Tensor, choose: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        z = x / divisor
        ctx.save_for_backward(z, divisor)
        ctx.choose = choose
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (g,), (z, divisor) = gradients, ctx.saved_tensors
        psi = ctx.choose(_over_tokens(g * z), _over_tokens(z.square()))
        return (g - psi * z) / divisor, None, None


def _over_tokens(x: Tensor) -> Tensor:
    return x.flatten(0, -2).mean(0)


_DISABLED: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}


def _never_compiled(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.compiler.disable` at the first call: it loads the compiler, which takes longer than all of normlab."""

    @wraps(method)
    def call(*args: Any) -> Tensor:
        if method not in _DISABLED:
            _DISABLED[method] = torch.compiler.disable(method)
        return _DISABLED[method](*args)

    return call


class RunningNorm(Norm):
    """``y = gamma * x / sqrt(s + eps) + beta``, with s a running mean of x^2 per feature.

    s is the same for every token, so a trained norm is a fixed gain. In training the subclass chooses s and its
    gradient. While ``warming``, s is the present pass's: tokens see the batch's later ones. Each rank, and each part of
    an accumulated batch, is a pass with an s of its own, so their number moves the training.

    What a step saw is dropped where it is not finite, as where a loss scale makes it overflow, and does not count as a
    step of s. Otherwise a loss scale has to be constant: nu is a running mean of scaled gradients.

    gamma = ``weight``, beta = ``bias``, s = ``mean_square`` and nu = ``gradient`` have shape ``(d,)``.

    Args:
        hidden_size: d.
        eps: added to s.
        momentum: alpha of the running means.
        warmup: share of the steps that use the batch's s. The released codes count 4,000 iterations or more instead.
    """

    operations = 3.0
    shortest_warmup = 1
    shown = ("eps", "momentum", "warmup")
    bias: nn.Parameter
    mean_square: Tensor
    gradient: Tensor

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, momentum: float = 0.9, warmup: float = 0.1) -> None:
        super().__init__(hidden_size)
        self.eps, self.momentum, self.warmup = eps, momentum, warmup
        self.warming = True
        self.dropped = 0  # of this training's steps, those that left no mean of x^2
        self.noted: dict[str, tuple[Tensor, int]] = {}  # sums, and how many passes
        self.add_parameter("weight", hidden_size, 1.0)
        self.add_parameter("bias", hidden_size, 0.0)
        self.add_buffer("mean_square", hidden_size, 1.0)
        self.add_buffer("gradient", hidden_size, 0.0)

    def starting_map(self) -> StartingMap:
        return StartingMap(slope=(1 + self.eps) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.numel():
            z = self._divided(x.float())
        else:
            z = x.float() * torch.rsqrt(self.mean_square.float() + self.eps)
        return self.gamma() * z.to(x.dtype) + self.bias

    @_never_compiled
    def _divided(self, x: Tensor) -> Tensor:
        batch = _over_tokens(x.detach().square())
        self._note("mean_square", batch)
        return _Divided.apply(x, (self._used(batch) + self.eps).sqrt(), self._choose)

    def _choose(self, gradient: Tensor, square: Tensor) -> Tensor:
        self._note("gradient", gradient)
        self._note("square", square)
        return self._psi(gradient)

    def _note(self, name: str, value: Tensor) -> None:
        before, count = self.noted.get(name, (torch.zeros_like(value), 0))
        self.noted[name] = before + value, count + 1

    @torch.no_grad()
    def at_step(self, step: int, total: int) -> None:
        if step == 0:
            self.dropped = 0
        if self.noted:
            nothing = torch.zeros_like(self.mean_square), 1  # if no backward pass reached this norm
            noted = {"gradient": nothing, "square": nothing, **self.noted}
            means = {name: sum_ / count for name, (sum_, count) in noted.items()}
            if (ranks := _ranks()) > 1:
                for mean in means.values():
                    torch.distributed.all_reduce(mean)
                    mean.div_(ranks)
            if means["mean_square"].isfinite().all():
                self._update(step - self.dropped, means["mean_square"])
            else:
                self.dropped += 1
            if all(means[name].isfinite().all() for name in ("gradient", "square")):
                self._update_gradient(means["gradient"], means["square"])
        self.noted = {}
        self.warming = step < round(self.warmup * total, 6) or step - self.dropped < self.shortest_warmup

    def _rate(self, number: int) -> float:
        """Rate of a running mean's next value, by its number from 1. The mean does not contain its start."""
        return max(1 - self.momentum, 1 / max(number, 1))

    def _used(self, batch: Tensor) -> Tensor:
        """s of this training pass, from the batch's mean of x^2."""
        raise NotImplementedError

    def _psi(self, gradient: Tensor) -> Tensor:
        """psi of this backward pass, from its mean of g z."""
        raise NotImplementedError

    def _update(self, number: int, mean_square: Tensor) -> None:
        """Update the buffers with a step's mean of x^2, by its number among those that were not dropped, from 1."""
        raise NotImplementedError

    def _update_gradient(self, gradient: Tensor, square: Tensor) -> None:
        """Update the buffers with a step's means of g z and z^2."""
        raise NotImplementedError


class PowerNorm(RunningNorm):
    """``y = gamma * z + beta``, ``z = x / sqrt(s + eps)``, s a running mean of the batches' ``mean(x^2)``.

    After the warm-up a step divides by ``s_{t-1}``. Its gradient is ``(g - nu_{t-1} z) / sqrt(s_{t-1} + eps)``, with
    ``g = gamma dL/dy``. Then ``nu_t = nu_{t-1} (1 - (1 - alpha) mean(z^2)) + (1 - alpha) mean(g z)``. In the warm-up
    it divides by the batch's mean square.

    This is the paper's form. The released code first scales each token's groups of features by their rms. It also
    divides the gradient by the batch's statistic.

    Source: PowerNorm (2003.07845), algorithm 2. The warm-up is from its code.
    """

    def _used(self, batch: Tensor) -> Tensor:
        return batch if self.warming else self.mean_square.float()

    def _psi(self, gradient: Tensor) -> Tensor:
        return self.gradient.float()

    def _update(self, number: int, mean_square: Tensor) -> None:
        self.mean_square.lerp_(mean_square.to(self.mean_square.dtype), self._rate(number))

    def _update_gradient(self, gradient: Tensor, square: Tensor) -> None:
        fresh = 1 - self.momentum
        self.gradient.mul_(1 - fresh * square).add_(fresh * gradient)


class UnifiedNorm(RunningNorm):
    """``y = gamma * z + beta``, ``z = x / sqrt(s + eps)``, s the geometric mean of the last M batches' ``mean(x^2)``.

    The present batch is one of the M. Out of training s is its running mean, alpha = 0.9.

    The gradient is ``(g - psi z) / sqrt(s + eps)`` with ``g = gamma dL/dy``. psi is a running mean of ``mean(g z)``
    over the last M batches. In the warm-up s and that mean are the batch's.

    The paper's general form also centres x and filters outlying batches; its code for language does neither. The code
    rescales the gradient by s over its running mean. The text does not mention this, and it is left out here.

    The buffers ``squares`` and ``gradients`` ``(M, d)`` hold one row per batch, the newest last.

    Args:
        window: M.

    Source: Unified Normalization for Accelerating Transformers (2208.01313), and its code.
    """

    squares: Tensor
    gradients: Tensor

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, window: int = 4, **shared: float) -> None:
        super().__init__(hidden_size, eps, **shared)
        self.add_buffer("squares", (window, hidden_size), 1.0)
        self.add_buffer("gradients", (window, hidden_size), 0.0)
        self.shortest_warmup = window  # until then the window has rows without a batch

    def _used(self, batch: Tensor) -> Tensor:
        return batch if self.warming else self._geometric(torch.cat([self.squares[1:], batch[None]]))

    def _geometric(self, squares: Tensor) -> Tensor:
        return squares.float().clamp_min(1e-30).log().mean(0).exp()

    def _psi(self, gradient: Tensor) -> Tensor:
        latest = gradient if self.warming else torch.cat([self.gradients[1:], gradient[None]]).mean(0)
        return self.gradient.float().lerp(latest.float(), 1 - self.momentum)

    def _update(self, number: int, mean_square: Tensor) -> None:
        self.mean_square.lerp_(self._used(mean_square).to(self.mean_square.dtype), self._rate(number))
        self._append(self.squares, mean_square)

    def _update_gradient(self, gradient: Tensor, square: Tensor) -> None:
        self.gradient.copy_(self._psi(gradient))
        self._append(self.gradients, gradient)

    def _append(self, rows: Tensor, new: Tensor) -> None:
        rows.copy_(torch.cat([rows[1:], new[None].to(rows.dtype)]))
