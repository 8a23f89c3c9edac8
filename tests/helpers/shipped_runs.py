"""The shipped runs, read once in a process: nobody changes them."""

from functools import cache
from pathlib import Path

import pandas as pd

import normlab

DATA = Path(__file__).parents[2] / "data"


@cache
def shipped_runs(folder: str) -> pd.DataFrame:
    """The table of the runs of data/FOLDER that leave their scheme's model as it is."""
    return normlab.load_runs(DATA / folder, variants=False)
