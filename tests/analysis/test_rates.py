"""Runs of one scheme at several learning rates, against the formulas that the runs follow."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from figures_helpers import MEAN_OF_SEEDS, activation, final_loss, one_run

from normlab.analysis import rates
from normlab.analysis.selection import choose
from normlab.errors import NormlabError


def runs_of(*runs: tuple[str, int, float], depth: int = 4, better: float = 0.0) -> pd.DataFrame:
    """Runs by scheme, seed and rate; all held-out losses `better` than the formula's."""
    table = pd.concat([one_run(scheme, depth, seed, lr) for scheme, seed, lr in runs], ignore_index=True)
    loss = (table["metric"] == "loss") & (table["split"] == "eval")
    return table.assign(value=table["value"] - better * loss)


def test_a_rates_final_stands_beside_the_shorter_run_at_the_same_rate():
    tried = [(scheme, 0, lr) for scheme in ("lns", "pre_rmsnorm") for lr in (0.002, 0.004, 0.008)]
    short = runs_of(*tried)
    full = runs_of(*[one for one in tried if one != ("lns", 0, 0.002)], ("bhyt", 0, 0.004), better=0.5)
    found = rates.finals(short, full)
    assert list(found.columns) == ["scheme", "depth", "lr", "loss_short", "loss_full"]
    assert list(zip(found["scheme"], found["depth"], found["lr"], strict=True)) == [
        *(("Pre-LN", 4, lr) for lr in (0.002, 0.004, 0.008)),
        *(("LNS", 4, lr) for lr in (0.004, 0.008)),
    ]
    for row, scheme in zip(found.itertuples(), ["pre_rmsnorm"] * 3 + ["lns"] * 2, strict=True):
        assert row.loss_short == pytest.approx(final_loss(scheme, 0)) and row.loss_full == row.loss_short - 0.5


def test_of_settings_that_a_search_tries_the_best_stands_at_each_rate():
    search = runs_of(("dyt", 0, 0.002), ("dyt", 0, 0.004), ("lns", 0, 0.004))
    other = runs_of(("dyt", 0, 0.004), ("dyt", 0, 0.002), better=0.5)
    other["run"] = other["run"] + "-alpha0"
    both = pd.concat([search, other[other["lr"] == 0.004], runs_of(("lns", 0, 0.004), better=-0.5).assign(run="worse")])
    with pytest.raises(NormlabError, match="differ in something"):
        choose(both)
    found = rates.settled(both)
    assert set(found["run"]) == {
        *search.query("lr == 0.002 or scheme == 'lns'")["run"],
        *other.query("lr == 0.004")["run"],
    }
    assert choose(found).runs.set_index("scheme")["lr"].to_dict() == {"dyt": 0.004, "lns": 0.004}


def test_loss_and_size_stand_by_rate_for_the_schemes_that_have_several():
    seeds = range(3)
    runs = runs_of(*((scheme, seed, 0.004) for scheme in ("pre_rmsnorm", "bhyt", "rmsnorm_gain") for seed in seeds))
    other = runs_of(*(("bhyt", seed, 0.016) for seed in seeds), ("rmsnorm_gain", 0, 0.002), better=0.5)
    found = rates.by_rate(runs, other)
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
    alone = rates.by_rate(runs[runs["scheme"] == "bhyt"], other)
    assert list(alone["scheme"]) == ["BHyT"] * 2 and alone["against"].isna().all()
    deeper = pd.concat([other, runs_of(("bhyt", 0, 0.016), depth=8)])
    pd.testing.assert_frame_equal(rates.by_rate(runs, deeper), found)  # the depth that both have
    assert rates.by_rate(runs, runs_of(("bhyt", 0, 0.016), depth=8)).empty


@pytest.mark.parametrize("differs", ["width", "steps", "text"])
def test_runs_that_differ_in_more_than_their_rates_do_not_stand_beside(differs: str):
    runs, other = runs_of(("pre_rmsnorm", 0, 0.004), ("bhyt", 0, 0.004)), runs_of(("bhyt", 0, 0.016))
    assert len(rates.by_rate(runs, other)) == 2
    if differs == "width":
        other["width"] *= 2
    elif differs == "steps":
        other["step"] *= 2
    else:
        other = other_text(other)
    assert rates.by_rate(runs, other).empty


def other_text(runs: pd.DataFrame) -> pd.DataFrame:
    """The same runs with the trigram loss of another text."""
    row = runs[(runs["metric"] == "loss") & (runs["split"] == "eval")].iloc[[-1]]
    return pd.concat([runs, row.assign(metric="trigram_loss", split=None, value=2.293)], ignore_index=True)
