"""The two tables of docs/papers.md: what two papers report, and what the shipped runs say. A row is a claim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from bench import BENCH
from queries import Diverged, estimate, picked, written
from tables import plain, table

import normlab
from normlab.analysis.compare import WHERE, chosen_pair
from normlab.analysis.quantities import quantity_row
from normlab.analysis.selection import has_learned, recipes_in_words, title_of
from normlab.analysis.theory import chebyshev_bound
from normlab.analysis.verdicts import SEEDS, UNDECIDED, judged, side_of
from normlab.errors import NormlabError

SMALL, LARGE = ("grid", 8), ("gpu", 24)  # folder and depth of our runs
KAPPA = 10  # of every BHyT here, as in the paper
SPEED_MARGIN = 1.0  # percent; RMSNorm against itself comes out 0.4 apart
RATES = {SMALL: 4e-3, LARGE: 1e-3}  # Pre-LN's best, at which sizes and costs are compared


@dataclass(frozen=True)
class Claim:
    """What a paper says of scheme a against b, and the quantity of ours that answers.

    metric: the paper's, of data/paper. Empty: it gives no number, and `says` is on which side of no effect its words
    are. large: the rate of our large models, where both schemes have another.
    """

    where: str
    words: str
    quantity: str
    a: str
    b: str = "pre_rmsnorm"
    metric: str = ""
    says: int = 0
    large: float | None = None


def _losses(where: str, metric: str, *schemes: str) -> tuple[Claim, ...]:
    words = "loss of {} minus Pre-LN's"
    return tuple(Claim(where, words.format(title_of(name)), "loss", name, metric=metric) for name in schemes)


def _sizes(**rates: float | None) -> tuple[Claim, ...]:
    words = "L2 norm of a token after the last block, {} over Pre-LN"
    return tuple(
        Claim("Figure 3", words.format(title_of(name)), "token_l2_mean", name, metric="token_l2_mean", large=rate)
        for name, rate in rates.items()
    )


CLAIMS = {
    "Curse of Depth": (
        *_losses("Table 1", "perplexity", "lns", "mix_ln", "post_rmsnorm", "deepnorm"),
        Claim("Figure 7", "leaving out a deep block costs more in LNS", "deep_cost", "lns", says=1),
        Claim("Figure 9", "the stream grows less in LNS, last block over first", "growth", "lns", says=-1),
    ),
    "BHyT": (
        *_sizes(lns=None, peri_ln=None, dyt=None, bhyt=4e-3),
        *_losses("Table 1", "eval_loss", "lns", "peri_ln", "dyt", "bhyt"),
        Claim("Table 3", "loss of BHyT minus Peri-LN's", "loss", "bhyt", "peri_ln", "eval_loss"),
    ),
}


def texts() -> dict[str, str]:
    head = ("claim", "in the paper", "theirs", "8 blocks, 128 wide", "24 blocks, 512 wide", "same sign?")
    curse, bhyt = (_rows(paper, claims) for paper, claims in CLAIMS.items())
    return {
        "table_of_curse_of_depth": table(head, curse) + _unlike(CLAIMS["Curse of Depth"]),
        "table_of_bhyt": table(head, [*bhyt, _beyond(), *_speeds()]) + _unlike(CLAIMS["BHyT"]),
    }


def _unlike(claims: tuple[Claim, ...]) -> str:
    """In what the runs of these schemes were trained differently, a line for a depth; empty if in nothing."""
    schemes = {name for claim in claims for name in (claim.a, claim.b)}
    lines = []
    for folder, depth in (SMALL, LARGE):
        runs = picked(folder, {"depth": depth})
        if words := recipes_in_words(runs[runs["scheme"].isin(schemes)]):
            lines.append(f"- {depth} blocks, {words}.")
    return "\n\n" * bool(lines) + "\n".join(lines)


def _rows(paper: str, claims: tuple[Claim, ...]) -> list[tuple[str, ...]]:
    """A row per claim. The comparisons of the table are one family."""
    found: dict[tuple[Claim, tuple[str, int]], pd.Series] = {}
    own: dict[tuple[Claim, tuple[str, int]], pd.Series | str] = {}
    for at in ((claim, place) for claim in claims for place in (SMALL, LARGE)):
        try:
            if (row := _ours(*at)) is not None:
                found[at] = row
        except Diverged as error:
            own[at] = str(error)
    if found:
        family = judged(pd.DataFrame(list(found.values())).reset_index(drop=True))
        own |= dict(zip(found, (row for _, row in family.iterrows()), strict=True))
    return [_row(paper, claim, {place: own[claim, place] for place in (SMALL, LARGE) if (claim, place) in own})
            for claim in claims]  # fmt: skip


def _row(paper: str, claim: Claim, ours: dict[tuple[str, int], pd.Series | str]) -> tuple[str, ...]:
    metric = quantity_row(claim.quantity)
    is_ratio = metric.is_ratio
    digits, theirs = (2 if is_ratio else 3), _theirs(paper, claim)
    sign = "" if is_ratio else "+"
    said = ", ".join(f"{plain(value, digits, sign)} ({model})" for model, value in theirs.items())
    side = claim.says or side_of(list(theirs.values())[-1], metric)
    cells = {
        place: row if isinstance(row, str) else written(row, digits, not is_ratio, True) + _remark(claim, place)
        for place, row in ours.items()
    }
    agree = ", ".join(_agrees(row, side) + _turns(claim, place, side) for place, row in ours.items())
    shown = (cells.get(place, "") for place in (SMALL, LARGE))
    return claim.words, claim.where, said or "no number", *shown, agree or "to come"


def _agrees(row: pd.Series | str, side: int) -> str:
    """Whether ours is on that side, or level as theirs is, in a word."""
    if isinstance(row, str):
        return "diverged"
    if row["seeds"] >= SEEDS and row["verdict"] == UNDECIDED:
        return UNDECIDED
    ours = side_of(row["estimate"], quantity_row(row["metric"]))
    return "yes" if ours == side else "**no**" if ours else "level"


def _ours(claim: Claim, place: tuple[str, int]) -> pd.Series | None:
    """Losses at each scheme's best rate, all else at one; None without such runs. Raises `Diverged`."""
    folder, depth = place
    rate = claim.large if place == LARGE and claim.large else RATES[place]
    options: dict[str, Any] = {"depth": depth} | ({} if claim.quantity == "loss" else {"lr": rate})
    try:
        return estimate(picked(folder, options), claim.quantity, claim.a, claim.b)
    except Diverged:
        raise
    except (NormlabError, ValueError):
        return None


