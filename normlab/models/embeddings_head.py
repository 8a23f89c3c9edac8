"""Embeddings and head of the schemes that change them. All others use Llama's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.residuals import rms_normalized, unit_length
from normlab.schemes import get_scheme
from normlab.schemes.start import own_draws


class Projection(nn.Module):
    """``y = W x``, W square and orthogonal at the start.

    W is drawn from a stream of its place's own: "embeddings" or "head". So other weights do not change.
    """

    def __init__(self, width: int, place: str) -> None:
        super().__init__()
        self.place = place
        self.weight = nn.Parameter(torch.empty(width, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.weight.device.type == "meta":
            return
        wide = torch.promote_types(self.weight.dtype, torch.float32)  # there is no QR in half precision
        with own_draws(self.place):
            self.weight.copy_(nn.init.orthogonal_(torch.empty_like(self.weight, dtype=wide)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class EmbeddingEnd(nn.Module):
    """Map of the token embeddings: ``sqrt(d) e/||e||``, ``e/rms(e)``, or a projection (see ``normlab.schemes.Ends``).

    FixNorm (1910.05895) fixes the length of word embeddings. Its authors' models scale embeddings by sqrt(d). The one
    learned scale of the logits is the final ScaleNorm's. Projections: 2506.19697.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        ends = get_scheme(config.scheme).ends
        self.unit = ends.unit_embeddings
        self.eps = config.rms_norm_eps if ends.normalized_embeddings else None
        self.projection = Projection(config.hidden_size, "embeddings") if ends.projection else None

    def forward(self, embeddings: Tensor) -> Tensor:
        if self.unit:
            return unit_length(embeddings) * embeddings.shape[-1] ** 0.5
        if self.eps is not None:
            return rms_normalized(embeddings, self.eps)
        return embeddings if self.projection is None else self.projection(embeddings)


class Head(nn.Linear):
    """``logits = factor * scale * W (P x + shift)``, each part only if the scheme has it.

    W may have unit rows, P is a projection, and factor is constant. ``scale`` is nGPT's s_z: the parameter starts at
    1/sqrt(d), its effect at 1.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        ends = get_scheme(config.scheme).ends
        self.unit = ends.unit_embeddings
        self.factor = 1.0 if ends.logit_factor is None else ends.logit_factor(config)
        self.projection = Projection(config.hidden_size, "head") if ends.projection else None
        self.scale = nn.Parameter(torch.empty(config.vocab_size)) if ends.logit_scale else None
        self.shift = nn.Parameter(torch.empty(1)) if ends.head_shift else None
        self.reset_scale()

    def reset_scale(self) -> None:
        """Set shift and scale to their starts."""
        if self.shift is not None:
            nn.init.zeros_(self.shift)
        if self.scale is not None:
            nn.init.constant_(self.scale, self.in_features**-0.5)

    def with_rows_of(self, resized: nn.Linear) -> Head:
        """Take another matrix, of more rows or fewer. ``scale`` of a new row has its start."""
        self.weight, rows = resized.weight, len(resized.weight)
        self.out_features = rows
        if self.scale is not None and len(self.scale) != rows:
            scale, kept = self.scale.data.new_full((rows,), self.in_features**-0.5), self.scale.data[:rows]
            scale[: len(kept)] = kept
            self.scale = nn.Parameter(scale)
        return self

    def forward(self, input: Tensor) -> Tensor:
        x = input if self.projection is None else self.projection(input)
        if self.shift is not None:
            x = x + self.shift
        logits = F.linear(x, unit_length(self.weight) if self.unit else self.weight) * self.factor
        return logits if self.scale is None else logits * (self.scale * self.in_features**0.5)


def changes_embeddings(config: Any) -> bool:
    """True if a map other than a learned factor follows the embeddings."""
    ends = get_scheme(config.scheme).ends
    return ends.unit_embeddings or ends.normalized_embeddings or ends.projection


def changes_head(config: Any) -> bool:
    """True if the head is more than a matrix."""
    ends = get_scheme(config.scheme).ends
    return (
        ends.unit_embeddings or ends.projection or ends.logit_scale or ends.head_shift or ends.logit_factor is not None
    )
