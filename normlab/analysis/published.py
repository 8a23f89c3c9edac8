"""Values that papers published, as one table.

Every row names its paper, arXiv number and table or figure. A value read off a plot has a relative reading error and is
drawn with an error bar.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from normlab.analysis.quantities import last_values
from normlab.analysis.selection import Selection, choose, in_order
from normlab.analysis.verdicts import differences
from normlab.errors import NormlabError

COLUMNS = {
    "paper": "string",
    "arxiv": "string",
    "where": "string",
    "model": "string",
    "depth": "Int64",
    "tokens": "float64",
    "method": "string",
    "scheme": "string",
    "metric": "string",
    "layer": "Int64",
    "value": "float64",
    "relative_error": "float64",
    "note": "string",
}

# Quantity that papers and runs both have -> the metric of a run.
SHARED = {"perplexity": "loss", "token_l2_mean": "token_l2_mean", "feature_var_mean": "feature_var_mean"}
HERE = "here"
PRINTED = ("train_loss", "eval_loss", "perplexity", "perplexity_finetuned", "accuracy_mean", "accuracy_mean_finetuned")

_PACKAGE = Path(__file__).resolve().parents[1]
# A checkout keeps the files in data/paper; a wheel carries the same files inside the package.
_PLACES = (_PACKAGE.parent / "data" / "paper", _PACKAGE / "paper_values")


def load_published(path: str | Path | None = None) -> pd.DataFrame:
    """All published values, one per row.

    Args:
        path: a folder of CSV files with the columns of `COLUMNS`; by default those that come with normlab.

    Returns:
        Columns `paper arxiv where model depth tokens method scheme metric layer value relative_error note`. `method` is
        the paper's name, `scheme` normlab's. `relative_error` is that of reading a plot. Cells are empty where a paper
        does not say, or normlab has no such scheme. Layer 0 is what enters block 1, blocks are 1..L.

    Raises:
        NormlabError: no such folder, no CSV in it, or a file whose columns are not these.
    """
    folder = Path(path) if path is not None else next((p for p in _PLACES if p.is_dir()), None)
    if folder is None or not folder.is_dir():
        where = folder if folder is not None else _PLACES[0]
        raise NormlabError(f"no published values at {where}: pass the path of a checkout's data/paper folder")
    files = sorted(folder.glob("*.csv"))
    if not files:
        raise NormlabError(f"no CSV file in {folder}: pass the path of a checkout's data/paper folder")
    tables = [_read(file) for file in files]
    return pd.concat(tables, ignore_index=True)


def printed(published: pd.DataFrame) -> list[pd.DataFrame]:
    """The papers' losses, perplexities and accuracies, a table per paper: a row per model, a column per method."""
    rows = published[published["metric"].isin(PRINTED)].fillna({"note": ""})
    place = ["where", "model", "metric", "note"]
    wide = {
        paper: own.pivot_table(index=place, columns="method", values="value", sort=False)
        for paper, own in rows.groupby("paper", sort=False)
    }
    return [table.rename_axis(columns=paper) for paper, table in wide.items()]


def ratios_to(base: str, runs: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Every scheme over scheme `base` in the same model: published ratios, and those of these runs.

    Perplexity is exp(loss), so its ratio is exp of the difference in held-out loss. Ours are paired by seed, with the
    interval of `normlab.analysis.verdicts.differences`. Sizes after the last layer are compared at the learning rate
    that all schemes of a depth share. Perplexities are compared at each scheme's own rate, as in the papers.

    Returns:
        Columns `quantity source model depth scheme ratio low high seeds`. source: "here", or paper and table. model:
        "depth 16", or the paper's. low, high: our interval, or the reading error's for values read off a plot; else
        missing.
    """
    known = published[published["metric"].isin(SHARED) & published["scheme"].notna()]
    theirs = [_their_ratios(rows, base) for _, rows in known.groupby(["paper", "where", "model", "metric"])]
    own = choose(runs, depth=None)
    one_rate = own.at_one_rate()
    ours = [_our_ratios(q, metric, own if metric == "loss" else one_rate, base) for q, metric in SHARED.items()]
    tables = [rows for rows in (*ours, *theirs) if len(rows)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _their_ratios(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    own = rows[rows["scheme"] == base]
    if len(own) != 1:
        return pd.DataFrame()
    first, others = own.iloc[0], rows[rows["scheme"] != base]
    ratio, error = others["value"] / first["value"], others["relative_error"]
    table = others.reindex(columns=["model", "depth", "scheme"])
    table = table.assign(quantity=first["metric"], ratio=ratio, seeds=pd.NA)
    table["source"] = others["paper"] + ", " + others["where"]
    return table.assign(low=ratio * (1 - error) / (1 + error), high=ratio * (1 + error) / (1 - error))


def _our_ratios(quantity: str, metric: str, chosen: Selection, base: str) -> pd.DataFrame:
    values = last_values(chosen, metric).dropna(subset="value")
    others = [name for name in in_order(values["scheme"]) if name != base]
    found = pd.concat([differences(values, name, base, metric) for name in others]) if others else pd.DataFrame()
    if found.empty:
        return found
    ends = found[["estimate", "low", "high"]].to_numpy(float)
    found[["ratio", "low", "high"]] = np.exp(ends) if metric == "loss" else ends
    found["model"] = [f"depth {depth}" for depth in found["depth"]]
    found = found.rename(columns={"a": "scheme"}).assign(quantity=quantity, source=HERE)
    columns = ["scheme", "seeds", "quantity", "source", "ratio", "low", "high", "model", "depth"]
    return found.loc[found["ratio"].notna(), columns]


def _read(file: Path) -> pd.DataFrame:
    table = pd.read_csv(file, dtype=COLUMNS)
    if list(table.columns) != list(COLUMNS):
        raise NormlabError(f"{file} has columns {', '.join(table.columns)}: expected {', '.join(COLUMNS)}")
    return table
