"""The league's table, on runs made so that each answer is known; and what is said where runs are missing."""

import math

import pandas as pd
import pytest
from figures_helpers import activation, one_run
from training_helpers import write_run

from normlab import SCHEMES, NormlabError
from normlab.analysis.published import load_published
from normlab.runs import EXPERIMENT_COLUMNS
from normlab.store import EXPERIMENTS, STATS
from normlab.study import league
from normlab.training.config import TrainConfig

PRE, LNS, MINE = "pre_rmsnorm", "lns", "my_norm_3e4269"
LOSS = {PRE: 3.5, LNS: 3.4, MINE: 3.8}
SPEED = {PRE: 100.0, LNS: 80.0, MINE: 100.0}


def with_loss(table: pd.DataFrame, loss: float) -> pd.DataFrame:
    is_last = table["metric"].eq("loss") & table["step"].eq(table["step"].max())
    return table.assign(value=table["value"].mask(is_last, loss))


def final(scheme: str, seed: int) -> pd.DataFrame:
    """A final run of 20 steps: Seed 2 has a uniform attention in block 3; MINE has them in blocks 3 and 4."""
    table = with_loss(one_run(scheme, seed=seed), LOSS[scheme] + 0.001 * seed)
    about = table.iloc[0].to_dict() | {"step": 20, "tokens": 2000, "mask": "all", "site": "model", "layer": pd.NA}
    rows = [about | {"split": "train", "metric": "tokens_per_s", "value": SPEED[scheme]}]
    rows += [about | {"split": "probe", "metric": "seen_loss", "value": LOSS[scheme] - 0.2}]
    for layer in range(1, 5):  # block 1 does not count
        is_uniform = layer == 1 or (seed == 2 and layer == 3) or (scheme == MINE and layer > 2)
        rows.append(about | {"split": "probe", "metric": "uniform_attention", "layer": layer, "value": is_uniform})
    return pd.concat([table, pd.DataFrame(rows).astype({"layer": "Int64", "value": float})], ignore_index=True)


def searched(scheme: str, losses: dict[float, float]) -> pd.DataFrame:
    """Runs of the search: 10 steps, half of a final run's."""
    status = {True: "finished", False: "diverged"}
    runs = [
        with_loss(one_run(scheme, seed=1000, lr=lr, steps=(0, 10), status=status[math.isfinite(loss)]), loss)
        for lr, loss in losses.items()
    ]
    return pd.concat(runs, ignore_index=True)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    finals = pd.concat([final(scheme, seed) for scheme in LOSS for seed in range(3)], ignore_index=True)
    tried = {
        PRE: {0.002: 3.9, 0.004: 3.89, 0.008: 4.2},
        LNS: {0.002: 3.8, 0.008: 3.7},
        MINE: {0.004: 4.1},
        "dyt": {0.002: 4.4},
    }
    search = pd.concat([searched(scheme, losses) for scheme, losses in tried.items()], ignore_index=True)
    costs = [(run, scheme, 4, layer, 0.1 * layer) for run, scheme, layer in _blocks(finals)]
    experiments = pd.DataFrame(costs, columns=["run", "scheme", "depth", "layer", "value"])
    seeds = experiments["run"].map(finals.drop_duplicates("run").set_index("run")["seed"])
    experiments = experiments.assign(seed=seeds, metric="skip_delta_loss", part="block")
    return league.standings(league.League(finals, search, experiments), load_published()).set_index("scheme")


def _blocks(finals: pd.DataFrame) -> list[tuple[str, str, int]]:
    names = finals[["run", "scheme"]].drop_duplicates().itertuples(index=False)
    return [(run, scheme, layer) for run, scheme in names for layer in range(1, 5)]


def test_every_scheme_has_a_row_and_what_was_not_run_says_so(table):
    assert set(table.index) == {*SCHEMES, MINE} and list(table.index[:4]) == [LNS, PRE, MINE, "dyt"]
    says = dict(zip(table.index, table["says"], strict=True))
    assert (says[LNS], says[PRE], says["dyt"]) == ("may be the best", "not the best", "search unfinished")
    assert says["mhc"] == "not run" and (table["says"] == "not run").sum() == len(SCHEMES) - 3
    assert table.loc[MINE, "title"] == MINE and math.isnan(table.loc[MINE, "parameters"])


def test_a_search_without_final_runs_puts_nobody_below_anybody():
    losses = {
        PRE: {0.001: 4.0, 0.002: 3.9, 0.008: 4.2},
        LNS: {0.001: 3.9, 0.002: 3.8, 0.008: math.inf},
        "dyt": {0.002: math.inf, 0.008: math.inf},
    }
    runs = [searched(scheme, rates) for scheme, rates in losses.items()]
    search = pd.concat(runs, ignore_index=True)
    found = league.standings(league.League(search.iloc[:0], search, None), load_published()).set_index("scheme")
    assert found.loc[[LNS, PRE, "dyt", "mhc"], "says"].tolist() == [*["only searched"] * 2, "diverged", "not run"]
    assert found.loc[LNS, ["loss_at_0.002", "loss_at_0.008"]].tolist() == [3.8, math.inf]
    expected = activation(LNS, 4, 10) / activation(LNS, 1, 10)
    assert found.loc[LNS, "growth_at_0.002"] == pytest.approx(expected)
    assert math.isnan(found.loc[LNS, "growth_at_0.008"])
    assert found.loc["dyt", "search_loss"] == math.inf and math.isnan(found.loc["dyt", "rate"])
    text = league.printed(found.reset_index())
    assert "diverged" in text and "inf" not in text


