"""Manifold-constrained hyper-connections: n streams, read, written and mixed by weights of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normlab.residuals.base import Map, Residual, rms_normalized, split

SINKHORN_STEPS = 20
# A logit whose sigmoid, or whose weight after the Sinkhorn steps, is 1 or 0 to three decimals.
SHARP = 8.0


def doubly_stochastic(logits: Tensor) -> Tensor:
    """exp(logits) (..., n, n) scaled to rows and columns that sum to 1, by alternate normalisation (Sinkhorn-Knopp), in
    logarithms."""
    for _ in range(SINKHORN_STEPS):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


class HyperConnected(Residual):
    """Streams X (n, d): the branch reads r X, and X <- M X + w^T f, per token.

    With v = the RMS-normalised concatenation of the streams (n d numbers) and a small learned factor a on each product:

        r = sigmoid(a_r v W_r + b_r)      (n)      read weights
        w = 2 sigmoid(a_w v W_w + b_w)    (n)      write weights
        M = Sinkhorn(exp(a_m v W_m + b_m)) (n, n)  doubly stochastic mixing

    ``matrix`` holds W_r, W_w, W_m side by side, ``bias`` b_r, b_w, b_m, ``factor`` the three a = 0.01. At the start
    sublayer k reads and writes stream k mod n and M is the identity, all to three decimals: Pre-LN, with each stream
    for a share of the sublayers. With one stream M = 1 and w = 1: Pre-LN but for r, which the norm takes out.

    Args:
        width: d.
        streams: n.
        sublayer: k, counted from 0.
        eps: of the RMS.

    Source: mHC (2512.24880) for r, w, M, the 20 steps and the factor; that static weights start as one stream read and
    written is hyper-connections' (2409.19606). In float32; the randomness of W is drawn aside, so that all other
    weights start as in any scheme.
    """

    def __init__(self, width: int, streams: int, sublayer: int, eps: float) -> None:
        super().__init__()
        self.width, self.streams, self.sublayer, self.eps = width, streams, sublayer, eps
        outputs = streams * (streams + 2)
        self.matrix = nn.Parameter(torch.empty(outputs, streams * width))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.factor = nn.Parameter(torch.empty(3))
        # X is read for the weights, for r X and for M X, and written; r X is written, f read.
        self.numbers = 4.0 * streams + 2.0
        self.operations = 2.0 * streams * outputs + 3 * streams + 2 * streams * (streams + 2)  # v W; v; r X, M X, w f
        self.reset_parameters()

    def reset_parameters(self) -> None:
        own, n = self.sublayer % self.streams, self.streams
        chosen = torch.full((n,), -SHARP)
        chosen[own] = SHARP if n > 1 else 0.0
        written = chosen.clone()
        written[own] = 0.0  # 2 sigmoid(0) = 1
        mixing = SHARP * torch.eye(n)
        with torch.no_grad():
            self.bias.copy_(torch.cat([chosen, written, mixing.flatten()]))
        nn.init.constant_(self.factor, 0.01)
        with torch.random.fork_rng(devices=[]):
            nn.init.normal_(self.matrix, std=1 / math.sqrt(self.matrix.shape[1]))

    def open(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.streams, -1) if x.shape[-1] == self.width else x

    def weights(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """r (..., n), w (..., n) and M (..., n, n), in float32."""
        n = self.streams
        factor = self.factor.float().repeat_interleave(torch.tensor([n, n, n * n], device=state.device))
        product = rms_normalized(state.float(), self.eps) @ self.matrix.float().T
        read, write, mix = (factor * product + self.bias.float()).split([n, n, n * n], -1)
        return read.sigmoid(), 2 * write.sigmoid(), doubly_stochastic(mix.unflatten(-1, (n, n)))

    def enter(self, state: Tensor) -> Tensor:
        read = self.weights(state)[0].to(state.dtype)
        return (read[..., None] * split(state, self.width)).sum(-2)

    def join(self, state: Tensor, branch: Tensor, norm: Map) -> Tensor:
        _, write, mix = (weight.to(state.dtype) for weight in self.weights(state))
        return (mix @ split(state, self.width) + write[..., None] * branch[..., None, :]).flatten(-2)


class SumOfStreams(Residual):
    """The streams' sum: what the final norm reads of hyper-connections (2409.19606)."""

    def __init__(self, width: int, streams: int) -> None:
        super().__init__()
        self.width = width
        self.numbers, self.operations = streams + 1.0, streams - 1.0

    def forward(self, state: Tensor) -> Tensor:
        return split(state, self.width).sum(-2)
