"""The README's intervals once more, from the files of the runs, by pandas and scipy alone.

Nothing of `normlab` is asked here: a rule that is wrong there would make the text and the other tests agree. Where
seeds move schemes alike, a difference of two has the residual variance of schemes x seeds (two-way, without
interaction); where not, one of its own, as in a paired t test, with a floor.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from quoted_numbers import README, ROOT, agrees, quoted
from scipy import stats

RUNS, LOW = ROOT / "data" / "runs", ROOT / "data" / "other_rates"


def manifests(folder) -> pd.DataFrame:
    """A run a row: its folder, and what its manifest says."""
    found = {path.parent: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/manifest.json")}
    names = ("scheme", "depth", "seed", "lr")
    rows = [[path, *(m["config"][name] for name in names), m["eval_loss"]] for path, m in found.items()]
    return pd.DataFrame(rows, columns=["path", *names, "loss"])


@pytest.fixture(scope="module")
def about() -> pd.DataFrame:
    return manifests(RUNS)


def size(rows: pd.DataFrame, layer: int | None = None) -> pd.DataFrame:
    """The log of a token's mean L2 norm after a block, at the last step, as column `size`."""

    def of(run) -> float:
        table = pd.read_parquet(run.path / "stats.parquet")
        chosen = (table["site"] == "block_out") & (table["metric"] == "token_l2_mean") & (table["mask"] == "all")
        chosen &= (table["layer"] == (layer or run.depth)) & (table["step"] == table["step"].max())
        return float(np.log(table.loc[chosen, "value"].item()))

    return rows.assign(size=[of(run) for run in rows.itertuples()])


def deep_cost(rows: pd.DataFrame) -> pd.DataFrame:
    """What leaving out one block of the deeper half costs in the mean, as column `cost`."""

    def of(run) -> float:
        table = pd.read_parquet(run.path / "experiments.parquet")
        return table.query("metric == 'skip_delta_loss' and part == 'block' and layer > @run.depth / 2")["value"].mean()

    return rows.assign(cost=[of(run) for run in rows.itertuples()])


def cells(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Seeds x schemes of those that have three seeds."""
    table = rows.pivot(index="seed", columns="scheme", values=value)
    return table.dropna(axis=1)


def alike(table: pd.DataFrame, a: str, b: str) -> tuple[float, float, float]:
    seeds, schemes = table.shape
    noise = table.sub(table.mean(axis=1), axis=0).sub(table.mean() - table.to_numpy().mean())
    freedom = (seeds - 1) * (schemes - 1)
    half = stats.t.ppf(0.975, freedom) * np.sqrt((noise**2).to_numpy().sum() / freedom * 2 / seeds)
    middle = (table[a] - table[b]).mean()
    return middle, middle - half, middle + half


def apart(table: pd.DataFrame, a: str, b: str) -> tuple[float, float, float]:
    pairs = [(table[own] - table[other]).var() for own in (a, b) for other in table.columns.drop(own)]
    return around(table[a] - table[b], pairs)


def around(values: pd.Series, spreads: list[float]) -> tuple[float, float, float]:
    """Student's interval of a mean, with a variance of its own, but no less than a lower quartile of all."""
    floor = sorted(spreads)[len(spreads) // 4]
    half = stats.t.ppf(0.975, len(values) - 1) * np.sqrt(max(values.var(), floor) / len(values))
    return values.mean(), values.mean() - half, values.mean() + half


def says(sentence: str, found: tuple[float, float, float]) -> None:
    agrees(quoted(sentence, README), pd.Series(found, index=["estimate", "low", "high"]))


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [
        ("pre_rmsnorm", "Pre-LN gains NUMBER INTERVAL nats of held-out loss"),
        ("lns_gain", "loss, LNS with a trained gain NUMBER INTERVAL"),
        ("lns", "LNS gains NUMBER INTERVAL and"),
        ("bhyt", "and BHyT NUMBER INTERVAL"),
    ],
)
def test_what_twelve_more_blocks_buy(about: pd.DataFrame, scheme: str, sentence: str):
    deep = cells(about[about["depth"] == 16], "loss")
    gains = cells(about[about["depth"] == 4], "loss")[deep.columns] - deep
    says(sentence, around(gains[scheme], list(gains.var())))


@pytest.mark.parametrize(
    ("scheme", "depth", "by", "sentence"),
    [
        ("lns", 16, alike, "Its loss is NUMBER INTERVAL nats from Pre-LN's there"),
        ("lns", 4, apart, "there, NUMBER INTERVAL at 4 layers"),
        ("lns_gain", 16, alike, "trained gain the loss is NUMBER INTERVAL nats"),
        ("bhyt", 16, alike, "where its loss is NUMBER INTERVAL nats from Pre-LN's"),
        ("bhyt_exact", 16, alike, "computed, comes to NUMBER INTERVAL nats"),
        ("rmsnorm_gain", 16, alike, "no tanh to NUMBER INTERVAL nats"),
    ],
)
def test_losses_beside_pre_lns(about: pd.DataFrame, scheme: str, depth: int, by: Callable, sentence: str):
    says(sentence, by(cells(about[about["depth"] == depth], "loss"), scheme, "pre_rmsnorm"))


@pytest.mark.parametrize(
    ("scheme", "depth", "layer", "by", "sentence"),
    [
        ("lns", 16, 1, apart, "smaller than Pre-LN's, NUMBER INTERVAL of it after the first"),
        ("lns", 16, None, alike, "and NUMBER INTERVAL after the last"),
        ("lns_gain", 16, None, alike, "Pre-LN's and the stream NUMBER INTERVAL of it"),
        ("bhyt", 4, None, apart, "that its search chose it is NUMBER INTERVAL"),
        ("bhyt", 16, None, alike, "and NUMBER INTERVAL after 16 layers"),
        ("bhyt_exact", 16, None, alike, "nats and a stream of NUMBER INTERVAL;"),
        ("rmsnorm_gain", 16, None, alike, "as large as Pre-LN's, NUMBER INTERVAL"),
    ],
)
def test_sizes_over_pre_lns(
    about: pd.DataFrame, scheme: str, depth: int, layer: int | None, by: Callable, sentence: str
):
    table = cells(size(about[about["depth"] == depth], layer), "size")
    says(sentence, tuple(np.exp(by(table, scheme, "pre_rmsnorm"))))


def test_bhyt_at_pre_lns_rate(about: pd.DataFrame):
    rows = pd.concat([about[about["scheme"] == "pre_rmsnorm"], manifests(LOW).query("scheme == 'bhyt'")])
    rows = rows[rows["depth"] == 4]
    assert set(rows["lr"]) == {0.004}
    says(
        "at Pre-LN's, NUMBER INTERVAL of Pre-LN's",
        tuple(np.exp(alike(cells(size(rows), "size"), "bhyt", "pre_rmsnorm"))),
    )


def test_what_a_deep_block_is_worth(about: pd.DataFrame):
    table = cells(deep_cost(about[about["depth"] == 16]), "cost")
    freedom = table.size - table.shape[1]
    spread = np.sqrt(((table - table.mean()) ** 2).to_numpy().sum() / freedom)
    half = stats.t.ppf(0.975, freedom) * spread / np.sqrt(len(table))
    for scheme, sentence in (
        ("lns", "half costs NUMBER INTERVAL nats"),
        ("lns_gain", "nats, with a trained gain NUMBER INTERVAL, of"),
        ("pre_rmsnorm", "of Pre-LN's NUMBER INTERVAL"),
    ):
        says(sentence, (table[scheme].mean(), table[scheme].mean() - half, table[scheme].mean() + half))
