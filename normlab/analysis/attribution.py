"""Direct logit attribution methods, compared with the logit and with measured effects.

Tables are those of `normlab.models.lens`: `direct_logit_attribution` by method, and `component_effects`.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

ADDS_UP = 1e-3  # largest remainder, as a share of the logit (of 1, if that is larger)
PREDICTS = 0.05  # largest error, as a share of the largest effect


def components(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that are components, named "embed", "attn 1", "mlp 1" ... in a column `name`."""
    rows = table[~table["component"].isin(["bias", "remainder"])]
    names = [f"{row.component} {row.layer}" if row.layer else row.component for row in rows.itertuples()]
    return rows.assign(name=names).reset_index(drop=True)


def judged_methods(shares: Mapping[str, pd.DataFrame], effects: pd.DataFrame) -> pd.DataFrame:
    """Judge whether methods' shares add up to the logit, and whether they predict the effect of a small change.

    Args:
        shares: by method, the result of `direct_logit_attribution`.
        effects: the result of `component_effects` for the same answers.

    Returns:
        One row per method: `method`, `total` of the shares (a bias included), `logit`, `adds_up`, `error` (the largest
        difference between share and measured effect, over the largest effect), `predicts`.
    """
    rows = []
    measured = components(effects)["effect"]
    for method, table in shares.items():
        total = float(table.loc[table["component"] != "remainder", "contribution"].sum())
        logit = float(table.attrs["logit"])
        error = float((components(table)["contribution"] - measured).abs().max() / measured.abs().max())
        row = {"method": method, "total": total, "logit": logit}
        row |= {"adds_up": abs(total - logit) <= ADDS_UP * max(1.0, abs(logit))}
        rows.append(row | {"error": error, "predicts": error <= PREDICTS})
    return pd.DataFrame(rows)
