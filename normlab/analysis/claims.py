"""What the papers claim of depth, asked of runs: one function a question, one table an answer, a verdict in every row.

learned       which runs came below the models that only count
growth        how many times larger the stream is after the last block than after the first
depth_gain    what more blocks buy in loss, scheme by scheme
depth_use     what it costs to skip a deep block, scheme by scheme
shown         any of these, or of `normlab.compare`, as a table to look at

A scheme's own mean over its seeds has the interval mean +- t(level, df) * sd / sqrt(seeds); sd is pooled over the
schemes of a depth, each around its own mean, so a seed that moves all schemes alike counts as noise here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from normlab.analysis.compare import last_values
from normlab.analysis.selection import choose, in_order, title_of
from normlab.analysis.verdicts import DIFFERENT, in_words, judged, t_quantile
from normlab.errors import NormlabError
from normlab.probes.metrics import metric_row

DEEP = 0.5  # the deep blocks are the last half of them


def learned(runs: pd.DataFrame) -> pd.DataFrame:
    """How many runs came below the trigram, a row a scheme and depth.

    Returns:
        Columns `scheme depth seeds below_trigram eval_loss trigram_loss`: the loss is the mean over the seeds, in
        nats a token; a diverged run's is infinite. `trigram_loss` is missing where runs do not know it; none is below
        it then.
    """
    about = choose(runs, depth=None).runs
    about = about.assign(below=about["eval_loss"] < about["trigram_loss"])
    found = about.groupby(["scheme", "depth"]).agg(
        seeds=("seed", "nunique"),
        below_trigram=("below", "sum"),
        eval_loss=("eval_loss", "mean"),
        trigram_loss=("trigram_loss", "mean"),
    )
    order = {name: place for place, name in enumerate(in_order(about["scheme"]))}
    found = found.reset_index()
    return found.sort_values(
        ["scheme", "depth"], key=lambda c: c.map(order) if c.name == "scheme" else c, ignore_index=True
    )


def growth(
    runs: pd.DataFrame, metric: str = "token_l2_mean", step: int | None = None, level: float = 0.95
) -> pd.DataFrame:
    """Layer L over layer 1 after training, a row a scheme and depth: geometric means over the seeds.

    Returns:
        Columns `depth a metric kind seeds estimate low high sd df p p_holm margin verdict`, and `first_half`: the share
        of the growth's logarithm that the first half of the blocks makes (0.5: a constant factor a block).

    Raises:
        NormlabError: a metric that is not compared as a ratio.
    """
    if not metric_row(metric).is_ratio:
        raise NormlabError(f"{metric} is not a positive size: growth is a ratio")
    chosen = choose(runs, depth=None, same_rate=True)
    values = []
    for depth in chosen.depths:
        at = {layer: last_values(chosen, metric, layer=layer, step=step) for layer in {1, (depth + 1) // 2, depth}}
        rows = at[depth][at[depth]["depth"] == depth]
        first, half = (at[layer].set_index("run")["value"].reindex(rows["run"]) for layer in (1, (depth + 1) // 2))
        ratio = rows["value"].to_numpy() / first.to_numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.log(half.to_numpy() / first.to_numpy()) / np.log(ratio)
        values.append(rows.assign(value=ratio, first_half=share))
    table = pd.concat(values)
    halves = table.groupby(["depth", "scheme"])["first_half"].mean().rename_axis(["depth", "a"]).reset_index()
    return judged(means(table, metric, level), level).merge(halves, on=["depth", "a"])


def depth_gain(
    runs: pd.DataFrame, shallow: int | None = None, deep: int | None = None, level: float = 0.95
) -> pd.DataFrame:
    """Held-out loss at depth `shallow` minus that at depth `deep`, paired by seed: above zero, depth pays.

    Each scheme and depth at its chosen learning rate. Depths default to the shallowest and the deepest at which a
    scheme has more than one seed.

    Returns:
        The columns of `growth`, without `first_half`; a row a scheme that was run at both depths.

    Raises:
        NormlabError: no scheme was run at both.
    """
    chosen = choose(runs, depth=None)
    values = last_values(chosen, "loss")
    seeds = values.groupby(["scheme", "depth"])["seed"].nunique()
    several = sorted({depth for (_, depth), count in seeds.items() if count > 1}) or chosen.depths
    shallow, deep = several[0] if shallow is None else shallow, several[-1] if deep is None else deep
    wide = values.pivot_table(index=["scheme", "seed"], columns="depth", values="value")
    if shallow == deep or not {shallow, deep} <= set(wide.columns):
        raise NormlabError(f"no scheme was run at depths {shallow} and {deep}; there is {chosen.depths}")
    gain = (wide[shallow] - wide[deep]).dropna().rename("value").reset_index().assign(depth=deep)
    return judged(means(gain, "loss", level), level).assign(shallow=shallow)


def depth_use(experiments: pd.DataFrame, depth: int, part: str = "block", level: float = 0.95) -> pd.DataFrame:
    """Loss that skipping one block of the deeper half adds, in the mean over these blocks, a row a scheme.

    Args:
        experiments: the table of `normlab.load_experiments`.
        part: "block", "attention", "mlp", "deleted" (deleted and renumbered, as the papers prune).

    Returns:
        The columns of `depth_gain`, and `share`: the deeper half's part of what skipping adds over all blocks.

    Raises:
        NormlabError: no run of that depth was measured so.
    """
    rows = experiments[
        (experiments["metric"] == "skip_delta_loss") & (experiments["part"] == part) & (experiments["depth"] == depth)
    ]
    if rows.empty:
        raise NormlabError(f"no run of depth {depth} has skip_delta_loss of {part}")
    rows = rows.assign(deep=rows["layer"].astype(int) > (1 - DEEP) * depth)
    place = ["depth", "scheme", "seed"]
    whole = rows.groupby(place, observed=True)["value"].sum()
    half = rows[rows["deep"]].groupby(place, observed=True)["value"]
    table = pd.DataFrame({"value": half.mean(), "share": half.sum() / whole}).reset_index()
    shares = table.groupby("scheme", observed=True)["share"].mean().rename_axis("a").reset_index()
    return judged(means(table, "skip_delta_loss", level), level).merge(shares, on="a")


def means(values: pd.DataFrame, metric: str, level: float = 0.95) -> pd.DataFrame:
    """Each scheme's own mean over its seeds against no effect: 1 for ratios (geometric means), 0 for differences.

    Args:
        values: columns `depth scheme seed value`, one row a run.
        metric: its row in the metrics table says whether values are ratios.

    Returns:
        Rows for `normlab.analysis.verdicts.judged`: columns `depth a metric kind seeds estimate low high sd df p`.
    """
    from scipy.stats import t

    ratio = metric_row(metric).is_ratio
    undo = np.exp if ratio else float
    y = values["value"].astype(float)
    y = np.log(y.where(y > 0)) if ratio else y
    values = values.assign(y=y.where(np.isfinite(y)))
    found = []
    for depth, layout in values.groupby("depth"):
        groups = layout.groupby("scheme", observed=True)["y"]
        freedom = int((groups.count() - 1).clip(lower=0).sum())
        sd = math.sqrt((layout["y"] - groups.transform("mean")).pow(2).sum() / freedom) if freedom else math.nan
        for scheme in in_order(layout["scheme"]):
            own = groups.get_group(scheme).dropna()
            mean, error = own.mean(), sd / math.sqrt(len(own)) if len(own) else math.nan
            half = t_quantile(level, freedom) * error
            with np.errstate(divide="ignore", invalid="ignore"):
                p = float(2 * t.sf(np.abs(np.float64(mean) / error), freedom)) if freedom else math.nan
            found.append(
                {"depth": int(depth), "a": scheme, "metric": metric, "kind": metric_row(metric).compared}
                | {"seeds": len(own), "estimate": undo(mean), "low": undo(mean - half), "high": undo(mean + half)}
                | {"sd": sd, "df": freedom, "p": p}
            )
    return pd.DataFrame(found)


def shown(rows: pd.DataFrame, digits: int = 3, more: Sequence[str] = ()) -> pd.DataFrame:
    """A table of verdicts to look at: schemes by their titles, estimate and interval in one format, verdicts in words.

    Args:
        rows: what `judged` returned, of this module or of `normlab.compare`.
        more: further columns to show, as they are.
    """
    sign = "" if rows["kind"].eq("ratio").all() else "+"

    def number(value: float) -> str:
        return "" if math.isnan(value) else f"{value:{sign}.{digits}f}"

    table = pd.DataFrame({"depth": rows["depth"], "scheme": [title_of(name) for name in rows["a"]]})
    if "b" in rows:
        table["against"] = [title_of(name) for name in rows["b"]]
    table["ratio" if not sign else "difference"] = [number(value) for value in rows["estimate"]]
    table["95% interval"] = [
        "none" if math.isnan(row.low) else f"[{number(row.low)}, {number(row.high)}]" for row in rows.itertuples()
    ]
    table["seeds"] = rows["seeds"]
    for name in more:
        table[name] = rows[name].round(digits)
    table["verdict"] = [in_words(row) if "b" in rows else _against_none(row) for row in rows.itertuples()]
    return table.reset_index(drop=True)


def _against_none(row: Any) -> str:
    """A scheme's own mean in words: where it lies when it is told from no effect."""
    if row.verdict != DIFFERENT:
        return in_words(row)
    none = 1 if row.kind == "ratio" else 0
    return f"{'above' if row.estimate > none else 'below'} {none}"
