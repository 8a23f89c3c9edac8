"""Whether a scheme trains at all."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from normlab.analysis.selection import DIVERGED

TRAINS, STALLS, DIVERGES, UNKNOWN = "trains", "stalls", "diverges", "no held-out loss"
MARGIN = 0.05  # nats below the unigram entropy: it is of all held-out text, a run's loss of some of its blocks
BEYOND = 0.25  # nats above the unigram entropy: a figure shows no point further out


def outcomes(about: pd.DataFrame) -> pd.DataFrame:
    """Judge whether every scheme in the runs `about` (of `normlab.choose`) trains, best first.

    A scheme trains if its held-out loss is at least `MARGIN` below the unigram entropy. It stalls if not: it has
    learned at most how frequent tokens are. It diverges if a run did. Of a scheme whose runs ended well and logged no
    held-out loss nothing is known.

    Returns:
        By scheme: `loss` (nats per token, mean of the seeds that have one), `entropy`, `outcome`, and `shown`, where a
        figure draws it: at most `BEYOND` above the entropy, and nowhere if nothing is known.
    """
    rows = {}
    for scheme, own in about.groupby("scheme"):
        entropy, losses = own["unigram_entropy"].median(), own["eval_loss"].astype(float)
        finite = losses[np.isfinite(losses)]
        diverged = (own["status"] == DIVERGED).any() or np.isinf(losses).any()
        loss = float(finite.mean()) if len(finite) else math.inf if diverged else math.nan
        if diverged:
            outcome = DIVERGES
        elif math.isnan(loss):
            outcome = UNKNOWN
        else:
            outcome = TRAINS if loss < entropy - MARGIN else STALLS
        shown = entropy + BEYOND if outcome == DIVERGES else np.fmin(loss, entropy + BEYOND)
        shown = math.nan if outcome == UNKNOWN else shown
        rows[scheme] = {"loss": loss, "entropy": entropy, "outcome": outcome, "shown": shown}
    table = pd.DataFrame.from_dict(rows, orient="index")
    order = table["outcome"].map({TRAINS: 0, STALLS: 1, DIVERGES: 2, UNKNOWN: 3})
    return table.assign(order=order).sort_values(["order", "loss"]).drop(columns="order")
