"""Tables of kernels' times and builds, and whether memory traffic explains the times.

Times are those of kernels/benchmarks/run.py: of single calls in rows_*.csv, of whole training steps and generated
tokens against a baseline in step_*.csv and generate_*.csv. Builds are those of aot.csv.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from normlab_kernels.experimental.linear_choices import FusionWin

from normlab.errors import NormlabError

OWN = "normlab"  # the peer that is ours
SAME_TIME = 1.5  # calls of the same bytes count as equally quick up to this factor: a busy machine's noise
COPY_NOISE = 1.02  # shares of the copy rate up to this are one: a copy's own time varies
NEAR_COPY = 0.5  # share of the copy rate above which traffic counts as what sets the time
_CALL = ["device", "function", "peer", "pass", "rows", "width", "dtype"]
_BUILD = ["target", "function", "direction", "width", "dtype"]
# Numbers that a call reads and writes, in units of rows x width.
_FLOORS = (
    ("a norm: RMSNorm, LayerNorm, BHyT, DyT", "x -> y", 2, "x, g -> dx", 3),
    ("row moments, for the probes", "x -> 4 numbers per row", 1, "", None),
    ("residual add, then a norm, two kernels", "x, r -> s; s -> y", 5, "s, g -> ds; ds, gs -> dx", 6),
    ("residual add and a norm, fused", "x, r -> s, y", 4, "s, g, gs -> dx", 4),
    ("product; add; norm (output side)", "-> p; p, r -> h, y", 5, "", None),
    ("addmm with the residual; norm", "r -> h; h -> y", 4, "", None),
    ("product, residual and carried BHyT, fused", "r -> h, y", 3, "", None),
)
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_APART = {"forward": 5, "backward": 6, "both": 11}  # a residual add and a norm as two kernels: the third of _FLOORS


def read_times(folder: str | Path) -> pd.DataFrame:
    """Every time in `folder`, the newest of each call, with a column `shape` ("1024 x 512"): rows x width.

    Raises:
        NormlabError: no table of times there.
    """
    files = sorted(Path(folder).glob("rows_*.csv"))
    if not files:
        raise NormlabError(f"no rows_*.csv in {folder}: kernels/benchmarks/run.py --sections rows writes them")
    table = pd.concat([pd.read_csv(path, dtype={"pass": "string", "peer": "string"}) for path in files])
    table = table[table["microseconds"].notna()].drop_duplicates(_CALL, keep="last", ignore_index=True)
    return table.assign(shape=table["rows"].astype(str) + " x " + table["width"].astype(str))


def read_ratios(folder: str | Path) -> pd.DataFrame:
    """Models timed in turn with a baseline: `device section tokens call peer against ratio low high steps`.

    No row where nothing was timed.
    """
    names = {"rows": "tokens", "function": "call", "ratio_low": "low", "ratio_high": "high"}
    columns = ["device", "section", "tokens", "call", "peer", "against", "ratio", "low", "high", "steps"]
    files = [path for section in ("step", "generate") for path in sorted(Path(folder).glob(f"{section}_*.csv"))]
    tables = [pd.read_csv(path).dropna(subset=["ratio"]).rename(columns=names)[columns] for path in files]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def read_builds(folder: str | Path) -> pd.DataFrame:
    """One row per kernel as it is launched: the newest of each, without launches that were only tried.

    Raises:
        NormlabError: no table of builds there.
    """
    path = Path(folder) / "aot.csv"
    if not path.is_file():
        raise NormlabError(f"no aot.csv in {folder}: python -m normlab_kernels.ahead_of_time --out writes it")
    table = pd.read_csv(path)
    if "launch" in table:
        table = table[table["launch"].isna()]
    return table.drop_duplicates(_BUILD, keep="last", ignore_index=True)


def floors(tokens: int, width: int, gigabytes_per_second: float) -> pd.DataFrame:
    """Bytes that each call must move in 16 bits, and how long that takes at a copy rate.

    Columns `call`, and for each direction what it `moves`, how many units `u` of tokens x width x 2 bytes, and `us`.
    """
    table = pd.DataFrame(_FLOORS, columns=["call", "forward moves", "forward u", "backward moves", "backward u"])
    for side in ("forward", "backward"):
        seconds = table[f"{side} u"] * tokens * width * 2 / (gigabytes_per_second * 1e9)
        table[f"{side} us"] = (seconds * 1e6).round(1)
    return table


def moved(times: pd.DataFrame) -> dict[str, float]:
    """Megabytes that a call of `times` (rows of one call, shape and pass) must move.

    By name: as "one call", and as "two kernels" where it joins the residual add to a norm. Nothing for no rows.
    """
    if times.empty:
        return {}
    first = times.iloc[0]
    found = {"one call": float(first["floor_bytes"]) / 1e6}
    if str(first["function"]).startswith("add_"):
        u = int(first["rows"]) * int(first["width"]) * _BYTES[str(first["dtype"])]
        found["two kernels"] = _APART[str(first["pass"])] * u / 1e6
    return found


def same_bytes(times: pd.DataFrame) -> pd.DataFrame:
    """Our calls, forward and backward together, that must move the same bytes: the quickest and the slowest.

    One row per device, shape and number of bytes. `factor`: the slowest time over the quickest.
    """
    own = _own(times)
    found = []
    for (device, shape, size), calls in own.groupby(["device", "shape", "floor_bytes"], sort=False):
        quick, slow = calls.loc[calls["microseconds"].idxmin()], calls.loc[calls["microseconds"].idxmax()]
        if len(calls) > 1:
            row = {"device": device, "shape": shape, "MB": size / 1e6}
            row |= {"quickest": quick["function"], "its us": quick["microseconds"]}
            row |= {"slowest": slow["function"], "its time, us": slow["microseconds"]}
            found.append(row | {"factor": slow["microseconds"] / quick["microseconds"]})
    return pd.DataFrame(found)


def traffic(times: pd.DataFrame) -> pd.DataFrame:
    """Does the traffic set the time? One row per device.

    `below_floor` of `times` are quicker than a copy of what must move, by more than `COPY_NOISE`: the count is wrong or
    a cache helped.
    `share_low` to `share_high`: our share of the copy rate. `factor`: the largest between calls of the same bytes.
    `sets_time`: that factor is below `SAME_TIME`, and every share above `NEAR_COPY`.
    """
    pairs, found = same_bytes(times), []
    for device, rows in times.groupby("device"):
        share = _own(rows)["share_of_copy"]
        factor = float(pairs.loc[pairs["device"] == device, "factor"].max()) if len(pairs) else float("nan")
        row = {"device": device, "times": len(rows), "below_floor": int((rows["share_of_copy"] > COPY_NOISE).sum())}
        row |= {"share_low": share.min(), "share_high": share.max(), "factor": factor}
        found.append(row | {"sets_time": bool(factor < SAME_TIME and share.min() > NEAR_COPY)})
    return pd.DataFrame(found)


def against_peers(times: pd.DataFrame, function: str, others: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Our time of `function`, forward and backward, over that of each (function, peer).

    One row per device and shape, one column per peer; missing where one was not timed.
    """
    both = times[times["pass"] == "both"]
    wide = both.pivot_table("microseconds", ["device", "shape"], ["function", "peer"], sort=False)
    missing = pd.Series(float("nan"), wide.index)
    ratios = {
        f"{of}, {peer}": wide.get((function, OWN), missing) / wide.get((of, peer), missing) for of, peer in others
    }
    return pd.DataFrame(ratios, index=wide.index).reset_index()


