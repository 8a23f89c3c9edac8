"""The questions of docs/findings.md that were worded before their runs: answers, estimates, hours.

texts   every text by the name that marks it in the page
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import pandas as pd
from findings import GAIN_CONTROL, ROOT, experiments, interval, league, league_table, manifests, plain, runs
from tables import table

import normlab
from normlab.analysis.quantities import last_values
from normlab.analysis.selection import Selection, in_order, mean_of, summarize, title_of
from normlab.analysis.verdicts import differences, judged
from normlab.errors import NormlabError
from normlab.probes.metrics import metric_row
from normlab.study import questions
from normlab.study.presets import get_preset
from normlab.training.grids import planned

RATES, GAINS, TANH, LEAGUE = "depth_and_rate", "gains", "tanh", "league"  # presets, and their folders in data/
GAIN_WORDS = ("own", "one", "five")  # g of `questions.GAINS`: BHyT's own, 1 and 5
NOT_BEGUN, NOT_THERE = "not begun", "incomplete: the runs that decide are missing"


def _configs(folder: str) -> pd.DataFrame:
    return normlab.load_configs(ROOT / "data" / folder)


# Name -> the question, and the decision as a table of `normlab.study.questions`.
QUESTIONS: dict[str, tuple[str, Callable[[], pd.DataFrame]]] = {
    "A1": ("Is LNS better than Pre-LN at equal rates?", lambda: questions.equal_rates(runs(RATES))),
    "A2": ("Does LNS wake deep layers?", lambda: questions.deep_blocks(runs(RATES), experiments(RATES))),
    "A3": (
        "Does Pre-LN's stream grow more than LNS's, as in the papers?",
        lambda: questions.growth_curve(runs(RATES)),
    ),
    "A4": ("Does LNS gain more from depth?", lambda: questions.depth_gain(runs(RATES))),
    "B": ("Is there a cure of uniform attention?", lambda: questions.dead_gains(runs(GAINS), _configs(GAINS))),
    "C": ("Does BHyT's tanh matter?", lambda: questions.tanh(runs(TANH), _configs(TANH))),
    "D": (
        "Which schemes may be the best (are not told from it)?",
        lambda: questions.league(league().finals, league().search),
    ),
}
# Part -> its preset, the preset's stage, the folder of its runs, and the hours planned, of a core with bfloat16.
PARTS = {
    "A": (RATES, "runs", RATES, 15),
    "B": (GAINS, "runs", GAINS, 3),
    "C": (TANH, "runs", TANH, 8),
    "D, search": (LEAGUE, "search", f"{LEAGUE}/search", 10),
    "D, final runs": (LEAGUE, "runs", LEAGUE, 13),
}
BEYOND = ("between", "checks", "fourth_seed", "mixing")  # folders of runs that were chosen after a look at the search


def texts() -> dict[str, str]:
    answers = [(name, words, answer(name)) for name, (words, _) in QUESTIONS.items()]
    by_gain = decided("C").set_index(["g", "quantity"])
    loss, stream = (
        {gain: by_gain.loc[(g, metric_row(name).label)] for gain, g in zip(GAIN_WORDS, questions.GAINS, strict=True)}
        for name in ("loss", "token_l2_mean")
    )
    growth = decided("A3").set_index("lr")
    files = decided("A1").iloc[0]
    return {
        "a1_files": f"[{plain(files['files_low'], 3)}, {plain(files['files_high'], 3)}]",
        "growth_equal": interval(growth.loc[0.004]),
        "growth_lowest": interval(growth.loc[0.001]),
        **{f"tanh_loss_{gain}": interval(row, sign=True) for gain, row in loss.items()},
        **{f"tanh_stream_{gain}": interval(row) for gain, row in stream.items()},
        "tanh_raises_one": interval(loss["one"]),
        "control_loss": interval(control().loc["loss"], sign=True),
        "control_stream": interval(control().loc["token_l2_mean"]),
        "table_of_questions": table(("", "question", "answer"), answers),
        "table_of_equal_rates": _means(RATES, "lr", "rate"),
        "table_of_estimates": _estimates(("A1", "A2", "A3", "A4"), "lr", "rate"),
        "table_of_tanh": _means(TANH, "g", "g"),
        "table_of_tanh_estimates": _estimates(("C",), "g", "g"),
        "table_of_hours": _hours(),
    }


@cache
def control() -> pd.DataFrame:
    """BHyT without tanh at its own g, minus or over the gain control, which has no lambda: one family of two."""
    about, gains = summarize(runs(TANH)), questions.start_gains(_configs(TANH))
    about = about[gains[about.index].eq(questions.GAINS[0]) | about["scheme"].eq(GAIN_CONTROL)]
    values = {name: last_values(Selection(runs(TANH), about), name) for name in ("loss", "token_l2_mean")}
    rows = [differences(own, questions.UNBOUNDED, GAIN_CONTROL, name) for name, own in values.items()]
    return judged(pd.concat(rows)).set_index("metric")


@cache
def decided(name: str) -> pd.DataFrame:
    """The decision's table; empty while the runs that it compares are not there."""
    _, decide = QUESTIONS[name]
    try:
        return decide()
    except NormlabError:
        return pd.DataFrame(columns=questions.COLUMNS)


