"""What bounds BHyT: the tables of a model whose statistic is known, and what would break the bound."""

import pandas as pd
import torch

import normlab
from normlab.study import bound, gain_or_bound


def test_shares_stay_below_the_bound_and_a_fresh_model_carries_what_it_would_measure():
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    torch.manual_seed(0)
    model = normlab.NormlabForCausalLM(normlab.NormlabConfig(scheme="bhyt", **sizes)).eval()
    tokens = torch.randint(64, (2, 16))
    shares, ratios = bound.saturation(model, tokens), bound.carried(model, tokens)
    assert list(shares.groupby("condition", sort=False).size()) == [len(bound.KAPPAS)] * 2
    assert (shares["of_bound"] <= 1).all() and shares["share"].iloc[0] > 0
    before, after = (ratios[ratios["stage"] == stage]["value"] for stage in bound.STAGES)
    assert len(before) == len(after) == 2 and after.tolist() == before.tolist(), "the same initial weights"
    assert set(bound.limits(shares, ratios)["met"]) == {"no"}


def test_a_limit_is_met_beyond_the_bound_and_beyond_a_factor_of_two_either_way():
    shares = pd.DataFrame({"kappa": [1.0, 2.0], "of_bound": [2.0, 1.1]})
    ratios = pd.DataFrame({"stage": ["before training", "after training"], "value": [1.0, 0.4]})
    found = bound.limits(shares, ratios)
    assert list(found["met"]) == ["yes", "yes"]
    assert "1.10" in found["measured"].iloc[0] and "2.50" in found["measured"].iloc[1]
    fine = bound.limits(shares.iloc[:1], ratios.iloc[:1].assign(stage="after training"))
    assert list(fine["met"]) == ["no", "no"]


def test_speeds_are_those_of_the_bench_and_of_the_paper(tmp_path):
    rows = [{"what": what, "ratio": 1.03, "low": 1.02, "high": 1.04, "pairs": 9} for what in ("bhyt step", "dyt step")]
    pd.DataFrame(rows).to_csv(tmp_path / "training_cpu.csv", index=False)
    ours, said = bound.speeds(tmp_path, normlab.load_published())
    assert ours["what"].tolist() == ["bhyt step"] and said["metric"].str.contains("speed_gain").all() and len(said) == 4


def test_a_wider_model_can_reach_further_into_the_tanh():
    found = gain_or_bound.reach(0.2, [100, 10_000])
    assert found["largest_z"].tolist() == [2.0, 20.0] and found["bends"].iloc[1] < 0.06 < found["bends"].iloc[0]
