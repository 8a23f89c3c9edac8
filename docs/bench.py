"""Tables and counts of docs/compare.md, docs/spikes.md, docs/beside.md and docs/extend/kernel.md, made from data/bench.

texts   every text by the name that marks it in a page
"""

from __future__ import annotations

from functools import cache

import pandas as pd
from normlab_kernels.experimental.linear_choices import FUSION_WINS
from tables import ROOT, plain, table

BENCH = ROOT / "data" / "bench"
DEVICE = "nvidia_h200"
PEERS = {
    "normlab": "ours",
    "torch": "PyTorch",
    "torch with QuACK": "PyTorch's QuACK",
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
    software = times("rows")[["torch", "triton"]].drop_duplicates()
    return {
        "kernel_software": "; ".join(f"PyTorch {torch}, Triton {triton}" for torch, triton in software.to_numpy()),
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
        **instabilities(),
        **{f"costs_{name.replace(' ', '_')}": _beside(rows) for name, rows in _bench("probes_cpu").groupby("pass")},
    }


def _bench(name: str) -> pd.DataFrame:
    return pd.read_csv(BENCH / f"{name}.csv")


@cache
def times(section: str) -> pd.DataFrame:
    """A table of kernels/benchmarks/run.py."""
    return pd.read_csv(BENCH / f"{section}_{DEVICE}.csv", dtype={"launch": "string"}).fillna({"launch": ""})


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
    """Share of the copy rate at each width: a row per function and pass, a column per peer that was measured."""
    rows = times("rows").query("rows == @ROWS").dropna(subset="share_of_copy")
    share = rows.set_index(["function", "pass", "peer", "width"])["share_of_copy"]
    peers = {peer: name for peer, name in PEERS.items() if peer in set(rows["peer"])}
    lines = []
    for name in FUNCTIONS:
        for direction in ("forward", "backward"):
            cells = [[share.get((name, direction, peer, width)) for width in WIDTHS] for peer in peers]
            texts = (" ".join("–" if pd.isna(value) else plain(value) for value in own) for own in cells)
            lines.append((f"`{name}`", direction, *("" if set(text) <= {"–", " "} else text for text in texts)))
    return table(("function", "pass", *peers.values()), lines)


def _fused(width: int) -> str:
    """The least and the largest gain of the fused product over addmm and the norm, from the rows of its entry on."""
    (win,) = (win for win in FUSION_WINS if win.width == width)
    here = times("linear").query("width == @width and rows >= @win.rows").set_index("rows")
    apart = here.loc[here["function"] == "addmm + bhyt_carried", "microseconds"]
    fused = here[here["function"] == "linear_add_bhyt"].groupby("launch")["microseconds"]
    gains = min((apart / own for _, own in fused), key=lambda ratio: -ratio.mean())
    return f"{plain(gains.min())} to {plain(gains.max())}"


def _beside(rows: pd.DataFrame) -> str:
    """Time over a bare pass and extra memory of every case that each depth has."""
    rows = rows[rows["cpu_ratio"].notna() & (rows["case"] != "bare")]
    depths = sorted(rows["depth"].unique())
    found = rows.set_index(["case", "depth"])

    def cell(case: str, depth: int) -> str:
        if (case, depth) not in found.index:
            return ""
        row = found.loc[(case, depth)]
        return f"{row['cpu_ratio']:.2f}, {max(0, row['extra_peak_mib']):,.0f} MiB"

    lines = [(case, *(cell(case, depth) for depth in depths)) for case in dict.fromkeys(rows["case"])]
    return table(("", *(f"{depth} blocks" for depth in depths)), lines)


def instabilities() -> dict[str, str]:
    """Counts of the layers that `explain` names, of the half "test". The other half chose the rule, and which kinds of
    fault are slow: those that its losses showed 20 steps after they began or later."""
    runs = _bench("instabilities")
    runs["lead"] = runs["loss_step"] - runs["named_step"]
    runs["right"] = runs["layer"] == runs["block"]
    runs["after"] = runs["loss_step"] - runs["begins"]
    faults = runs[(runs["kind"] != "quiet") & (runs["half"] == "test")]
    of_block, of_model = faults[faults["block"].notna()], faults[faults["block"].isna()]
    soonest = runs[runs["half"] == "development"].groupby("kind")["after"].min()
    slow, named = of_block[of_block["kind"].map(soonest) >= 20], of_block[of_block["named_step"].notna()]
    rows = []
    for kind, part in faults.groupby("kind", sort=False):
        right = "-" if part["block"].isna().all() else f"{part['right'].sum()} of {part['named_step'].count()}"
        after, lead = ([plain(x, 0) for x in part[name].dropna()] for name in ("after", "lead"))
        rows.append((f"`{kind}`", ", ".join(after) or "not", ", ".join(lead) or "not", right))
    quiet = runs[runs["kind"] == "quiet"].groupby("half")[["steps", "alarms"]].sum()
    return {
        "unstable_runs": f"{len(faults)}",
        "unstable_seeds": f"{faults['seed'].min()} to {faults['seed'].max()}",
        "unstable_kinds": f"{slow['kind'].nunique()}",
        "unstable_share": f"{100 * (slow['right'] & (slow['lead'] >= 20)).mean():.0f}%",
        "unstable_slow": f"{len(slow)}",
        "unstable_in_time": f"{(slow['right'] & (slow['lead'] >= 20)).sum()}",
        "unstable_of_block": f"{len(of_block)}",
        "unstable_named": f"{len(named)}",
        "unstable_right": f"{named['right'].sum()}",
        "unstable_of_model": f"{len(of_model)}",
        "unstable_early": f"{(of_model['lead'] >= 20).sum()}",
        "quiet_steps": f"{quiet.loc['test', 'steps']:,}",
        "quiet_alarms": plain(quiet.loc["test", "alarms"], 0),
        "table_of_instabilities": table(
            ("fault", "the loss shows it after", "named before that by", "right layer, of those named"), rows
        ),
    }
