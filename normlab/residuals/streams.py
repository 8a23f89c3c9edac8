"""Rules with several streams: two streams, hyper-connections, and attention over depth."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.residuals.base import Map, Residual, rms_normalized, split, without_autocast

SINKHORN_STEPS = 20
# As close to "one stream" and to the identity as leaves a slope: sigmoid(4) = 0.98, and the identity's weights 0.95.
LOGIT = 4.0


class Streams(Residual):
    """Base of rules whose state holds several streams of width d, all started at the embeddings."""

    def __init__(self, width: int, streams: int = 2) -> None:
        super().__init__()
        self.width, self.streams = width, streams

    def open(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.streams, -1) if x.shape[-1] == self.width else x


class Dual(Streams):
    """``x <- norm(x + f(x))`` and ``s <- s + f(x)``: Post-LN, and the plain sum of its branches.

    Source: ResiDual (2304.14802).
    """

    numbers = 6.0
    operations = 2.0

    def enter(self, state: Tensor) -> Tensor:
        return state[..., : self.width]

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        x, total = state.split(self.width, -1)
        return torch.cat([norm(x + branch), total + branch], -1)


class NormedStreams(Streams):
    """Base of rules with RMSNorms of two streams. Their gains are parameters here, so probes do not list them."""

    def __init__(self, width: int, eps: float, *gains: str) -> None:
        super().__init__(width)
        self.eps, self.gains = eps, gains
        for name in gains:
            self.add_parameter(name, width, 1.0)

    def normalized(self, x: Tensor, gain: str) -> Tensor:
        """RMSNorm of one stream by a gain's name."""
        weight = getattr(self, gain)
        return (weight if self.centre == 0.0 else weight + self.centre) * rms_normalized(x, self.eps)


class DualEnd(NormedStreams):
    """``x + RMSNorm(s)``: what leaves ResiDual's two streams (2304.14802). The scheme has no further norm."""

    operations = 5.0

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps, "gain")

    def forward(self, state: Tensor) -> Tensor:
        x, total = self.open(state).split(self.width, -1)
        return x + self.normalized(total, "gain")


class Siamese(NormedStreams):
    """``x <- N1(x)``, ``z = f(norm(x + N3(y)))``, ``x <- x + z/sqrt(2 l)``, ``y <- y + z``.

    N1 and N3 are RMSNorms with gains ``gain_x`` and ``gain_y``. N1 acts once per sublayer, on what the branch and the
    sum read. With gain_x = 0 only y is left: Pre-LN on N3(y).

    Args:
        width: d.
        eps: of the norms.
        layer: l, counted from 1.

    Source: SiameseNorm (2602.08064), post_pre. Released code of its language, DeiT and DiT models.
    """

    numbers = 8.0
    operations = 12.0

    def __init__(self, width: int, eps: float, layer: int) -> None:
        super().__init__(width, eps, "gain_x", "gain_y")
        self.divisor = math.sqrt(2 * layer)

    def enter(self, state: Tensor) -> Tensor:
        x, y = state.split(self.width, -1)
        return self.normalized(x, "gain_x") + self.normalized(y, "gain_y")

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        x, y = state.split(self.width, -1)
        return torch.cat([self.normalized(x, "gain_x") + branch / self.divisor, y + branch], -1)


class SiameseEnd(NormedStreams):
    """``N(x) + N'(y)``, RMSNorms: what the final norm reads of SiameseNorm's two streams (2602.08064)."""

    operations = 9.0

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps, "gain_x", "gain_y")

    def forward(self, state: Tensor) -> Tensor:
        x, y = self.open(state).split(self.width, -1)
        return self.normalized(x, "gain_x") + self.normalized(y, "gain_y")


class EmbeddingMix(Streams):
    """``h = a x + b x0`` before a block's attention, then ``x <- h + f(h)``. Its MLP adds plainly.

    x0 is the embedding, where x starts. The state is (x, x0).

    Args:
        width: d.
        start: starts of the scalars ``keep`` = a and ``embedding`` = b. None: the MLP's rule, without them.

    Source: nanochat.
    """

    keep: nn.Parameter
    embedding: nn.Parameter

    def __init__(self, width: int, start: tuple[float, float] | None) -> None:
        super().__init__(width)
        self.mixes = start is not None
        self.numbers, self.operations = (7.0, 7.0) if start else (3.0, 1.0)
        for name, value in zip(("keep", "embedding"), start or (), strict=False):
            self.add_parameter(name, 1, value)

    def _mixed(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x, first = state.split(self.width, -1)
        return (self.keep * x + self.embedding * first if self.mixes else x), first

    def enter(self, state: Tensor) -> Tensor:
        return self._mixed(state)[0]

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        mixed, first = self._mixed(state)
        return torch.cat([norm(mixed + branch), first], -1)


class FirstStream(Residual):
    """The first of several streams."""

    numbers, operations = 0.0, 0.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, state: Tensor) -> Tensor:
        return state[..., : self.width]


