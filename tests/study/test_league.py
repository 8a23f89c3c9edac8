"""The league's table and figures: rates chosen on the validation half, pairs by seed with their own t, no rank of one
seed; what others say; and what one table cannot hold."""

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
from figures_helpers import activation, one_run
from scipy import stats
from training_helpers import write_run

from normlab.analysis.published import load_published
from normlab.analysis.selection import choose, summarize
from normlab.errors import NormlabError
from normlab.figures import loss_by_rate
from normlab.runs import EXPERIMENT_COLUMNS
from normlab.schemes import SCHEMES, tagged
from normlab.store import EXPERIMENTS
from normlab.study import league, league_figures
from normlab.study.league import by_rate, contenders
from normlab.training.config import TrainConfig

LOSSES = {  # scheme -> rate -> (test, validation), by seed 0
    "pre_rmsnorm": {2e-3: (3.10, 3.00), 4e-3: (3.05, 2.95), 8e-3: (3.30, 3.20)},
    "lns": {2e-3: (3.20, 3.12), 4e-3: (3.07, 2.93), 8e-3: (3.04, 2.94)},
    "dyt": {2e-3: (6.50, 6.50), 4e-3: (6.60, 6.60), 8e-3: (6.40, 6.40)},
}
SHIFTS = {"pre_rmsnorm": [0.0, 0.01, 0.02, 0.03], "lns": [0.0, 0.02, 0.01, 0.05]}  # of seeds, at the best rates


def run(scheme, lr, seed, test, validation):
    table = one_run(scheme, 8, seed, lr)
    end = (table["site"] == "model") & (table["split"] == "eval") & (table["metric"] == "loss")
    table.loc[end & (table["step"] == 20), "value"] = test
    last = table[end & (table["step"] == 20)]
    others = [last.assign(metric="validation_loss", value=validation), last.assign(metric="trigram_loss", value=3.7)]
    return pd.concat([table, *others, last.assign(metric="bigram_loss", value=4.4)], ignore_index=True)


@pytest.fixture(scope="module")
def runs():
    tables = []
    for scheme, rates in LOSSES.items():
        for lr, (test, validation) in rates.items():
            is_best = lr == 4e-3 and scheme in SHIFTS
            for seed, shift in enumerate(SHIFTS[scheme] if is_best else [0.0]):
                tables.append(run(scheme, lr, seed, test + shift, validation + shift))
    return pd.concat(tables, ignore_index=True)


@pytest.fixture(scope="module")
def table(runs):
    steps = pd.DataFrame({"scheme": ["lns"], "step": [1.25], "step_low": [1.2], "step_high": [1.3]})
    return league.standings(runs, load_published(), steps).set_index("scheme", drop=False)


def test_rates_are_chosen_on_the_validation_half_and_reported_on_the_test_half(runs):
    about = summarize(choose(runs, depth=8).table)
    assert about.groupby("scheme")["lr"].first().to_dict() == {"dyt": 8e-3, "lns": 4e-3, "pre_rmsnorm": 4e-3}
    one_seed = runs[runs["seed"] == 0]
    assert summarize(choose(one_seed, depth=8).table).groupby("scheme")["lr"].first()["lns"] == 4e-3  # not 8e-3
    table = contenders(one_seed).set_index("scheme")
    assert table.loc["lns", ["best", "loss"]].tolist() == [4e-3, 3.07] and not table.loc["lns", "at_edge"]
    assert table.loc["dyt", "at_edge"] and not table.loc["dyt", "learned"]


def test_a_pair_of_four_seeds_is_tested_by_its_own_t_and_others_are_not(runs):
    table = contenders(runs).set_index("scheme")
    gaps = np.array(SHIFTS["lns"]) - np.array(SHIFTS["pre_rmsnorm"]) + 3.07 - 3.05
    interval = stats.t.interval(0.95, 3, gaps.mean(), stats.sem(gaps))
    assert table.loc["lns", ["minus", "low", "high"]].tolist() == pytest.approx([gaps.mean(), *interval])
    assert table.loc["lns", "p_holm"] == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue)  # a family of one
    assert table.loc[["pre_rmsnorm", "dyt"], ["minus", "low", "p_holm"]].isna().all(axis=None)
    assert contenders(runs[runs["seed"] == 0])["minus"].isna().all()


