"""A sweep over the gain g = lambda/kappa of a bounded norm and its control without the bound.

A norm gamma * f(g * x/rms(x)) with f'(0) = 1 has the slope gamma0 * g for small inputs. Runs with equal products start
alike. Then g alone sets how far inputs reach into f.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from normlab.analysis.claims import shown
from normlab.analysis.compare import compare_variants
from normlab.analysis.selection import title_of
from normlab.analysis.verdicts import DIFFERENT
from normlab.probes.metrics import metric_row

FIELDS = ["width", "outlier_channels", "gamma0", "g"]  # in which conditions differ
GROUPS = ("g · γ₀ fixed", "larger gain", "planted outliers", "another width")
PANELS = {  # quantity -> axis
    "held-out loss (nats)": "linear",
    "L2 norm after the last layer": "log",
    "largest |z|": "log",
    "share of |tanh z| > 0.95": "log",
}
LEAST = 1e-6  # a share of zero is drawn here, on a log axis


def with_gain(configs: pd.DataFrame, kappa: float) -> pd.DataFrame:
    """`normlab.load_configs` with a column `g` = lam_input / kappa; `kappa` is that of runs that do not set it."""
    own = configs["kappa"].fillna(kappa) if "kappa" in configs else kappa
    return configs.assign(g=configs["lam_input"] / own)


def reach(g: float, widths: Sequence[int]) -> pd.DataFrame:
    """How far into the tanh a model of each width can drive an input z = g x/rms(x): |z| is at most g sqrt(width).

    Returns:
        Columns `width largest_z tanh_z bends`; `bends` is tanh z / z, 1 where the tanh does nothing.
    """
    table = pd.DataFrame({"width": list(widths)})
    table["largest_z"] = g * np.sqrt(table["width"])
    table["tanh_z"] = np.tanh(table["largest_z"])
    return table.assign(bends=table["tanh_z"] / table["largest_z"])


def base_of(configs: pd.DataFrame) -> tuple[int, float]:
    """Width and small-signal slope of the sweep's base condition.

    The width is the least one. The slope is the smallest g * gamma0 of its runs without outliers.
    """
    width = int(configs["width"].min())
    plain = configs[configs["outlier_channels"].eq(0) & configs["width"].eq(width)]
    return width, float((plain["g"] * plain["gamma0"]).min())


def along_gain(grid: pd.DataFrame, configs: pd.DataFrame, schemes: Sequence[str]) -> pd.DataFrame:
    """The quantities of `PANELS` after training, of all runs with the slope of the base condition.

    Args:
        grid: the table of `normlab.load_runs`.
        configs: of `with_gain`, for the same runs.

    Returns:
        Columns `panel scheme setting seed value`, one row per run and quantity. The setting is g. z = g x/rms(x) is
        that of the norms before attention, with or without a bound after it.
    """
    width, slope = base_of(configs)
    same = (configs["g"] * configs["gamma0"] - slope).abs() < 1e-9
    base = configs[same & configs["outlier_channels"].eq(0) & configs["width"].eq(width)]
    base = base[base["scheme"].isin(schemes)]
    rows = grid[grid["run"].isin(base.index) & grid["step"].eq(configs["steps"].max()) & grid["mask"].eq("all")]
    depth = int(base["depth"].iloc[0])
    at_z = rows[rows["site"] == "attn_norm_in"]
    last = rows[(rows["site"] == "block_out") & (rows["layer"] == depth)]
    found = (
        base["eval_loss"],
        last[last["metric"] == "token_l2_mean"].groupby("run")["value"].mean(),
        at_z[at_z["metric"] == "tanh_input_max"].groupby("run")["value"].max(),
        at_z[at_z["metric"] == "saturation_95"].groupby("run")["value"].mean().clip(lower=LEAST),
    )
    about = base[["scheme", "g", "seed"]].rename(columns={"g": "setting"})
    tables = [
        about.join(values.rename("value"), how="inner").assign(panel=panel)
        for panel, values in zip(PANELS, found, strict=True)
    ]
    return pd.concat(tables)[["panel", "scheme", "setting", "seed", "value"]]


def conditions(grid: pd.DataFrame, configs: pd.DataFrame, a: str, b: str, metric: str = "loss") -> pd.DataFrame:
    """Scheme a against scheme b under each condition of the sweep, paired by seed, judged as one family.

    Args:
        configs: of `with_gain`.

    Returns:
        The columns of `normlab.compare_variants`, with `condition` (the runs' settings) and `group` (one of `GROUPS`),
        in the order of the groups and of g.
    """
    width, slope = base_of(configs)
    found = compare_variants(grid, configs, a, b, FIELDS, metric)

    def group(row: pd.Series) -> int:
        if row["width"] != width:
            return 3
        return 2 if row["outlier_channels"] else int(abs(row["g"] * row["gamma0"] - slope) > 1e-9)

    def name(row: pd.Series) -> str:
        outliers = f", {int(row['outlier_channels'])} outliers" if row["outlier_channels"] else ""
        wide = f", width {int(row['width'])}" if row["width"] != width else ""
        return f"g = {row['g']:g}, γ₀ = {row['gamma0']:g}{outliers}{wide}"

    place = found.apply(group, axis=1)
    found = found.assign(place=place, group=[GROUPS[at] for at in place], condition=found.apply(name, axis=1))
    return found.sort_values(["place", "g"], kind="stable", ignore_index=True).drop(columns="place")


def found(tables: Sequence[pd.DataFrame]) -> str:
    """In a sentence: under how many conditions the two schemes differ, in each of the tables of `conditions`."""
    counts = [
        f"in {metric_row(rows['metric'].iloc[0]).label} under {rows['verdict'].eq(DIFFERENT).sum()} of {len(rows)}"
        for rows in tables
    ]
    a, b = (title_of(tables[0][side].iloc[0]) for side in ("a", "b"))
    return f"{a} differs from {b} {' and '.join(counts)} conditions of the grid."


def verdicts(found: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables of `conditions`, of one metric each, side by side: one row per condition, two columns per metric."""
    parts = {metric_row(rows["metric"].iloc[0]).label: shown(rows) for rows in found}
    first = found[0]
    table = pd.DataFrame({("", "group"): first["group"], ("", "condition"): first["condition"]})
    for (label, part), rows in zip(parts.items(), found, strict=True):
        if list(rows["condition"]) != list(first["condition"]):
            raise ValueError(f"the conditions of {label} differ from those of the first table")
        kind = "ratio" if "ratio" in part else "difference"
        table[(label, f"{kind} [95% interval]")] = part[kind] + " " + part["95% interval"]
        table[(label, "verdict")] = part["verdict"]
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table
