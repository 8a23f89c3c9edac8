"""What bounds BHyT in trained models, and what its gain does alone: tables of notebooks 02, 08 and 10."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from normlab.analysis.compare import compare
from normlab.analysis.selection import at_rate, title_of, width_of_most
from normlab.analysis.theory import chebyshev_bound
from normlab.analysis.verdicts import judged
from normlab.models import NormlabForCausalLM
from normlab.probes import record
from normlab.probes.metrics import site_label
from normlab.schemes import DEFAULT
from normlab.widgets.change import Change, ask

KAPPAS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0)
OUTLIER = 30.0  # how many times as large one feature of the embeddings is made
STAGES = ("before training", "after training")
# What is measured: what would falsify the bound, from which value on, and the value in words.
LIMITS = {
    "of_bound": ("a share of tanh inputs above 1/κ²", 1.0, "the largest is {:.2f} of it"),
    "factor": ("a carried ratio further than a factor of 2 from 1", 2.0, "the furthest is a factor of {:.2f}"),
}


def saturation(model: Any, tokens: Tensor) -> pd.DataFrame:
    """The share of tanh inputs before attention beyond lambda at each kappa of `KAPPAS`, with the exact statistic.

    Measured as the model was trained, and with one outlier feature, the case that the bound is made for.

    Args:
        tokens: (rows, length) ids.

    Returns:
        Columns `condition kappa share of_bound`: the mean over blocks, and that over Chebyshev's 1/kappa^2.
    """
    planted = copy.deepcopy(model)
    with torch.no_grad():
        planted.model.embed_tokens.weight[:, 0] *= OUTLIER
    rows = []
    for condition, subject in {"as it was trained": model, "one outlier feature": planted}.items():
        for kappa in KAPPAS:
            answer = ask(subject, tokens, Change(kappa=kappa / model.config.kappa, exact=True))
            share = float(np.mean(answer.profile("saturation", "attn_norm_in")))
            rows.append((condition, kappa, share, share / chebyshev_bound(kappa)))
    return pd.DataFrame(rows, columns=["condition", "kappa", "share", "of_bound"])


def carried(model: Any, tokens: Tensor) -> pd.DataFrame:
    """The mean square of each MLP norm's input over the one that it carries, of a fresh model and of this one.

    Returns:
        The rows of `carried_var_ratio`, with a column `stage`, one of `STAGES`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = NormlabForCausalLM(model.config).eval()
    parts = []
    for stage, subject in zip(STAGES, (fresh, model), strict=True):
        with record(subject, metrics=["carried_var_ratio"]) as rec, torch.no_grad():
            subject(input_ids=tokens)
        parts.append(rec.stats().to_pandas().query("mask == 'all'").assign(stage=stage))
    return pd.concat(parts)


def recorded(*tables: pd.DataFrame) -> pd.DataFrame:
    """What runs of BHyT recorded of the bound after training, on held-out text: one row per run, norm and block.

    Args:
        tables: of `normlab.load_runs`.

    Returns:
        Columns `run model where of_bound ratio`. `model` is its size. `of_bound` is the share of tanh inputs beyond
        lambda over Chebyshev's 1/kappa^2. `ratio` is that of `carried`, missing where a norm carries no statistic.
    """
    names = ["saturation", "saturation_bound", "carried_var_ratio"]
    rows = _after_training(tables, names)
    place = ["depth", "width", "run", "layer", "site"]
    wide = rows[rows["scheme"] == DEFAULT].pivot(index=place, columns="metric", values="value")
    found = wide.reindex(columns=names).dropna(subset=names[:2]).rename_axis(columns=None).reset_index()
    found = found.rename(columns={"carried_var_ratio": "ratio"})
    chebyshev = found["saturation_bound"] / found["ratio"].fillna(1.0)
    found["of_bound"] = found["saturation"] / chebyshev
    found["model"] = [f"{row.depth} blocks, {row.width} wide" for row in found.itertuples()]
    found["where"] = [_where(row.site, row.layer) for row in found.itertuples()]
    return found[["run", "model", "where", "of_bound", "ratio"]]