def _remark(claim: Claim, place: tuple[str, int]) -> str:
    """What a number of ours does not say itself.

    A dagger at a loss whose scheme was tried at one learning rate, so that its best is not known; a double one where a
    seed has not learned. At a size of other rates than the table's the rate, and the sizes at best rates.
    """
    runs = picked(place[0], {"depth": place[1]})
    if claim.quantity == "loss":
        tried = runs.groupby("scheme", observed=True)["lr"].nunique()
        pair = chosen_pair(runs, claim.a, claim.b, "loss", None, None, WHERE)
        marks = {"†": tried[[claim.a, claim.b]].min() == 1, "‡": not has_learned(pair.runs).all()}
        return "".join(mark for mark, holds in marks.items() if holds)
    if place == LARGE and claim.large:
        return f" at {claim.large:g}, {plain(_at_best_rates(claim), 2)} at best rates"
    return ""


def _at_best_rates(claim: Claim) -> float:
    """The ratio of sizes in our large models, each scheme at its best rate."""
    runs = picked(LARGE[0], {"depth": LARGE[1]})
    a, b = (estimate(runs, claim.quantity, name)["estimate"] for name in (claim.a, claim.b))
    return a / b


def _turns(claim: Claim, place: tuple[str, int], side: int) -> str:
    """That a size which `_remark` gives at best rates too is on another side there."""
    if place != LARGE or claim.large is None or side_of(_at_best_rates(claim), quantity_row(claim.quantity)) == side:
        return ""
    return " at that rate alone"


@cache
def _published() -> pd.DataFrame:
    return normlab.load_published()


def _theirs(paper: str, claim: Claim) -> dict[str, float]:
    """The paper's difference or ratio, by model: the smallest of its table and the largest."""
    rows = _published()
    rows = rows[(rows["paper"] == paper) & rows["where"].eq(claim.where) & rows["metric"].eq(claim.metric)]
    values = rows.pivot_table(index="model", columns="scheme", values="value", sort=False)
    if claim.a not in values:
        return {}
    pair = values[[claim.a, claim.b]].dropna()
    a, b = (np.log(pair[name]) if claim.metric == "perplexity" else pair[name] for name in (claim.a, claim.b))
    found = a / b if claim.quantity == "token_l2_mean" else a - b
    return {model: found[model] for model in dict.fromkeys((found.index[0], found.index[-1]))}


def _beyond() -> tuple[str, ...]:
    """The largest share of tanh inputs beyond λ of one norm, in percent, in BHyT after training at any rate."""
    bound = 100 * chebyshev_bound(KAPPA)
    shares = []
    for folder, depth in (SMALL, LARGE):
        runs = picked(folder, {"depth": depth})
        rows = runs[(runs["scheme"] == "bhyt") & (runs["metric"] == "saturation") & (runs["mask"] == "all")]
        shares.append(100 * rows.loc[rows["step"] == rows["step"].max(), "value"].max())
    agrees = ", ".join("**no**" if share > bound else "yes" for share in shares)
    words = "largest share of tanh inputs beyond λ in one norm, %"
    return words, "Chebyshev's bound", f"at most {bound:g}", *(plain(share, 2) for share in shares), agrees


def _speeds() -> list[tuple[str, ...]]:
    """BHyT's speed over RMSNorm's in percent: as two versions of the paper say it, and ours on an H200."""
    said, rows = _published(), []
    for what, file in (("training", "step"), ("generation", "generate")):
        theirs = said[said["metric"] == f"{what}_speed_gain_percent"]
        versions = zip(theirs["value"], theirs["arxiv"].str[-2:], strict=True)
        times = pd.read_csv(BENCH / f"{file}_nvidia_h200.csv").query("function == 'bhyt' and peer == 'normlab'")
        gains = 100 / times["ratio"] - 100
        numbers = (", ".join(f"{value:+g} ({version})" for value, version in versions), "",
                   ", ".join(plain(gain, 1, "+") for gain in gains) + " (16 blocks, 2,048 wide)")  # fmt: skip
        agrees = "level" if abs(gains.median()) < SPEED_MARGIN else "yes" if gains.median() > 0 else "**no**"
        rows.append((f"speed of {what} over RMSNorm, %", "abstract", *numbers, agrees))
    return rows
