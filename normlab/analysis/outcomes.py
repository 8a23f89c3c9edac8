"""Whether a scheme trains at all."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from normlab.analysis.selection import DIVERGED

TRAINS, STALLS, DIVERGES = "trains", "stalls", "diverges"
MARGIN = 0.05  # nats below the unigram entropy: it is of all held-out text, a run's loss of some of its blocks
BEYOND = 0.25  # nats above the unigram entropy: a figure shows no point further out


def outcomes(about: pd.DataFrame) -> pd.DataFrame:
    """Judge whether every scheme in the runs `about` (of `normlab.choose`) trains, best first.

    A scheme trains if its held-out loss is at least `MARGIN` below the unigram entropy. It stalls if not: it has
    learned at most how frequent tokens are. It diverges if a loss was not finite.

    Returns:
        By scheme: `loss` (nats per token, mean of the seeds that have one), `entropy`, `outcome`, and `shown`, where a
        figure draws it: at most `BEYOND` above the entropy.
    """
    rows = {}
    for scheme, own in about.groupby("scheme"):
        entropy, losses = own["unigram_entropy"].median(), own["eval_loss"].astype(float)
        finite = losses[np.isfinite(losses)]
        loss = float(finite.mean()) if len(finite) else math.inf
        if (own["status"] == DIVERGED).any() or not len(finite):
            outcome = DIVERGES
        else:
            outcome = TRAINS if loss < entropy - MARGIN else STALLS
        shown = entropy + BEYOND if outcome == DIVERGES else min(loss, entropy + BEYOND)
        rows[scheme] = {"loss": loss, "entropy": entropy, "outcome": outcome, "shown": shown}
    table = pd.DataFrame.from_dict(rows, orient="index")
    order = table["outcome"].map({TRAINS: 0, STALLS: 1, DIVERGES: 2})
    return table.assign(order=order).sort_values(["order", "loss"]).drop(columns="order")