def test_a_pair_with_a_diverged_seed_is_not_tested_and_its_loss_is_infinite(runs):
    lost = (runs["scheme"] == "lns") & (runs["lr"] == 4e-3) & (runs["seed"] == 3)
    runs = runs.assign(status=runs["status"].mask(lost, "diverged"))
    table = contenders(runs).set_index("scheme")
    assert table.loc["lns", "loss"] == np.inf and table.loc["lns", ["minus", "p_holm"]].isna().all()
    with pytest.raises(NormlabError, match="no run of 12 blocks in the table"):
        contenders(runs, 12)


def test_validation_losses_of_some_runs_alone_choose_no_rate(runs):
    some = (runs["metric"] != "validation_loss") | (runs["lr"] == 8e-3) | (runs["scheme"] != "lns")
    about = summarize(runs[some])
    own = about[about["scheme"] == "lns"]
    assert own["validation_loss"].tolist() == own["eval_loss"].tolist()


def test_runs_that_differ_in_something_else_are_not_drawn_as_one(runs):
    twins = runs[runs["lr"] == 2e-3].assign(run=lambda t: t["run"].astype(str) + "-twin")
    assert "keep those of one setting" in str(loss_by_rate(pd.concat([runs, twins])).layout.annotations)
    wider = runs.assign(width=32, run=runs["run"].astype(str) + "-wide", value=runs["value"] + 1)
    lines = {trace.name: trace.y for trace in loss_by_rate(pd.concat([runs, wider[wider["seed"] > 0]])).data}
    assert lines["LNS"][0] == 3.20


def test_every_rate_has_a_row_with_means_over_seeds(runs):
    rates = by_rate(runs, 8).set_index(["scheme", "lr"])
    assert rates["seeds"].to_dict()["lns", 4e-3] == 4 and len(rates) == 9
    assert rates.loc[("lns", 4e-3), "loss"] == pytest.approx(3.07 + np.mean(SHIFTS["lns"]))
    assert rates["learned"].to_dict()["pre_rmsnorm", 8e-3] and not rates["learned"].to_dict()["dyt", 2e-3]
    wide = contenders(runs).set_index("scheme")
    assert wide.loc["pre_rmsnorm", ["loss_at_0.002", "loss_at_0.008"]].tolist() == [3.10, 3.30]


def test_the_figure_has_a_line_per_scheme_and_triangles_for_what_has_not_learned(runs):
    figure = loss_by_rate(runs)
    lines = {trace.name: trace for trace in figure.data if trace.mode == "lines"}
    assert list(lines["LNS"].x) == [2e-3, 4e-3, 8e-3] and lines["LNS"].y[0] == 3.20
    assert list(lines["DyT"].y) == [None] * 3
    triangles = [trace for trace in figure.data if trace.marker.symbol == "triangle-up"]
    assert sorted(trace.x[0] for trace in triangles) == [2e-3, 4e-3, 8e-3]
    assert all("6." in trace.hovertemplate for trace in triangles)
    assert "trigram 3.70" in figure.layout.title.subtitle.text
    empty = loss_by_rate(runs[runs["lr"] == 4e-3])
    assert "was trained at several learning rates" in str(empty.layout.annotations)


def test_runs_above_the_edge_at_one_rate_have_a_triangle_per_scheme_side_by_side(runs):
    lost = runs["scheme"].isin(["lns", "pre_rmsnorm"]) & (runs["lr"] == 4e-3)
    figure = loss_by_rate(runs.assign(status=runs["status"].mask(lost, "diverged")))
    triangles = [t for t in figure.data if t.marker.symbol == "triangle-up" and "rate 0.004" in t.hovertemplate]
    assert [trace.name for trace in triangles] == ["Pre-LN", "LNS", "DyT"], "not one per run"
    places = [trace.x[0] for trace in triangles]
    assert places[0] < places[1] < places[2] and places == pytest.approx([4e-3] * 3, rel=0.1)
    assert "triangles: above it or diverged" in figure.layout.title.subtitle.text
    assert "triangles: above it ·" in loss_by_rate(runs).layout.title.subtitle.text + " ·"


