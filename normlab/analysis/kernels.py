"""What kernels/benchmarks/run.py timed: single norms beside a copy of the same bytes, and whole models in turns."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from normlab.errors import NormlabError

OWN = "normlab"  # the peer that is ours
_CALL = ["device", "function", "peer", "pass", "rows", "width", "dtype"]


def copy_shares(folder: str | Path) -> pd.DataFrame:
    """The share of the measured copy rate that each call reaches, forward and backward together.

    At 1 a call takes as long as a copy of the bytes that it must move.

    Args:
        folder: with rows_*.csv; the newest time of a call counts.

    Returns:
        Columns `device function peer share least most`: the geometric mean over the shapes that were timed, and its
        range.

    Raises:
        NormlabError: no table of times there.
    """
    files = sorted(Path(folder).glob("rows_*.csv"))
    if not files:
        raise NormlabError(f"no rows_*.csv in {folder}: kernels/benchmarks/run.py --sections rows writes them")
    times = pd.concat([pd.read_csv(path, dtype={"pass": "string", "peer": "string"}) for path in files])
    times = times[times["microseconds"].notna() & times["pass"].eq("both")].drop_duplicates(_CALL, keep="last")
    shares = times.groupby(["device", "function", "peer"], sort=False)["share_of_copy"]
    found = shares.agg(share=lambda own: own.prod() ** (1 / len(own)), least="min", most="max")
    return found.reset_index()


def model_ratios(folder: str | Path) -> pd.DataFrame:
    """Training steps and generated tokens of whole models, timed in turns with Pre-LN in the same kernels.

    Returns:
        Columns `device what model ratio low high tokens`: the model's time over Pre-LN's. No row where nothing was
        timed.
    """
    files = [path for what in ("step", "generate") for path in sorted(Path(folder).glob(f"{what}_*.csv"))]
    names = {"section": "what", "function": "model", "ratio_low": "low", "ratio_high": "high", "rows": "tokens"}
    columns = ["device", "what", "model", "ratio", "low", "high", "tokens"]
    tables = [pd.read_csv(path).query("peer == @OWN").dropna(subset="ratio") for path in files]
    if not tables:
        return pd.DataFrame(columns=columns)
    return pd.concat(tables, ignore_index=True).rename(columns=names)[columns]


def nearest_to_copy(shares: pd.DataFrame) -> str:
    """In a sentence: how near to a copy our kernels run on each device, the nearest and the furthest."""
    own = shares[shares["peer"] == OWN].set_index("function").groupby("device")["share"]
    parts = [
        f"on {device} at {share.min():.0%} ({share.idxmin()}) to {share.max():.0%} ({share.idxmax()})"
        for device, share in own
    ]
    return f"Forward and backward, the norms here run {' and '.join(parts)} of the rate of a copy."
