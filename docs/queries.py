"""Marks that are queries: what a page states of shipped tables, each asked by the mark around it.

    <!-- deep_cost: lns - pre_rmsnorm @ grid depth=8 lr=0.004 : different -->−0.06<!-- / -->

QUANTITY: A - B @ FOLDER compares scheme A with B over the runs of data/FOLDER, as `normlab.compare` does: a ratio of
sizes, a difference of everything else. Without B it is A's mean over seeds, a geometric one of sizes. What follows the
folder picks runs by their configuration (`depth=8`, `init_std=none`), or says how the number is written: `digits=3`,
`abs=1` without its sign, `range=1` with its interval. Without `lr` losses are of each scheme's best rate, sizes of the
rate that the pair shares. A word after a last colon is what the sentence rests on: the verdict, or on which side of no
effect the estimate is (`above`, `below`). `fill` refuses a page of which that is no longer true.

    <!-- table: loss @ grid depth=8 -->
    <!-- table: loss - pre_rmsnorm @ grid depth=8 -->
    <!-- table: loss token_l2_mean:1 deep_cost @ gpu depth=24 -->

A table of one quantity has a row per scheme and a column per rate: means over seeds, or the difference from a scheme.
A difference has its interval from four seeds on, and is bold where it is different after Holm's correction over the
table. A table of several has a row per scheme and rate. `:1` is the layer, `only=main,beam` the rows of these schemes,
`main` being all that have this tag. A loss in italics is not below the trigram model.
Where a run diverged a cell is "1 of 4 diverged", and QUANTITY is refused: a number would be of the other seeds.

    <!-- seeds: deep_cost @ grid depth=8 only=main -->

A row per scheme that has four seeds at its best rate, a column per seed.

    <!-- lowest: loss @ grid depth=8 -->Pre-LN<!-- / -->

The scheme with the lowest loss, each at its best rate.

    <!-- bench/first_layer.csv: t["class"].nunique() -->67<!-- / -->

FILE: EXPRESSION is what Python makes of the table `t`, data/FILE. Floats are written with two digits.

A plain name, `<!-- table_of_league -->`, is a text that `docs/generate.py` has from one of its modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from tables import ROOT, plain, table

import normlab
from normlab.analysis.compare import WHERE, chosen_pair, pair_rows
from normlab.analysis.quantities import quantity_row, values_of
from normlab.analysis.selection import DIVERGED, at_rate, choose, has_learned, in_order, summarize, title_of
from normlab.analysis.verdicts import DIFFERENT, SEEDS, UNDECIDED, bracketed, judged, means
from normlab.schemes import TAGS, tagged

ASKED = r"\w+|[^>]*?: .*?"
MARK = re.compile(rf"<!-- (?P<what>{ASKED}) -->(?P<text>.*?)<!-- / -->", re.DOTALL)
FILE = re.compile(r"(?P<file>[\w/.-]+\.csv): (?P<expression>.+)")
RUNS = r" @ (?P<folder>\w+)(?P<options>(?: \w+=\S+)*)"
LOWEST = re.compile(r"lowest: loss" + RUNS)
BY_SEED = re.compile(r"seeds: (?P<quantity>\w+)" + RUNS)
TABLE = re.compile(r"table: (?P<quantities>\w+(?::\d+)?(?: \w+(?::\d+)?)*)(?: - (?P<b>\w+))?" + RUNS)
NUMBER = re.compile(r"(?P<quantity>\w+): (?P<a>\w+)(?: - (?P<b>\w+))?" + RUNS + r"(?: : (?P<verdict>\w+))?")
NO_QUERY = "is no query, nor a name that has a text: write QUANTITY: A - B @ FOLDER name=value : verdict"
FORMS = ("digits", "abs", "range", "only")


def fill(page: str, name: str, texts: Mapping[str, str] | None = None) -> str:
    """The page with what each query finds, and with the text of each plain name.

    Raises:
        ValueError: a name without a text, or a query that the shipped tables do not answer or that states another
            verdict. Also a mark within a paragraph that begins a line, where Markdown ends the paragraph.
    """

    def text_of(match: re.Match[str]) -> str:
        what = match["what"]
        try:
            found = texts[what] if texts and what in texts else answer(what)
            if match["text"].startswith("\n") or "\n" in found:
                found = f"\n\n{found}\n\n"
            elif page[: match.start()].endswith("\n"):
                raise ValueError("begins a line: break the line elsewhere")
        except Exception as error:
            raise ValueError(f"{name}: <!-- {what} --> {error}") from error
        return f"<!-- {what} -->{found}<!-- / -->"

    for comment in re.findall(r"<!-- (.*?) -->", page):
        if comment != "/" and not re.fullmatch(ASKED, comment):
            raise ValueError(f"{name}: <!-- {comment} --> {NO_QUERY}")
    return MARK.sub(text_of, page)


def answer(query: str) -> str:
    """What a query asks for, as text."""
    if match := FILE.fullmatch(query):
        return shown(eval(match["expression"], {"t": _file(match["file"]), "pd": pd, "np": np}))
    if match := TABLE.fullmatch(query):
        options = _options(match)
        runs, digits = picked(match["folder"], options, match["b"]), int(options.get("digits", 2))
        names = match["quantities"].split()
        return by_rate(runs, names[0], match["b"], digits) if len(names) == 1 else side_by_side(runs, names, digits)
    if match := BY_SEED.fullmatch(query):
        options = _options(match)
        return by_seed(picked(match["folder"], options), match["quantity"], int(options.get("digits", 2)))
    if match := LOWEST.fullmatch(query):
        runs = picked(match["folder"], _options(match))
        best = choose(runs).runs.groupby("scheme")["eval_loss"].mean()
        return title_of(best.idxmin())
    if match := NUMBER.fullmatch(query):
        return number(match)
    raise ValueError(NO_QUERY)


def number(query: re.Match[str]) -> str:
    forms = _options(query)
    runs = picked(query["folder"], forms)
    if any(forms.get(name, "1") != "1" for name in ("abs", "range")) or {"abs", "range"} <= forms.keys():
        raise ValueError("abs=1 or range=1, not both, or leave them out")
    row = estimate(runs, query["quantity"], query["a"], query["b"])
    side = "above" if row["estimate"] > (1 if row["kind"] == "ratio" else 0) else "below"
    said = side if query["verdict"] in ("above", "below") else row["verdict"]
    if query["verdict"] and query["verdict"] != said:
        raise ValueError(f"the runs say {said}: write the sentence anew")
    is_change = query["b"] is not None and row["kind"] == "difference" and "abs" not in forms
    if "abs" in forms:
        row["estimate"] = abs(row["estimate"])
    return written(row, int(forms.get("digits", 2)), is_change, "range" in forms)


class Diverged(ValueError):
    """A number is asked for of seeds of which some diverged: it would be one of the others alone."""

    def __init__(self, scheme: str, count: int, of: int):
        self.scheme, self.words = scheme, "diverged" if count == of else f"{count} of {of} diverged"
        super().__init__(f"{title_of(scheme)}: {self.words}")

    def in_row_of(self, scheme: str) -> str:
        return self.words if scheme == self.scheme else str(self)


def by_rate(runs: pd.DataFrame, quantity: str, b: str | None, digits: int) -> str:
    """A row per scheme, a column per learning rate: the scheme's mean, or what it is against scheme `b`."""
    rates = sorted((runs if b is None else runs[runs["scheme"] == b])["lr"].unique())
    about, cells = summarize(runs), dict[tuple[str, float], pd.Series]()
    lost: dict[tuple[str, float], str] = {}
    for rate in rates:
        here = at_rate(runs, rate)
        for scheme in in_order(here["scheme"]):
            try:
                if scheme != b:
                    cells[scheme, rate] = estimate(here, quantity, scheme, b)
            except Diverged as error:
                lost[scheme, rate] = error.in_row_of(scheme)
    if b is not None and cells:
        family = judged(pd.DataFrame(list(cells.values())).reset_index(drop=True))
        cells = dict(zip(cells, (row for _, row in family.iterrows()), strict=True))
    poor = _unlearned(runs) if quantity == "loss" and b is None else set()

    def cell(scheme: str, rate: float) -> str:
        if (scheme, rate) not in cells:
            return lost.get((scheme, rate), "")
        row = cells[scheme, rate]
        text = written(row, digits, b is not None and row["kind"] == "difference", b is not None)
        return f"**{text}**" if row["verdict"] == DIFFERENT else f"*{text}*" if (scheme, rate) in poor else text

    names = [scheme for scheme in in_order(about["scheme"]) if scheme != b]
    lines = [(title_of(scheme), *(cell(scheme, rate) for rate in rates)) for scheme in names]
    return table(("", *(f"{rate:g}" for rate in rates)), lines)


