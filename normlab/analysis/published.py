"""Values that papers published, as one table: `load_published()` reads the CSV files of `data/paper/`.

Every row names its paper, arXiv number and place (table or figure), so a figure that shows a published value can say
where it is from. A value read off a plot carries its relative reading error and is drawn with an error bar.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

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

_PACKAGE = Path(__file__).resolve().parents[1]
# A checkout keeps the files in data/paper; a wheel carries the same files inside the package.
_PLACES = (_PACKAGE.parent / "data" / "paper", _PACKAGE / "paper_values")


def load_published(path: str | Path | None = None) -> pd.DataFrame:
    """All published values, one a row.

    Args:
        path: a folder of CSV files with the columns of `COLUMNS`; by default those that come with normlab.

    Returns:
        Columns: `paper arxiv where` (source), `model depth tokens` (what was trained; empty where the paper does not
        say), `method` (the paper's name), `scheme` (normlab's name, empty when there is none), `metric layer value`,
        `relative_error` (of reading a plot; empty for a printed number), `note`. Layer 0 is the embeddings, blocks are
        1..L.

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


def _read(file: Path) -> pd.DataFrame:
    table = pd.read_csv(file, dtype=COLUMNS)
    if list(table.columns) != list(COLUMNS):
        raise NormlabError(f"{file} has columns {', '.join(table.columns)}: expected {', '.join(COLUMNS)}")
    return table
