"""The kernels' times on a GPU: the numbers of docs/extend/kernel.md.

texts   every text by the name that marks it in the page
"""

from __future__ import annotations

from functools import cache

import pandas as pd
from findings import ROOT, plain
from normlab_kernels.experimental.linear_choices import FUSION_WINS
from tables import table

DEVICE = "nvidia_h200"
PEERS = {
    "normlab": "ours",
    "torch": "PyTorch",
    "liger": "Liger",
    "quack": "QuACK",
    "compile": "torch.compile",
}
FUNCTIONS = ("rms_norm", "add_rms_norm", "layer_norm", "bhyt", "bhyt_carried", "add_bhyt", "dyt", "derf")
FEW = 16  # rows, in decoding
ROWS, WIDTHS, WIDE = 16_384, (2048, 4096, 8192), 8192


def texts() -> dict[str, str]:
    launches = times("launch").query("width == @WIDE").set_index(["function", "launch"])["microseconds"].unstack()
    gained = launches["stages=2"] / launches[""]
    about = times("rows").iloc[0]
    return {
        "kernel_software": f"PyTorch {about['torch']}, Triton {about['triton']}",
        "table_of_shares": _shares(),
        "compiled_carried": plain(_own("bhyt_carried", "forward", "compile").loc[WIDTHS[0], "share_of_copy"]),
        "compiled_isru": plain(_own("isru", "forward", "compile").loc[WIDTHS[0], "share_of_copy"]),
        "share_seed_norm": _range("seed_norm", "backward"),
        "share_row_moments": _range("row_moments", "forward"),
        "share_rms_forward": _range("rms_norm", "forward"),
        "share_rms_backward": _range("rms_norm", "backward"),
        "host_ours": f"{_own('rms_norm', 'forward')['host_microseconds'].median():.0f}",
        "host_torch": f"{_own('rms_norm', 'forward', 'torch')['host_microseconds'].median():.0f}",
        "staged_gain": f"{plain(gained.min(), 1)} to {plain(gained.max(), 1)}",
        **_decode(),
        **{f"fused_gain_{win.width}": _fused(win.width) for win in FUSION_WINS},
    }


@cache
def times(section: str) -> pd.DataFrame:
    """A table of kernels/benchmarks/run.py."""
    return pd.read_csv(ROOT / "data" / "bench" / f"{section}_{DEVICE}.csv", dtype={"launch": "string"}).fillna(
        {"launch": ""}
    )


def _own(function: str, direction: str, peer: str = "normlab") -> pd.DataFrame:
    """A peer's rows of a function and pass, by width."""
    asked = "rows == @ROWS and function == @function and `pass` == @direction and peer == @peer"
    return times("rows").query(asked).set_index("width").loc[lambda rows: rows.index.isin(WIDTHS)]


def _range(function: str, direction: str) -> str:
    share = _own(function, direction)["share_of_copy"]
    return f"{plain(share.min())} to {plain(share.max())}"


def _decode() -> dict[str, str]:
    """The authors' decoding kernel beside ours, at few rows: its time over ours, and how far both are from the
    formula, of its largest number."""
    rows = times("decode").query("function in ('bhyt', 'add_bhyt') and rows <= @FEW")
    by = rows.set_index(["function", "rows", "peer"])
    ratio = by["microseconds"].unstack()["released"] / by["microseconds"].unstack()["normlab"]
    errors = by["error"].unstack().max()
    return {
        "decode_time": f"{plain(ratio.min())} to {plain(ratio.max())}",
        "decode_error": f"{errors['released']:.4f}",
        "decode_error_ours": f"{errors['normlab']:.4f}",
    }


def _shares() -> str:
    """Share of the copy rate at each width: a row per function and pass, a column per peer."""
    share = times("rows").query("rows == @ROWS").set_index(["function", "pass", "peer", "width"])["share_of_copy"]
    lines = []
    for name in FUNCTIONS:
        for direction in ("forward", "backward"):
            cells = [[share.get((name, direction, peer, width)) for width in WIDTHS] for peer in PEERS]
            texts = (" ".join("–" if pd.isna(value) else plain(value) for value in own) for own in cells)
            lines.append((f"`{name}`", direction, *("" if set(text) <= {"–", " "} else text for text in texts)))
    return table(("function", "pass", *PEERS.values()), lines)


def _fused(width: int) -> str:
    """The least and the largest gain of the fused product over addmm and the norm, from the rows of its entry on."""
    (win,) = (win for win in FUSION_WINS if win.width == width)
    here = times("linear").query("width == @width and rows >= @win.rows").set_index("rows")
    apart = here.loc[here["function"] == "addmm + bhyt_carried", "microseconds"]
    fused = here[here["function"] == "linear_add_bhyt"].groupby("launch")["microseconds"]
    gains = min((apart / own for _, own in fused), key=lambda ratio: -ratio.mean())
    return f"{plain(gains.min())} to {plain(gains.max())}"
