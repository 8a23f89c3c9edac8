"""A scheme as data: norm, layout, residual rule, and what else it changes.

Layout     which of a block's six places hold a norm, and the attribute that holds it (the name in released checkpoints)
NormSite   one such place in one model, from which a scheme builds the norm
Sublayer   one attention or MLP in one model, from which a scheme builds its residual rule
Branches   changes inside attention and MLP
Ends       changes at the embeddings and the logits
Rate       factors on a parameter's learning rate, Adam eps and weight decay
Scheme     the row of data
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

from normlab.residuals import Residual
from normlab.schemes.start import placed

Family = Literal["norm", "placement", "depth", "residual", "streams", "without norm"]  # what a scheme changes
PARTS = ("attn", "mlp")  # the sublayers of a block
QK_NORMS = ("none", "l2", "rms_head", "rms_width")


@dataclass(frozen=True)
class Layout:
    """``x + out(f(in(x)))``, then ``sum(.)``, for f = attention and f = MLP: the attribute of each norm, or None.

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


def part_of(place: str) -> str:
    """The part that a place belongs to: "attn", "mlp" or "final"."""
    return place.partition("_")[0]


@dataclass(frozen=True)
class NormSite:
    """The place of a norm in a model.

    ``place`` is a field of Layout, or "final". ``layer`` counts from 1 and is L + 1 for the final norm.
    """

    place: str
    layer: int
    config: Any  # NormlabConfig; this floor does not import the one above

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def lam(self) -> float:
        """lambda at this site: ``lam_input``, ``lam_post`` or ``lam_last``. 0 means no tanh."""
        if self.place == "final":
            return self.config.lam_last
        return self.config.lam_input if part_of(self.place) == "attn" else self.config.lam_post


@dataclass(frozen=True)
class Sublayer:
    """The place of a residual rule in a model. ``part`` is "attn" or "mlp"; ``layer`` counts from 1."""

    part: str
    layer: int
    config: Any

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def depth(self) -> int:
        return self.config.num_hidden_layers

    @property
    def eps(self) -> float:
        return self.config.rms_norm_eps

    @property
    def index(self) -> int:
        """Number of sublayers before this one."""
        return 2 * (self.layer - 1) + (self.part == "mlp")


@dataclass(frozen=True)
class Branches:
    """Changes inside attention and MLP.

    Args:
        qk_norm: default of ``NormlabConfig.qk_norm``, the norm of queries and keys. "none". "l2": unit length, with one
            learned scale per head for the softmax (2010.04245). "rms_head": RMSNorm of each head (Qwen 3). "rms_width":
            RMSNorm over all heads (OLMo 2).
        value_norm: RMSNorm of each head's values.
        output_norm: RMSNorm before the output projection of attention and MLP.
        spherical: nGPT's learned scales s_qk and s_uv on unit queries, unit keys, gate and up.
        shifted: Fixup's learned scalars, added to the inputs of each matrix and of the activation.
        softmax_scale: factor on the attention scores, from the configuration. None: 1/sqrt(d_head).
    """

    qk_norm: str = "none"
    value_norm: bool = False
    output_norm: bool = False
    spherical: bool = False
    shifted: bool = False
    softmax_scale: Callable[[Any], float] | None = None


@dataclass(frozen=True)
class Ends:
    """Changes at the embeddings and the logits.

    Args:
        embedding_scale: start of a learnable factor on the token embeddings, from the width. None: no factor.
        unit_embeddings: embeddings ``sqrt(d) e/||e||``, and logits from the same rows at unit length.
        normalized_embeddings: embeddings ``e/rms(e)``, without a gain.
        projection: a square matrix after the embeddings and one before the head, orthogonal at the start.
        logit_factor: constant factor on the logits, from the configuration.
        logit_scale: a learned factor per token of the vocabulary on the logits, 1 at the start.
        head_std: standard deviation of an untied head's start. None: ``initializer_range``.
        head_shift: a learned scalar, 0 at the start, added to the head's input.
    """

    embedding_scale: Callable[[int], float] | None = None
    unit_embeddings: bool = False
    normalized_embeddings: bool = False
    projection: bool = False
    logit_factor: Callable[[Any], float] | None = None
    logit_scale: bool = False
    head_std: float | None = None
    head_shift: bool = False


@dataclass(frozen=True)
class Rate:
    """Multipliers on learning rate, Adam eps and weight decay."""

    lr: float = 1.0
    eps: float = 1.0
    weight_decay: float = 1.0


