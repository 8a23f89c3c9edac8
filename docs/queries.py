"""Marks that are queries: numbers of pages, each asked of shipped runs by the mark around it.

    <!-- deep_cost: lns - pre_rmsnorm @ grid depth=16 lr=0.004 : different -->−0.06<!-- / -->

QUANTITY: A - B @ FOLDER compares scheme A with B over the runs of data/FOLDER, as `normlab.compare` does: a ratio of
sizes, a difference of everything else. Without B it is A's mean over seeds, a geometric one of sizes. What follows the
folder picks runs: `depth`, `lr`, `seed`. Without `lr` losses are of each scheme's best rate, sizes of the rate that the
pair shares. Or it says how the number is written: `digits=3`, `abs=1` without its sign, `range=1` with its interval. A
word after a last colon is the verdict that the sentence rests on. `fill` refuses a page whose verdict has changed.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

import normlab
from normlab.analysis.compare import compare
from normlab.analysis.quantities import quantity_row, values_of
from normlab.analysis.selection import at_rate, choose
from normlab.analysis.verdicts import bracketed, means

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(
    r"<!-- (?P<quantity>\w+): (?P<a>\w+)(?: - (?P<b>\w+))? @ (?P<folder>[\w/]+)(?P<options>(?: \w+=\S+)*)"
    r"(?: : (?P<verdict>\w+))? -->(?P<text>.*?)<!-- / -->",
    re.DOTALL,
)
PICKS, FORMS = ("depth", "lr", "seed"), ("digits", "abs", "range")


def fill(page: str, name: str) -> str:
    """The page with the number of each query.

    Raises:
        ValueError: a query that the runs do not answer, or another verdict than the one it states.
    """

    def text_of(match: re.Match[str]) -> str:
        mark = match[0].partition("-->")[0] + "-->"
        try:
            return f"{mark}{answer(match)}<!-- / -->"
        except (ValueError, normlab.NormlabError) as error:
            raise ValueError(f"{name}: {mark} {error}") from error

    filled = MARKED.sub(text_of, page)
    for mark in re.findall(r"<!--[^>]* @ [^>]*-->", page):
        if not MARKED.match(f"{mark}<!-- / -->"):
            raise ValueError(f"{name}: {mark} is no query: write QUANTITY: A - B @ FOLDER name=value : verdict")
    return filled


def answer(query: re.Match[str]) -> str:
    """The number that a query asks for, as text."""
    options = dict(pair.split("=") for pair in query["options"].split())
    if any(options.get(name, "1") != "1" for name in ("abs", "range")) or {"abs", "range"} <= options.keys():
        raise ValueError("abs=1 or range=1, not both, or leave them out")
    if unknown := sorted(options.keys() - {*PICKS, *FORMS}):
        raise ValueError(f"unknown option {unknown[0]}: choose from {', '.join((*PICKS, *FORMS))}")
    runs = picked(query["folder"], **{key: float(value) for key, value in options.items() if key in PICKS})
    row = estimate(runs, query["quantity"], query["a"], query["b"])
    if query["verdict"] and query["verdict"] != row["verdict"]:
        raise ValueError(f"the runs say {row['verdict']}: write the sentence anew")
    is_change = query["b"] is not None and row["kind"] == "difference"
    if not np.isfinite(row["estimate"]):
        raise ValueError("the runs have no such number")
    written = f"{{:{'+' if is_change and 'abs' not in options else ''}.{options.get('digits', 2)}f}}".format
    value = abs(row["estimate"]) if "abs" in options else row["estimate"]
    text = written(value) + (bracketed(row["low"], row["high"], written) if "range" in options else "")
    return text.replace("-", "−")


def picked(folder: str, depth: float | None = None, lr: float | None = None, seed: float | None = None) -> pd.DataFrame:
    """The runs of a shipped folder of one depth, learning rate or seed."""
    runs = at_rate(_runs(folder), lr)
    for name, value in (("depth", depth), ("seed", seed)):
        runs = runs if value is None else runs[runs[name] == value]
    if runs.empty:
        raise ValueError(f"data/{folder} has no such runs")
    if runs["depth"].nunique() > 1:
        raise ValueError(f"say the depth: {', '.join(map(str, sorted(runs['depth'].unique())))}")
    return runs


def estimate(runs: pd.DataFrame, quantity: str, a: str, b: str | None = None) -> pd.Series:
    """One row of `compare`; without `b` one of `means`, whose estimate and interval are of the values themselves."""
    if b is not None:
        return compare(runs, a, b, quantity).iloc[0]
    values = values_of(choose(runs, schemes=[a], same_rate=False), quantity)
    values = values[values["scheme"] == a]
    if values["value"].isna().all():
        raise ValueError(f"{a} has no {quantity_row(quantity).label} here")
    return means(values, quantity).assign(verdict="").replace({np.inf: np.nan}).iloc[0]


@cache
def _runs(folder: str) -> pd.DataFrame:
    return normlab.load_runs(ROOT / "data" / folder)
