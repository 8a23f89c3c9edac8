"""TaperNorm: an RMSNorm that becomes a fixed gain while it trains."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width


class TaperNorm(Norm):
    """y = gamma x (g / sqrt(mean(x^2) + eps) + (1 - g) c): RMSNorm at gate g = 1, a foldable gain c gamma at g = 0.

    Calibration: while g = 1, c is the running mean (momentum 0.99) of 1/sqrt(mean(x^2) + eps) over what is trained on.
    Then g falls along half a cosine. Both are saved buffers, and the output is the same function of them in training
    and out of it.

    Shapes: x and y (..., d); gamma = ``weight`` (d,); ``gate`` and c = ``inverse_rms`` scalars.

    Args:
        hidden_size: d.
        eps: added to the mean square.
        start, end: shares of all steps at which g leaves 1 and reaches 0; ours, the paper tunes them.

    A training loop tells the time by ``model.after_step``; without it g stays 1.

    Raises:
        NormlabError: hidden_size below 1.

    Source: TaperNorm (2602.10408): the gate, its cosine and the calibration.
    """

    gate: Tensor
    inverse_rms: Tensor
    momentum = 0.99

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, start: float = 0.25, end: float = 0.75) -> None:
        super().__init__()
        check_width(hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.register_buffer("gate", torch.empty(()))
        self.register_buffer("inverse_rms", torch.empty(()))
        self.eps, self.start, self.end = eps, start, end
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.centre)
        nn.init.ones_(self.gate)
        nn.init.ones_(self.inverse_rms)

    def starting_map(self) -> StartingMap:
        return StartingMap(eps=self.eps)

    def at_step(self, step: int, total: int) -> None:
        done = (step / max(total, 1) - self.start) / (self.end - self.start)
        self.gate.fill_(0.5 + 0.5 * math.cos(math.pi * min(max(done, 0.0), 1.0)))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        inverse = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        if self.training:
            self._calibrate(inverse)
        return self.gamma() * (x32 * (self.gate * inverse + (1 - self.gate) * self.inverse_rms)).to(x.dtype)

    @torch.no_grad()
    def _calibrate(self, inverse: Tensor) -> None:
        """Looks at what is trained on, and leaves this call's output as it is."""
        seen = self.momentum * self.inverse_rms + (1 - self.momentum) * inverse.mean()
        # A new tensor: this call's backward pass still needs the value that it used.
        self.inverse_rms = torch.where(self.gate == 1, seen, self.inverse_rms).to(self.inverse_rms.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, start={self.start:g}, end={self.end:g}"
