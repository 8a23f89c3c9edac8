"""One number per run, each with one definition: against the raw tables, and through `compare`."""

import numpy as np
import pandas as pd
import pytest
from training_helpers import write_run

import normlab
from normlab import NormlabError, compare
from normlab.analysis.quantities import QUANTITIES, values_of
from normlab.analysis.selection import choose
from normlab.release import DATA
from normlab.runs import EXPERIMENT_COLUMNS
from normlab.store import EXPERIMENTS
from normlab.training.config import TrainConfig

FOLDER = DATA / "gpu"


@pytest.fixture(scope="module")
def shipped():
    runs = normlab.load_runs(FOLDER)
    return runs[runs["lr"] == 0.004]


def by_hand(name, runs, experiments, run):
    """The definition in its docstring, from the tables' rows."""
    own = runs[(runs["run"] == run) & (runs["mask"] == "all")]
    sizes = own[(own["site"] == "block_out") & (own["metric"] == "token_l2_mean") & (own["step"] == own["step"].max())]
    sizes = sizes.set_index("layer")["value"]
    cost = experiments[(experiments["run"] == run) & (experiments["metric"] == "skip_delta_loss")]
    spans = cost[(cost["part"] == "span") & (cost["other"] == 6)].set_index("layer")["value"]
    cost = cost[cost["part"] == "block"].set_index("layer")["value"]
    uniform = runs[(runs["run"] == run) & (runs["metric"] == "uniform_attention")]
    uniform = uniform[uniform["step"] == uniform["step"].max()].set_index("layer")["value"]
    return {
        "growth": lambda: sizes[24] / sizes[1],
        "growth_2": lambda: sizes[24] / sizes[2],
        "deep_cost": lambda: np.mean([cost[layer] for layer in range(13, 24)]),
        "early_cost": lambda: np.mean([cost[layer] for layer in range(2, 13)]),
        "deep_span_cost": lambda: spans[13],
        "uniform_attentions": lambda: sum(uniform[layer] for layer in range(2, 25)),
    }[name]()


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_quantity_is_its_definition(name, shipped):
    experiments = normlab.load_experiments(FOLDER)
    values = values_of(choose(shipped, depth=24), name).set_index("run")["value"]
    assert len(values) == shipped["run"].nunique() and values.notna().all()
    for run, value in values.items():
        assert value == pytest.approx(by_hand(name, shipped, experiments, run), rel=1e-12), run


def test_compare_takes_quantities_and_pairs_them_by_seed(shipped):
    found = compare(shipped, "lns", "pre_rmsnorm", "deep_cost").iloc[0]
    values = values_of(choose(shipped, depth=24), "deep_cost").pivot(index="seed", columns="scheme", values="value")
    assert found["kind"] == "difference" and found["seeds"] == len(values)
    assert found["estimate"] == pytest.approx((values["lns"] - values["pre_rmsnorm"]).mean())
    assert compare(shipped, "lns", "pre_rmsnorm", "growth")["kind"].tolist() == ["ratio"]


@pytest.mark.parametrize(
    ("name", "where", "message"),
    [
        ("growth", {"layer": 3}, "growth is .*: leave out layer"),
        ("deep_cost", {"step": 0, "split": "eval"}, "deep_cost is .*: leave out split, step"),
        ("deepcost", {}, "no metric 'deepcost' in the table, which has: .*deep_cost"),
    ],
)
def test_what_a_quantity_fixes_cannot_be_chosen(name, where, message, shipped):
    with pytest.raises(NormlabError, match=message):
        compare(shipped, "lns", "pre_rmsnorm", name, **where)


def test_deep_spans_begin_where_deep_blocks_do_at_odd_depths_too(tmp_path):
    for scheme in ("lns", "pre_rmsnorm"):
        run = write_run(TrainConfig(scheme=scheme, depth=9), tmp_path, corpus={"unigram_entropy": 6.5})
        rows = [("skip_delta_loss", "span", layer, 2, 0.1 * layer, 0.0) for layer in range(1, 9)]
        pd.DataFrame(rows, columns=EXPERIMENT_COLUMNS).to_parquet(run / EXPERIMENTS, index=False)
    values = values_of(choose(normlab.load_runs(tmp_path)), "deep_span_cost")["value"]
    assert values.tolist() == [pytest.approx(0.5)] * 2


def test_a_table_without_its_source_has_no_experiments(shipped):
    alone = shipped.copy()
    alone.attrs.clear()
    with pytest.raises(NormlabError, match="does not say where its runs are"):
        compare(alone, "lns", "pre_rmsnorm", "deep_cost")
