"""Attention over depth: a branch reads a weighted mean of everything written before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normlab.residuals.base import Map, Residual, rms_normalized, split


class DepthAttention(Residual):
    """sum_i softmax_i(q . RMSNorm(v_i)) v_i over v_0 = the embeddings and v_i = what sublayer i wrote.

    The state holds all v_i, so it grows by d a sublayer. ``query`` q (d,) is the sublayer's own and starts at 0: a
    plain mean; the first sublayer has nothing to choose from, and no query. The RMSNorm has no gain: q times a gain is
    another q. As a module it makes what the final norm reads, with a query of its own.

    Source: Attention Residuals (2603.15031), over all sublayers, not blocks of them.
    """

    def __init__(self, width: int, eps: float, sublayer: int) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        values = sublayer + 1 if sublayer else 0  # each weighed by its size and by the query, then added
        self.numbers, self.operations = 2.0 * values + 2.0, 6.0 * values
        self.query = nn.Parameter(torch.empty(width)) if sublayer else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.query is not None:
            nn.init.zeros_(self.query)

    def enter(self, state: Tensor) -> Tensor:
        if self.query is None:
            return state
        values = split(state, self.width)
        scores = rms_normalized(values.float(), self.eps) @ self.query.float()
        return (scores.softmax(-1).to(state.dtype)[..., None] * values).sum(-2)

    def join(self, state: Tensor, branch: Tensor, norm: Map) -> Tensor:
        return torch.cat([state, branch], -1)

    def forward(self, state: Tensor) -> Tensor:
        return self.enter(state)
