"""How a branch's output joins the residual stream.

Plain addition, x + f(x), is the model's own code (`normlab.models.modeling`). What differs from it is here, a module a
sublayer:

Residual             base: ``enter(state)`` what the branch reads, ``join(state, branch, norm)`` the next state
Scaled               keep x + add f, two constants: DeepNorm, Keel, CompleteP
LearnedScale         x + a f, a scalar or a channel's: LayerScale, SkipInit; with biases: Fixup
GradientPreserving   x + f, scaled down where gradients do not see it: GPAS
Progressive          x + a(t) f, switched on layer by layer: ProRes
BlockInput           Post-LN with the block's input added once more: B2T
Spherical            a step on the unit sphere: nGPT
Dual, Siamese        two streams: ResiDual, SiameseNorm
HyperConnected       n streams that mix: mHC
DepthAttention       softmax over all earlier outputs: attention residuals

A state of n streams is one tensor (..., n d), stream by stream, so that blocks, caches and hooks go on passing tensors.
``leave`` modules make one stream of it in front of the final norm: SumOfStreams, DualEnd, SiameseEnd, DepthAttention.
"""

from normlab.residuals.base import Residual, split
from normlab.residuals.depth import DepthAttention
from normlab.residuals.hyper import HyperConnected, SumOfStreams
from normlab.residuals.single import BlockInput, GradientPreserving, LearnedScale, Progressive, Scaled, Spherical
from normlab.residuals.two import Dual, DualEnd, Siamese, SiameseEnd

__all__ = [
    "BlockInput",
    "DepthAttention",
    "Dual",
    "DualEnd",
    "GradientPreserving",
    "HyperConnected",
    "LearnedScale",
    "Progressive",
    "Residual",
    "Scaled",
    "Siamese",
    "SiameseEnd",
    "Spherical",
    "SumOfStreams",
    "split",
]