def by_seed(runs: pd.DataFrame, quantity: str, digits: int) -> str:
    """A row per scheme with enough seeds, at its best rate, and a column per seed."""
    chosen = choose(runs)
    values = values_of(chosen, quantity)
    values = values[values.groupby("scheme")["seed"].transform("nunique") >= SEEDS]
    texts = values["value"].map(lambda value: f"{value:.{digits}f}", na_action="ignore")
    diverged = values["run"].map(chosen.runs["status"]) == DIVERGED
    values = values.assign(text=texts.astype(object).mask(diverged, "diverged"))
    wide = values.pivot(index=["scheme", "lr"], columns="seed", values="text").fillna("")
    names = sorted(wide.index, key=lambda place: in_order(values["scheme"]).index(place[0]))
    lines = [(title_of(scheme), f"{rate:g}", *wide.loc[(scheme, rate)]) for scheme, rate in names]
    return table(("", "rate", *(f"seed {seed}" for seed in wide)), lines)


def side_by_side(runs: pd.DataFrame, quantities: list[str], digits: int) -> str:
    """A row per scheme and learning rate, a column per quantity."""
    asked = [(name.partition(":")[0], _layer(name)) for name in quantities]
    heads = [" ".join([quantity_row(metric).label, *(f"after block {n}" for n in at.values())]) for metric, at in asked]
    lines = []

    def cell(here: pd.DataFrame, scheme: str, metric: str, at: dict[str, int]) -> str:
        try:
            return written(estimate(here, metric, scheme, **at), digits, False, False)
        except Diverged as error:
            return error.words

    for scheme in in_order(runs["scheme"]):
        own = runs[runs["scheme"] == scheme]
        for rate in sorted(own["lr"].unique()):
            here = at_rate(own, rate)
            lines.append((title_of(scheme), f"{rate:g}", *(cell(here, scheme, metric, at) for metric, at in asked)))
    return table(("scheme", "rate", *heads), lines)


