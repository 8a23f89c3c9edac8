"""Which schemes train at extreme depths: tables of notebook 01."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from normlab.analysis.outcomes import DIVERGES, UNKNOWN, outcomes
from normlab.analysis.selection import choose, in_order, title_of
from normlab.runs import read_configs
from normlab.schemes import SCHEMES
from normlab.training.config import INIT_STD

DEEPEST = "deepest_trained"  # of `normlab.load_published`: blocks of the deepest model that a paper trained


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


def initial_std(folder: str | Path) -> str:
    """The std of the initial weights of the runs in a folder, in words, and the schemes with a rule of their own."""
    configs = read_configs(folder).values()
    stds = {config.get("init_std") or INIT_STD for config in configs}
    known = (name for name in in_order({config["scheme"] for config in configs}) if name in SCHEMES)
    own = [title_of(name) for name in known if SCHEMES[name].starts_by_own_rule]
    rule = "has a rule of its own" if len(own) == 1 else "have a rule of their own"
    but = f", but for {'; '.join(own)}, which {rule}" if own else ""
    return f"The initial weights of these models have std {', '.join(f'{std:g}' for std in sorted(stds))}{but}."


def _in_words(table: pd.DataFrame) -> pd.Series:
    return table["outcome"].where(
        table["outcome"].isin([DIVERGES, UNKNOWN]), table["loss"].map("{:.3f}, ".format) + table["outcome"]
    )
