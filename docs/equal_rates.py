"""LNS against Pre-LN at equal rates: the models of data/depth_and_rate that have 16 blocks.

texts      every text by the name that marks it in the page
compared   LNS over or minus Pre-LN: each quantity at each rate
picture    data/figures/skip_at_equal_rates.png
deep       the quantities of one run, for any folder of runs of 16 blocks
"""

from __future__ import annotations

from functools import cache

import pandas as pd
from findings import LNS, PRE_LN, ROOT, experiments, interval, manifests, runs, turned
from questions import decided

from normlab.analysis.selection import summarize
from normlab.analysis.verdicts import differences, judged
from normlab.export import save_images
from normlab.figures import by_layer

FOLDER = "depth_and_rate"
LOW, HIGH = 0.004, 0.008
# Quantity -> the metric that says whether it is compared as a ratio.
QUANTITIES = {
    "loss": "loss",
    "size": "token_l2_mean",
    "variance": "feature_var_mean",
    "growth": "feature_var_mean",
    "angle": "angular_distance",
    "jacobian": "jacobian_identity",
    "skip": "skip_delta_loss",
}


def texts() -> dict[str, str]:
    made = {
        f"lns_{quantity}_{name}": interval(row, 3 if quantity == "angle" else 2, sign=row["kind"] == "difference")
        for quantity in ("loss", "size", "angle", "jacobian", "skip")
        for name, row in (("low", compared().loc[(quantity, LOW)]), ("high", compared().loc[(quantity, HIGH)]))
    }
    in_bfloat16 = sum(manifest["config"]["dtype"] == "bfloat16" for manifest in manifests(FOLDER))
    return made | {
        "lns_skip_low_less": interval(turned(compared().loc[("skip", LOW)])),
        "lns_lead_equal": interval(turned(decided("A1").iloc[0])),
        "equal_bfloat16": f"{in_bfloat16} of {len(manifests(FOLDER))}",
    }


@cache
def compared() -> pd.DataFrame:
    """LNS against Pre-LN; the quantities of a rate are one family. Indexed by quantity and rate."""
    values = deep(FOLDER)
    rows = [
        judged(pd.concat([_difference(own, quantity) for quantity in QUANTITIES], ignore_index=True)).assign(
            quantity=list(QUANTITIES), lr=rate
        )
        for rate, own in values.groupby("lr")
    ]
    return pd.concat(rows).set_index(["quantity", "lr"])


def _difference(values: pd.DataFrame, quantity: str) -> pd.DataFrame:
    return differences(values.assign(value=values[quantity]), LNS, PRE_LN, QUANTITIES[quantity])


@cache
def deep(folder: str) -> pd.DataFrame:
    """Quantities of the runs of 16 blocks after training: `scheme depth seed lr`, then a column for each.

    loss: on held-out text. size, variance: L2 norm of a token and variance of the stream after block 16. growth: that
    variance over the one after block 1. Means over blocks 9 to 15: angle between a block's input and output, distance
    of the Jacobian from the identity, cost of leaving the block out.
    """
    about = summarize(runs(folder)).query("depth == 16")
    stats = runs(folder).query("run in @about.index and site == 'block_out' and mask == 'all'")
    stats = stats[stats["step"] == stats["step"].max()]
    size, variance = (
        stats[stats["metric"] == metric].pivot_table(index="run", columns="layer", values="value", observed=True)
        for metric in ("token_l2_mean", "feature_var_mean")
    )
    tried = experiments(folder).query("run in @about.index")
    angles = tried.query("metric == 'angular_distance' and other == layer + 1 and 9 <= other <= 15")
    by_block = tried.query("part == 'block' and 9 <= layer <= 15")
    means = by_block.pivot_table(index="run", columns="metric", values="value", observed=True)
    return about[["scheme", "depth", "seed", "lr"]].assign(
        loss=about["eval_loss"],
        size=size[16],
        variance=variance[16],
        growth=variance[16] / variance[1],
        angle=angles.groupby("run", observed=True)["value"].mean(),
        jacobian=means["jacobian_identity"],
        skip=means["skip_delta_loss"],
    )


def picture() -> None:
    """Draw data/figures/skip_at_equal_rates.png: the cost of leaving out each block, at the lower rate."""
    own = experiments(FOLDER)
    figure = by_layer(own[own["lr"] == LOW], "skip_delta_loss", depth=16, log=True)
    figure.update_layout(title_text=f"Loss added by leaving out one block: at rate {LOW:g} LNS's deep blocks add less")
    save_images({"skip_at_equal_rates": figure}, ROOT / "data" / "figures")


if __name__ == "__main__":
    picture()
