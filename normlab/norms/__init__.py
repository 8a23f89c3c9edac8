"""Normalization layers, ``y = norm(x)``.

RMSNorm     x / rms(x) * gamma, with a starting gain and a constant depth scale
LayerNorm   centred, with bias
DyT         gamma * tanh(alpha * x): no statistics
BHyT        gamma * tanh((lambda/kappa) * x / rms(x)); ``bounded=False`` is the same map without its tanh
Derf        gamma * erf(alpha * x + s) + beta
DyISRU      gamma * sqrt(d) * x / sqrt(b + x^2): a LayerNorm without the other channels
ScaleNorm   g * x / ||x||: one gain for all channels
SeeDNorm    (tanh(x . b) a + gamma) * x / rms(x)
GatedNorm   RMSNorm times a low-rank sigmoid gate of itself
CRMSNorm    LayerNorm of a zero-mean vector, from all its numbers but the last
TaperNorm   RMSNorm that becomes a fixed gain during training
PowerNorm   batch norm without a mean, with running statistics
UnifiedNorm the same over the last few batches, smoothed
NoNorm      x
Norm        the base class: what models, theory and the TransformerLens bridge use

``norm(x)`` returns y. RMSNorm, ScaleNorm and BHyT also have a mean square: ``norm(x, return_mean_square=True)`` returns
``(y, ms)``, with ms ``(..., 1)`` in float32. ``norm(x, mean_square=ms)`` uses ms as given and adds eps only.

``norm.add(x, residual)`` returns ``(s, norm(s))`` for ``s = residual + x``, in one pass where kernels compute, in two
steps elsewhere. The bits are those of the two steps. Hooks on the norm see the two steps alone; BHyT with its tanh
takes one pass everywhere. The block takes the one pass where kernels compute and the norm has no hooks.

``norm.kernels`` is the backend: "auto" (Triton on CUDA, else PyTorch), "triton", or "torch" (rounds as Llama does).
"""

from normlab.norms.base import NoNorm, Norm, StartingMap
from normlab.norms.layer_norm import CRMSNorm, LayerNorm
from normlab.norms.rms import GatedNorm, RMSNorm, ScaleNorm, SeeDNorm
from normlab.norms.running import PowerNorm, TaperNorm, UnifiedNorm
from normlab.norms.tanh import BHyT, Derf, DyISRU, DyT

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
