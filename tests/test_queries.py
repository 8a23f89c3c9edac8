"""Marks of pages that are queries: their numbers are those of the shipped tables, and a changed verdict is refused."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import normlab

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "data").is_dir(), reason="the shipped runs are not in this checkout")


@pytest.fixture(scope="module")
def fill():
    sys.path.insert(0, str(ROOT / "docs"))
    yield importlib.import_module("queries").fill
    sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def packed():
    """The rows of the runs of 16 blocks at 0.004."""
    runs = normlab.load_runs(ROOT / "data" / "depth_and_rate")
    return runs[(runs["depth"] == 16) & np.isclose(runs["lr"], 0.004)]


def number(fill, query: str) -> str:
    page = fill(f"It is <!-- {query} -->?<!-- / --> here.", "page.md")
    start, _, rest = page.partition("-->")
    assert start == f"It is <!-- {query} " and rest.endswith("<!-- / --> here.")
    return rest.partition("<!--")[0]


def last(rows, scheme, **where):
    rows = rows[rows["scheme"] == scheme]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows.sort_values("step").groupby("seed", observed=True)["value"].last()


def test_a_difference_is_the_mean_over_seeds_of_paired_differences(fill, packed):
    where = dict(site="model", metric="loss", split="eval")
    expected = (last(packed, "lns", **where) - last(packed, "pre_rmsnorm", **where)).mean()
    written = f"{expected:+.3f}".replace("-", "−")
    assert number(fill, "loss: lns - pre_rmsnorm @ depth_and_rate depth=16 lr=0.004 digits=3") == written
    assert number(fill, "loss: lns - pre_rmsnorm @ depth_and_rate depth=16 lr=0.004 digits=3 abs=1") == written[1:]


def test_a_ratio_and_a_schemes_own_value_are_geometric_means(fill, packed):
    def grown(scheme):
        ends = [
            last(packed, scheme, site="block_out", metric="token_l2_mean", mask="all", layer=layer) for layer in (16, 1)
        ]
        return np.log(ends[0] / ends[1])

    ratio, own = np.exp((grown("lns") - grown("pre_rmsnorm")).mean()), np.exp(grown("lns").mean())
    assert number(fill, "growth: lns - pre_rmsnorm @ depth_and_rate depth=16 lr=0.004") == f"{ratio:.2f}"
    assert number(fill, "growth: lns @ depth_and_rate depth=16 lr=0.004") == f"{own:.2f}"


def test_a_verdict_that_the_runs_do_not_give_and_bad_queries_are_refused(fill):
    query = "deep_cost: lns - pre_rmsnorm @ depth_and_rate depth=16 lr=0.004"
    assert "[" in number(fill, f"{query} range=1 : different")
    for bad, words in (
        (f"{query} : equivalent", "the runs say different: write the sentence anew"),
        (f"{query} colour=1", "unknown option colour"),
        ("loss: lns @ depth_and_rate lr=0.004 depth=99", "has no such runs"),
        ("loss: lns @ depth_and_rate lr=0.004", "say the depth: 4, 16"),
        ("loss: derf @ depth_and_rate depth=16", "derf"),
        (f"{query} abs=1 range=1", "not both"),
        ("loss: lns-pre_rmsnorm @ depth_and_rate depth=16", "is no query"),
    ):
        with pytest.raises(ValueError, match="p.md: <!-- .*" + words):
            fill(f"<!-- {bad} -->?<!-- / -->", "p.md")
