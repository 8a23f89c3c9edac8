"""What a plot calls every metric, site and mask, and what it is measured in: one row each.

Figures, widgets and reports take labels and hover texts from here. Definitions of measured metrics are those of
`normlab.probes`, so each is written once. `h_l` is the output of block l (1..L), `h_0` the embeddings. Everything is
pooled over all counted tokens, padding excluded.
"""

from __future__ import annotations

from dataclasses import dataclass

from normlab.probes import metrics as probed


@dataclass(frozen=True)
class Metric:
    """One measured quantity: its name in tables, label and unit in plots, definition, and whether it spans decades."""

    name: str
    label: str
    unit: str
    definition: str
    log: bool

    @property
    def axis(self) -> str:
        """Axis title: label and unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


def _measured(name: str, label: str, unit: str = "", log: bool = True) -> Metric:
    return Metric(name, label, unit, probed.METRICS[name].definition, log)


_ROWS = (
    _measured("token_l2_mean", "L2 norm of a token"),
    _measured("feature_var_mean", "variance over features"),
    _measured("rms", "root mean square"),
    _measured("max_abs", "largest magnitude"),
    _measured("kurtosis", "kurtosis"),
    _measured("grad_l2_mean", "gradient norm of a token", "nats"),
    _measured("grad_l2_total", "gradient norm of the batch", "nats"),
    Metric("loss", "loss", "nats per token", "mean cross-entropy of the next token", False),
    Metric("grad_norm", "gradient norm of all parameters", "", "L2 norm over all parameters, before clipping", True),
    Metric("learning_rate", "learning rate", "", "step size of AdamW at this step", True),
    Metric("tokens_per_s", "training speed", "tokens/s", "trained tokens per second of wall-clock time", False),
    Metric(
        "unigram_entropy",
        "unigram entropy",
        "nats per token",
        "cross-entropy of the held-out text under token frequencies alone",
        False,
    ),
    Metric(
        "bigram_loss",
        "bigram loss",
        "nats per token",
        "loss of a Witten-Bell bigram model of the training text on the same held-out blocks",
        False,
    ),
    Metric(
        "trigram_loss",
        "trigram loss",
        "nats per token",
        "loss of a Witten-Bell trigram model of the training text on the same held-out blocks; a run that is not below"
        " it has not learned",
        False,
    ),
)

METRICS: dict[str, Metric] = {row.name: row for row in _ROWS}

# Measured once for the whole model, so the table gives them no layer.
OF_THE_MODEL = frozenset(
    {"loss", "grad_norm", "learning_rate", "tokens_per_s", "unigram_entropy", "bigram_loss", "trigram_loss"}
)

# Losses of models that only count, from the highest down: the lines that loss figures draw.
COUNTED: dict[str, str] = {
    "unigram_entropy": "unigram entropy",
    "bigram_loss": "bigram loss",
    "trigram_loss": "trigram loss",
}

SITES: dict[str, str] = {
    "block_out": "block output",
    "attn_norm_in": "input of the attention norm",
    "mlp_norm_in": "input of the MLP norm",
    "final_norm_in": "input of the final norm",
    "block_in_grad": "gradient at the block's input",
    "attn_norm_in_grad": "gradient at the attention norm's input",
    "mlp_norm_in_grad": "gradient at the MLP norm's input",
    "final_norm_in_grad": "gradient at the final norm's input",
}

MASKS: dict[str, str] = {"all": "all tokens", "no_first": "without each row's first token"}


def metric_row(name: str) -> Metric:
    """The row of a metric; one that is not in the table is shown under its own name, on a linear axis."""
    if name in METRICS:
        return METRICS[name]
    definition = probed.METRICS[name].definition if name in probed.METRICS else "defined by whoever measured it"
    return Metric(name, name.replace("_", " "), "", definition, False)
