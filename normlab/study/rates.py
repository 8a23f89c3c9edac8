"""Learning rates, budgets of tokens and extreme depths: tables of the notebooks on depth and on BHyT."""

from __future__ import annotations

import numpy as np
import pandas as pd

from normlab.analysis.outcomes import DIVERGES, outcomes
from normlab.analysis.quantities import last_values
from normlab.analysis.selection import choose, in_order, summarize, title_of
from normlab.probes.metrics import NGRAM_LOSSES
from normlab.schemes import BASELINE

ALIKE = ["width", "steps", *NGRAM_LOSSES]  # runs that differ in these differ in more than their rates
COLUMNS = ["scheme", "depth", "lr", "seeds", "loss", "spread", "token_l2", "against"]
DEEPEST = "deepest_trained"  # of `normlab.load_published`: blocks of the deepest model that a paper trained


def settled(search: pd.DataFrame) -> pd.DataFrame:
    """The runs of a search with each scheme's best setting.

    A search tries settings (DyT's alpha0, Post-LN's warm-up) as well as rates. Of the runs of a scheme, depth, width,
    seed and rate, the one with the least held-out loss is kept.
    """
    about = summarize(search).fillna({"eval_loss": np.inf})
    best = about.groupby(["scheme", "depth", "width", "seed", "lr"])["eval_loss"].idxmin()
    return search[search["run"].isin(best)]


def finals(short: pd.DataFrame, full: pd.DataFrame) -> pd.DataFrame:
    """Losses of a search's runs, and of its longer finals at the same rates.

    Args:
        short, full: of `normlab.load_runs`, below `search` and below `finals` of a sweep.

    Returns:
        Columns `scheme depth lr loss_short loss_full`, one row per scheme (its title), depth and rate that is in both:
        held-out losses in nats per token, of the best setting.
    """
    place = ["scheme", "depth", "lr"]
    best = [summarize(table).groupby(place)["eval_loss"].min() for table in (short, full)]
    both = pd.concat(best, axis=1, join="inner", keys=["loss_short", "loss_full"]).reset_index()
    return _in_order(both)


def by_rate(*tables: pd.DataFrame, depth: int | None = None) -> pd.DataFrame:
    """Loss and size of the stream at each rate, for schemes that were trained at several.

    Args:
        tables: of `normlab.load_runs`. In each of them a scheme counts at its best rate at a depth. Runs of the later
            tables count only if runs of the first have their width, steps and n-gram losses: the same text,
            vocabulary and length.
        depth: default that of most runs of the last table, of those that all tables have.

    Returns:
        Columns `scheme depth lr seeds loss spread token_l2 against`, one row per scheme (its title) and rate. `loss`:
        held-out, in nats per token, mean over seeds. `spread`: the largest minus the smallest. `token_l2`: L2 norm of a
        token after the last block, geometric mean over seeds. `against`: that over Pre-LN's in the first table. Schemes
        of one rate give no row, nor do tables that share no depth.
    """
    tables = (tables[0], *(_alike(table, tables[0]) for table in tables[1:]))
    if depth is None:
        common = set.intersection(*(set(table["depth"]) for table in tables))
        depths = summarize(tables[-1])["depth"]
        counts = depths[depths.isin(common)].value_counts()
        if counts.empty:
            return pd.DataFrame(columns=COLUMNS)
        depth = int(counts.idxmax())
    parts = []
    for table in tables:
        chosen = choose(table, depth=depth)
        values = last_values(chosen, "loss").rename(columns={"value": "loss"})
        values["log_l2"] = np.log(last_values(chosen, "token_l2_mean")["value"])
        parts.append(values)
    rates = pd.concat(parts).groupby(["scheme", "depth", "lr"])
    rows = rates.agg(
        seeds=("seed", "nunique"), loss=("loss", "mean"), spread=("loss", np.ptp), token_l2=("log_l2", "mean")
    )
    rows = rows.assign(token_l2=np.exp(rows["token_l2"])).reset_index()
    baseline = parts[0].loc[parts[0]["scheme"] == BASELINE, "log_l2"].mean()
    rows["against"] = rows["token_l2"] / np.exp(baseline)
    return _in_order(rows[rows.groupby("scheme")["lr"].transform("nunique") > 1])


