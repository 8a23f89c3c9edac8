"""The base of every norm, and the identity. Models, theory and TransformerLens use these members only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import normlab_kernels as nk
import torch
from torch import Tensor, nn

from normlab.errors import NormlabError


@dataclass(frozen=True)
class StartingMap:
    """A norm before training, per feature: ``y = gain * f(z)``, ``z = slope * x / sqrt(ms + eps)``.

    Args:
        slope: factor on the input. For a norm with a tanh, its slope at 0.
        gain: factor on the output.
        eps: added to the mean square. None: x is not divided.
        function: f, elementwise. None: the identity.
        reach: the |x|/rms(x) above which |z| exceeds the norm's bound lambda. None: no bound.
    """

    slope: float = 1.0
    gain: float = 1.0
    eps: float | None = None
    function: Callable[[Tensor], Tensor] | None = None
    reach: float | None = None


def mean_square(x: Tensor) -> Tensor:
    """``mean(x^2)`` over the last axis in float32, not centred: ``(..., d)`` to ``(..., 1)``."""
    return x.float().pow(2).mean(-1, keepdim=True)


def added(x: Tensor, residual: Tensor) -> Tensor:
    """``residual + x``. NormlabError for other shapes, as by the kernels: one of them would be repeated."""
    if residual.shape != x.shape:
        raise NormlabError(f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}")
    return residual + x


class ConstantStart(nn.Module):
    """A module whose parameters and buffers start at constants. Base of norms and residual rules.

    Attributes:
        gains: names of the parameters that are gains.
        centre: 1 for zero-centred gains, ``gamma = 1 + weight``, so that weight decay pulls gamma to 1. Else 0.
        starts: name of a parameter or buffer -> its start.
        numbers, operations: cost per token and channel. Numbers read and written, and arithmetic operations.
    """

    gains: tuple[str, ...] = ()
    centre = 0.0
    starts: dict[str, float] = {}
    numbers: float
    operations: float

    def add_parameter(self, name: str, shape: int | tuple[int, ...], start: float) -> None:
        """Register a parameter with every number at `start`."""
        self.register_parameter(name, nn.Parameter(self._filled(name, shape, start)))

    def add_buffer(self, name: str, shape: int | tuple[int, ...], start: float, persistent: bool = True) -> None:
        """Register a buffer, in float32, with every number at `start`."""
        self.register_buffer(name, self._filled(name, shape, start, torch.float32), persistent)

    def _filled(
        self, name: str, shape: int | tuple[int, ...], start: float, dtype: torch.dtype | None = None
    ) -> Tensor:
        self.starts = {**self.starts, name: start}
        return torch.full((shape,) if isinstance(shape, int) else shape, float(start), dtype=dtype)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> ConstantStart:
        """Move as any module does, but keep buffers in float32: half precision rounds a statistic's steps away."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, was in before.items():
            now = self._buffers[name]
            if was is not None and now is not None and now.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = was.to(now.device)
        return self

    def reset_parameters(self) -> None:
        """Set every parameter and buffer to its start, a gain to its start minus the centre."""
        for name, start in self.starts.items():
            nn.init.constant_(getattr(self, name), start - (self.centre if name in self.gains else 0.0))

    def at_step(self, step: int, total: int) -> None:
        """Called before the first optimizer step and after each one, with the number of steps done."""


def _definer(kind: type, *names: str) -> int:
    """The place in a class's order of inheritance of the first that defines one of these names."""
    return next(place for place, base in enumerate(kind.__mro__) if any(name in vars(base) for name in names))


