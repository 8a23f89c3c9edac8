"""Tables of the notebooks on depth and on rates, against the formulas that the runs follow."""

import numpy as np
import pandas as pd
import pytest
from figures_helpers import MEAN_OF_SEEDS, UNIGRAM, activation, final_loss, one_run
from figures_helpers import table as runs_table

from normlab.analysis import outcomes
from normlab.analysis.published import load_published
from normlab.analysis.selection import choose
from normlab.errors import NormlabError
from normlab.schemes import SCHEMES
from normlab.study import rates as tables


def runs_of(*runs: tuple[str, int, float], depth: int = 4, better: float = 0.0) -> pd.DataFrame:
    """Runs by scheme, seed and rate; all held-out losses `better` than the formula's."""
    table = pd.concat([one_run(scheme, depth, seed, lr) for scheme, seed, lr in runs], ignore_index=True)
    loss = (table["metric"] == "loss") & (table["split"] == "eval")
    return table.assign(value=table["value"] - better * loss)


def test_a_rates_final_is_next_to_the_shorter_run_at_the_same_rate():
    tried = [(scheme, 0, lr) for scheme in ("lns", "pre_rmsnorm") for lr in (0.002, 0.004, 0.008)]
    short = runs_of(*tried)
    full = runs_of(*[one for one in tried if one != ("lns", 0, 0.002)], ("bhyt", 0, 0.004), better=0.5)
    found = tables.finals(short, full)
    assert list(found.columns) == ["scheme", "depth", "lr", "loss_short", "loss_full"]
    assert list(zip(found["scheme"], found["depth"], found["lr"], strict=True)) == [
        *(("Pre-LN", 4, lr) for lr in (0.002, 0.004, 0.008)),
        *(("LNS", 4, lr) for lr in (0.004, 0.008)),
    ]
    for row, scheme in zip(found.itertuples(), ["pre_rmsnorm"] * 3 + ["lns"] * 2, strict=True):
        assert row.loss_short == pytest.approx(final_loss(scheme, 0)) and row.loss_full == row.loss_short - 0.5


def test_the_best_setting_of_a_search_is_kept_at_each_rate():
    search = runs_of(("dyt", 0, 0.002), ("dyt", 0, 0.004), ("lns", 0, 0.004))
    other = runs_of(("dyt", 0, 0.004), ("dyt", 0, 0.002), better=0.5)
    other["run"] = other["run"] + "-alpha0"
    both = pd.concat([search, other[other["lr"] == 0.004], runs_of(("lns", 0, 0.004), better=-0.5).assign(run="worse")])
    with pytest.raises(NormlabError, match="differ in something"):
        choose(both)
    found = tables.settled(both)
    assert set(found["run"]) == {
        *search.query("lr == 0.002 or scheme == 'lns'")["run"],
        *other.query("lr == 0.004")["run"],
    }
    assert choose(found).runs.set_index("scheme")["lr"].to_dict() == {"dyt": 0.004, "lns": 0.004}


def test_loss_and_size_by_rate_of_schemes_that_have_several():
    seeds = range(3)
    runs = runs_of(*((scheme, seed, 0.004) for scheme in ("pre_rmsnorm", "bhyt", "rmsnorm_gain") for seed in seeds))
    other = runs_of(*(("bhyt", seed, 0.016) for seed in seeds), ("rmsnorm_gain", 0, 0.002), better=0.5)
    found = tables.by_rate(runs, other)
    assert list(found["scheme"]) == ["BHyT", "BHyT", "Pre-LN, gain λ/κ", "Pre-LN, gain λ/κ"]
    assert list(found["lr"]) == [0.004, 0.016, 0.002, 0.004] and list(found["seeds"]) == [3, 3, 1, 3]
    bhyt = np.mean([final_loss("bhyt", seed) for seed in seeds])
    assert list(found["loss"][:2]) == pytest.approx([bhyt, bhyt - 0.5])
    spreads = [max(own) - min(own) for own in [[final_loss("bhyt", seed) for seed in seeds]] * 2]
    assert list(found["spread"]) == pytest.approx([*spreads, 0.0, spreads[0]])
    size = activation("bhyt", 4, 20) * MEAN_OF_SEEDS
    assert list(found["token_l2"][:2]) == pytest.approx([size] * 2)
    ratio = activation("bhyt", 4, 20) / activation("pre_rmsnorm", 4, 20)
    assert list(found["against"][:2]) == pytest.approx([ratio] * 2)
    alone = tables.by_rate(runs[runs["scheme"] == "bhyt"], other)
    assert list(alone["scheme"]) == ["BHyT"] * 2 and alone["against"].isna().all()
    deeper = pd.concat([other, runs_of(("bhyt", 0, 0.016), depth=8)])
    pd.testing.assert_frame_equal(tables.by_rate(runs, deeper), found)  # the depth that both have
    assert tables.by_rate(runs, runs_of(("bhyt", 0, 0.016), depth=8)).empty


@pytest.mark.parametrize("differs", ["width", "steps", "text"])
def test_runs_that_differ_in_more_than_their_rates_are_left_out(differs):
    runs, other = runs_of(("pre_rmsnorm", 0, 0.004), ("bhyt", 0, 0.004)), runs_of(("bhyt", 0, 0.016))
    assert len(tables.by_rate(runs, other)) == 2
    if differs == "width":
        other["width"] *= 2
    elif differs == "steps":
        other["step"] *= 2
    else:
        other = other_text(other)
    assert tables.by_rate(runs, other).empty


def other_text(runs: pd.DataFrame) -> pd.DataFrame:
    """The same runs with the trigram loss of another text."""
    row = runs[(runs["metric"] == "loss") & (runs["split"] == "eval")].iloc[[-1]]
    return pd.concat([runs, row.assign(metric="trigram_loss", split=None, value=2.293)], ignore_index=True)


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