def answer(name: str) -> str:
    """The decision, in the words that were fixed. Where it differs, the rate or the quantity is named."""
    made = decided(name)
    if name == "D":
        return "; ".join(map(title_of, made.loc[made["in_set"], "scheme"]))
    made = made[made["says"] != ""]
    if made["says"].nunique() > 1:
        where = made["lr"].map("at rate {:g}".format) if "lr" in made else "(" + made["quantity"] + ")"
        return "; ".join(made["says"] + " " + where)
    if made.empty:
        return NOT_BEGUN if decided(name).empty else NOT_THERE
    return made["says"].iloc[0]


def _means(folder: str, at: str, head: str) -> str:
    """The means over seeds at each depth and rate (or g, which the control lacks): losses, and the stream's size."""
    table_of = runs(folder)
    about = summarize(table_of)
    about["g"] = questions.start_gains(_configs(folder)) if at == "g" else np.nan
    for name, metric in (("seen", "seen_loss"), ("size", "token_l2_mean")):
        about[name] = last_values(Selection(table_of, about), metric).set_index("run")["value"]
    rows = []
    for scheme in in_order(about["scheme"]):
        for (depth, place), own in about[about["scheme"] == scheme].groupby(["depth", at], dropna=False):
            losses = map(plain, own[["eval_loss", "seen"]].mean())
            size = plain(mean_of(own["size"], "token_l2_mean"), 1)
            rows.append((title_of(scheme), depth, "" if pd.isna(place) else f"{place:g}", len(own), *losses, size))
    return table(("scheme", "blocks", head, "seeds", "loss", "on seen text", "L2 norm after the last block"), rows)


def _estimates(names: Iterable[str], at: str, head: str) -> str:
    """Every comparison of these questions that has runs. Sizes and their growth are ratios, the others differences."""
    lines = []
    for name in names:
        for _, row in decided(name).iterrows():
            verdict = row["verdict"] if row["seeds"] >= questions.ENOUGH else ""
            is_ratio = name == "A3" or row["quantity"] == metric_row("token_l2_mean").label
            estimate = interval(row, digits=3, sign=not is_ratio)
            lines.append((name, row["quantity"], row[at], row["seeds"], estimate, verdict))
    return table(("", "quantity", head, "seeds", "estimate", "verdict"), lines)


def _hours() -> str:
    rows, beyond = [], [manifest for folder in BEYOND for manifest in _finished(folder)]
    for part, (preset, stage, folder, hours) in PARTS.items():
        most = sum(what == stage for what, _ in planned(get_preset(preset)))
        there = _finished(folder)
        own = [manifest for manifest in there if _is_planned(manifest, folder)]
        beyond += [manifest for manifest in there if not _is_planned(manifest, folder)]
        rows.append((part, f"`{preset}`", len(own), most, hours, _spent(own)))
    rows.append(("beyond the plan", "", len(beyond), "", "", _spent(beyond)))
    together = (sum(row[at] for row in rows if row[at] != "") for at in range(2, 6))
    lines = [(*row[:-1], plain(row[-1], 1)) for row in (*rows, ("together", "", *together))]
    return table(("part", "preset", "runs", "of at most", "hours planned", "hours spent"), lines)


def _is_planned(manifest: dict, folder: str) -> bool:
    """All but the league's final runs of a scheme that has only one."""
    return folder != LEAGUE or league_table().set_index("scheme").loc[manifest["config"]["scheme"], "seeds"] > 1


def _spent(of: Iterable[dict]) -> float:
    return sum(manifest["measured"]["wall_s"] for manifest in of) / 3600


def _finished(folder: str) -> list[dict]:
    return manifests(folder) if (ROOT / "data" / folder).is_dir() else []