def picked(folder: str, options: Mapping[str, Any], b: str | None = None) -> pd.DataFrame:
    """The runs of a shipped folder with these fields of their configuration, of one depth. `only` keeps `b` too."""
    runs, configs = _runs(folder), _configs(folder)
    for name in options.keys() - set(FORMS):
        if name not in configs:
            raise ValueError(f"unknown option {name}: choose from {', '.join(FORMS)}, or a field of the configuration")
        column = configs[name]
        is_it = column.isna() if options[name] == "none" else column.eq(float(options[name]))
        runs = runs[runs["run"].isin(configs.index[is_it])]
    if "only" in options:
        rows = [tagged(name) if name in TAGS else (name,) for name in options["only"].split(",")]
        runs = runs[runs["scheme"].isin({b, *chain(*rows)})]
    if runs.empty:
        raise ValueError(f"data/{folder} has no such runs")
    if runs["depth"].nunique() > 1:
        raise ValueError(f"say the depth: {', '.join(map(str, sorted(runs['depth'].unique())))}")
    return runs


def estimate(runs: pd.DataFrame, quantity: str, a: str, b: str | None = None, **where: Any) -> pd.Series:
    """One row of `compare`; without `b` one of `means`, whose estimate is of the values themselves.

    With too few seeds for a claim there is no interval, and the verdict is "undecided".

    Raises:
        Diverged: one of the runs.
    """
    if b is not None:
        where = WHERE | where
        pair = chosen_pair(runs, a, b, quantity, None, None, where)  # as `normlab.compare`
        _require_finished(pair.runs)
        row = judged(pair_rows(values_of(pair, quantity, **where), a, b, quantity)).iloc[0]
        if row["seeds"] < SEEDS:
            row[["low", "high", "p"]], row["verdict"] = np.nan, UNDECIDED
        return row
    chosen = choose(runs, schemes=[a], same_rate=False)
    _require_finished(chosen.runs[chosen.runs["scheme"] == a])
    values = values_of(chosen, quantity, **where)
    values = values[values["scheme"] == a]
    if values["value"].isna().all():
        raise ValueError(f"{a} has no {quantity_row(quantity).label} here")
    return means(values, quantity).assign(verdict="").replace({np.inf: np.nan}).iloc[0]


def _require_finished(about: pd.DataFrame) -> None:
    for scheme in in_order(about["scheme"]):
        statuses = about.loc[about["scheme"] == scheme, "status"]
        if count := int(statuses.eq(DIVERGED).sum()):
            raise Diverged(scheme, count, len(statuses))


def _options(query: re.Match[str]) -> dict[str, str]:
    return dict(pair.split("=") for pair in query["options"].split())


def _layer(name: str) -> dict[str, int]:
    layer = name.partition(":")[2]
    return {"layer": int(layer)} if layer else {}


def _unlearned(runs: pd.DataFrame) -> set[tuple[str, float]]:
    about = summarize(runs)
    return set(about.loc[~has_learned(about), ["scheme", "lr"]].itertuples(index=False, name=None))


def written(row: pd.Series, digits: int, signed: bool, with_interval: bool) -> str:
    if not np.isfinite(row["estimate"]):
        raise ValueError("the runs have no such number")
    form: Callable[[float], str] = f"{{:{'+' if signed else ''}.{digits}f}}".format
    if row["kind"] == "ratio" and row["estimate"] >= 10:  # the size of a stream
        form = "{:,.0f}".format
    text = form(row["estimate"]) + (bracketed(row["low"], row["high"], form) if with_interval else "")
    return text.replace("-", "−")


def shown(value: Any) -> str:
    if isinstance(value, float):
        return plain(value)
    return f"{value:,}" if isinstance(value, int | np.integer) else str(value)


@cache
def _runs(folder: str) -> pd.DataFrame:
    return normlab.load_runs(ROOT / "data" / folder, variants=False)


@cache
def _configs(folder: str) -> pd.DataFrame:
    return normlab.load_configs(ROOT / "data" / folder)


@cache
def _file(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "data" / name)