def doubly_stochastic(logits: Tensor) -> Tensor:
    """Scale ``exp(logits)`` ``(..., n, n)`` to columns and rows that sum to 1.

    Columns and rows are normalized in turn (Sinkhorn-Knopp), in logarithms. The last step is of the rows: each stream
    becomes a mean of streams.
    """
    for _ in range(SINKHORN_STEPS):
        logits = logits - logits.logsumexp(-2, keepdim=True)
        logits = logits - logits.logsumexp(-1, keepdim=True)
    return logits.exp()


class Hyper(Streams):
    """Base of hyper-connections. Per token the branch reads ``r X``, and ``X <- M X + w^T f``.

    The streams are X ``(n, d)``. r ``(n)`` comes from ``read_weights``; w ``(n)`` and M ``(n, n)`` from the module's
    call, which probes listen to. ``matrix`` is the part of them that depends on the token.
    """

    probe_role = "mixing"
    matrix: nn.Parameter
    factor: nn.Parameter

    def __init__(self, width: int, streams: int, sublayer: int, eps: float) -> None:
        super().__init__(width, streams)
        self.sublayer, self.eps = sublayer, eps
        self.numbers = 4.0 * streams + 2.0  # X read for the weights, for r X and for M X, and written; r X and f

    @property
    def first_read(self) -> Tensor:
        """``(n,)``: 1 for the stream that sublayer k reads at the start, k mod n."""
        return torch.eye(self.streams)[self.sublayer % self.streams]

    def read_weights(self, state: Tensor) -> Tensor:
        """r ``(..., n)``, float32."""
        raise NotImplementedError

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """w ``(..., n)`` and M ``(..., n, n)``, float32."""
        raise NotImplementedError

    @without_autocast
    def enter(self, state: Tensor) -> Tensor:
        read = self.read_weights(state).to(state.dtype)
        return (read[..., None] * split(state, self.width)).sum(-2)

    @without_autocast
    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        write, mix = (weight.to(state.dtype) for weight in self(state))
        return (mix @ split(state, self.width) + write[..., None] * branch[..., None, :]).flatten(-2)


class ManifoldHyperConnected(Hyper):
    """mHC. v is the RMS-normalized concatenation of the streams (n d numbers), and each product has a factor a.

        r = sigmoid(a_r v W_r + b_r)       (n)     read weights
        w = 2 sigmoid(a_w v W_w + b_w)     (n)     write weights
        M = Sinkhorn(exp(a_m v W_m + b_m)) (n, n)  doubly stochastic mixing

    ``matrix`` holds W_r, W_w and W_m, ``bias`` b_r, b_w and b_m. ``factor`` holds the three a = 0.01. At the start
    sublayer k reads stream k mod n with weight 0.98. All streams are written with weight 1, and M is near the identity.
    All streams start equal, so this starts as Pre-LN to about 1%. In a model ``matrix`` is drawn from a stream of its
    sublayer's own, so other weights do not change.

    Args:
        width: d.
        streams: n.
        sublayer: k, counted from 0.
        eps: of the RMS.

    Source: mHC (2512.24880) for r, w, M, the 20 steps and the factor. Hyper-connections (2409.19606, eq. 14) for the
    start. The logits of the start are ours: with 8 instead of 4 nothing moves in 300 steps.
    """

    bias: nn.Parameter

    def __init__(self, width: int, streams: int, sublayer: int, eps: float) -> None:
        super().__init__(width, streams, sublayer, eps)
        outputs = streams * (streams + 2)
        self.operations = 2.0 * streams * outputs + 3 * streams + 2 * streams * (streams + 2)  # v W; v; r X, M X, w f
        self.add_parameter("matrix", (outputs, streams * width), 0.0)
        self.add_parameter("bias", outputs, 0.0)
        self.add_parameter("factor", 3, 0.01)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        n = self.streams
        read = LOGIT * (2 * self.first_read - 1) if n > 1 else torch.zeros(1)
        with torch.no_grad():
            self.bias.copy_(torch.cat([read, torch.zeros(n), LOGIT * torch.eye(n).flatten()]))  # 2 sigmoid(0) = 1
        nn.init.normal_(self.matrix, std=1 / math.sqrt(self.matrix.shape[1]))

    def _logits(self, state: Tensor, rows: slice, *factors: Tensor) -> Tensor:
        """``a v W + b`` for some rows of W, float32."""
        product = rms_normalized(state.float(), self.eps) @ self.matrix[rows].float().T
        return torch.cat(factors).float() * product + self.bias[rows].float()

    def read_weights(self, state: Tensor) -> Tensor:
        n = self.streams
        return self._logits(state, slice(0, n), self.factor[:1].expand(n)).sigmoid()

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        n = self.streams
        factors = self.factor[1:2].expand(n), self.factor[2:].expand(n * n)
        write, mix = self._logits(state, slice(n, None), *factors).split([n, n * n], -1)
        return 2 * write.sigmoid(), doubly_stochastic(mix.unflatten(-1, (n, n)))


