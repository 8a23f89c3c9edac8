"""The metrics and the sites where they are measured, one row each.

A *statistic* is one number per token (a norm, a variance, a cosine ...). Statistics are streamed as (count, mean, M2,
max) over the counted tokens and merged by Chan's rule. No result depends on how the data was cut into batches. A
*metric* reads one statistic:

    mean      mean over tokens
    max       largest value over tokens
    rms       sqrt of the pooled mean of squares over tokens and features (the statistic is a token's L2 norm)
    norm      sqrt of the sum of squares over all tokens
    array     from an array that is not one number per token

`kind` says what the statistic is taken from:

    activation  h at block_out, and at what norms read: attn_norm_in, cross_norm_in, ..., final_norm_in
    gradient    dLoss/dh at the same tensors; for block outputs, at the blocks' inputs
    branch      what the branches add, at sites attn, cross, mixer, mlp, and all of them, at block
    change      h_l against h_{l-1}, at site block
    attention   pre-softmax scores, at site attn; their entropy is staged apart, as `entropy`
    sink        the softmax's columns that are a learned sink's, at site attn
    tanh        the argument of a norm's tanh; bounded: the same, where the norm has lambda and kappa
    carried     a statistic handed to a norm, not computed by it
    router      the scores of a mixture's router, at site mlp; load: the experts that it takes
    streams     the state that a rule mixes, where there are several streams
    spectrum    the block's update as a matrix; coordinate: features one by one
    model       nothing inside the model: training logs it, and `record` does not take it

Figures, widgets, comparisons and reports take labels, units, axes, default sites and definitions from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from normlab.errors import NormlabError


@dataclass(frozen=True)
class Site:
    """A place where something is measured.

    Args:
        name: in tables.
        label: in plots.
        takes: "activation" = h itself; "branch" = what is added to the stream; "gradient" = dLoss/d`of`; "model" = the
            model as a whole.
        of: for a gradient, the place of the tensor.
    """

    name: str
    label: str
    takes: Literal["activation", "branch", "gradient", "model"]
    of: str = ""


# Norms' names in sites and in words. All in the order of tables.
_NORMS = (("attn", "attention"), ("cross", "cross-attention"), ("mixer", "mixer"), ("mlp", "MLP"), ("final", "final"))
SITES: dict[str, Site] = {
    site.name: site
    for site in (
        Site("block_out", "block output", "activation"),
        *(Site(f"{part}_norm_in", f"input of the {word} norm", "activation") for part, word in _NORMS),
        Site("attn", "attention", "branch"),
        Site("cross", "cross-attention", "branch"),
        Site("mixer", "mixer", "branch"),
        Site("mlp", "MLP", "branch"),
        Site("block", "block", "branch"),
        *(
            Site(f"{part}_norm_in_grad", f"gradient at the {word} norm's input", "gradient", f"{part}_norm_in")
            for part, word in _NORMS
        ),
        Site("block_in_grad", "gradient at the block's input", "gradient", "block_in"),
        Site("model", "the model", "model"),
    )
}
GRADIENT_SITES = {site.of: site.name for site in SITES.values() if site.takes == "gradient"}


@dataclass(frozen=True)
class Mask:
    """Which tokens count: in plots, and in words."""

    label: str
    definition: str


MASKS = {
    "all": Mask("all tokens", "padding excluded"),
    "no_first": Mask("without each row's first token", "padding and the first real token of every row excluded"),
}


def site_label(name: str) -> str:
    """A site's name in plots; the name itself for one that is not in the table, such as a parameter's."""
    return SITES[name].label if name in SITES else name


def mask_label(name: str) -> str:
    """A mask's name in plots; the name itself for one that is not in the table."""
    return MASKS[name].label if name in MASKS else name


def site_order(name: str) -> tuple[int, str]:
    """Sorts sites as the table does, others after them by name."""
    place = list(SITES).index(name) if name in SITES else len(SITES)
    return place, name


