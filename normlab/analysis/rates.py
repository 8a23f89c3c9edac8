"""What a learning rate makes of a scheme: the same question asked at several.

settled   a search's runs, of those that differ in a setting the best
finals    which rate is best in short runs, and which in long ones
by_rate   loss and size of the stream at each rate that a scheme was trained at
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from normlab.analysis.compare import last_values
from normlab.analysis.selection import choose, in_order, summarize, title_of
from normlab.probes.metrics import NGRAM_LOSSES
from normlab.schemes import BASELINE

__all__ = ["by_rate", "finals", "settled"]

ALIKE = ["width", "steps", *NGRAM_LOSSES]  # runs that differ in these differ in more than their rates
COLUMNS = ["scheme", "depth", "lr", "seeds", "loss", "spread", "token_l2", "against"]


def settled(search: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table of a search, which tries settings of a scheme (DyT's alpha0, Post-LN's warm-up) beside its
    rates: of the runs of a scheme, depth, width, seed and rate those of the one with the least held-out loss."""
    about = summarize(search).fillna({"eval_loss": np.inf})
    best = about.groupby(["scheme", "depth", "width", "seed", "lr"])["eval_loss"].idxmin()
    return search[search["run"].isin(best)]


def finals(short: pd.DataFrame, full: pd.DataFrame) -> pd.DataFrame:
    """What a search's runs say of learning rates, and what their finals, which are longer, say of the same.

    Args:
        short, full: of `normlab.load_runs`, below `search` and below `finals` of a sweep.

    Returns:
        Columns `scheme depth lr loss_short loss_full`, a row a scheme (its title), depth and rate that is in both:
        held-out losses in nats a token, of a scheme's settings the best.
    """
    place = ["scheme", "depth", "lr"]
    best = [summarize(table).groupby(place)["eval_loss"].min() for table in (short, full)]
    both = pd.concat(best, axis=1, join="inner", keys=["loss_short", "loss_full"]).reset_index()
    return _in_order(both)


def by_rate(*tables: pd.DataFrame, depth: int | None = None) -> pd.DataFrame:
    """What the schemes that were trained at several learning rates come to at each of them.

    Args:
        tables: of `normlab.load_runs`, in each of which a scheme counts at the best of its rates at a depth. Runs of
            the later ones are left out unless runs of the first have their width, steps and n-gram losses: their
            text, vocabulary and length.
        depth: default that of most runs of the last table, of those that all tables have.

    Returns:
        Columns `scheme depth lr seeds loss spread token_l2 against`, a row a scheme (its title) and rate: held-out loss
        in nats a token, mean over seeds, and the largest minus the smallest; L2 norm of a token after the last block,
        geometric mean over seeds, and that over the same of Pre-LN in the first table (missing without Pre-LN).
        Schemes of one rate give no row, nor do tables that share no depth.
    """
    tables = (tables[0], *(_alike(table, tables[0]) for table in tables[1:]))
    if depth is None:
        common = set.intersection(*(set(table["depth"]) for table in tables))
        depths = summarize(tables[-1])["depth"]
        counts = depths[depths.isin(common)].value_counts()
        if counts.empty:
            return pd.DataFrame(columns=COLUMNS)
        depth = int(counts.idxmax())
    found = []
    for table in tables:
        chosen = choose(table, depth=depth)
        values = last_values(chosen, "loss").rename(columns={"value": "loss"})
        values["log_l2"] = np.log(last_values(chosen, "token_l2_mean")["value"])
        found.append(values)
    rates = pd.concat(found).groupby(["scheme", "depth", "lr"])
    rows = rates.agg(
        seeds=("seed", "nunique"), loss=("loss", "mean"), spread=("loss", np.ptp), token_l2=("log_l2", "mean")
    )
    rows = rows.assign(token_l2=np.exp(rows["token_l2"])).reset_index()
    baseline = found[0].loc[found[0]["scheme"] == BASELINE, "log_l2"].mean()
    rows["against"] = rows["token_l2"] / np.exp(baseline)
    return _in_order(rows[rows.groupby("scheme")["lr"].transform("nunique") > 1])


def _alike(table: pd.DataFrame, first: pd.DataFrame) -> pd.DataFrame:
    """The rows of the runs that are as wide and as long as runs of the first table, and read the same text."""
    known = summarize(first)[ALIKE].round(6).drop_duplicates()
    about = summarize(table)[ALIKE].round(6).rename_axis("run").reset_index()
    return table[table["run"].isin(about.merge(known, on=ALIKE)["run"])]


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Schemes in the registry's order and by their titles, then depths and rates."""
    ranked = rows.assign(scheme=pd.Categorical(rows["scheme"], in_order(rows["scheme"])))
    ranked = ranked.sort_values(["scheme", "depth", "lr"], ignore_index=True)
    return ranked.assign(scheme=[title_of(scheme) for scheme in ranked["scheme"]])