def test_losses_and_their_intervals(table):
    row = table.loc[LNS]
    assert (row["loss"], row["seen_loss"]) == pytest.approx((3.401, 3.2))
    half = 4.302653 * 0.001 / math.sqrt(3)
    assert (row["loss_low"], row["loss_high"]) == pytest.approx((3.401 - half, 3.401 + half), abs=1e-6)
    assert (row["minus"], row["verdict"]) == (pytest.approx(-0.1), "different") and math.isnan(table.loc[PRE, "minus"])


def test_the_valley_of_rates(table):
    assert table.loc[PRE, ["rate", "valley", "inside", "valley_open"]].tolist() == [0.004, 2.0, True, True]
    assert table.loc[LNS, ["rate", "valley", "inside", "valley_open"]].tolist() == [0.008, 1.0, False, True]
    assert table.loc[[PRE, LNS], "valley_most"].isna().all()
    losses = {LNS: {0.002: 4.0, 0.004: 3.9, 0.008: 4.0}, "dyt": {0.002: 6.5, 0.004: 6.5, 0.008: 6.5}}
    search = pd.concat([searched(scheme, rates) for scheme, rates in losses.items()], ignore_index=True)
    is_last = search["metric"].eq("loss") & search["step"].eq(10) & search["split"].eq("eval")
    search = pd.concat([search, search[is_last].assign(metric="bigram_loss", value=4.5)], ignore_index=True)
    found = league.standings(league.League(search.iloc[:0], search, None), load_published()).set_index("scheme")
    assert found.loc[LNS, ["valley", "valley_most", "valley_open"]].tolist() == [1.0, 4.0, False]
    assert math.isnan(found.loc["dyt", "valley"]), "it has not learned at any rate"
    assert "x 1 to 4" in league.printed(found.reset_index())


def test_what_depth_does(table):
    expected = activation(LNS, 4, 20) / activation(LNS, 1, 20)
    assert table.loc[LNS, ["growth", "uniform", "attentions", "deep_cost"]].tolist() == pytest.approx(
        [expected, 1, 9, 0.3]
    )
    assert table.loc[LNS, ["growth_low", "deep_cost_high"]].tolist() == pytest.approx([expected, 0.3])
    assert table.loc[MINE, "uniform"] == 6


def test_the_gain_at_equal_compute_takes_off_what_pre_ln_gains_in_that_time(table):
    assert table.loc[LNS, "step_cost"] == pytest.approx(1.25)
    fall = (3.89 - 3.501) / math.log(2)
    assert table.loc[LNS, "equal_compute"] == pytest.approx(0.1 - fall * math.log(1.25))
    assert table.loc[MINE, "equal_compute"] == pytest.approx(-0.3)
    width = table.loc[LNS, "minus_high"] - table.loc[LNS, "minus_low"]
    assert table.loc[LNS, "equal_high"] - table.loc[LNS, "equal_low"] == pytest.approx(width)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float32", "bfloat16", "float32")])
def test_times_of_two_precisions_or_of_one_seed_are_not_compared(dtypes):
    pre = [final(PRE, seed).assign(dtype="float32") for seed in range(len(dtypes) - 1)]
    lns = [final(LNS, seed).assign(dtype=dtype) for seed, dtype in enumerate(dtypes[1:])]
    finals = pd.concat([*pre, *lns], ignore_index=True)
    search = pd.concat([searched(scheme, {0.002: 3.9}) for scheme in (PRE, LNS)], ignore_index=True)
    row = league.standings(league.League(finals, search, None), load_published()).set_index("scheme").loc[LNS]
    assert row["minus"] == pytest.approx(-0.1) and math.isnan(row["step_cost"]) and math.isnan(row["equal_compute"])


def test_claims_have_their_source(table):
    claim = table.loc[LNS, "claim"]
    assert "−0.029 from RMSNorm (BHyT Table 1, Llama-1B)" in claim
    assert f"−{math.log(17.02 / 15.71):.3f} from Pre-LN (Curse of Depth Table 1, Llama-1B)" in claim
    assert "polynomial" in claim and table.loc["rmsnorm_gain", "claim"] == ""
    assert table.loc["nanochat", "claim"].endswith("0.0039 at 20 (nanochat)")
    assert table.loc["seednorm", "claim"].endswith("(SeeDNorm, 2510.22777)")
    assert table.loc["derf", "claim"] == "+0.000 from LN (Derf reported losses, GPT-2)"
    assert table.loc["post_rmsnorm", "predicted"] == "MLS-Bench: higher than Pre-LN"


