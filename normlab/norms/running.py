"""What PowerNorm and Unified Normalization share: statistics of a feature over the training batch, kept from step to
step, and a backward pass that puts a running mean in place of a batch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width

Mean = tuple[Tensor, int]
_DISABLED: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}


class _Divided(torch.autograd.Function):
    """z = x / divisor, feature by feature, with the gradient (g - psi z) / divisor: in place of the gradient through a
    batch's own divisor, g - mean(g z) z, a psi that `choose(mean(g z), mean(z^2))` returns."""

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


def _never_compiled(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.compiler.disable`, at the first call: it loads the compiler, which takes longer than all of normlab."""

    @wraps(method)
    def call(*args: Any) -> Tensor:
        if method not in _DISABLED:
            _DISABLED[method] = torch.compiler.disable(method)
        return _DISABLED[method](*args)

    return call


class RunningNorm(Norm):
    """y = gamma x / sqrt(s + eps) + beta, s a running mean of x^2 for each feature, the same for every token: a fixed
    gain once trained. In training the subclass chooses s, and what its gradient is.

    A forward or backward pass writes no statistic: it notes what it saw, and `at_step` takes the mean of that in, over
    the parts of an accumulated batch and over ranks. So a pass can be repeated (gradient checkpointing), and a model
    that is trained without ``model.after_step`` keeps s = 1. While ``warming``, s is the batch's own, of this rank: its
    tokens see the batch's later ones.

    Shapes: x and y (..., d); gamma = ``weight``, beta = ``bias``, s = ``mean_square``, nu = ``gradient`` (d,).

    Args:
        hidden_size: d.
        eps: added to s.
        momentum: alpha of the running means.
        warmup: share of the steps that use the batch's own s; ours: the released codes count iterations, 4,000 or more.

    Raises:
        NormlabError: hidden_size below 1.
    """

    mean_square: Tensor
    gradient: Tensor
    operations = 3.0
    shortest_warmup = 1

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, momentum: float = 0.9, warmup: float = 0.1) -> None:
        super().__init__()
        check_width(hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.register_buffer("mean_square", torch.empty(hidden_size))
        self.register_buffer("gradient", torch.empty(hidden_size))
        self.eps, self.momentum, self.warmup = eps, momentum, warmup
        self.warming = True
        self.noted: dict[str, Mean] = {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.centre)
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.mean_square)
        nn.init.zeros_(self.gradient)

    def starting_map(self) -> StartingMap:
        return StartingMap(slope=(1 + self.eps) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            z = self._divided(x.float())
        else:
            z = x.float() * torch.rsqrt(self.mean_square.float() + self.eps)
        return self.gamma() * z.to(x.dtype) + self.bias

    @_never_compiled
    def _divided(self, x: Tensor) -> Tensor:
        own = _over_tokens(x.detach().square())
        self._note("mean_square", own)
        return _Divided.apply(x, (self._used(own) + self.eps).sqrt(), self._choose)

    def _choose(self, gradient: Tensor, square: Tensor) -> Tensor:
        self._note("gradient", gradient)
        self._note("square", square)
        return self._psi(gradient)

    def _note(self, name: str, value: Tensor) -> None:
        before, count = self.noted.get(name, (torch.zeros_like(value), 0))
        self.noted[name] = before + value, count + 1

    @torch.no_grad()
    def at_step(self, step: int, total: int) -> None:
        if self.noted:
            nothing = torch.zeros_like(self.mean_square), 1  # of a backward pass that did not reach this norm
            noted = {"gradient": nothing, "square": nothing, **self.noted}
            means = {name: sum_ / count for name, (sum_, count) in noted.items()}
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                for mean in means.values():
                    torch.distributed.all_reduce(mean)
                    mean.div_(torch.distributed.get_world_size())
            self._update(step, **means)
        self.noted = {}
        self.warming = step < max(self.warmup * total, self.shortest_warmup)

    def _rate(self, step: int) -> float:
        """Of a running mean of which the start is no part."""
        return max(1 - self.momentum, 1 / max(step, 1))

    def _used(self, own: Tensor) -> Tensor:
        """s of this training pass, from the batch's own mean of x^2."""
        raise NotImplementedError

    def _psi(self, gradient: Tensor) -> Tensor:
        """psi of this backward pass, from its own mean of g z."""
        raise NotImplementedError

    def _update(self, step: int, mean_square: Tensor, gradient: Tensor, square: Tensor) -> None:
        """Take a step's means of x^2, g z and z^2 into the buffers."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, momentum={self.momentum:g}, warmup={self.warmup:g}"
