"""The tables of extreme depths, against the formulas that the runs follow."""

import pandas as pd
import pytest
from figures_helpers import UNIGRAM, text_of
from figures_helpers import table as runs_table
from training_helpers import make_run

from normlab.analysis import outcomes
from normlab.analysis.claims import losses
from normlab.analysis.published import load_published
from normlab.analysis.selection import choose
from normlab.figures import trains_at_depth
from normlab.schemes import SCHEMES
from normlab.study import depths as tables


def test_which_schemes_train_at_each_depth():
    statuses = {("bhyt", 4): "diverged", ("pre_rmsnorm", 4): "not_learned"}
    runs = runs_table(statuses=statuses, seeds=(0,))
    found = tables.by_depth(runs, load_published())
    deep = found["4 blocks"]
    assert deep[SCHEMES["bhyt"].title] == "diverges"
    assert deep[SCHEMES["pre_rmsnorm"].title].endswith(", stalls")
    assert deep[SCHEMES["bhyt_linear"].title] == "4.300, trains"
    assert list(found.index) == [SCHEMES[name].title for name in SCHEMES if name in set(runs["scheme"])]


def test_the_margin_is_below_the_unigram_entropy():
    about = pd.DataFrame(
        {"scheme": ["lns", "bhyt"], "status": "not_learned", "unigram_entropy": UNIGRAM}
        | {"eval_loss": [UNIGRAM - outcomes.MARGIN - 1e-6, UNIGRAM - outcomes.MARGIN + 1e-6]}
    )
    assert outcomes.outcomes(about)["outcome"].to_dict() == {"lns": outcomes.TRAINS, "bhyt": outcomes.STALLS}


def test_a_run_that_logged_no_held_out_loss_is_not_said_to_diverge():
    runs = runs_table(("pre_rmsnorm", "lns", "bhyt"), (4,), (0, 1), statuses={("bhyt", 4): "diverged"})
    runs = runs[~(runs["scheme"].eq("lns") & runs["metric"].eq("loss") & runs["split"].eq("eval"))]
    found = outcomes.outcomes(choose(runs).runs)
    assert found["outcome"].to_dict() == {"pre_rmsnorm": "trains", "bhyt": "diverges", "lns": "no held-out loss"}
    assert found.loc["lns", ["loss", "shown"]].isna().all()
    assert tables.by_depth(runs, load_published())["4 blocks"][SCHEMES["lns"].title] == "no held-out loss"
    figure = trains_at_depth(runs)
    assert "1 train, ○ 0 stall, × 1 diverge, 1 without a held-out loss" in text_of(figure)
    assert all("lns" not in trace.meta["schemes"] for trace in figure.data if trace.meta and "outcome" in trace.meta)
    assert losses(runs)[4].to_dict() == {"Pre-LN": "4.150", "LNS": "(without a held-out loss)", "BHyT": "(diverged)"}
    one = runs[~(runs["seed"].eq(1) & runs["metric"].eq("loss"))]
    assert losses(one)[4]["Pre-LN"] == "4.000 (1 of 2 seeds without a held-out loss)"


def test_the_deepest_of_several_models_of_a_paper_counts():
    rows = {"paper": "P", "arxiv": "0000.00000", "scheme": "lns", "metric": tables.DEEPEST, "value": [12.0, 1000.0]}
    published = pd.DataFrame(rows | {"note": ["shallow", "deep"]})
    whole = tables.by_depth(runs_table(seeds=(0,)), published)
    found = whole.loc[SCHEMES["lns"].title]
    assert found["its paper's deepest"] == "1,000" and found["what the paper says"] == "deep"
    assert whole["paper"].tolist().count("") == len(set(runs_table()["scheme"])) - 1


def test_claims_on_depth_name_their_place_and_what_was_trained():
    claims = load_published().query("metric == @tables.DEEPEST")
    assert claims["scheme"].is_unique and claims[["where", "model", "note"]].notna().all(axis=None)
    assert (claims["value"] == claims["depth"]).all() and claims["value"].ge(2).all()
    assert claims.set_index("scheme")["value"]["deepnorm"] == pytest.approx(1000)


def test_initial_weights_are_those_of_the_configurations(tmp_path):
    config = {"scheme": "lns", "depth": 2, "width": 32, "seed": 0, "lr": 1e-3}
    make_run(tmp_path, "old", config=config)
    assert tables.initial_std(tmp_path).endswith("have std 0.02.")
    make_run(tmp_path, "new", config=config | {"init_std": 0.113})
    assert tables.initial_std(tmp_path).endswith("have std 0.02, 0.113.")
    make_run(tmp_path, "deepnorm", config=config | {"scheme": "deepnorm"})
    assert tables.initial_std(tmp_path).endswith(", but for DeepNorm, which has a rule of its own.")
    for name in ("ngpt", "of_a_file"):
        make_run(tmp_path, name, config=config | {"scheme": name})
    said = "have std 0.02, 0.113, but for DeepNorm; nGPT, which have a rule of their own."
    assert tables.initial_std(tmp_path).endswith(said)