def test_runs_that_all_diverged_have_a_figure_that_says_so():
    runs = pd.concat([one_run("lns", 8, 0, lr, status="diverged") for lr in (1e-3, 2e-3)], ignore_index=True)
    runs = runs[runs["metric"] != "unigram_entropy"]
    assert "No run of 8 blocks ended with a finite loss." in str(loss_by_rate(runs).layout.annotations)


def test_sizes_are_of_one_rate_and_steps_are_those_that_were_timed(runs, table):
    grown = activation("lns", 8, 20) / activation("lns", 1, 20)
    assert table.loc["lns", ["at", "of_seed", "growth", "step"]].tolist() == pytest.approx([4e-3, 0, grown, 1.25])
    others = (runs["seed"] > 0) & runs["metric"].eq("token_l2_mean") & runs["layer"].eq(8)
    taller = contenders(runs.assign(value=runs["value"].where(~others, 2 * runs["value"]))).set_index("scheme")
    assert taller["growth"].to_dict() == pytest.approx(table["growth"].to_dict()), "of one seed in every row"
    assert table.loc["pre_rmsnorm", "step"] == 1 and np.isnan(table.loc["dyt", "step"])
    assert table["deep_cost"].isna().all(), "no experiments"
    others = contenders(runs[runs["lr"] != 4e-3])
    assert others["at"].unique().tolist() == [2e-3], "no run at 0.004"


def test_what_papers_and_marin_say_has_its_source(table):
    assert "−0.029 from RMSNorm (BHyT Table 1, Llama-1B)" in table.loc["lns", "claim"]
    assert f"−{np.log(17.02 / 15.71):.3f} from Pre-LN (Curse of Depth Table 1, Llama-1B)" in table.loc["lns", "claim"]
    words, changes = league._of_marin(load_published())
    by_blocks = "−0.009 (512 wide), −0.022 (768 wide), issue 9290; whether full or by blocks is not said"
    assert words["block_attn_residuals"] == by_blocks and words["peri_ln"] == "+0.013 (512 wide), issue 9290"
    assert words["gatednorm"] == "kept in the baseline: removing it hurts, issue 4026" and "gatednorm" not in changes
    assert "marin" not in league.claims(load_published()).get("gatednorm", "")


def test_the_rank_agreement_is_of_schemes_that_both_have_and_that_have_learned(table):
    assert "none yet, as both have 1 of these schemes (it takes 3)" in league.agreement(table)
    losses = {"pre_rmsnorm": 3.1, "peri_ln": 3.0, "block_attn_residuals": 2.9, "mhc": 2.8, "residual_mix": 3.9}
    changes = {"peri_ln": 0.0134, "block_attn_residuals": -0.0089, "mhc": -0.0074, "residual_mix": -0.0097}
    made = pd.DataFrame({"scheme": [*losses], "loss": [*losses.values()], "learned": [*[True] * 4, False]})
    made["marin_change"] = made["scheme"].map(changes)
    theirs = {**changes, "pre_rmsnorm": 0.0}
    pairs = itertools.combinations(list(losses)[:4], 2)
    signs = [np.sign((losses[a] - losses[b]) * (theirs[a] - theirs[b])) for a, b in pairs]
    assert f"Kendall's tau {np.mean(signs):.2f}. A random order agrees as well" in league.agreement(made)
    assert "over the 4 schemes that both have, Pre-LN with a change of 0" in league.agreement(made)


def test_an_agreement_of_three_schemes_is_said_to_mean_nothing():
    """One of the six orders of three is any given one."""
    made = pd.DataFrame({"scheme": ["block_attn_residuals", "pre_rmsnorm", "peri_ln", "mhc"], "loss": [1, 2, 3, 0.5]})
    made = made.assign(learned=True, marin_change=[-0.01, np.nan, 0.01, -0.02])
    said = "Kendall's tau 1.00. A random order agrees as well with a chance of"
    assert league.agreement(made[:3]).endswith(f"{said} 0.17: too few schemes to mean anything.")
    assert league.agreement(made).endswith(f"{said} 0.04.")