def test_the_printed_tables_are_of_final_runs_then_of_searches_and_name_what_was_not_run(table):
    finals, searches, last = (part.splitlines() for part in league.printed(table.reset_index()).split("\n\n"))
    assert len(finals) == 4 and "1 of 9" in finals[1] and "3.40 [3.40, 3.40]" in finals[1] and ">= x 1" in finals[1]
    assert len(searches) == 2 and "search unfinished" in searches[1]
    assert len(last) == 1 and last[0].startswith("not run: ") and "mHC" in last[0]


def test_runs_of_two_texts_make_no_league(tmp_path):
    text = {"unigram_entropy": 6.5}
    for scheme, trigram in ((PRE, 4.0), (LNS, 4.1)):
        write_run(TrainConfig(scheme=scheme, depth=2, dtype="float32"), tmp_path, corpus=text, trigram_loss=trigram)
    with pytest.raises(NormlabError, match="runs of the league differ in trigram_loss"):
        league.load([tmp_path])


def test_a_run_that_diverged_and_so_ended_early_is_of_the_league(tmp_path):
    text = {"unigram_entropy": 6.5}
    for scheme, loss in ((PRE, 3.9), ("none", None)):
        run = write_run(TrainConfig(scheme=scheme, depth=2, dtype="float32"), tmp_path, loss, corpus=text)
    stats = pd.read_parquet(run / STATS)
    stats[stats["step"] < stats["step"].max()].to_parquet(run / STATS, index=False)
    found = league.load([tmp_path]).finals.groupby("scheme", observed=True)["step"].max()
    assert found["none"] < found[PRE]


def test_final_runs_at_a_second_rate_are_no_further_seeds(tmp_path):
    text = {"corpus": {"unigram_entropy": 6.5}}
    for rate, loss in ((0.002, 3.9), (0.008, 4.4)):
        for folder, loss_of in ((tmp_path, loss), (tmp_path / "search", loss + 0.5)):
            config = TrainConfig(scheme=PRE, depth=2, dtype="float32", lr=rate)
            run = write_run(config, folder, loss_of, **text)
            costs = pd.DataFrame([("skip_delta_loss", "block", 1, None, rate, 0.0)], columns=EXPERIMENT_COLUMNS)
            costs.to_parquet(run / EXPERIMENTS, index=False)
    with pytest.warns(UserWarning, match="left out: 1 final runs of pre_rmsnorm at another rate than 0.002"):
        found = league.load([tmp_path])
    assert found.finals["lr"].unique().tolist() == [0.002] and found.search["lr"].nunique() == 2
    assert found.experiments["value"].tolist() == [0.002]


@pytest.mark.parametrize("options", [[], ["--add", "lns", "--tiny"]])
def test_a_missing_folder_is_one_line_before_anything_is_trained(options, refused, tmp_path):
    assert "none is no folder of runs" in refused("league", tmp_path / "none", "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_runs_without_experiments_have_no_skip_costs(tmp_path):
    write_run(TrainConfig(scheme=PRE, depth=2, dtype="float32"), tmp_path, corpus={"unigram_entropy": 6.5})
    found = league.standings(league.load([tmp_path]), load_published())
    assert "deep_cost" not in found and found.loc[0, "scheme"] == PRE
    assert "not run: " in league.printed(found)


def test_a_run_in_two_folders_counts_once_and_steps_are_those_that_were_timed(tmp_path):
    for folder in ("here", "there"):
        for scheme in (PRE, LNS):
            config = TrainConfig(scheme=scheme, depth=2, dtype="float32")
            write_run(config, tmp_path / folder, corpus={"unigram_entropy": 6.5})
    (tmp_path / "here" / league.STEPS).write_text("scheme,step,step_low,step_high\nlns,1.5,1.4,1.6\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="is the same run"):
        both = league.load([tmp_path / "here", tmp_path / "there"])
    assert len(both.finals) == len(league.load([tmp_path / "here"]).finals) and both.finals["run"].nunique() == 2
    found = league.standings(both, load_published()).set_index("scheme")
    assert found.loc[LNS, ["step_cost", "step_low", "step_high"]].tolist() == [1.5, 1.4, 1.6]
    assert math.isnan(found.loc["dyt", "step_cost"])


def test_a_final_run_in_a_second_precision_is_no_further_seed(tmp_path):
    for seed, dtype in ((0, "float32"), (0, "bfloat16"), (1, "float32")):
        config = TrainConfig(scheme=PRE, depth=2, dtype=dtype, seed=seed)
        write_run(config, tmp_path, corpus={"unigram_entropy": 6.5})
    with pytest.warns(UserWarning, match="left out: 1 final runs that others repeat in another precision"):
        finals = league.load([tmp_path]).finals
    assert finals.groupby("seed")["run"].nunique().tolist() == [1, 1] and set(finals["dtype"]) == {"float32"}
