"""Functions that rows name: norms by site, residual rules by sublayer, initialisation, rates.

A row may also hold a lambda. ``of(norm, ...)`` builds a norm with the configuration's eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from normlab.norms import BHyT, Derf, DyT, GatedNorm, NoNorm, Norm, RMSNorm, TaperNorm
from normlab.residuals import Residual
from normlab.residuals.single import LearnedScale, NormalizedInput, Scaled, ScaledSum
from normlab.residuals.streams import (
    DepthAttention,
    EmbeddingMix,
    HyperConnected,
    ManifoldHyperConnected,
    SumOfStreams,
)
from normlab.schemes.scheme import NormSite, Rate, Sublayer, part_of

# -- norms -----------------------------------------------------------------------------------------------------------


def of(norm: Callable[..., Norm], **fixed: Any) -> Callable[[NormSite], Norm]:
    """The same norm at every site, with the configuration's eps unless `fixed` has another."""
    return lambda site: norm(site.width, **{"eps": site.config.rms_norm_eps, **fixed})


rms = of(RMSNorm)
rms_fixed = of(RMSNorm, trained=False)


def nothing(site: NormSite) -> Norm:
    return NoNorm()


def inside(norm: Callable[[NormSite], Norm], final: Callable[[NormSite], Norm] = rms) -> Callable[[NormSite], Norm]:
    """One norm in the blocks, another at the end."""
    return lambda site: final(site) if site.place == "final" else norm(site)


def outputs(norm: Callable[[NormSite], Norm]) -> Callable[[NormSite], Norm]:
    """RMSNorm, but `norm` on the branches' outputs."""
    return lambda site: norm(site) if site.place.endswith("_out") else rms(site)


def over_root_layer(field: str) -> Callable[[NormSite], Norm]:
    """RMSNorm in the blocks with 1/sqrt(layer) as ``gain`` (a start) or ``scale`` (a constant)."""
    return inside(lambda site: of(RMSNorm, **{field: 1.0 / math.sqrt(site.layer)})(site))


def over_root_depth(site: NormSite) -> Norm:
    """The depth scale of Pangu Ultra (2504.07866). Its tuned factors are 1 here.

    The formula is from a secondary source, not checked against the paper.
    """
    return of(RMSNorm, gain=site.config.num_hidden_layers**-0.5)(site)


def rms_gain(site: NormSite) -> Norm:
    """RMSNorm that starts as BHyT does for small inputs: gain gamma0 lambda/kappa where BHyT has a tanh, else 1."""
    kappa = kappa_of(site)
    return of(RMSNorm, gain=1.0 if kappa is None else site.config.gamma0 * site.lam / kappa)(site)


# From this width on: alpha at the attention, and elsewhere. From 4096 as in the released code of 2503.10622. The two
# rows below are from its table, not checked.
DYT_ALPHA = {1: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}


def dyt(site: NormSite) -> Norm:
    attention, other = DYT_ALPHA[max(width for width in DYT_ALPHA if width <= site.width)]
    by_width = attention if part_of(site.place) == "attn" else other
    return DyT(site.width, alpha=by_width if site.config.alpha0 is None else site.config.alpha0)


def derf(site: NormSite) -> Norm:
    return Derf(site.width, alpha=1.0 if site.config.alpha0 is None else site.config.alpha0)


def gated(site: NormSite) -> Norm:
    """GatedNorm, whose matrix starts as those of the model do."""
    return of(GatedNorm, std=site.config.initializer_range)(site)


# kappa in block l is kappa l^power.
KAPPA_POWERS = {"constant": 0.0, "inverse_sqrt": -0.5, "sqrt": 0.5, "fourth_root": 0.25}

# Learned corrections of BHyT's carried statistic: scalars of the block and their starts. Names as in released
# checkpoints (2601.09719, released code).
CORRECTIONS: dict[str, dict[str, float]] = {
    "none": {},
    "beta": {"var_beta": 1.0},
    "eta": {"var_eta": 0.0},
    "residual_aware": {"var_cross_beta": 0.0, "var_alpha": 1.0},
}


