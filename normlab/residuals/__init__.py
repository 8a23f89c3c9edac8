"""Residual rules: how a branch's output joins the residual stream.

Plain addition, x + f(x), is the model's code (`normlab.models.block`). Every other rule is a module here, one per
sublayer, or one for both sublayers of a block. In `base`, `single` and `streams`:

Residual                 base: ``enter(state)`` is what the branch reads, ``join(state, branch, ...)`` the next state
Scaled                   keep x + add f, two constants: DeepNorm, Keel, CompleteP
NormalizedInput          keep r + f(r), r the normalized x: MiniMax-01
LearnedScale             x + a f, a scalar or one number per channel: LayerScale, SkipInit, Fixup
Gated                    sqrt(1 - s^2) x + s f: residual gate
Mixed                    sqrt(1 - b/L) x + sqrt(b/L) f: norm-preserving residual mixing
ScaledSum                a (x + f), a scalar: layer scalar
GradientPreserving       x + f, scaled down without scaling the gradients: GPAS
Progressive              x + a(t) f, switched on layer by layer: ProRes
BlockInput               Post-LN with the block's input added once more: B2T
Delta                    x + beta k (v - k.x): deep delta learning
Spherical                a step on the unit sphere: nGPT
Dual, Siamese            two streams: ResiDual, SiameseNorm
EmbeddingMix             the embeddings mixed in again: nanochat
HyperConnected           n streams that mix: hyper-connections; ManifoldHyperConnected: mHC
DepthAttention           softmax over earlier outputs: attention residuals, of all sublayers or of blocks of them

A state of n streams is one tensor ``(..., n d)``, stream by stream. So blocks, caches and hooks pass tensors. The
modules SumOfStreams, DualEnd, SiameseEnd, FirstStream and DepthAttention make what the final norm reads.
"""

from normlab.residuals.base import Residual, rms_normalized, split, unit_length

__all__ = ["Residual", "rms_normalized", "split", "unit_length"]
