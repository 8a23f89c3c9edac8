"""A scheme is data: which norm, where in the block, what it starts at. This is the only file that knows schemes by
name.

Layout    which of a block's six places hold a norm, and the attribute that holds it (the name in released checkpoints)
NormSite  one such place in one model: what a scheme needs to know to build the norm there
Scheme    the row of data
SCHEMES   the registry, in the order in which figures show them
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from normlab.errors import NormlabError
from normlab.norms import BHyT, DyT, LayerNorm, RMSNorm


@dataclass(frozen=True)
class Layout:
    """x + out(f(in(x))), then sum(.), for f = attention and f = MLP: the attribute holding each norm, or None.

    ``*_in`` normalizes the branch's input, ``*_out`` its output, ``*_sum`` the residual sum.
    """

    attn_in: str | None = None
    attn_out: str | None = None
    attn_sum: str | None = None
    mlp_in: str | None = None
    mlp_out: str | None = None
    mlp_sum: str | None = None

    def places(self) -> list[tuple[str, str]]:
        """(place, attribute) of every norm in the block, in order of use."""
        return [(place, name) for place, name in vars(self).items() if name is not None]


PRE = Layout(attn_in="input_layernorm", mlp_in="post_attention_layernorm")
POST = Layout(attn_sum="post_attention_layernorm", mlp_sum="post_feedforward_layernorm")
PERI = Layout(
    attn_in="input_layernorm",
    attn_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)


@dataclass(frozen=True)
class NormSite:
    """Where a norm is built: ``place`` is a field of Layout, or "final"; ``layer`` counts from 1 (L+1 for the final
    norm)."""

    place: str
    layer: int
    config: Any  # NormlabConfig; this floor does not import the one above

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def lam(self) -> float:
        """lambda at this site: ``lam_input``, ``lam_post`` or ``lam_last`` (0: not a tanh site)."""
        attention = self.place.startswith("attn")
        return (
            self.config.lam_last
            if self.place == "final"
            else self.config.lam_input
            if attention
            else self.config.lam_post
        )


def _rms(site: NormSite) -> nn.Module:
    return RMSNorm(site.width, site.config.rms_norm_eps)


def _rms_gain(site: NormSite) -> nn.Module:
    """Starts as BHyT does for small inputs: gain gamma0 lambda/kappa where BHyT has a tanh, 1 where it has none."""
    config = site.config
    return RMSNorm(site.width, config.rms_norm_eps, gain=config.gamma0 * site.lam / config.kappa if site.lam else 1.0)


def _rms_depth_scaled(site: NormSite) -> nn.Module:
    scale = 1.0 if site.place == "final" else 1.0 / math.sqrt(site.layer)
    return RMSNorm(site.width, site.config.rms_norm_eps, scale=scale)


def _rms_depth_gain(site: NormSite) -> nn.Module:
    gain = 1.0 if site.place == "final" else 1.0 / math.sqrt(site.layer)
    return RMSNorm(site.width, site.config.rms_norm_eps, gain=gain)


def _layer_norm(site: NormSite) -> nn.Module:
    return LayerNorm(site.width, eps=1e-5)


# From this width on: alpha at the attention site, alpha elsewhere (2503.10622; the last row from memory of its table).
DYT_ALPHA = {8192: (0.2, 0.05), 5120: (0.6, 0.15), 4096: (0.8, 0.2), 2048: (1.0, 0.5), 1: (1.0, 1.0)}


def _dyt(site: NormSite) -> nn.Module:
    attention, other = next(alphas for width, alphas in DYT_ALPHA.items() if site.width >= width)
    by_width = attention if site.place.startswith("attn") else other
    return DyT(site.width, alpha=by_width if site.config.alpha0 is None else site.config.alpha0)


def _bhyt(bounded: bool) -> Callable[[NormSite], nn.Module]:
    def build(site: NormSite) -> nn.Module:
        if site.lam == 0.0:  # the final norm unless lam_last asks for a tanh there
            return _rms(site)
        config = site.config
        fixed = {"learnable_lam": config.learnable_lam, "gain": config.gamma0, "bounded": bounded}
        return BHyT(site.width, site.lam, config.kappa, **fixed)

    return build


@dataclass(frozen=True)
class Scheme:
    """One way to normalize a transformer.

    Args:
        name: key in SCHEMES and value of ``NormlabConfig.scheme``.
        title: label in figures.
        paper: source.
        norm: builds the norm for a site.
        layout: places of the norms in a block.
        first_layout: places in the first ``post_fraction`` of the blocks, if they differ (Mix-LN).
        carried: statistics the MLP site may use in place of its own, the default first; empty: none exists.
        residual_init: factor on the init std of o_proj and down_proj, from the depth L.
        embedding_scale: start of a learnable factor on the token embeddings, from the width; None: no factor.
        decayed: names of norm and scale parameters that weight decay acts on (matrices always decay).
        released_as: value of ``norm_type`` in the configurations of released checkpoints.
        is_control: exists to be shown beside BHyT: its gain, or its map without the bound.
        color, dash: the same in every figure.
    """

    name: str
    title: str
    paper: str
    norm: Callable[[NormSite], nn.Module]
    color: str
    layout: Layout = PRE
    first_layout: Layout | None = None
    carried: tuple[str, ...] = ()
    residual_init: Callable[[int], float] | None = None
    embedding_scale: Callable[[int], float] | None = None
    decayed: frozenset[str] = frozenset()
    released_as: str | None = None
    is_control: bool = False
    dash: str = "solid"

    @property
    def carries_statistic(self) -> bool:
        """Whether the MLP site can reuse the attention site's mean square."""
        return any(kind != "exact" for kind in self.carried)

    def layout_at(self, layer: int, num_layers: int, post_fraction: float) -> Layout:
        """Layout of block ``layer`` (1..L). Mix-LN: the first max(1, round(post_fraction * L)) blocks are Post-LN."""
        if self.first_layout is not None and layer <= max(1, round(post_fraction * num_layers)):
            return self.first_layout
        return self.layout


