"""Statistics that are not one number per token, but still stream and merge.

`gram`             sum over tokens of u u^T (d x d, float64): its eigenvalues are the squared singular values of the
                   update
`coordinate_peak`  largest |h| of each feature (d): massive activations live in a few of them
`expert_counts`    how often each expert of a mixture was taken (experts)
`carried_position` tokens counted and sum of exact / carried mean square at each position of a row (2 x positions)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def _add_padded(a: Tensor, b: Tensor) -> Tensor:
    """The sum of (2, positions) tables of unequal length: what a shorter row does not reach counts as zero."""
    length = max(a.shape[-1], b.shape[-1])
    return functional.pad(a, (0, length - a.shape[-1])) + functional.pad(b, (0, length - b.shape[-1]))


MERGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gram": torch.add,
    "coordinate_peak": torch.maximum,
    "carried_position": _add_padded,
    "expert_counts": torch.add,
}
FIXED_SHAPE = ("gram", "coordinate_peak", "expert_counts")  # a different one means a different model


def gram(rows: Tensor, mask: Tensor) -> Tensor:
    """(d, d) float64: sum over the counted tokens of u u^T. `rows`: (tokens, d); `mask`: (tokens,) bool.

    float64 because a singular value is the root of an eigenvalue: in float32 those below 1e-3 of the largest would be
    noise.
    """
    dtype = torch.float32 if rows.device.type == "mps" else torch.float64
    kept = torch.where(mask[:, None], rows, 0).to(dtype)
    return kept.mT @ kept


def coordinate_peak(rows: Tensor, mask: Tensor) -> Tensor:
    """(d,): largest |h| of each feature over the counted tokens; 0 when none counts."""
    kept = torch.where(mask[:, None], rows, 0)
    return torch.maximum(kept.amax(0), -kept.amin(0)).double()


def by_position(values: Tensor, positions: Tensor, mask: Tensor, length: int) -> Tensor:
    """(2, length): how many counted tokens stand at each position, and the sum of their values.

    `values`, `positions`, `mask`: (tokens,), a token's number, its position among its row's real tokens, and whether
    it counts.
    """
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    table = torch.zeros(2, length, dtype=dtype, device=values.device)
    counted = torch.stack([mask.to(dtype), torch.where(mask, values, 0).to(dtype)])
    return table.index_add_(1, positions, counted)


def effective_rank(matrix: Tensor) -> float:
    """exp(H(p)), p_i = s_i / sum s, with s_i^2 the eigenvalues of a Gram matrix (Roy and Vetterli's effective rank,
    2007); NaN for zeros."""
    singular = torch.linalg.eigvalsh(matrix.double()).clamp(min=0).sqrt()
    if not bool(singular.sum() > 0):
        return float("nan")
    return float(torch.special.entr(singular / singular.sum()).sum().exp())


def peak_ratio(peaks: Tensor) -> float:
    """Largest over median of the features' largest values: tens in a healthy layer, thousands where activations are
    massive."""
    middle = float(peaks.median())
    return float(peaks.max()) / middle if middle > 0 else float("nan")


def largest_load(counts: Tensor) -> float:
    """The largest expert's share of all choices over an even share: 1 where all are taken alike."""
    total = float(counts.sum())
    return float(counts.max()) * len(counts) / total if total > 0 else float("nan")


READOUT = {"gram": effective_rank, "coordinate_peak": peak_ratio, "expert_counts": largest_load}