def moves(**losses):
    """One run per scheme and rate, of (test, validation) losses. The trigram model's is 3.7."""
    tables = [run(scheme, lr, 0, *both) for scheme, rates in losses.items() for lr, both in rates.items()]
    return pd.concat(tables, ignore_index=True)


def test_what_a_factor_of_two_in_the_rate_moves_is_of_one_seed_and_of_runs_that_have_learned(runs):
    (row,) = league.moved(runs).to_dict("records")  # seed 0 of LNS and Pre-LN at 0.004, though both have four
    assert row["scheme"] == "lns" and row["by_rate"] == pytest.approx(3.20 - 3.07)
    assert row["from_baseline"] == pytest.approx(3.07 - 3.05)
    base = {4e-3: (3.05, 2.95)}
    lost = {2e-3: (3.12, 3.0), 4e-3: (3.10, 2.98), 8e-3: (6.5, 6.5), 5e-4: (3.6, 3.5)}
    made = moves(pre_rmsnorm=base, post_rmsnorm=lost, dyt={2e-3: (3.6, 3.5), 4e-3: (6.5, 6.5)}, lns=LOSSES["lns"])
    by_rate = league.moved(made).set_index("scheme")["by_rate"]
    assert by_rate["post_rmsnorm"] == pytest.approx(0.02), "neither a loss of 6.5 nor what is a factor of eight away"
    assert np.isnan(by_rate["dyt"]), "learned at one rate"
    said = league.found(made)
    assert said.startswith("A factor of two in the learning rate moves the loss of 1 of 2 schemes, not most of them,")
    assert said.endswith(
        "nats, of one seed. Not so: Post-LN. Not compared, as learned at neither half nor twice the best rate: DyT."
    )
    assert "the loss of 1 of 1 schemes, most of them, further than" in league.found(runs)


def test_what_the_rate_moves_is_compared_with_nothing_where_pre_ln_or_every_other_has_not_learned(runs):
    is_base = runs["scheme"] == "pre_rmsnorm"
    without_trigram = runs[~is_base | (runs["metric"] != "trigram_loss")]
    alone = moves(pre_rmsnorm={4e-3: (3.05, 2.95)}, lns={4e-3: (3.05, 2.95)})
    for some in (runs[~is_base], without_trigram, runs[is_base]):
        assert league.found(some).startswith("Nothing is compared: it takes runs of Pre-LN and another scheme that")
    assert league.found(alone).startswith("Nothing is compared: no scheme has learned at its best learning rate and")


def test_our_losses_stand_next_to_the_papers(table):
    found = league.against_papers(table, load_published()).set_index("scheme")["ours, from the same scheme"]
    assert found["DyT"] == "not learned", "one row: the other table's LN was not run"
    row = table.loc["lns"]
    assert set(found["LNS"]) == {f"+{row['minus']:.2f} [{row['low']:.2f}, {row['high']:.2f}]".replace("-", "−")}


def test_what_must_be_said_of_a_table_is_said(runs, table):
    said = " ".join(league.remarks(table))
    assert said.startswith("8 blocks; losses are held-out, in nats per token, of 1 to 4 seeds; growth and deep cost at")
    assert "No interval, and so no rank: DyT." in said and "at the edge of those tried: DyT (0.008)." in said
    assert "Not learned with every seed at the best rate, so above a trigram model: DyT." in said
    assert "growth and deep cost at rate 0.004, of seed 0 alone." in said and "Step not timed: DyT." in said
    assert "at one rate alone" not in said
    alone = league.standings(runs[runs["lr"] == 4e-3], load_published(), league.step_times().iloc[:0])
    assert "Tried at one rate alone: Pre-LN; LNS; DyT." in league.remarks(alone)
    odd = " ".join(league.remarks(table.assign(dtype=["bfloat16", "bfloat16", "float32"])))
    assert f"up to 0.04: {table['title'].iloc[-1]} (float32)." in odd and "another precision" not in said