def correction_factors(kind: str, learned: Mapping[str, Any]) -> tuple[Any, Any]:
    """(s, a) of the corrected statistic ``s * ms + a * correction``.

    "none" gives (1, 1), "beta" (1, b), "eta" (1 + e, 0) and "residual_aware" (1 + x, a).

    Args:
        kind: a key of ``CORRECTIONS``.
        learned: values of its parameters.
    """
    if kind == "eta":
        return 1 + learned["var_eta"], 0.0
    if kind == "residual_aware":
        return 1 + learned["var_cross_beta"], learned["var_alpha"]
    return 1.0, learned.get("var_beta", 1.0)


def is_bounded(config: Any, layer: int) -> bool:
    """True if a block, from 1, is within ``bounded_layers``."""
    first, last = config.bounded_layers or (1, config.num_hidden_layers)
    return first <= layer <= last


def kappa_of(site: NormSite) -> float | None:
    """BHyT's kappa at a place, by the schedule; None where BHyT has no tanh."""
    config, final = site.config, site.place == "final"
    if site.lam == 0.0 or not (final or is_bounded(config, site.layer)):
        return None
    return config.kappa * (1.0 if final else site.layer ** KAPPA_POWERS[config.kappa_schedule])


def bhyt(bounded: bool) -> Callable[[NormSite], Norm]:
    """BHyT, or RMSNorm in blocks outside ``bounded_layers`` and at the end unless ``lam_last`` is set."""

    def build(site: NormSite) -> Norm:
        config, kappa = site.config, kappa_of(site)
        if kappa is None:
            return rms(site)
        fixed = {"learnable_lam": config.learnable_lam, "gain": config.gamma0, "bounded": bounded}
        return BHyT(site.width, site.lam, kappa, **fixed)

    return build


def taper(site: NormSite) -> Norm:
    """TaperNorm. The final norm stays unless ``taper_final``: it anchors the scale of the stream (2602.10408)."""
    stays = site.place == "final" and not site.config.taper_final
    return rms(site) if stays else of(TaperNorm)(site)


def post_blocks(config: Any) -> int:
    """Number of Mix-LN's Post-LN blocks: the share ``post_fraction``, rounded down, at least one.

    A quarter is L // 4, as in the authors' later code. Their first code rounded to the nearest.
    """
    return max(1, math.floor(config.post_fraction * config.num_hidden_layers + 1e-9))


# -- residual rules --------------------------------------------------------------------------------------------------


def deepnorm(sublayer: Sublayer) -> Residual:
    """A decoder's constants (2203.00555): alpha = (2L)^(1/4). beta = (8L)^(-1/4) is Xavier's gain."""
    return Scaled(keep=(2 * sublayer.depth) ** 0.25)


def keel(sublayer: Sublayer) -> Residual:
    """alpha = 2L, but 1 at the first attention and the first MLP (2601.19895, section 3.1)."""
    return Scaled(keep=2.0 * sublayer.depth if sublayer.layer > 1 else 1.0)


def over_depth(sublayer: Sublayer) -> Residual:
    return Scaled(add=base_depth_over(sublayer.config))


def over_root_count(sublayer: Sublayer) -> Residual:
    """sqrt((k-1)/k) x + f/sqrt(k), k = 2 at the first sublayer (Beam).

    So the stream is the sum of the embeddings and of all branches so far, over the root of their number.
    """
    count = sublayer.index + 2
    return Scaled(keep=math.sqrt((count - 1) / count), add=math.sqrt(1 / count))


def layer_scale(sublayer: Sublayer) -> Residual:
    """One factor per channel from 0.1 up to 18 layers, 1e-5 up to 24, and 1e-6 beyond (2103.17239)."""
    start = next(start for deepest, start in ((18, 0.1), (24, 1e-5), (math.inf, 1e-6)) if sublayer.depth <= deepest)
    return LearnedScale(sublayer.width, start)