def limits(shares: pd.DataFrame, ratios: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """What would falsify the bound (`LIMITS`), and how far models are from it: one row per model and limit.

    Args:
        shares: of `saturation`, of one model; kappa 1 is left out, where the bound is 1.
        ratios: of `carried`, of the same model.
        runs: of `recorded`; models of one size have one row, of the norm that is nearest to the limit or beyond it.

    Returns:
        Columns `model measured falsified`, indexed by the limit.
    """
    after = ratios[ratios["stage"] == STAGES[1]]
    carries = pd.DataFrame({"ratio": after["value"], "where": list(map(_where, after["site"], after["layer"]))})
    one = pd.concat([shares[shares["kappa"] > 1].rename(columns={"condition": "where"}), carries])
    every = pd.concat([one.assign(model="the one read above"), runs], ignore_index=True)
    every["factor"] = np.maximum(every["ratio"], 1 / every["ratio"])
    rows = [
        (limit, model, f"{words.format(row[column])}: {row['where']}", "yes" if row[column] > most else "no")
        for column, (limit, most, words) in LIMITS.items()
        for model, own in every.groupby("model", sort=False)
        for _, row in own.nlargest(1, column).iterrows()
    ]
    columns = ["it would be falsified by", "model", "measured", "falsified"]
    return pd.DataFrame(rows, columns=columns).set_index(columns[0])


def found(limits: pd.DataFrame) -> str:
    """Whether the bound holds, in a sentence, of a table of `limits`."""
    broken = limits.loc[[LIMITS["of_bound"][0]]].query("falsified == 'yes'")
    where = "; ".join(f"{row.model} ({row.measured})" for row in broken.itertuples())
    but = f", but not with {where}" if where else ""
    return f"At most a share 1/κ² of the tanh inputs exceeds λ in these trained models{but}."


def _where(site: str, layer: int) -> str:
    return f"{site_label(site)}, block {layer}"


def _after_training(tables: Sequence[pd.DataFrame], metrics: Collection[str]) -> pd.DataFrame:
    """The rows of these metrics that are of all tokens, after each run's last step."""
    rows = pd.concat([table[table["metric"].isin(metrics) & table["mask"].eq("all")] for table in tables])
    return rows[rows["step"] == rows.groupby("run", observed=True)["step"].transform("max")]


def speeds(bench: str | Path, published: pd.DataFrame) -> list[pd.DataFrame]:
    """BHyT's training step over Pre-LN's, as `normlab bench` timed it, and what the paper says of speed, in percent."""
    timed = pd.read_csv(Path(bench) / "training_cpu.csv")
    own = timed[timed["what"].str.startswith(DEFAULT)][["what", "ratio", "low", "high", "pairs"]]
    said = published[published["metric"].str.contains("speed_gain")][["paper", "where", "metric", "value", "note"]]
    return [own.reset_index(drop=True), said.reset_index(drop=True)]


def at_each_rate(runs: pd.DataFrame, a: str, b: str, metric: str, depth: int) -> pd.DataFrame:
    """`normlab.compare` of two schemes at each learning rate that both have, one family, with the `rate`; or no row.

    All are of one width, that of most runs.
    """
    runs = runs[runs["width"] == width_of_most(runs)]
    own = runs[runs["depth"] == depth].groupby("scheme")["lr"].unique()
    rates = sorted(set(own.get(a, [])) & set(own.get(b, [])))
    found = [compare(at_rate(runs, rate), a, b, metric, depth=depth).assign(rate=rate) for rate in rates]
    return judged(pd.concat(found, ignore_index=True)) if found else pd.DataFrame()


def reach(g: float, widths: Sequence[int]) -> pd.DataFrame:
    """How far into the tanh a model of each width can drive an input z = g x/rms(x): |z| is at most g sqrt(width).

    Returns:
        Columns `width largest_z tanh_z bends`; `bends` is tanh z / z, 1 where the tanh does nothing.
    """
    table = pd.DataFrame({"width": list(widths)})
    table["largest_z"] = g * np.sqrt(table["width"])
    table["tanh_z"] = np.tanh(table["largest_z"])
    return table.assign(bends=table["tanh_z"] / table["largest_z"])


def reached(*tables: pd.DataFrame) -> pd.DataFrame:
    """How far into the tanh trained models drove an input on held-out text: the largest |z| over blocks and seeds.

    Args:
        tables: of `normlab.load_runs`.

    Returns:
        Columns `scheme width blocks rate place largest_z bends limit`, of runs whose norms have a bound. `bends` is
        tanh z / z there, `limit` what no input can exceed with the lambda that training gave.
    """
    names = {"tanh_input_max": "largest_z", "tanh_input_max_bound": "limit"}
    place = {"scheme": "scheme", "width": "width", "depth": "blocks", "lr": "rate", "site": "place"}
    rows = _after_training(tables, names)
    wide = rows.pivot_table(index=list(place), columns="metric", values="value", aggfunc="max", observed=True)
    wide = wide.reindex(columns=list(names)).dropna().rename_axis(columns=None)
    found = wide.reset_index().rename(columns=names | place)
    found["scheme"] = [title_of(name) for name in found["scheme"]]
    found["place"] = [site_label(site) for site in found["place"]]
    found.insert(6, "bends", np.tanh(found["largest_z"]) / found["largest_z"])
    return found