def test_a_warm_up_of_a_schemes_own_is_said_of_the_table_and_under_its_figures(runs, table):
    assert not any("differently" in sentence for sentence in league.remarks(table))
    own = runs.assign(recipe=np.where(runs["scheme"] == "dyt", "warmup=0.3", "warmup=0.1"))
    made = league.standings(own, load_published(), league.step_times().iloc[:0])
    assert "Trained differently: warmup 0.1 and 0.3 (DyT)." in league.remarks(made)
    for name in ("league_losses", "league_depth"):
        said = league_figures.FIGURES[name](made).layout.title.subtitle.text
        assert "trained differently: warmup 0.1 and 0.3 (DyT)" in said


def test_runs_without_a_trigrams_loss_are_not_said_to_be_above_it(runs):
    unknown = league.standings(runs[runs["metric"] != "trigram_loss"], load_published(), league.step_times().iloc[:0])
    said = " ".join(league.remarks(unknown))
    assert "Not learned" not in said
    assert "Not known to have learned, as the runs know no trigram model's loss: Pre-LN; LNS; DyT." in said
    assert not league.shown(unknown).astype(str).apply(lambda column: column.str.contains("(", regex=False)).any().any()
    assert "not learned" not in set(league.against_papers(unknown, load_published()).iloc[:, -1])


def test_a_scheme_that_logged_no_held_out_loss_is_not_said_to_be_above_the_trigram_model(runs):
    of_lns = runs["scheme"].eq("lns") & runs["metric"].isin(["loss", "validation_loss"]) & runs["split"].eq("eval")
    made = league.standings(runs[~of_lns], load_published(), league.step_times().iloc[:0])
    said = " ".join(league.remarks(made))
    assert "as not every seed logged a held-out loss at the best rate: LNS." in said
    assert "no trigram model's" not in said and "above a trigram model: DyT." in said
    rows = made.set_index("scheme")
    assert np.isnan(rows.loc["lns", "loss"]) and not rows.loc["lns", "told"] and rows.loc["dyt", "told"]
    one = runs[~(runs["scheme"].eq("lns") & runs["seed"].eq(3) & of_lns)]
    assert contenders(one).set_index("scheme").loc[["lns", "pre_rmsnorm"], "loss"].isna().tolist() == [True, False]


def test_the_printed_table_marks_best_rates_and_fits_a_terminal(table):
    lines = league.printed(table).splitlines()
    first, row = lines[0].split(), next(line for line in lines if line.split()[0] == "LNS").split()
    assert first[:4] == ["scheme", ".002", ".004", ".008"] and row[1:4] == ["3.20", "3.09*", "3.04"]
    dyt = next(line for line in lines if line.split()[0] == "DyT").split()
    assert dyt[1:] == ["(6.50)", "(6.60)", "(6.40)+", f"{activation('dyt', 8, 20) / activation('dyt', 1, 20):.2f}"]
    names = tagged("contender")
    full = pd.concat([table.loc[["lns"]]] * len(names), ignore_index=True)
    full = full.assign(scheme=names, title=[SCHEMES[name].title for name in names], deep_cost=0.123, minus=-0.05)
    full = full.assign(low=-0.08, high=-0.02, at_edge=True)
    full.insert(13, "loss_at_0.001", 3.5), full.insert(16, "loss_at_0.016", 3.5)
    full = full.assign(**{"learned_at_0.001": True, "learned_at_0.016": False})
    full = full.assign(**{"told_at_0.001": True, "told_at_0.016": True})
    assert max(map(len, league.printed(full).splitlines())) <= 100


def test_a_loss_is_in_parentheses_where_not_every_seed_has_learned(runs):
    """By rate: of a scheme that has learned at another one too, and of one that has at that rate alone."""
    told = {("lns", 8e-3): 3.9, ("dyt", 2e-3): 3.6}
    end = (runs["metric"] == "loss") & (runs["split"] == "eval") & (runs["step"] == 20)
    changed = pd.Series(zip(runs["scheme"], runs["lr"], strict=True), index=runs.index).map(told).where(end)
    made = contenders(runs.assign(value=changed.fillna(runs["value"])))
    found = league.shown(made.assign(title=made["scheme"], step=np.nan)).set_index("scheme")
    assert found.loc["lns", [".002", ".004", ".008"]].tolist() == ["3.20", "3.09*", "(3.90)"]
    assert found.loc["dyt", ".002"] == "3.60" and found.loc["dyt", ".004"] == "(6.60)"