class HyperConnected(Hyper):
    """Dynamic hyper-connections. v_i is the LayerNorm of stream i, without gain and bias.

        r_i = A_i + s_a tanh(v_i . u)        read weights
        w_i = B_i + s_b tanh(v_i . u')       write weights
        M_ji = A_ij + s_a tanh(v_i . u_j)    mixing: what stream i gives to stream j

    ``matrix`` ``(n + 2, d)`` holds u, u' and the u_j, from 0. ``factor`` holds s_a = s_b = 0.01. ``static_read``
    ``(n)``, ``static_write`` ``(n)`` and ``static_mix`` ``(n, n)`` hold A and B. At the start sublayer k reads stream k
    mod n alone and writes all with weight 1. M is the identity then: exactly Pre-LN, with output matrices that the
    scheme starts smaller by sqrt(n).

    Args:
        width: d.
        streams: n.
        sublayer: k, counted from 0.
        eps: of the LayerNorm.

    Source: Hyper-Connections (2409.19606), eqs. 10 to 14. Its LayerNorm has a gain, which u absorbs, and a bias.
    """

    static_read: nn.Parameter
    static_write: nn.Parameter
    static_mix: nn.Parameter

    def __init__(self, width: int, streams: int, sublayer: int, eps: float) -> None:
        super().__init__(width, streams, sublayer, eps)
        self.operations = 2.0 * streams * (streams + 2) + 5 * streams + 2 * streams * (streams + 2)  # as above
        self.add_parameter("matrix", (streams + 2, width), 0.0)
        self.add_parameter("factor", 2, 0.01)
        self.add_parameter("static_read", streams, 0.0)
        self.add_parameter("static_write", streams, 1.0)
        self.add_parameter("static_mix", (streams, streams), 0.0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.static_read.copy_(self.first_read)
            self.static_mix.copy_(torch.eye(self.streams))

    def _moved(self, state: Tensor, rows: slice) -> Tensor:
        """``tanh(v_i . u)`` for some rows of the matrix: ``(..., n, rows)``, float32."""
        v = F.layer_norm(split(state, self.width).float(), (self.width,), eps=self.eps)
        return torch.tanh(v @ self.matrix[rows].float().T)

    def read_weights(self, state: Tensor) -> Tensor:
        moved = self._moved(state, slice(0, 1))[..., 0]
        return self.static_read.float() + self.factor[0].float() * moved

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        moved = self._moved(state, slice(1, None))
        write = self.static_write.float() + self.factor[1].float() * moved[..., 0]
        gives = self.static_mix.float() + self.factor[0].float() * moved[..., 1:]
        return write, gives.transpose(-1, -2)


class SumOfStreams(Residual):
    """The streams' sum: what the final norm reads of hyper-connections (2409.19606)."""

    def __init__(self, width: int, streams: int) -> None:
        super().__init__()
        self.width = width
        self.numbers, self.operations = streams + 1.0, streams - 1.0

    def forward(self, state: Tensor) -> Tensor:
        return split(state, self.width).sum(-2)


class DepthAttention(Residual):
    """``sum_i softmax_i(q . RMSNorm(v_i)) v_i`` over v_0, the embeddings, and v_i, the values written since.

    The state holds all v_i. A sublayer's output is a new v_i, or is added to the last one. The first is full attention
    residuals, whose state grows by d per sublayer. The second is block attention residuals: d per block of layers.

    ``query`` = q ``(d,)`` starts at 0: a plain mean. A sublayer that reads one v_i has no query. The RMSNorm has no
    gain, because q would absorb it. Called as a module, this is what the final norm reads.

    Args:
        width: d.
        eps: of the RMSNorm.
        values: number of v_i in the state.
        opens: the output is a new v_i.

    Source: Attention Residuals (2603.15031).
    """

    query: nn.Parameter

    def __init__(self, width: int, eps: float, values: int, opens: bool = True) -> None:
        super().__init__()
        self.width, self.eps, self.values, self.opens = width, eps, values, opens
        weighed = values if values > 1 else 0  # each weighed by its size and by the query, then added
        self.numbers, self.operations = 2.0 * weighed + (2.0 if opens else 3.0), 6.0 * weighed + (not opens)
        if values > 1:
            self.add_parameter("query", width, 0.0)

    @without_autocast
    def enter(self, state: Tensor) -> Tensor:
        if self.values == 1:
            return state
        values = split(state, self.width)
        scores = rms_normalized(values.float(), self.eps) @ self.query.float()
        return (scores.softmax(-1).to(state.dtype)[..., None] * values).sum(-2)

    def join(self, state: Tensor, branch: Tensor, norm: Map, read: Tensor) -> Tensor:
        if self.opens:
            return torch.cat([state, branch], -1)
        return torch.cat([state[..., : -self.width], state[..., -self.width :] + branch], -1)

    def forward(self, state: Tensor) -> Tensor:
        return self.enter(state)