def get_scheme(name: str) -> Scheme:
    """The scheme of that name; NormlabError names the known ones otherwise."""
    if name not in SCHEMES:
        raise NormlabError(f"unknown scheme {name!r}: choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


_BHYT = "Bounded Hyperbolic Tangent (2601.09719)"
_CARRIED = ("uniform", "causal", "exact")

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("pre_rmsnorm", "Pre-LN", "RMSNorm (1910.07467)", _rms, "#000000", released_as="rms"),
        Scheme("pre_layernorm", "Pre-LN (LayerNorm)", "LayerNorm (1607.06450)", _layer_norm, "#000000", dash="dot"),
        Scheme(
            "pre_rmsnorm_scaled_init",
            "Pre-LN, scaled init",
            "GPT-2; compared in The Curse of Depth (2502.05795)",
            _rms,
            "#7f7f7f",
            residual_init=lambda depth: 1.0 / math.sqrt(2 * depth),
        ),
        Scheme("lns", "LNS", "The Curse of Depth (2502.05795)", _rms_depth_scaled, "#009e73"),
        Scheme(
            "lns_gain",
            "LNS, trained gain",
            "LNS as GPAS (2506.22049) and ProRes (2603.05369) have it: a gain that starts at 1/sqrt(l)",
            _rms_depth_gain,
            "#009e73",
            dash="dash",
        ),
        Scheme("peri_ln", "Peri-LN", "Peri-LN (2502.02732)", _rms, "#e69f00", layout=PERI),
        Scheme("post_rmsnorm", "Post-LN", "Attention Is All You Need (1706.03762)", _rms, "#8c564b", layout=POST),
        Scheme("mix_ln", "Mix-LN", "Mix-LN (2412.13795)", _rms, "#8c564b", first_layout=POST, dash="dash"),
        Scheme(
            "dyt",
            "DyT",
            "Transformers without Normalization (2503.10622)",
            _dyt,
            "#cc79a7",
            embedding_scale=math.sqrt,
            decayed=frozenset({"alpha", "weight", "shared_scale"}),
        ),
        Scheme("bhyt", "BHyT", _BHYT, _bhyt(bounded=True), "#0072b2", carried=_CARRIED, released_as="bhytline"),
        Scheme(
            "bhyt_exact",
            "BHyT*",
            _BHYT,
            _bhyt(bounded=True),
            "#0072b2",
            carried=("exact",),
            released_as="bhytstar",
            dash="dot",
        ),
        Scheme(
            "bhyt_linear",
            "BHyT without tanh",
            "control: " + _BHYT,
            _bhyt(bounded=False),
            "#56b4e9",
            carried=_CARRIED,
            is_control=True,
            dash="dash",
        ),
        Scheme(
            "rmsnorm_gain", "Pre-LN, gain λ/κ", "control: " + _BHYT, _rms_gain, "#d55e00", is_control=True, dash="dash"
        ),
    )
}

# What other files need by name, so that names stay here.
BASELINE = "pre_rmsnorm"  # what the others are compared with; stock Llama
DEFAULT = "bhyt"  # of `normlab train`
SHORT_LIST = (BASELINE, "lns", "rmsnorm_gain", "bhyt")  # of a sweep of minutes
CORE = (BASELINE, "lns", "lns_gain", "bhyt", "bhyt_exact", "rmsnorm_gain")  # of the sweep of hours: with seeds
FURTHER = ("peri_ln", "dyt", "pre_rmsnorm_scaled_init", "mix_ln", "post_rmsnorm", "bhyt_linear")
DEEP = (BASELINE, "lns", "bhyt_exact", "rmsnorm_gain")  # at depth 32
DEEPEST = (BASELINE, "rmsnorm_gain")  # at depth 64
# What a search tries beside the learning rate, where a scheme is known to hang on it: fields of TrainConfig.
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "dyt": ({}, {"model": {"alpha0": 0.5}}, {"model": {"alpha0": 0.25}}),
    "post_rmsnorm": ({}, {"warmup": 0.3}),
}
PILOT = ("lns",)  # which text is learned furthest
BOUND_AND_CONTROL = ("bhyt", "bhyt_linear")  # the same parameters, with the tanh and without
GAIN_CONTROL = "rmsnorm_gain"  # BHyT's gain and nothing else of it
TIMED = ("bhyt", "bhyt_exact", "lns", "peri_ln", "dyt")  # whose training step is timed against the baseline's