class Norm(ConstantStart):
    """Base of every norm. A new norm is one class here and one row in ``normlab.schemes``.

    A subclass adds its parameters in ``__init__``. It defines `starting_map`, and either ``forward`` or ``kernel`` with
    `operands`. One with a ``forward`` or ``kernel`` of its own does not inherit ``add`` and ``add_kernel``, which
    compute what it was made of.

    Args:
        hidden_size: d, the width of the vectors. None: any.

    Raises:
        NormlabError: hidden_size below 1.

    Attributes:
        takes_mean_square: whether the call has ``mean_square`` and ``return_mean_square``.
        kernels: the backend, see ``normlab.norms``.
        kernel, add_kernel: functions of ``normlab_kernels``. The second also adds the residual.
        fuses_add: whether ``add`` is one pass of a kernel.
        gain_name: the parameter that multiplies the output. Folding uses it.
        probe_role: marks the module as a norm for probes.
        shown: attributes in the module's representation.
    """

    takes_mean_square = False
    kernels = "auto"
    kernel: Any = None
    add_kernel: Any = None
    gains: tuple[str, ...] = ("weight",)
    gain_name = "weight"
    probe_role = "norm"
    numbers = 2.0
    operations = 4.0
    shown: tuple[str, ...] = ("eps",)
    weight: nn.Parameter

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if _definer(cls, "forward", "kernel") < _definer(cls, "add", "add_kernel"):
            cls.add, cls.add_kernel = Norm.add, None  # type: ignore[method-assign]

    def __init__(self, hidden_size: int | None = None) -> None:
        super().__init__()
        if hidden_size is not None and hidden_size < 1:
            raise NormlabError(f"hidden_size is {hidden_size}: give the width of the vectors to normalize, at least 1")
        self.hidden_size = hidden_size

    @property
    def fuses_add(self) -> bool:
        has_own = type(self).add is not Norm.add or self.add_kernel is not None
        return has_own and "forward" not in vars(self)  # which a library has put around the norm

    def gamma(self) -> Tensor:
        """The gain, shape of ``weight``."""
        return self.weight if self.centre == 0.0 else self.weight + self.centre

    def starting_map(self) -> StartingMap:
        """The map before training, for `normlab.analysis.theory`."""
        raise NotImplementedError

    def operands(self) -> tuple[Any, ...]:
        """Return the kernel's arguments after x, the gain first if there is one."""
        raise NotImplementedError

    def _operands_for(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """The operands for x of a dtype. A gain that is a buffer is in float32, which is no reason to widen y."""
        if self.gain_name not in self._buffers:
            return self.operands()
        gain, *others = self.operands()
        return gain.to(dtype), *others

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, *self._operands_for(x.dtype), kernels=self.kernels)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``s = residual + x`` and norm(s), in one pass where there is an ``add_kernel`` and kernels compute.

        Raises NormlabError, or the kernels' ValueError, for a residual of another shape than x.
        """
        if self.add_kernel is None or not nk.chooses_kernels(residual, self.kernels, x):
            s = added(x, residual)
            return s, self(s)
        operands = self._operands_for(torch.promote_types(x.dtype, residual.dtype))
        return self.add_kernel(x, residual, *operands, kernels=self.kernels)

    def constant(self) -> Tensor | None:
        """The output's part that no part of x makes: the bias, or None."""
        return getattr(self, "bias", None)

    def shares(self, x: Tensor, parts: Tensor) -> Tensor:
        """Split the output at x, without `constant`, over the parts of x.

        Each feature's secant ``y_j/x_j`` multiplies the part's feature. What depends on all of x is held fixed. This is
        exact for every norm that acts per feature but for its divisor.

        Args:
            x: ``(..., d)``, the sum of the parts.
            parts: ``(n, ..., d)``.
        """
        tiny = 1e-6 * x.square().mean(-1, keepdim=True).sqrt()
        nonzero = torch.where(x.abs() < tiny, tiny, x)  # y/x has a limit at x = 0, and this is close to it
        constant = self.constant()
        share: Tensor = (self(nonzero) - (0.0 if constant is None else constant)) / nonzero * parts
        return share

    def extra_repr(self) -> str:
        values = [f"{name}={getattr(self, name)}" for name in self.shown]
        return ", ".join(values if self.hidden_size is None else [str(self.hidden_size), *values])


class NoNorm(Norm):
    """``y = x``, without parameters."""

    numbers = 0.0
    operations = 0.0
    shown = ()

    def starting_map(self) -> StartingMap:
        return StartingMap()

    def forward(self, x: Tensor) -> Tensor:
        return x

    def shares(self, x: Tensor, parts: Tensor) -> Tensor:
        return parts