def layer_scalar(sublayer: Sublayer) -> Residual:
    """One scalar per block, on its output (Gemma 4's code)."""
    return ScaledSum() if sublayer.part == "mlp" else Residual()


def normalized_input(sublayer: Sublayer) -> Residual:
    """DeepNorm's constant. MiniMax-01's 3.5566 is (2L)^(1/4) for its 80 layers."""
    return NormalizedInput((2 * sublayer.depth) ** 0.25)


def embedding_mix(sublayer: Sublayer) -> Residual:
    """a from 1.15 in the first layer to 1.05 in the last, b from 0.2 to 0.05 (nanochat's code)."""
    depth = (sublayer.layer - 1) / max(sublayer.depth - 1, 1)
    return EmbeddingMix(sublayer.width, (1.15 - 0.1 * depth, 0.2 - 0.15 * depth) if sublayer.part == "attn" else None)


def end(rule: Callable[[int, float], Residual]) -> Callable[[Any], Residual]:
    """The same way out of several streams in every model."""
    return lambda config: rule(config.hidden_size, config.rms_norm_eps)


def hyper(rule: type[HyperConnected | ManifoldHyperConnected]) -> Callable[[Sublayer], Residual]:
    return lambda sublayer: rule(sublayer.width, sublayer.config.streams, sublayer.index, sublayer.eps)


def hyper_end(config: Any) -> Residual:
    return SumOfStreams(config.hidden_size, config.streams)


def over_sublayers(sublayer: Sublayer) -> Residual:
    return DepthAttention(sublayer.width, sublayer.eps, sublayer.index + 1)


def over_sublayers_end(config: Any) -> Residual:
    return DepthAttention(config.hidden_size, config.rms_norm_eps, 2 * config.num_hidden_layers + 1)


DEPTH_BLOCKS = 8  # at most so many blocks of layers in block attention residuals (2603.15031: about eight)


def layers_per_block(config: Any) -> int:
    return math.ceil(config.num_hidden_layers / DEPTH_BLOCKS)


def over_blocks(sublayer: Sublayer) -> Residual:
    """Values: the embeddings, the outputs' sum of each whole block, and the sum of the present block so far."""
    size, done = layers_per_block(sublayer.config), sublayer.layer - 1
    first = sublayer.part == "attn"
    begun = math.ceil((done if first else done + 1) / size)
    opens = first and done % size == 0
    return DepthAttention(sublayer.width, sublayer.eps, 1 + begun, opens)


def over_blocks_end(config: Any) -> Residual:
    begun = math.ceil(config.num_hidden_layers / layers_per_block(config))
    return DepthAttention(config.hidden_size, config.rms_norm_eps, 1 + begun)


# -- initialisation, by a matrix's name ------------------------------------------------------------------------------

WRITING = ("o_proj", "down_proj")


def fan(name: str, config: Any) -> tuple[int, int]:
    """(inputs, outputs) of a block's matrix."""
    head = config.head_dim or config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads * head
    kv_heads = (config.num_key_value_heads or config.num_attention_heads) * head
    d, f = config.hidden_size, config.intermediate_size
    attention = {"q_proj": (d, heads), "k_proj": (d, kv_heads), "v_proj": (d, kv_heads), "o_proj": (heads, d)}
    mlp = {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}
    return {**attention, **mlp, "affine_gate": (d, config.num_attention_heads)}[name]


def writing_over_depth(name: str, config: Any) -> float:
    """The matrices that write into the stream start smaller by sqrt(2L).

    HybridNorm's configurations (2503.04598) set this by ``init_fn: full_megatron``.
    """
    factor = 1.0 / math.sqrt(2 * config.num_hidden_layers) if name in WRITING else 1.0
    return config.initializer_range * factor


def writing_over_streams(name: str, config: Any) -> float:
    """The matrices that write into all n streams, which are summed at the end, start smaller by sqrt(n).

    Hyper-Connections (2409.19606, section 4) scales them "by a factor of sqrt(n)", so that the sum's size stays the
    original's. That it means smaller follows from this aim. While the streams are equal, the sum still is n times one.
    """
    factor = 1.0 / math.sqrt(config.streams) if name in WRITING else 1.0
    return config.initializer_range * factor