def findings(times: pd.DataFrame, builds: pd.DataFrame, fusion_wins: Sequence[FusionWin]) -> pd.DataFrame:
    """Verdicts on each part of the claim: columns `claim on found verdict`.

    A verdict is "holds", "does not hold", "not tested" or "not shown".

    Args:
        fusion_wins: where the fused product was timed and won (`linear_choices.FUSION_WINS`).
    """
    rows = []
    judged = traffic(times)
    for row in judged.itertuples():
        share = f"{row.share_low:.0%} to {row.share_high:.0%} of the copy rate"
        if math.isnan(row.factor):
            rows.append(
                ("the bytes set the time", row.device, f"no two calls move the same bytes; {share}", "not tested")
            )
            continue
        spread = f"up to {row.factor:.1f} times the time for the same bytes"
        expected = "" if row.sets_time or not row.device.startswith("cpu") else ", nor is it claimed of a CPU"
        rows.append(("the bytes set the time", row.device, f"{spread}; {share}", _holds(row.sets_time) + expected))
        under = f"{row.below_floor} of {row.times} times"
        rows.append(("no call is quicker than its floor", row.device, f"{under} are", _holds(row.below_floor == 0)))
    if judged["device"].str.startswith("cpu").all():
        rows.append(("the bytes set the time", "a GPU", "nothing was timed on one", "not tested"))
    won = "; ".join(f"{win.device}: {win.width} x {win.inner} from {win.rows} rows on" for win in fusion_wins)
    found = (won, "holds") if won else ("the table of where it won is empty", "not shown")
    rows.append(("the fused product beats addmm and a norm", "a GPU", *found))
    spilled, targets = int((builds["spilled_bytes"] > 0).sum()), ", ".join(sorted(set(builds["target"])))
    rows.append(
        ("no kernel spills registers", f"compiled for {targets}", f"{spilled} of {len(builds)} do", _holds(not spilled))
    )
    return pd.DataFrame(rows, columns=["claim", "on", "found", "verdict"])


def _holds(condition: bool) -> str:
    return "holds" if condition else "does not hold"


def _own(times: pd.DataFrame) -> pd.DataFrame:
    return times[(times["pass"] == "both") & (times["peer"] == OWN)]