@dataclass(frozen=True)
class Metric:
    """One row of the metrics table.

    Args:
        name: in tables.
        definition: what it is, as a formula or in words.
        label: in plots.
        unit: in plots; empty: none.
        scale: of an axis, "log" or "linear".
        compared: "ratio" for positive sizes, which are averaged geometrically; "difference" for losses, cosines,
            entropies and shares.
        default_site: where figures show it by default.
        kind, statistic, readout: what it is taken from, which number per token, and how that is read (see the module).
    """

    name: str
    definition: str
    label: str
    unit: str = ""
    scale: str = "linear"
    compared: str = "difference"
    default_site: str = "block_out"
    kind: str = ""
    statistic: str = ""
    readout: str = ""

    @property
    def axis(self) -> str:
        """Axis title: label and unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def log(self) -> bool:
        """True for a logarithmic axis."""
        return self.scale == "log"

    @property
    def is_ratio(self) -> bool:
        """True if two values are compared by their ratio."""
        return self.compared == "ratio"

    def value(
        self, count: np.ndarray, mean: np.ndarray, m2: np.ndarray, peak: np.ndarray, width: np.ndarray
    ) -> np.ndarray:
        """The metric from streamed statistics; NaN where no token was counted.

        Args:
            count: tokens.
            mean, m2, peak: mean, sum of squared deviations and maximum of the statistic over them.
            width: features per token.
        """
        with np.errstate(all="ignore"):
            square_sum = m2 + count * mean * mean
            square_sum = np.where(np.isfinite(square_sum), square_sum, np.nan)
            if self.readout == "rms":
                value = np.sqrt(square_sum / (count * width))
            elif self.readout == "norm":
                value = np.sqrt(square_sum)
            else:
                value = peak if self.readout == "max" else mean
        return np.where(count == 0, np.nan, value)


# How a metric is shown and compared: the scale of its axis, and ratios or differences.
SIZE = ("log", "ratio")  # positive sizes
AMOUNT = ("linear", "difference")  # losses, cosines, entropies, shares

# fmt: off
_ROWS = (
    # name, definition
    #     label, unit, scale and comparison, default site, kind, statistic, readout
    Metric("token_l2_mean", "mean over tokens of ‖h‖₂",
           "L2 norm of a token", "", *SIZE, "block_out", "activation", "l2", "mean"),
    Metric("feature_var_mean", "mean over tokens of the biased variance of h over its features",
           "variance over features", "", *SIZE, "block_out", "activation", "var", "mean"),
    Metric("rms", "square root of the mean of h^2, pooled over tokens and features",
           "root mean square", "", *SIZE, "block_out", "activation", "l2", "rms"),
    Metric("max_abs", "largest |h| over tokens and features",
           "largest magnitude", "", *SIZE, "block_out", "activation", "max_abs", "max"),
    Metric("kurtosis", "mean over tokens of m4 / m2^2 over features (3 for a Gaussian)",
           "kurtosis", "", *SIZE, "block_out", "activation", "kurtosis", "mean"),
    Metric("grad_l2_mean", "mean over tokens of ‖dLoss/dh‖₂, Loss summed over labels",
           "gradient norm of a token", "nats", *SIZE, "block_in_grad", "gradient", "grad_l2", "mean"),
    Metric("grad_l2_total", "L2 norm of dLoss/dh over all tokens, Loss summed over labels",
           "gradient norm of the batch", "nats", *SIZE, "block_in_grad", "gradient", "grad_l2", "norm"),
    Metric("relative_contribution",
           "mean over tokens of ‖attn‖/‖h‖, ‖mlp‖/‖h+attn‖, ‖attn+mlp‖/‖h‖ (sites attn, mlp, block), "
           "after an output norm where there is one; h is what they are added to, in DeepNorm scaled, in MiniMax "
           "normalized",
           "relative contribution", "", *SIZE, "block", "branch", "ratio", "mean"),
    Metric("update_cosine",
           "mean over tokens of cos(attn, h), cos(mlp, h+attn), cos(h_l, h_{l-1}) (sites attn, mlp, block)",
           "cosine of the update", "", *AMOUNT, "block", "branch", "cosine", "mean"),
    Metric("block_influence", "1 - mean over tokens of cos(h_{l-1}, h_l)",
           "block influence", "", *AMOUNT, "block", "change", "change", "mean"),
    Metric("attention_logit_max", "largest pre-softmax attention score over heads, queries and keys",
           "largest attention score", "", *AMOUNT, "attn", "attention", "logit_max", "max"),
    Metric("attention_entropy",
           "mean over queries and heads of the entropy of an attention row, in nats; over the keys: a learned sink is "
           "left out, and the rest adds up to 1",
           "entropy of attention", "nats", *AMOUNT, "attn", "attention", "entropy", "mean"),
    Metric("sink_share", "mean over queries and heads of the share of attention that a learned sink takes",
           "share of a learned sink", "", *AMOUNT, "attn", "sink", "sink_share", "mean"),
    Metric("saturation", "share of tanh inputs with |z| > lambda; in BHyT without tanh of what would be its input",
           "share of inputs beyond lambda", "", *AMOUNT, "attn_norm_in", "bounded", "saturated", "mean"),
    Metric("saturation_bound", "Chebyshev bound on `saturation`: mean over tokens of (ms / ms used) / kappa^2",
           "bound on the share beyond lambda", "", *AMOUNT, "attn_norm_in", "bounded", "saturated_bound", "mean"),
    Metric("tanh_input_max_bound", "bound on `tanh_input_max`: lambda sqrt(d) / kappa, times sqrt(ms / ms used)",
           "bound on the largest tanh input", "", *SIZE, "attn_norm_in", "bounded", "peak_bound", "max"),
    Metric("saturation_95",
           "share of tanh inputs with |tanh z| > 0.95; in BHyT without tanh of what would be its input",
           "share of inputs in the flat of tanh", "", *AMOUNT, "attn_norm_in", "tanh", "flat", "mean"),
    Metric("tanh_input_max", "largest |z|, z the argument of tanh; in BHyT without tanh what would be its argument",
           "largest tanh input", "", *SIZE, "attn_norm_in", "tanh", "peak", "max"),
    Metric("carried_var_ratio", "mean over tokens of exact mean square / the statistic the norm was given",
           "exact over carried mean square", "", *SIZE, "mlp_norm_in", "carried", "carried_ratio", "mean"),
    Metric("router_entropy", "mean over tokens of the entropy of the softmax of the router's scores over the experts",
           "entropy of the router", "nats", *AMOUNT, "mlp", "router", "router_entropy", "mean"),
    Metric("expert_load_max",
           "largest share of the tokens' choices that one expert takes, over an even share (1: all are taken alike)",
           "largest load of an expert", "", *SIZE, "mlp", "load", "expert_counts", "array"),
    Metric("mixing_from_identity",
           "mean over tokens of ‖M - I‖_F / sqrt(n - 1), M the n x n matrix that mixes streams (0: each stays its own, "
           "1: the uniform matrix)",
           "distance of mixing from the identity", "", *AMOUNT, "attn", "streams", "from_identity", "mean"),
    Metric("mixing_from_uniform",
           "mean over tokens of ‖M - 1/n‖_F / sqrt(n - 1) (0: all streams become one, 1: the identity)",
           "distance of mixing from uniform", "", *AMOUNT, "attn", "streams", "from_uniform", "mean"),
    Metric("stream_cosine", "mean over tokens and pairs of streams of their cosine, where a sublayer reads them",
           "likeness of streams", "", *AMOUNT, "attn", "streams", "stream_cosine", "mean"),
    Metric("update_effective_rank",
           "exp of the entropy of s_i / sum s, s the singular values of the block's update h_l - h_{l-1} "
           "as a tokens x features matrix; in half precision the rounding of the stream is part of it",
           "effective rank of the update", "", *SIZE, "block", "spectrum", "gram", "array"),
    Metric("massive_activation_ratio", "largest over the median, over features, of the largest |h| of a feature",
           "largest over median feature", "", *SIZE, "block_out", "coordinate", "coordinate_peak", "array"),
    Metric("loss", "mean cross-entropy of the next token",
           "loss", "nats per token", *AMOUNT, "model", "model"),
    Metric("grad_norm", "L2 norm over all parameters, before clipping",
           "gradient norm of all parameters", "", *SIZE, "model", "model"),
    Metric("learning_rate", "step size of AdamW at this step",
           "learning rate", "", *SIZE, "model", "model"),
    Metric("tokens_per_s", "trained tokens per second of wall-clock time",
           "training speed", "tokens/s", "linear", "ratio", "model", "model"),
    Metric("unigram_entropy", "cross-entropy of all held-out text, validation and test, under token frequencies",
           "unigram entropy", "nats per token", *AMOUNT, "model", "model"),
    Metric("bigram_loss", "loss of a Witten-Bell bigram model of the training text on the same held-out blocks",
           "bigram loss", "nats per token", *AMOUNT, "model", "model"),
    Metric("trigram_loss",
           "loss of a Witten-Bell trigram model of the training text on the same held-out blocks; a run that is not "
           "below it has not learned",
           "trigram loss", "nats per token", *AMOUNT, "model", "model"),
    Metric("seen_loss", "loss, after training, on blocks evenly spaced over those that the run was trained on",
           "loss on seen text", "nats per token", *AMOUNT, "model", "model"),
    Metric("copy_loss", "loss on the second copy of 32 rows of random tokens, the copy's first token aside",
           "loss on copied tokens", "nats per token", *AMOUNT, "model", "model"),
    Metric("validation_loss", "loss on held-out files that choose learning rates, where others are reported",
           "validation loss", "nats per token", *AMOUNT, "model", "model"),
    Metric("file_loss", "loss on the tokens of one held-out file; the site is its path",
           "loss on a file", "nats per token", *AMOUNT, "model", "model"),
    Metric("file_tokens", "labels that `file_loss` is the mean over",
           "tokens of a file", "", *SIZE, "model", "model"),
    Metric("uniform_attention", "1 where `attention_entropy` is above 98% of uniform attention's, else 0",
           "uniform attention", "", *AMOUNT, "model", "model"),
    Metric("parameter_rms", "root mean square of a parameter; the site is its name within the block",
           "size of a parameter", "", *SIZE, "model", "model"),
    Metric("update_ratio",
           "‖update‖ of Adam, with a weight decay that is in its gradient, without a decoupled one, as AdamW's, over "
           "‖parameters‖ of a block; at a matrix's name: ‖its change in a step‖ over ‖it before‖",
           "update over weights", "", *SIZE, "model", "model"),
    Metric("first_moment",
           "root mean square of Adam's first moment in a block, corrected for its start; with a weight decay that "
           "is in its gradient, without a decoupled one, as AdamW's",
           "size of the first moment", "", *SIZE, "model", "model"),
    Metric("second_moment",
           "root of the mean of Adam's second moment in a block, corrected for its start; with a weight decay that "
           "is in its gradient, without a decoupled one, as AdamW's",
           "root of the second moment", "", *SIZE, "model", "model"),
    Metric("parameter_mean", "mean of a gain, lambda, alpha or scale; the site is its name within the block",
           "mean of a gain", "", *AMOUNT, "model", "model"),
)
# fmt: on
ALL_METRICS: dict[str, Metric] = {row.name: row for row in _ROWS}
# Losses of models that only count, from the highest down: the lines that loss figures draw.
NGRAM_LOSSES = ("unigram_entropy", "bigram_loss", "trigram_loss")
# What `record` takes.
METRICS: dict[str, Metric] = {name: row for name, row in ALL_METRICS.items() if row.kind != "model"}


def metric_row(name: str) -> Metric:
    """The row of a metric; one that is not in the table is shown under its own name, on a linear axis."""
    return ALL_METRICS.get(name) or Metric(name, "defined by whoever measured it", name.replace("_", " "))


KIND_STATISTICS = {
    "activation": ("l2", "var", "kurtosis", "max_abs"),
    "gradient": ("grad_l2",),
    "branch": ("ratio", "cosine"),
    "change": ("change",),
    "attention": ("logit_max",),
    "entropy": ("entropy",),  # of attention, where the largest score may not be known
    "sink": ("sink_share",),
    "bounded": ("saturated", "saturated_bound", "peak_bound"),
    "tanh": ("flat", "peak"),
    "carried": ("carried_ratio",),
    "router": ("router_entropy",),
    "streams": ("from_identity", "from_uniform", "stream_cosine"),
}
DEFAULT_METRICS = ("token_l2_mean", "feature_var_mean", "rms", "max_abs", "kurtosis")
FORWARD_METRICS = tuple(metric.name for metric in METRICS.values() if metric.kind != "gradient")


def resolve_metrics(names: Sequence[str] | None) -> tuple[Metric, ...]:
    """The rows for `names` (default: the cheap activation metrics). Raises `NormlabError` on a name that is not a
    metric."""
    if isinstance(names, str):
        names = [names]
    chosen = list(DEFAULT_METRICS if names is None else dict.fromkeys(names))
    unknown = [name for name in chosen if name not in METRICS]
    if unknown:
        raise NormlabError(f"unknown metric {unknown[0]!r}: choose from {', '.join(METRICS)}")
    if not chosen:
        raise NormlabError("no metric was asked for: give at least one name to `metrics`")
    return tuple(METRICS[name] for name in chosen)
