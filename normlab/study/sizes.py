"""The same claims asked of models of two sizes: the table of notebook 10."""

from __future__ import annotations

import pandas as pd

from normlab.analysis.claims import AS_SAID, FAILS, HOLDS, NOT_AS_SAID

AGREE, TURN = "agree", "turn"


def beside(small: pd.DataFrame, large: pd.DataFrame) -> pd.DataFrame:
    """Two results of `claims.tested` for the same claims, one next to the other.

    Returns:
        One row per claim: what the models of each size say, and of `sizes` whether both say it or both do not
        (`AGREE`), or one does and the other does not (`TURN`). It is empty where one of them cannot say.
    """
    told = pd.concat([_told(table) for table in (small, large)], axis=1).rename_axis("claim")
    product = _side(small["says"]) * _side(large["says"])
    return told.assign(sizes=product.map({1: AGREE, -1: TURN, 0: ""}))


def agreement(table: pd.DataFrame) -> str:
    """`beside` in a sentence: how many claims have one outcome at both sizes, and which turn."""
    agree, turned = table["sizes"].eq(AGREE).sum(), table.index[table["sizes"] == TURN]
    rest = len(table) - agree - len(turned)
    which = f": {'; '.join(f'“{claim}”' for claim in turned)}" if len(turned) else ""
    turns = f" {len(turned)} turn{'s' * (len(turned) == 1)}{which}." if len(turned) else ""
    others = f" On {rest} one of them is level or cannot decide." if rest else ""
    return f"Of {len(table)} claims the sizes agree on {agree}.{turns}{others}"


def _told(table: pd.DataFrame) -> pd.Series:
    """A row of `claims.tested` as one cell; the name says how many blocks."""
    measured = (table["ours"] + " at rate " + table["rates"] + ": ").where(table["ours"].ne(""), "")
    return (measured + table["says"]).rename(str(table.index.name).removeprefix("at "))


def _side(says: pd.Series) -> pd.Series:
    """1 where a claim is as said, -1 where it is not, 0 where that is open."""
    return says.str.startswith((HOLDS, AS_SAID)).astype(int) - says.str.startswith((FAILS, NOT_AS_SAID)).astype(int)