def by_tokens(*tables: pd.DataFrame) -> pd.DataFrame:
    """Compare the gain from depth after few tokens and after many.

    Schemes count if every table has them at two depths or more. Losses are held-out losses at the least and at the
    greatest depth that all tables have, each at its chosen learning rate. They are means over the seeds of both depths.

    Args:
        tables: of `normlab.load_runs`, each trained on as many tokens per run.

    Returns:
        Columns `scheme tokens shallow deep loss_shallow loss_deep gain seeds`, one row per scheme (its title) and
        table. Losses are in nats per token. Empty where no scheme has two depths.
    """
    parts = [(int(table["tokens"].max()), last_values(choose(table, depth=None), "loss").dropna()) for table in tables]
    depths = [values.groupby("scheme")["depth"].unique().map(set) for _, values in parts]
    rows = []
    for scheme in in_order(set.intersection(*(set(own.index) for own in depths))):
        common = set.intersection(*(own[scheme] for own in depths))
        for tokens, values in parts if len(common) > 1 else ():
            own = values[values["scheme"] == scheme].pivot_table(index="seed", columns="depth", values="value")
            both = own[[min(common), max(common)]].dropna()
            shallow, deep = both.mean()
            rows.append((title_of(scheme), tokens, *both.columns, shallow, deep, shallow - deep, len(both)))
    columns = ["scheme", "tokens", "shallow", "deep", "loss_shallow", "loss_deep", "gain", "seeds"]
    return pd.DataFrame(rows, columns=columns)


def by_depth(runs: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Each scheme's held-out loss and outcome, one column per depth, next to what its paper says of depth.

    Args:
        runs: the table of `normlab.load_runs`.
        published: the table of `normlab.load_published`; its rows of metric `deepest_trained`.
    """
    about = choose(runs, depth=None).runs
    columns = {f"{depth:,} blocks": _in_words(outcomes(own)) for depth, own in about.groupby("depth")}
    claims = published[published["metric"].eq(DEEPEST) & published["scheme"].notna()]
    claims = claims.sort_values("value", ascending=False).drop_duplicates("scheme").set_index("scheme")
    table = pd.DataFrame(columns).reindex(in_order(about["scheme"]))
    blocks = claims["value"].reindex(table.index).map(lambda count: "" if pd.isna(count) else f"{count:,.0f}")
    source = claims["paper"] + " (" + claims["arxiv"] + ")"
    table = table.assign(**{"its paper's deepest": blocks, "what the paper says": claims["note"], "paper": source})
    return table.fillna("").rename(index=title_of).rename_axis("scheme")


def _in_words(table: pd.DataFrame) -> pd.Series:
    return table["outcome"].where(
        table["outcome"].eq(DIVERGES), table["loss"].map("{:.3f}, ".format) + table["outcome"]
    )


def _alike(table: pd.DataFrame, first: pd.DataFrame) -> pd.DataFrame:
    """The rows of runs that have the width, the length and the text of runs of the first table."""
    known = summarize(first)[ALIKE].round(6).drop_duplicates()
    about = summarize(table)[ALIKE].round(6).rename_axis("run").reset_index()
    return table[table["run"].isin(about.merge(known, on=ALIKE)["run"])]


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Schemes in the registry's order and by their titles, then depths and rates."""
    ranked = rows.assign(scheme=pd.Categorical(rows["scheme"], in_order(rows["scheme"])))
    ranked = ranked.sort_values(["scheme", "depth", "lr"], ignore_index=True)
    return ranked.assign(scheme=[title_of(scheme) for scheme in ranked["scheme"]])