def config(**fields):
    return TrainConfig(**{"scheme": "lns", "depth": 2, "dtype": "float32", **fields})


TEXT = {"corpus": {"unigram_entropy": 6.5}}


def test_changed_models_are_no_rows_and_a_twin_in_another_precision_is_no_seed(tmp_path):
    changed = {"scheme": "bhyt", "model": {"gamma0": 2.0}}
    for more in ({}, {"seed": 1}, {"dtype": "bfloat16"}, {"scheme": "bhyt", "warmup": 0.3}, changed):
        write_run(config(**more), tmp_path / "here", **TEXT)
    write_run(config(), tmp_path / "there", **TEXT)
    with warnings.catch_warnings(record=True):
        found = summarize(league.load([tmp_path / "here", tmp_path / "there"]))
    assert sorted(zip(found["scheme"], found["seed"], strict=True)) == [("bhyt", 0), ("lns", 0), ("lns", 1)]
    assert set(found["dtype"]) == {"float32"}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"trigram_loss": 4.1}, "runs of 2 blocks differ in trigram_loss, .* normlab.packages. is installed"),
        ({"batch_size": 64}, "runs of 2 blocks differ in tokens, so their losses do not compare$"),
        ({"width": 64}, "runs of 2 blocks differ in width, so their losses do not compare$"),
        ({"warmup": 0.3}, "runs of lns at depth 2 differ in warmup 0.1 and 0.3: keep those of one recipe"),
        ({"seed": 1, "warmup": 0.3}, "runs of lns at depth 2 differ in warmup 0.1 and 0.3: keep those of one recipe"),
        ({"scheme": "dyt", "clip": 5.0}, "runs of 2 blocks differ in clip, so their losses do not compare$"),
        ({"probe_every": 10}, "runs of lns at depth 2, rate .* and seed 0 differ in something else"),
    ],
)
def test_runs_of_two_recipes_make_no_table(tmp_path, other, message):
    about = {"trigram_loss": 4.0} | {name: other[name] for name in other if name == "trigram_loss"}
    write_run(config(), tmp_path, trigram_loss=4.0, **TEXT)
    more = {name: value for name, value in other.items() if name != "trigram_loss"}
    write_run(config(**(more or {"scheme": "dyt"})), tmp_path, **about, **TEXT)
    with pytest.raises(NormlabError, match=message):
        league.load([tmp_path])
    with pytest.raises(NormlabError, match="none is no folder of runs"):
        league.load([tmp_path / "none"])


def test_the_cost_of_deep_blocks_is_their_mean_without_the_last(tmp_path):
    run = write_run(config(depth=8), tmp_path, **TEXT)
    rows = [("skip_delta_loss", "block", layer, None, 0.1 * layer, 0.0) for layer in range(1, 9)]
    pd.DataFrame(rows, columns=EXPERIMENT_COLUMNS).to_parquet(run / EXPERIMENTS, index=False)
    assert contenders(league.load([tmp_path]), at=config().lr)["deep_cost"].tolist() == [pytest.approx(0.6)]


def test_the_league_is_of_the_depth_with_most_schemes_though_half_of_them_are_deeper():
    schemes = ("pre_rmsnorm", "lns", "bhyt", "dyt")
    runs = pd.concat([one_run(scheme, depth) for depth in (8, 16) for scheme in schemes[: 24 // depth + 1]])
    assert sorted(runs.groupby("depth")["scheme"].nunique()) == [2, 4] and choose(runs).depths == [8]
    runs = pd.concat([runs, one_run("bhyt", 16)])
    assert choose(runs).depths == [16] and {*contenders(runs)["depth"]} == {8} and len(contenders(runs)) == 4