def block_over_depth(name: str, config: Any) -> float:
    """Every matrix of a block starts smaller by sqrt(L), as in B2T's code (2206.00330)."""
    return config.initializer_range / math.sqrt(config.num_hidden_layers)


def xavier(gain: Callable[[int], float]) -> Callable[[str, Any], float]:
    """``gain(L) sqrt(2 / (inputs + outputs))`` for v, o and the MLP, with gain 1 for q and k."""

    def std(name: str, config: Any) -> float:
        factor = 1.0 if name in ("q_proj", "k_proj") else gain(config.num_hidden_layers)
        return factor * math.sqrt(2 / sum(fan(name, config)))

    return std


def fixup_init(name: str, config: Any) -> float:
    """Start of a branch with m matrices, one of n = 2L: the last at 0, others at ``inputs^(-1/2) n^(-1/(2m-2))``.

    Attention has m = 4 (q, k, v, o; 1901.09321 and its code): n^(-1/6). A gated MLP has m = 3, since gate and up
    multiply. Both are matrices before the last, and their factors multiply to n^(-1/2), as the rule wants. The paper
    has no gated MLP; this is derived.
    """
    if name in WRITING:
        return 0.0
    m = 4 if name in ("q_proj", "k_proj", "v_proj") else 3
    return fan(name, config)[0] ** -0.5 * (2 * config.num_hidden_layers) ** (-1 / (2 * m - 2))


BASE_WIDTH, BASE_DEPTH = 256, 2  # of CompleteP: where its rules are those of any scheme


def over_width(config: Any) -> float:
    """Base width over width."""
    return BASE_WIDTH / config.hidden_size


def base_depth_over(config: Any) -> float:
    """Base depth over depth."""
    return BASE_DEPTH / config.num_hidden_layers


def over_head_width(config: Any) -> float:
    """1/d_head instead of its root."""
    return 1.0 / (config.head_dim or config.hidden_size // config.num_attention_heads)


def complete_p_init(name: str, config: Any) -> float:
    return config.initializer_range * math.sqrt(over_width(config))


def complete_p_rates(name: str, dimensions: int, config: Any) -> Rate:
    """CompleteP's alpha = 1 (2505.01618), with m = d/256 and depth L over 2.

    A block's matrices learn at 1/m of the rate. They decay m times as much and have eps 2/(m L). A block's vectors
    have eps 2/(m L). Everything else has eps 1/m, as in the paper's table; the code uses the blocks' eps everywhere.
    The rates of depth are (L/2)^(alpha-1) = 1.
    """
    factor = over_width(config)
    if ".layers." not in name:
        return Rate(eps=factor)
    eps = factor * base_depth_over(config)
    return Rate(lr=factor, eps=eps, weight_decay=1 / factor) if dimensions >= 2 else Rate(eps=eps)


# -- after each step -------------------------------------------------------------------------------------------------


@torch.no_grad()
def unit_matrices(model: nn.Module) -> None:
    """Scale every matrix to unit length along the residual stream's axis (nGPT, 2410.01131).

    That is rows that read the stream, and columns that write it. Frozen matrices stay, and those that PEFT puts beside
    a matrix.
    """
    adapted = [f"{path}." for path, module in model.named_modules() if hasattr(module, "base_layer")]
    for name, parameter in model.named_parameters():
        is_added = any(name.startswith(path) and not name.startswith(f"{path}base_layer.") for path in adapted)
        if parameter.dim() == 2 and parameter.requires_grad and not is_added:
            axis = 0 if any(part in WRITING for part in name.split(".")) else 1
            length = torch.linalg.vector_norm(parameter.float(), dim=axis, keepdim=True)
            parameter.div_(length.clamp_min(1e-12).to(parameter.dtype))  # the padding token's row is 0
