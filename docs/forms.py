"""The tables of docs/forms.md: on which forms of a model each function holds, by the shipped audit.

texts   every text by the name that marks it in the page
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pandas as pd
from tables import ROOT, table

PATH = ROOT / "data" / "bench" / "forms.csv"
NOT_FUNCTIONS = ("class", "task", "form", "error", "transformers")
RECORDED = 9  # of the functions, the first: what `record` measures
SILENT = ("WRONG", "failed")  # never to be seen
VERDICTS = {"refused": "refused", "absent": "left out", "no such": "no such form", "unchecked": "not checked"}
HEADS = {"attention entropy": "entropy", "router entropy": "router", "expert load": "load", "skip 2 blocks": "2 blocks",
         "cheapest spans": "spans", "cheapest branches": "branches", "void tokens": "void"}  # fmt: skip


def texts() -> dict[str, str]:
    audit = pd.read_csv(PATH, keep_default_na=False, dtype=str)
    functions = [name for name in audit.columns if name not in NOT_FUNCTIONS]
    cells = audit.melt(["class", "form"], functions, "function", "cell")
    cells[["verdict", "why"]] = cells["cell"].str.split(": ", n=1, expand=True).fillna("")
    cells["why"] = cells["why"].map(_without_sizes)
    counts = cells["verdict"].value_counts()
    told = cells[~cells["verdict"].isin(("right", *SILENT))]
    found = set(zip(told["verdict"], told["why"], strict=True))
    lines = sorted(found, key=lambda line: ([*VERDICTS].index(line[0]), line[1]))
    marks = {line: _mark(number) for number, line in enumerate(lines)}
    return {
        "forms_recorded": _table(cells, functions[:RECORDED], marks),
        "forms_experiments": _table(cells, functions[RECORDED:], marks),
        "forms_lines": "\n".join(_line(marks[line], line, told) for line in lines),
        "forms_classes": str(audit["class"].nunique()),
        "forms_cells": f"{len(cells) - counts.get('no such', 0):,}",
        "forms_right": f"{counts.get('right', 0):,}",
        "forms_told": f"{counts.get('refused', 0) + counts.get('absent', 0):,}",
        "forms_unchecked": f"{counts.get('unchecked', 0):,}",
        "forms_silent": str(sum(counts.get(verdict, 0) for verdict in SILENT) or "none"),
    }


def _mark(number: int) -> str:
    """a .. z, then aa .. az."""
    return ("" if number < 26 else chr(96 + number // 26)) + chr(97 + number % 26)


def _without_sizes(line: str) -> str:
    """A line in which numbers that differ from class to class are n."""
    return re.sub(r"\b\d+\b", "n", line).replace("`", "")


def _table(cells: pd.DataFrame, functions: Iterable[str], marks: dict[tuple[str, str], str]) -> str:
    functions = list(functions)
    rows = []
    for form in cells["form"].unique():
        mine = cells[cells["form"] == form]
        rows.append((form, *(_cell(mine[mine["function"] == name], marks) for name in functions)))
    return table(("form", *(HEADS.get(name, name) for name in functions)), rows)


def _cell(cells: pd.DataFrame, marks: dict[tuple[str, str], str]) -> str:
    """Of how many classes it is right; the marks of the lines that say why not of others."""
    found = cells["verdict"].value_counts()
    parts = [str(found.get("right", 0))]
    told = dict.fromkeys(zip(cells["verdict"], cells["why"], strict=True))
    letters = sorted((marks[line] for line in told if line in marks), key=lambda mark: (len(mark), mark))
    parts += [f"<sup>{' '.join(letters)}</sup>"] if letters else []
    parts += [f"**{found[verdict]} {verdict}**" for verdict in SILENT if verdict in found]
    return " ".join(parts)


def _line(mark: str, line: tuple[str, str], told: pd.DataFrame) -> str:
    verdict, why = line
    classes = told.loc[(told["verdict"] == verdict) & (told["why"] == why), "class"].unique()
    names = ", ".join(re.sub("For[A-Z].*|LMHeadModel", "", name) for name in classes[:6])
    more = f" and {len(classes) - 6} more" if len(classes) > 6 else ""
    return f"- **{mark}** {VERDICTS[verdict]}: `{why}` ({names}{more})"
