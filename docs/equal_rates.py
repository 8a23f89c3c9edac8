"""LNS against Pre-LN at equal rates: the models of data/depth_and_rate that have 16 blocks.

texts      every text by the name that marks it in the page
compared   LNS over or minus Pre-LN: each quantity at each rate, and with each scheme at its better one
deep       the quantities of one run, for any folder of runs of 16 blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pandas as pd
from findings import LNS, PRE_LN, experiments, interval, runs, turned
from tables import table

from normlab.analysis.decisions import ENOUGH
from normlab.analysis.selection import one_precision, summarize
from normlab.analysis.verdicts import DIFFERENT, differences, judged

FOLDER = "depth_and_rate"
LOW, HIGH, BEST = 0.004, 0.008, "best"
PLACES = {LOW: f"both at rate {LOW:g}", HIGH: f"both at {HIGH:g}", BEST: "each at its better one"}
# Quantity -> its name on the page, and the metric that says whether it is compared as a ratio.
QUANTITIES = {
    "loss": ("held-out loss, nats", "loss"),
    "first": ("L2 norm of a token after block 1", "token_l2_mean"),
    "size": ("L2 norm of a token after block 16", "token_l2_mean"),
    "variance": ("variance of the stream after block 16", "feature_var_mean"),
    "growth": ("that variance over the one after block 1", "feature_var_mean"),
    "early": ("cost of leaving out one of blocks 2 to 8, their sum, nats", "skip_delta_loss"),
    "skip": ("cost of leaving out one of blocks 9 to 15, their mean, nats", "skip_delta_loss"),
    "spread": ("spread of the costs of blocks 2 to 15, standard deviation over mean", "token_l2_mean"),
    "jacobian": ("distance of the Jacobians of blocks 9 to 15 from the identity", "jacobian_identity"),
    "angle": ("angle by which these turn the stream, as a share of π", "angular_distance"),
}
DIGITS = {"angle": 3}
FIRST_SCREEN = {
    "loss": "loss minus Pre-LN's",
    "size": "stream over Pre-LN's",
    "skip": "cost of a deep block minus Pre-LN's",
}


def texts() -> dict[str, str]:
    made = {}
    for name, rate in (("low", LOW), ("high", HIGH)):
        made |= {
            f"lns_loss_{name}": in_words("loss", rate),
            f"lns_first_{name}": interval(compared().loc[("first", rate)]),
            f"lns_size_{name}": interval(compared().loc[("size", rate)]),
            f"lns_skip_{name}_less": interval(turned(compared().loc[("skip", rate)])),
        }
    dtypes = summarize(runs(FOLDER)).query("depth == 16")["dtype"]
    best = {name: f"{rate:g}" for name, rate in best_rates(deep(FOLDER)).items()}
    return made | {
        "lns_best_rate": best[LNS],
        "pre_ln_best_rate": best[PRE_LN],
        "lns_loss_best": in_words("loss", BEST),
        "lns_size_best": interval(compared().loc[("size", BEST)]),
        "lns_lead_high": interval(turned(compared().loc[("loss", HIGH)])),
        "equal_bfloat16": f"{(dtypes == 'bfloat16').sum()} of {len(dtypes)}",
        "table_of_equal": _table({name: words for name, (words, _) in QUANTITIES.items()}),
        "table_of_first_screen": _table(FIRST_SCREEN),
    }


def _table(names: Mapping[str, str]) -> str:
    """A row per quantity, a column per rate: bold where the verdict is *different*."""
    rows = []
    for quantity, words in names.items():
        cells = [(in_words(quantity, place), compared().loc[(quantity, place), "verdict"]) for place in PLACES]
        rows.append((words, *(f"**{text}**" if verdict == DIFFERENT else text for text, verdict in cells)))
    return table(("LNS against Pre-LN", *PLACES.values()), rows)


def in_words(quantity: str, place: float | str) -> str:
    """LNS minus Pre-LN with its interval; of a size "x" and LNS over Pre-LN."""
    row = compared().loc[(quantity, place)]
    is_ratio = row["kind"] == "ratio"
    return ("x " if is_ratio else "") + interval(row, DIGITS.get(quantity, 2), sign=not is_ratio)


@cache
def compared() -> pd.DataFrame:
    """LNS against Pre-LN; the quantities of a place are one family, a column of the page's table."""
    values = deep(FOLDER)
    best = best_rates(values)
    own = {rate: values[values["lr"] == rate] for rate in (LOW, HIGH)}
    own[BEST] = values[values["lr"] == values["scheme"].map(best)]
    rows = [
        judged(pd.concat([_difference(here, quantity) for quantity in QUANTITIES], ignore_index=True)).assign(
            quantity=list(QUANTITIES), place=place
        )
        for place, here in own.items()
    ]
    return pd.concat(rows).set_index(["quantity", "place"])


def best_rates(values: pd.DataFrame) -> pd.Series:
    """The rate of each scheme with the lowest mean loss, of those with enough seeds."""
    losses = values.groupby(["scheme", "lr"])["loss"].agg(["mean", "size"])
    losses = losses.loc[losses["size"] >= ENOUGH, "mean"].unstack()
    return losses.idxmin(axis=1)


def _difference(values: pd.DataFrame, quantity: str) -> pd.DataFrame:
    return differences(values.assign(value=values[quantity]), LNS, PRE_LN, QUANTITIES[quantity][1])


@cache
def deep(folder: str) -> pd.DataFrame:
    """Quantities of the runs of 16 blocks after training: `scheme depth seed lr`, then a column for each.

    `QUANTITIES` names them. Those of blocks 9 to 15 are means, that of blocks 2 to 8 is a sum.
    """
    about = one_precision(summarize(runs(folder))).query("depth == 16")
    stats = runs(folder).query("run in @about.index and site == 'block_out' and mask == 'all'")
    stats = stats[stats["step"] == stats["step"].max()]
    size, variance = (
        stats[stats["metric"] == metric].pivot_table(index="run", columns="layer", values="value", observed=True)
        for metric in ("token_l2_mean", "feature_var_mean")
    )
    tried = experiments(folder).query("run in @about.index")
    angles = tried.query("metric == 'angular_distance' and other == layer + 1 and 9 <= other <= 15")
    costs = tried.query("part == 'block' and 2 <= layer <= 15 and metric == 'skip_delta_loss'")
    by_run = costs.groupby("run", observed=True)["value"]
    by_block = tried.query("part == 'block' and 9 <= layer <= 15")
    means = by_block.pivot_table(index="run", columns="metric", values="value", observed=True)
    return about[["scheme", "depth", "seed", "lr"]].assign(
        loss=about["eval_loss"],
        first=size[1],
        size=size[16],
        variance=variance[16],
        growth=variance[16] / variance[1],
        early=costs[costs["layer"] <= 8].groupby("run", observed=True)["value"].sum(),
        spread=by_run.std(ddof=0) / by_run.mean(),
        angle=angles.groupby("run", observed=True)["value"].mean(),
        jacobian=means["jacobian_identity"],
        skip=means["skip_delta_loss"],
    )
