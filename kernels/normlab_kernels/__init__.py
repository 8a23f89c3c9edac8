"""Fused row norms for transformers: Triton on a GPU, cache-blocked PyTorch on a CPU."""

from normlab_kernels.dispatch import chooses_kernels
from normlab_kernels.experimental.linear import linear_add_bhyt, linear_add_dyt, prefers_fused
from normlab_kernels.functions import (
    add_bhyt,
    add_bhyt_carried,
    add_crms_norm,
    add_dyt,
    add_isru,
    add_layer_norm,
    add_rms_norm,
    add_seed_norm,
    bhyt,
    bhyt_carried,
    crms_norm,
    derf,
    dyt,
    isru,
    layer_norm,
    rms_norm,
    seed_norm,
)  # fmt: skip
from normlab_kernels.moments import RowMoments, row_moments

__all__ = [
    "RowMoments", "add_bhyt", "add_bhyt_carried", "add_crms_norm", "add_dyt", "add_isru", "add_layer_norm",
    "add_rms_norm", "add_seed_norm", "bhyt", "bhyt_carried", "chooses_kernels", "crms_norm", "derf", "dyt", "isru",
    "layer_norm", "linear_add_bhyt", "linear_add_dyt", "prefers_fused", "rms_norm", "row_moments", "seed_norm",
]  # fmt: skip
