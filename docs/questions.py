"""The questions of docs/findings.md that were worded before their runs: answers, estimates, hours.

texts   every text by the name that marks it in the page
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pandas as pd
from findings import ROOT, experiments, interval, league, manifests, plain, runs
from tables import table

import normlab
from normlab.analysis import decisions
from normlab.analysis.compare import last_values
from normlab.analysis.selection import Selection, in_order, summarize, title_of
from normlab.errors import NormlabError
from normlab.training.grids import planned
from normlab.training.presets import get_preset

RATES, GAINS, TANH, LEAGUE = "depth_and_rate", "gains", "tanh", "league"  # presets, and their folders in data/
NOT_BEGUN = "not begun"


class Question(NamedTuple):
    """A question, the preset that answers it, and the decision as a table of `normlab.analysis.decisions`."""

    words: str
    preset: str
    decide: Callable[[], pd.DataFrame]


def _configs(folder: str) -> pd.DataFrame:
    return normlab.load_configs(ROOT / "data" / folder)


QUESTIONS = {
    "A1": Question("Is LNS better than Pre-LN at equal rates?", RATES, lambda: decisions.equal_rates(runs(RATES))),
    "A2": Question("Does LNS wake deep layers?", RATES, lambda: decisions.deep_blocks(runs(RATES), experiments(RATES))),
    "A3": Question(
        "Does Pre-LN's stream grow more than LNS's, as in the papers?",
        RATES,
        lambda: decisions.growth_curve(runs(RATES)),
    ),
    "A4": Question("Does LNS gain more from depth?", RATES, lambda: decisions.depth_gain(runs(RATES))),
    "B": Question(
        "Is there a cure of uniform attention?", GAINS, lambda: decisions.dead_gains(runs(GAINS), _configs(GAINS))
    ),
    "C": Question("Does BHyT's tanh matter?", TANH, lambda: decisions.tanh(runs(TANH), _configs(TANH))),
    "D": Question(
        "Which schemes are not told from the best?", LEAGUE, lambda: decisions.league(league().finals, league().search)
    ),
}
PLANNED_HOURS = {"A": 15, "B": 3, "C": 8, "D, search": 10, "D, final runs": 13}  # of a core with bfloat16


def texts() -> dict[str, str]:
    answers = [(name, question.words, answer(name)) for name, question in QUESTIONS.items()]
    return {
        "table_of_questions": table(("", "question", "answer"), answers),
        "table_of_equal_rates": _equal_rates(),
        "table_of_estimates": _estimates(),
        "table_of_hours": _hours(),
    }


@cache
def decided(name: str) -> pd.DataFrame:
    """The decision's table; empty while the runs that it compares are not there."""
    try:
        return QUESTIONS[name].decide()
    except NormlabError:
        return pd.DataFrame(columns=decisions.COLUMNS)


def answer(name: str) -> str:
    """The decision, in the words that were fixed."""
    made = decided(name)
    said = made.loc[made["in_set"], "scheme"].map(title_of) if name == "D" else made["says"]
    return ", ".join(dict.fromkeys(filter(None, said))) or NOT_BEGUN


def _equal_rates() -> str:
    """The mean losses of A at each rate."""
    about = summarize(runs(RATES))
    about["seen"] = last_values(Selection(runs(RATES), about), "seen_loss").set_index("run")["value"]
    by_place = about.groupby(["scheme", "depth", "lr"])
    rows = [
        (title_of(scheme), depth, f"{rate:g}", len(own), *map(plain, own[["eval_loss", "seen"]].mean()))
        for scheme in in_order(about["scheme"])
        for (name, depth, rate), own in by_place
        if name == scheme
    ]
    return table(("scheme", "blocks", "rate", "seeds", "loss", "on seen text"), rows)


def _estimates() -> str:
    """Every comparison of A that has runs; A3 is a ratio, the others are differences."""
    lines = [
        (name, row["quantity"], row["lr"], row["seeds"], interval(row, digits=3, sign=name != "A3"), row["verdict"])
        for name in QUESTIONS
        if name.startswith("A")
        for _, row in decided(name).iterrows()
    ]
    return table(("", "quantity", "rate", "seeds", "estimate", "verdict"), lines)


def _hours() -> str:
    stages = {
        "A": (RATES, RATES, "runs"),
        "B": (GAINS, GAINS, "runs"),
        "C": (TANH, TANH, "runs"),
        "D, search": (LEAGUE, f"{LEAGUE}/search", "search"),
        "D, final runs": (LEAGUE, LEAGUE, "runs"),
    }
    rows = []
    for part, (preset, folder, stage) in stages.items():
        spent = [manifest["measured"]["wall_s"] / 3600 for manifest in _finished(folder)]
        most = sum(what == stage for what, _ in planned(get_preset(preset)))
        rows.append((part, f"`{preset}`", len(spent), most, PLANNED_HOURS[part], sum(spent)))
    rows.append(("together", "", *(sum(row[at] for row in rows) for at in range(2, 6))))
    lines = [(*row[:-1], plain(row[-1], 1)) for row in rows]
    return table(("part", "preset", "runs", "of at most", "hours planned", "hours so far"), lines)


def _finished(folder: str) -> list[dict]:
    return manifests(folder) if (ROOT / "data" / folder).is_dir() else []
