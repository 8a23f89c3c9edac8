"""What can be measured, as data: every metric is one row here.

A *statistic* is one number per token (a norm, a variance, a cosine ...). Statistics are streamed as (count, mean, M2,
max) over the counted tokens, merged by Chan's rule, so no result depends on how the data was cut into batches. A
*metric* reads one statistic:

    mean      mean over tokens
    max       largest value over tokens
    rms       sqrt of the pooled mean of squares over tokens and features (the statistic is a token's L2 norm)
    norm      sqrt of the sum of squares over all tokens
    array     from an array that is not one number per token

`kind` says what the statistic is taken from:

    activation  h at block_out, attn_norm_in, mlp_norm_in, final_norm_in
    gradient    dLoss/dh at the same tensors, the blocks' inputs for their outputs
    branch      what attention and MLP add, at sites attn, mlp, block
    change      h_l against h_{l-1}, at site block
    attention   pre-softmax scores, at site attn
    tanh        the argument of a norm's tanh; bounded: the same, where the norm has lambda and kappa
    carried     a statistic handed to a norm, not computed by it
    spectrum    the block's update as a matrix; coordinate: features one by one (see `normlab.probes.arrays`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from normlab.errors import NormlabError


@dataclass(frozen=True)
class Metric:
    """One row of the metrics table: its name, the statistic it reads, how it reads it, what it means in words, and
    where it applies."""

    name: str
    statistic: str
    readout: str
    kind: str
    definition: str
    sites: tuple[str, ...] = ()

    def applies_to(self, site: str) -> bool:
        """Whether the metric is reported at `site` (everywhere its statistic is taken, unless `sites` says less)."""
        return not self.sites or site in self.sites

    def value(self, count: float, mean: float, m2: float, peak: float, width: int) -> float:
        """The metric from a streamed statistic: tokens, mean, M2 (sum of squared deviations), maximum, features."""
        if count == 0:
            return math.nan
        if self.readout in ("rms", "norm"):
            square_sum = m2 + count * mean * mean
            if not math.isfinite(square_sum):
                return math.nan
            return math.sqrt(square_sum / (count * width) if self.readout == "rms" else square_sum)
        return peak if self.readout == "max" else mean


_ROWS = (
    ("token_l2_mean", "l2", "mean", "activation", "mean over tokens of ‖h‖₂"),
    ("feature_var_mean", "var", "mean", "activation", "mean over tokens of the biased variance of h over its features"),
    ("rms", "l2", "rms", "activation", "square root of the mean of h^2, pooled over tokens and features"),
    ("max_abs", "max_abs", "max", "activation", "largest |h| over tokens and features"),
    ("kurtosis", "kurtosis", "mean", "activation", "mean over tokens of m4 / m2^2 over features (3 for a Gaussian)"),
    ("grad_l2_mean", "grad_l2", "mean", "gradient", "mean over tokens of ‖dLoss/dh‖₂, Loss summed over labels"),
    ("grad_l2_total", "grad_l2", "norm", "gradient", "L2 norm of dLoss/dh over all tokens, Loss summed over labels"),
    (
        *("relative_contribution", "ratio", "mean", "branch"),
        "mean over tokens of ‖attn‖/‖h‖, ‖mlp‖/‖h+attn‖, ‖attn+mlp‖/‖h‖ (sites attn, mlp, block), "
        "after an output norm where there is one",
    ),
    (
        *("update_cosine", "cosine", "mean", "branch"),
        "mean over tokens of cos(attn, h), cos(mlp, h+attn), cos(h_l, h_{l-1}) (sites attn, mlp, block)",
    ),
    ("block_influence", "change", "mean", "change", "1 - mean over tokens of cos(h_{l-1}, h_l)", ("block",)),
    (
        *("attention_logit_max", "logit_max", "max", "attention"),
        "largest pre-softmax attention score over heads, queries and keys",
    ),
    (
        *("attention_entropy", "entropy", "mean", "attention"),
        "mean over queries and heads of the entropy of an attention row, in nats",
    ),
    ("saturation", "saturated", "mean", "bounded", "share of tanh inputs with |z| > lambda"),
    (
        *("saturation_bound", "saturated_bound", "mean", "bounded"),
        "Chebyshev bound on `saturation`: mean over tokens of (ms / ms used) / kappa^2",
    ),
    (
        *("tanh_input_max_bound", "peak_bound", "max", "bounded"),
        "bound on `tanh_input_max`: lambda sqrt(d) / kappa, times sqrt(ms / ms used)",
    ),
    ("saturation_95", "flat", "mean", "tanh", "share of tanh inputs with |tanh z| > 0.95"),
    ("tanh_input_max", "peak", "max", "tanh", "largest |z|, z the argument of tanh"),
    (
        *("carried_var_ratio", "carried_ratio", "mean", "carried"),
        "mean over tokens of exact mean square / the statistic the norm was given",
    ),
    (
        *("update_effective_rank", "gram", "array", "spectrum"),
        "exp of the entropy of s_i / sum s, s the singular values of the block's update h_l - h_{l-1} "
        "as a tokens x features matrix",
    ),
    (
        *("massive_activation_ratio", "coordinate_peak", "array", "coordinate"),
        "largest over the median, over features, of the largest |h| of a feature",
    ),
)
METRICS: dict[str, Metric] = {row[0]: Metric(*row) for row in _ROWS}
KIND_STATISTICS = {
    "activation": ("l2", "var", "kurtosis", "max_abs"),
    "gradient": ("grad_l2",),
    "branch": ("ratio", "cosine"),
    "change": ("change",),
    "attention": ("logit_max", "entropy"),
    "bounded": ("saturated", "saturated_bound", "peak_bound"),
    "tanh": ("flat", "peak"),
    "carried": ("carried_ratio",),
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
