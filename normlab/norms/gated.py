"""GatedNorm: an RMSNorm whose channels are opened and closed by a low-rank gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.norms.base import Norm, StartingMap
from normlab.norms.rms import check_width


class GatedNorm(Norm):
    """y = n sigmoid(W_up silu(W_down n)), n = gamma x / sqrt(mean(x^2) + eps), of rank r.

    W_down starts N(0, 0.02) from numbers drawn aside, W_up at 0 (the gate is 1/2 everywhere): the starts are ours.

    Shapes: x and y (..., d); gamma = ``weight`` (d,); W_down = ``down`` (r, d); W_up = ``up`` (d, r).

    Args:
        hidden_size: d.
        eps: added to the mean square.
        rank: r.

    Raises:
        NormlabError: hidden_size below 1.

    Source: GatedNorm (2601.22966).
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, rank: int = 16) -> None:
        super().__init__()
        check_width(hidden_size)
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.down = nn.Parameter(torch.empty(rank, hidden_size))
        self.up = nn.Parameter(torch.empty(hidden_size, rank))
        self.eps = eps
        self.operations = 6.0 + 4.0 * rank
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.centre)
        with torch.random.fork_rng(devices=[]):
            nn.init.normal_(self.down, std=0.02)
        nn.init.zeros_(self.up)

    def starting_map(self) -> StartingMap:
        return StartingMap(gain=0.5, eps=self.eps)

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        n = self.gamma() * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return n * F.linear(F.silu(F.linear(n, self.down)), self.up).sigmoid()

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, rank={self.down.shape[0]}"
