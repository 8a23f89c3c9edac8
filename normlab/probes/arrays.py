"""Statistics that are not one number per token, but still stream and merge.

`gram`             sum over tokens of u u^T (d x d, float64): its eigenvalues are the squared singular values of the
                   update
`coordinate_peak`  largest |h| of each feature (d): massive activations live in a few of them
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MERGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"gram": torch.add, "coordinate_peak": torch.maximum}


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
    return torch.where(mask[:, None], rows, 0).abs().amax(0).double()


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


READOUT = {"gram": effective_rank, "coordinate_peak": peak_ratio}