PRE = Layout(attn_in="input_layernorm", mlp_in="post_attention_layernorm")
POST = Layout(attn_sum="post_attention_layernorm", mlp_sum="post_feedforward_layernorm")
OUT = Layout(attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm")
PERI = Layout(
    attn_in="input_layernorm",
    attn_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
# Around the sum and before the branch: Keel.
PRE_AND_POST = Layout(
    attn_in="input_layernorm",
    attn_sum="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_sum="post_feedforward_layernorm",
)
WITHOUT = Layout()


@dataclass(frozen=True)
class Scheme:
    """One way to normalize a transformer.

    Args:
        name: key in SCHEMES and value of ``NormlabConfig.scheme``.
        title: label in figures.
        formula: formula of a sublayer f, with the stream x and the norm N.
        paper: source.
        norm: builds the norm for a site.
        family: what it changes. Figures group by it.
        color, dash: the same in every figure. Without a color, the next free pair of `normlab.figures.theme`.
        tags: lists that the scheme is in, separated by spaces. `tagged` reads them, and the sweeps' presets.
        layout: places of the norms in a block.
        first_layout: places in the first ``first_blocks(config)`` blocks, if they differ (Mix-LN).
        residual: builds a sublayer's residual rule. None: plain addition.
        shares_residual: a block's attention and MLP share one rule.
        leave: makes one stream of several, before the final norm. None: there is one.
        loops: the first block's attention and MLP are those of all blocks; norms and residual rules are not.
        branches, ends: changes inside the branches, and before and after the blocks.
        carried: statistics that the MLP site may use instead of the exact one, the default first.
        init: standard deviation of a block's matrix, by its name ("v_proj" ...). None: ``initializer_range``.
        decayed: names of norm, residual and scale parameters that weight decay acts on.
        decays_matrices: whether it acts on matrices outside norms and residual rules.
        after_step: applied to the model at the start and after each optimizer step.
        rates: factors on the optimizer's settings, by parameter name and number of its dimensions.
        released_as: values of ``norm_type``, or of ``model_type``, in the configurations of released checkpoints.
        is_control: shown with BHyT as a control: its gain, or its map without the bound.
        unpredicted: why `normlab.analysis.theory` has no recursion for it. Empty: it has.
    """

    name: str
    title: str
    formula: str
    paper: str
    norm: Callable[[NormSite], nn.Module]
    family: Family
    color: str = ""
    dash: str = "solid"
    tags: str = ""
    layout: Layout = PRE
    first_layout: Layout | None = None
    first_blocks: Callable[[Any], int] = lambda config: 1
    residual: Callable[[Sublayer], Residual] | None = None
    shares_residual: bool = False
    leave: Callable[[Any], Residual] | None = None
    loops: bool = False
    branches: Branches = Branches()
    ends: Ends = Ends()
    carried: tuple[str, ...] = ()
    init: Callable[[str, Any], float] | None = None
    decayed: frozenset[str] = frozenset()
    decays_matrices: bool = True
    after_step: Callable[[nn.Module], None] | None = None
    rates: Callable[[str, int, Any], Rate] | None = None
    released_as: tuple[str, ...] = ()
    is_control: bool = False
    unpredicted: str = ""

    @property
    def carries_statistic(self) -> bool:
        """True if the MLP site can reuse the attention site's mean square."""
        return any(kind != "exact" for kind in self.carried)

    @property
    def changes_blocks_only(self) -> bool:
        """True if only norms and sums of the blocks differ from Llama, so that an existing model can be converted."""
        whole = self.loops or self.leave is not None or self.after_step is not None
        return self.ends == Ends() and self.branches == Branches() and not whole

    @property
    def starts_by_own_rule(self) -> bool:
        """True if a block's matrices start by a rule of the scheme's, not all from ``initializer_range``."""
        return self.init is not None or self.after_step is not None

    def layout_at(self, layer: int, config: Any) -> Layout:
        """Layout of block ``layer`` (1..L)."""
        if self.first_layout is not None and layer <= self.first_blocks(config):
            return self.first_layout
        return self.layout

    def norm_at(self, site: NormSite) -> Any:
        """The norm for a site, its gain zero-centred if the configuration says so."""
        return placed(partial(self.norm, site), f"{site.layer}.{site.place}", site.config)

    def rule_at(self, sublayer: Sublayer) -> Any:
        """The residual rule of a sublayer, or None: plain addition. Its gains are zero-centred as a norm's are."""
        if self.residual is None:
            return None
        return placed(partial(self.residual, sublayer), f"{sublayer.layer}.{sublayer.part}", sublayer.config)

    def leave_at(self, config: Any) -> Any:
        """What makes one stream of several, or None."""
        return None if self.leave is None else placed(partial(self.leave, config), "leave", config)

    def matrix_std(self, name: str, config: Any) -> float:
        """Standard deviation of a block's matrix at the start."""
        return config.initializer_range if self.init is None else self.init(name, config)
