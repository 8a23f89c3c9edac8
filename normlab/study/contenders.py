"""The schemes of the preset `grid` in one table: what each makes of every rate, and what its best one gives."""

from __future__ import annotations

import numpy as np
import pandas as pd

from normlab.analysis.quantities import values_of
from normlab.analysis.selection import Selection, has_learned, in_order, summarize
from normlab.analysis.verdicts import differences, judged
from normlab.errors import NormlabError
from normlab.schemes import BASELINE

SEEDS = 4  # that a pair needs to be tested
SIZES = ("growth", "deep_cost")  # compared at one rate


def by_rate(runs: pd.DataFrame, depth: int) -> pd.DataFrame:
    """Each scheme at each learning rate, of one depth.

    Returns:
        Columns `scheme lr seeds loss validation_loss learned growth deep_cost`, means over seeds, a geometric one of
        growth. `loss` is of the test half, and infinite where a run diverged. `learned`: all of them end below the
        trigram model.
    """
    about = summarize(runs)
    about = about[about["depth"] == depth]
    if about.empty:
        raise NormlabError(f"no run of {depth} blocks in the table")
    about = about.assign(learned=has_learned(about), eval_loss=about["eval_loss"].fillna(np.inf))
    for name in SIZES:
        chosen = Selection(runs[runs["run"].isin(about.index)], about, False)
        about[name] = values_of(chosen, name).set_index("run")["value"]
    rates = about.groupby(["scheme", "lr"])
    table = rates[["eval_loss", "validation_loss", *SIZES]].mean().rename(columns={"eval_loss": "loss"})
    table["growth"] = np.exp(np.log(about["growth"]).groupby([about["scheme"], about["lr"]]).mean())
    table.insert(0, "seeds", rates["seed"].nunique())
    table.insert(3, "learned", rates["learned"].all())
    return table.loc[in_order(about["scheme"])].reset_index()


def contenders(runs: pd.DataFrame, depth: int = 8, at: float = 4e-3) -> pd.DataFrame:
    """One row per scheme, the lowest loss first.

    Args:
        runs: the table of `normlab.load_runs` of the grid.
        depth: number of blocks.
        at: the rate at which growth and the cost of deep blocks are compared.

    Returns:
        Columns `scheme best at_edge seeds loss learned minus low high p_holm verdict`, a column `loss_at_<rate>` for
        each rate, `growth deep_cost`. `best` is the rate of the lowest validation loss, of those with most seeds;
        `at_edge` whether it is the least or the largest that was tried. `minus` is the scheme's loss at its best rate
        minus Pre-LN's at its own, paired by seed. `low` and `high` are the pair's own 95% interval (t over the seeds),
        and `verdict` is corrected by Holm over the schemes with four seeds; of fewer there is neither.
    """
    rates = by_rate(runs, depth)
    rows = []
    for scheme, own in rates.groupby("scheme", sort=False):
        best = own.loc[_best(own)]
        ends = own["lr"].min(), own["lr"].max()
        row = {"scheme": scheme, "best": best["lr"], "at_edge": best["lr"] in ends and len(own) > 1}
        row |= {name: best[name] for name in ("seeds", "loss", "learned")}
        row |= {f"loss_at_{rate:g}": loss for rate, loss in zip(own["lr"], own["loss"], strict=True)}
        there = own[np.isclose(own["lr"], at)]
        rows.append(row | {name: there[name].iloc[0] if len(there) else np.nan for name in SIZES})
    table = pd.DataFrame(rows).merge(_against_baseline(runs, depth, rates), on="scheme", how="left")
    losses = sorted((name for name in table if name.startswith("loss_at_")), key=lambda name: float(name[8:]))
    order = ["scheme", "best", "at_edge", "seeds", "loss", "learned", "minus", "low", "high", "p_holm", "verdict"]
    return table.sort_values("loss", ignore_index=True)[[*order, *losses, *SIZES]]


def _best(own: pd.DataFrame) -> int:
    """The row of a scheme's best rate: seeds were added where the first one's validation loss was lowest."""
    return int(own.sort_values(["seeds", "validation_loss"], ascending=[False, True]).index[0])


def _against_baseline(runs: pd.DataFrame, depth: int, rates: pd.DataFrame) -> pd.DataFrame:
    """Losses minus Pre-LN's at the best rates, for the schemes with enough seeds there."""
    best = rates.loc[[_best(own) for _, own in rates.groupby("scheme")]].set_index("scheme")
    about = summarize(runs)
    about = about[(about["depth"] == depth) & np.isclose(about["lr"], about["scheme"].map(best["lr"]))]
    values = about.rename(columns={"eval_loss": "value"}).reset_index()
    others = [name for name in best.index[best["seeds"] >= SEEDS] if name != BASELINE]
    columns = ["scheme", "minus", "low", "high", "p_holm", "verdict"]
    if BASELINE not in best.index or best.loc[BASELINE, "seeds"] < SEEDS or not others:
        return pd.DataFrame(columns=columns).astype({"scheme": str})
    pairs = []
    for name in others:
        both = values[values["scheme"].isin([name, BASELINE])]
        pairs.append(differences(both, name, BASELINE, "loss"))
    enough = pd.concat(pairs, ignore_index=True).query("seeds >= @SEEDS")  # a diverged run leaves fewer
    if enough.empty:
        return pd.DataFrame(columns=columns).astype({"scheme": str})
    table = judged(enough.reset_index(drop=True))
    return table.rename(columns={"a": "scheme", "estimate": "minus"})[columns]
