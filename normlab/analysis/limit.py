"""Which schemes still train at a great depth: the verdict on every run, and what the schemes' papers say of theirs."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from normlab.analysis.selection import DIVERGED, choose, in_order, title_of

TRAINS, STALLS, DIVERGES = "trains", "stalls", "diverges"
MARGIN = 0.05  # nats below the unigram entropy: it is of all held-out text, a run's loss of some of its blocks
BEYOND = 0.25  # nats above the unigram entropy: a figure shows no point further out
DEEPEST = "deepest_trained"  # of `normlab.load_published`: number of blocks of the deepest model that a paper trained


def outcomes(about: pd.DataFrame) -> pd.DataFrame:
    """What became of every scheme in the runs `about` (of `normlab.choose`), best first.

    It trains if its held-out loss came at least `MARGIN` below the unigram entropy, stalls if not (it has learned at
    most how frequent tokens are), and diverges if a loss was not finite.

    Returns:
        By scheme: `loss` (nats a token, mean of the seeds that have one), `entropy`, `outcome`, and `shown`, where a
        point stands: the loss, at most `BEYOND` above the entropy; a diverged scheme there, too.
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


def by_depth(runs: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """A row a scheme, a column a depth: its held-out loss (nats a token) and what became of it; beside them the deepest
    model that its paper trained and what the paper says of depth, as far as `published` knows.

    Args:
        runs: the table of `normlab.load_runs`.
        published: the table of `normlab.load_published`; its rows of metric `deepest_trained`.
    """
    about = choose(runs, depth=None).runs
    found = {f"{depth:,} blocks": _in_words(outcomes(own)) for depth, own in about.groupby("depth")}
    claims = published[published["metric"].eq(DEEPEST) & published["scheme"].notna()]
    claims = claims.sort_values("value", ascending=False).drop_duplicates("scheme").set_index("scheme")
    table = pd.DataFrame(found).reindex(in_order(about["scheme"]))
    blocks = claims["value"].reindex(table.index).map(lambda count: "" if pd.isna(count) else f"{count:,.0f}")
    source = claims["paper"] + " (" + claims["arxiv"] + ")"
    table = table.assign(**{"its paper's deepest": blocks, "what the paper says": claims["note"], "paper": source})
    return table.fillna("").rename(index=title_of).rename_axis("scheme")


def _in_words(table: pd.DataFrame) -> pd.Series:
    words = [
        outcome if outcome == DIVERGES else f"{loss:.3f}, {outcome}"
        for loss, outcome in zip(table["loss"], table["outcome"], strict=True)
    ]
    return pd.Series(words, index=table.index)
