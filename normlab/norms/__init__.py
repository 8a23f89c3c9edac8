"""Normalization layers, y = norm(x), one module a family.

RMSNorm     x / rms(x) * gamma, with an optional starting gain and a constant depth scale
LayerNorm   centred, with bias
DyT         gamma * tanh(alpha * x): no statistics
BHyT        gamma * tanh((lambda/kappa) * x / rms(x)); ``bounded=False`` is the same map without its tanh
Derf        gamma * erf(alpha * x + s) + beta
DyISRU      gamma * sqrt(d) * x / sqrt(b + x^2): a LayerNorm without the other channels
ScaleNorm   g * x / ||x||: one gain for all channels
SeeDNorm    (tanh(x . b) a + gamma) * x / rms(x)
GatedNorm   RMSNorm times a low-rank sigmoid gate of itself
CRMSNorm    LayerNorm of a zero-mean vector, from all its numbers but the last
TaperNorm   RMSNorm that becomes a fixed gain while it trains
PowerNorm   a batch norm without a mean, its statistics running ones
UnifiedNorm the same of the last few batches, smoothed
NoNorm      x

Norm        their base: what models, theory and the TransformerLens bridge ask of any norm

Calls: ``norm(x)`` returns y. Where a mean square exists (RMSNorm, BHyT), ``norm(x, return_mean_square=True)`` returns
(y, ms) with ms (..., 1) in float32, and ``norm(x, mean_square=ms)`` uses ms as given, adding eps only.

``norm.add(x, residual)`` returns (s, norm(s)) of s = residual + x in one pass of the kernels, with the bits of the two
steps; it is the block's shortcut, and hooks on the norm do not see it.

``norm.kernels`` chooses what computes it: "auto" (Triton on CUDA, PyTorch elsewhere), "triton", or "torch" (rounds as
Llama does).
"""

from normlab.norms.base import Norm, StartingMap
from normlab.norms.bhyt import BHyT
from normlab.norms.compressed import CRMSNorm
from normlab.norms.derf import Derf
from normlab.norms.dyt import DyT
from normlab.norms.gated import GatedNorm
from normlab.norms.identity import NoNorm
from normlab.norms.isru import DyISRU
from normlab.norms.layer_norm import LayerNorm
from normlab.norms.power import PowerNorm
from normlab.norms.rms import RMSNorm
from normlab.norms.scale_norm import ScaleNorm
from normlab.norms.seed_norm import SeeDNorm
from normlab.norms.taper import TaperNorm
from normlab.norms.unified import UnifiedNorm

__all__ = [
    "BHyT",
    "CRMSNorm",
    "Derf",
    "DyISRU",
    "DyT",
    "GatedNorm",
    "LayerNorm",
    "NoNorm",
    "Norm",
    "PowerNorm",
    "RMSNorm",
    "ScaleNorm",
    "SeeDNorm",
    "StartingMap",
    "TaperNorm",
    "UnifiedNorm",
]
