"""The table of docs/league.md, made from data/grid, with what must be said of it.

texts   every text by the name that marks it in the page
"""

from __future__ import annotations

from tables import table

import normlab
from normlab.analysis.verdicts import DIFFERENT
from normlab.study import league


def texts() -> dict[str, str]:
    found = league.standings(league.load([league.grid()]), normlab.load_published(), league.step_times())
    shown = league.shown(found).rename(columns=lambda name: f"rate 0{name}" if name.startswith(".") else name)
    shown["marin"] = found["marin"]
    cells = shown.replace({r"\*$": r"\\*", "\N{NO-BREAK SPACE}": " "}, regex=True)
    cells["from Pre-LN"] = cells["from Pre-LN"].mask(found["verdict"] == DIFFERENT, "**" + cells["from Pre-LN"] + "**")
    remarks = "\n".join(f"- {sentence}" for sentence in league.remarks(found))
    return {"table_of_league": f"{table(cells, cells.itertuples(index=False))}\n\n{remarks}"}
