"""What bounds BHyT: the tables of a model whose statistic is known, what breaks the bound, how far inputs reach."""

import pandas as pd
import pytest
import torch
from figures_helpers import activation, one_run, table, two_rates

import normlab
from normlab.study import bound

SIDES = ("bhyt", "lns")


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
    assert set(bound.limits(shares, ratios, bound.recorded(one_run("lns")))["falsified"]) == {"no"}


def held(share: float, ratio: float, layer: int = 1, **about: object) -> pd.DataFrame:
    """A run of BHyT that recorded this share beyond lambda with kappa 10, and what it carried, at one MLP norm."""
    values = {"saturation": share, "saturation_bound": ratio / 100, "carried_var_ratio": ratio}
    rows = pd.DataFrame(list(values.items()), columns=["metric", "value"])
    about = one_run("bhyt", depth=2).iloc[0][["run", "scheme", "depth", "width"]].to_dict() | about
    return rows.assign(step=20, site="mlp_norm_in", mask="all", layer=layer, **about)


def test_a_limit_is_met_beyond_the_bound_and_beyond_a_factor_of_two_either_way():
    shares = pd.DataFrame({"kappa": [1.0, 2.0], "of_bound": [2.0, 1.1], "condition": "as it was trained"})
    places = {"site": "mlp_norm_in", "layer": [1, 2]}
    ratios = pd.DataFrame({"stage": ["before training", "after training"], "value": [9.0, 0.4]} | places)
    none = bound.recorded(one_run("lns"))
    found = bound.limits(shares, ratios, none)
    assert list(found["falsified"]) == ["yes", "yes"] and set(found["model"]) == {"the one read above"}
    assert "1.10 of it: as it was trained" in found["measured"].iloc[0]
    assert "2.50: input of the MLP norm, block 2" in found["measured"].iloc[1]
    fine = bound.limits(shares.assign(of_bound=0.9), ratios.assign(value=1.9), none)
    assert list(fine["falsified"]) == ["no", "no"]
    assert bound.found(fine).endswith("in these trained models.")


def test_runs_are_held_to_the_same_limits_and_the_furthest_of_a_size_counts():
    shares = pd.DataFrame({"kappa": [2.0], "of_bound": [0.5], "condition": "as it was trained"})
    ratios = pd.DataFrame({"stage": ["after training"], "value": [1.0], "site": "mlp_norm_in", "layer": 1})
    early = held(0.9, 50.0).assign(step=10)
    other = held(0.5, 9.0, scheme="bhyt_linear", run="linear")
    runs = bound.recorded(pd.concat([early, held(0.004, 1.2), held(0.002, 0.4, layer=2)]), other)
    assert runs["of_bound"].tolist() == pytest.approx([0.4, 0.2]) and runs["ratio"].tolist() == [1.2, 0.4]
    deep = bound.recorded(held(0.35, 128.0, depth=24, width=512, run="deep"))
    found = bound.limits(shares, ratios, pd.concat([runs, deep]))
    sizes = ["the one read above", f"2 blocks, {int(early['width'].iloc[0])} wide", "24 blocks, 512 wide"]
    assert found["model"].tolist() == 2 * sizes
    assert found["falsified"].tolist() == ["no", "no", "yes", "no", "yes", "yes"]
    assert found["measured"].iloc[4] == "the furthest is a factor of 2.50: input of the MLP norm, block 2"
    said = "the largest is 35.00 of it: input of the MLP norm, block 1"
    assert bound.found(found).endswith(f"in these trained models, but not with 24 blocks, 512 wide ({said}).")


def test_speeds_are_those_of_the_bench_and_of_the_paper(tmp_path):
    rows = [{"what": what, "ratio": 1.03, "low": 1.02, "high": 1.04, "pairs": 9} for what in ("bhyt step", "dyt step")]
    pd.DataFrame(rows).to_csv(tmp_path / "training_cpu.csv", index=False)
    ours, said = bound.speeds(tmp_path, normlab.load_published())
    assert ours["what"].tolist() == ["bhyt step"] and said["metric"].str.contains("speed_gain").all() and len(said) == 4


def test_a_wider_model_can_reach_further_into_the_tanh():
    found = bound.reach(0.2, [100, 10_000])
    assert found["largest_z"].tolist() == [2.0, 20.0] and found["bends"].iloc[1] < 0.06 < found["bends"].iloc[0]


def test_two_schemes_are_compared_at_every_rate_that_both_have():
    found = bound.at_each_rate(two_rates(), "bhyt", "lns", "token_l2_mean", 4)
    ratio = activation("bhyt", 4, 20) / activation("lns", 4, 20)
    assert found["rate"].tolist() == [1e-3, 3e-3] and found["estimate"].tolist() == pytest.approx([ratio] * 2)
    assert (found["p_holm"] >= 2 * found["p"]).all(), "one family"
    assert bound.at_each_rate(two_rates(), "bhyt", "pre_rmsnorm", "loss", 4)["rate"].tolist() == [1e-3]
    assert bound.at_each_rate(two_rates(), "bhyt", "dyt", "loss", 4).empty


def test_every_rate_is_compared_at_the_width_of_most_runs():
    narrow = [table(SIDES, (4,), (0,)), table(SIDES, (4,), lr=3e-3)]
    wide = table(SIDES, (4,), (0, 1)).assign(width=32, run=lambda rows: rows["run"] + "-wide")
    wide["value"] = wide["value"].where(wide["scheme"] == "lns", 2 * wide["value"])
    found = bound.at_each_rate(pd.concat([*narrow, wide], ignore_index=True), *SIDES, "token_l2_mean", 4)
    ratio = activation("bhyt", 4, 20) / activation("lns", 4, 20)
    assert found["rate"].tolist() == [1e-3, 3e-3] and found["seeds"].tolist() == [1, 3]
    assert found["estimate"].tolist() == pytest.approx([ratio] * 2)


def test_how_far_models_reached_is_the_largest_of_blocks_and_seeds_at_the_last_step_where_there_is_a_bound():
    rows = [("tanh_input_max", 20, 1, 0.5), ("tanh_input_max", 20, 2, 2.0), ("tanh_input_max", 10, 2, 9.0)]
    rows += [("tanh_input_max_bound", 20, layer, 3.0) for layer in (1, 2)]
    table = pd.DataFrame(rows, columns=["metric", "step", "layer", "value"])
    about = one_run("bhyt", depth=2).iloc[0][["run", "scheme", "depth", "width", "lr"]].to_dict()
    table = table.assign(site="attn_norm_in", mask="all", **about)
    dyt = table[table["metric"] == "tanh_input_max"].assign(scheme="dyt", run="dyt")
    found = bound.reached(pd.concat([table, dyt]), one_run("lns"))
    (row,) = found.to_dict("records")
    assert (row["scheme"], row["place"]) == ("BHyT", "input of the attention norm")
    assert (row["largest_z"], row["limit"]) == (2.0, 3.0)
    assert row["bends"] == pytest.approx(0.482, abs=1e-3)
    assert bound.reached(one_run("lns")).empty
