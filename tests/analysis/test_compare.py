"""Comparisons between schemes: paired by seed, with intervals that are right, and no claim where there is none."""

import math

import numpy as np
import pandas as pd
import pytest
from figures_helpers import empty, one_run, table, text_of

from normlab.analysis.claims import depth_gain, losses, shown
from normlab.analysis.compare import compare, compare_variants, report
from normlab.analysis.profiles import Profiles, View, default_view
from normlab.analysis.quantities import last_values, values_of
from normlab.analysis.selection import NothingToShow, choose, fully_tried, of_depth, summarize
from normlab.analysis.verdicts import DIFFERENT, UNDECIDED, in_words
from normlab.errors import NormlabError
from normlab.figures.settings import variant_differences


def test_pairing_by_seed_sees_a_difference_that_the_spread_of_seeds_hides():
    found = compare(table(), "lns", "pre_rmsnorm").iloc[-1]
    # Seeds move both by 0.3, the schemes differ by 0.1 exactly.
    assert found["estimate"] == pytest.approx(0.1)
    assert found["low"] == pytest.approx(0.1, abs=1e-6) and found["verdict"] == DIFFERENT
    assert in_words(found) == "different: lns is higher"
    assert found["seeds"] == 3 and found["kind"] == "difference"


def test_an_interval_that_holds_zero_and_what_would_matter_is_undecided():
    runs = table(schemes=("pre_rmsnorm", "lns"), depths=(4,))
    noise = {0: 0.3, 1: -0.25, 2: 0.0}
    mine = (runs["scheme"] == "lns") & (runs["metric"] == "loss") & (runs["split"] == "eval")
    runs.loc[mine, "value"] = runs.loc[mine, "value"] - 0.1 + runs.loc[mine, "seed"].map(noise)
    found = compare(runs, "lns", "pre_rmsnorm").iloc[0]
    assert found["low"] < 0 < found["high"] and found["verdict"] == UNDECIDED == in_words(found)


def test_a_metric_that_spans_decades_is_compared_as_a_ratio_at_the_last_layer():
    found = compare(table(), "bhyt", "pre_rmsnorm", "token_l2_mean", depth=4).iloc[0]
    assert found["kind"] == "ratio"
    assert found["estimate"] == pytest.approx((1 + 0.1 * 4 * 3) / (1 + 4 * 3))
    before = compare(table(), "bhyt", "pre_rmsnorm", "token_l2_mean", depth=4, step=0).iloc[0]
    assert before["estimate"] == pytest.approx((1 + 0.1 * 4) / (1 + 4))


def test_a_diverged_seed_is_counted_out_loud_and_never_compared():
    runs = pd.concat([one_run("pre_rmsnorm", seed=0), one_run("lns", seed=0, status="diverged")], ignore_index=True)
    found = compare(runs, "lns", "pre_rmsnorm").iloc[0]
    assert found["seeds"] == 0 and found["unpaired"] == 1 and in_words(found) == "nothing to compare"


def test_what_cannot_be_compared_is_one_sentence():
    with pytest.raises(NormlabError, match="no run of 'dyt' in the table"):
        compare(table(), "dyt", "bhyt")
    with pytest.raises(NormlabError, match="between 0 and 1"):
        compare(table(), "lns", "bhyt", level=95)
    with pytest.raises(NormlabError, match="no run"):
        compare(empty(), "lns", "bhyt")


def test_the_learning_rate_is_the_one_with_most_seeds_then_the_lowest_loss():
    searched = [one_run("bhyt", lr=lr, seed=0) for lr in (1e-3, 3e-3)]
    lower = searched[1]["metric"] == "loss"
    searched[1].loc[lower, "value"] -= 1.0
    chosen = choose(pd.concat(searched, ignore_index=True))
    assert set(chosen.runs["lr"]) == {3e-3}
    more = choose(pd.concat([*searched, one_run("bhyt", lr=1e-3, seed=1)], ignore_index=True))
    assert set(more.runs["lr"]) == {1e-3}


def test_a_diverged_learning_rate_is_chosen_only_when_there_is_no_other():
    runs = pd.concat([one_run("bhyt", lr=1e-2, status="diverged"), one_run("bhyt", lr=1e-3)], ignore_index=True)
    chosen = choose(runs)
    assert set(chosen.runs["lr"]) == {1e-3}


def test_controls_come_along_whatever_schemes_are_asked_for():
    chosen = choose(table(), schemes=["bhyt"])
    assert set(chosen.schemes) == {"bhyt", "bhyt_linear", "rmsnorm_gain"}


def test_controls_choose_neither_depth_nor_width():
    runs = pd.concat([one_run("lns", 2), one_run("rmsnorm_gain", 4), one_run("rmsnorm_gain", 4, 1)], ignore_index=True)
    for depth in ("deepest", None, 2):
        chosen = choose(runs, depth, schemes=["lns"])
        assert (chosen.schemes, chosen.depths) == (["lns"], [2])
    assert choose(runs, schemes=["lns", "rmsnorm_gain"]).depths == [4], "one that is asked for does"
    with pytest.raises(NothingToShow, match="No run of lns at depth 4 in the table, which has it at depth 2"):
        choose(runs, 4, schemes=["lns"])
    wide = runs.assign(depth=4, width=runs["width"].mask(runs["scheme"] == "lns", 32))
    assert choose(wide, schemes=["lns"]).schemes == ["lns"]
    with pytest.raises(NothingToShow, match="No run of lns at width 16 in the table"):
        choose(wide, width=16, schemes=["lns"])


def test_a_depth_that_is_there_at_another_width_is_named_with_it():
    runs = pd.concat([table(("lns", "bhyt"), (2,)), one_run("lns", 4).assign(width=32)], ignore_index=True)
    with pytest.raises(NothingToShow, match="No run of depth 4 at width 16 .* has that depth at width 32"):
        choose(runs, 4, width=16)
    assert choose(runs, 4).runs["width"].tolist() == [32]
    with pytest.raises(NothingToShow, match="No run of depth 8 in the table, which has depth 2"):
        choose(runs, 8)
    for depth in (None, 8):
        with pytest.raises(NothingToShow, match="^The table has no run.$"):
            of_depth(runs[:0], depth)


def test_a_summary_has_a_row_a_run_with_its_last_losses():
    about = summarize(table(schemes=("lns",), depths=(4,), seeds=(0, 1)))
    assert len(about) == 2 and about["eval_loss"].tolist() == pytest.approx([4.1, 4.4])
    assert about["unigram_entropy"].tolist() == [6.0, 6.0] and about["steps"].tolist() == [20, 20]
    with pytest.raises(NormlabError, match="lacks the columns"):
        summarize(about)


def with_noise() -> pd.DataFrame:
    """Runs whose seeds move schemes apart by different amounts, at one learning rate and, for some, at another too."""
    random = np.random.default_rng(0)
    runs = table(schemes=("pre_rmsnorm", "lns", "bhyt"))
    better = pd.concat([one_run("bhyt", depth, seed, lr=3e-3) for depth in (2, 4) for seed in range(3)])
    is_measured = better["metric"] != "unigram_entropy"
    runs = pd.concat([runs, better.assign(value=better["value"].mask(is_measured, 0.9 * better["value"]))])
    runs["value"] *= 1 + 0.2 * random.random(len(runs)) * (runs["metric"] != "unigram_entropy")
    runs = runs.reset_index(drop=True)
    return runs


@pytest.mark.parametrize("metric", ["token_l2_mean", "grad_l2_total"])
def test_the_numbers_are_those_of_the_explorer_at_every_layer(metric):
    """Its view against a reference: same runs, same pairs, same interval; magnitudes at one learning rate."""
    runs = with_noise()
    profiles = Profiles(runs)
    for scheme, depth, step in (("bhyt", 4, 20), ("lns", 2, 10), ("bhyt", 2, 0)):
        site = profiles.sites(metric)[0]
        rate = profiles.opening_rate(depth)
        view = View(metric, site, "all", depth, step, (scheme,), reference="pre_rmsnorm", rate=rate)
        (line,) = profiles.lines(view)
        for place, layer in enumerate(line.layers):
            found = compare(runs, scheme, "pre_rmsnorm", metric, depth=depth, layer=int(layer), step=step).iloc[0]
            shown = (line.values[place], line.low[place], line.high[place], line.seeds)
            assert (found["estimate"], found["low"], found["high"], found["seeds"]) == pytest.approx(shown)


def test_a_scheme_against_itself_is_one_whatever_seeds_do():
    profiles = Profiles(with_noise())
    view = View("token_l2_mean", "block_out", "all", 4, 20, ("lns", "bhyt"), reference="lns")
    itself, other = profiles.lines(view)
    for values in (itself.values, itself.low, itself.high):
        assert values.tolist() == [1.0] * len(values)
    assert itself.seeds == 3 and (other.high > other.low).all()


def test_losses_are_those_of_each_schemes_own_learning_rate_and_magnitudes_of_the_shared_one():
    runs = with_noise()
    loss, size = compare(runs, "bhyt", "lns"), compare(runs, "bhyt", "lns", "token_l2_mean")
    assert "each scheme's learning rate: 0.001 (" in loss.attrs["about"]
    assert "learning rate 0.001" in size.attrs["about"]


def test_two_runs_are_compared_by_name_if_they_are_a_pair():
    runs = pd.concat([one_run("bhyt", lr=1e-3), one_run("bhyt", lr=3e-3, steps=(0, 10)), one_run("lns", seed=1)])
    first, second, third = runs["run"].unique()
    found = compare(runs, first, second, step=10).iloc[0]
    assert in_words(found) == "undecided, one seed: no interval" and found["a"] == first and found["estimate"] != 0
    with pytest.raises(NormlabError, match="20 steps and .* for 10: give the step"):
        compare(runs, first, second)
    with pytest.raises(NormlabError, match="have seed 0 and 1: no pair"):
        compare(runs, first, third)


def test_runs_of_another_length_are_not_compared_at_their_ends():
    runs = pd.concat([one_run("bhyt"), one_run("lns", steps=(0, 10, 20, 40))], ignore_index=True)
    with pytest.raises(NormlabError, match="at depth 4, seed 0, bhyt was trained for 20 steps and lns for 40"):
        compare(runs, "bhyt", "lns")
    assert compare(runs, "bhyt", "lns", step=20).iloc[0]["seeds"] == 1


def test_runs_of_another_text_are_not_compared():
    other = one_run("lns")
    other["value"] = other["value"].mask(other["metric"] == "unigram_entropy", 4.95)
    with pytest.raises(NormlabError, match=r"depth 4 were measured on 2 texts .*entropy 4.950, 6.000\)"):
        compare(pd.concat([one_run("bhyt"), other], ignore_index=True), "bhyt", "lns")
    three = pd.concat([one_run("bhyt"), one_run("dyt"), other], ignore_index=True)
    assert compare(three, "bhyt", "dyt")["estimate"].notna().all(), "a third scheme's text is not theirs"
    seeds = table(("bhyt", "lns"), (2, 4), (0, 1))
    entropy = seeds["metric"].eq("unigram_entropy")
    by_seed = seeds.assign(value=seeds["value"].mask(entropy & seeds["seed"].eq(1), 4.95))
    with pytest.raises(NormlabError, match=r"depth 2 were measured on 2 texts .*entropy 4.950, 6.000\): keep"):
        compare(by_seed, "bhyt", "lns")
    by_depth = seeds.assign(value=seeds["value"].mask(entropy & seeds["depth"].eq(2), 4.95))
    assert len(compare(by_depth, "bhyt", "lns")) == 2, "each depth has a mean of its own"


def test_runs_of_two_depths_and_texts_are_not_shown_together():
    runs = table(("lns", "bhyt"), (2, 4))
    other = runs["depth"].eq(2) & runs["metric"].eq("unigram_entropy")
    runs["value"] = runs["value"].mask(other, 4.95)
    message = r"depths 2, 4 were measured on 2 texts or in other tokens \(unigram_entropy 4.950, 6.000\): keep"
    for asked in (lambda: choose(runs, None), lambda: depth_gain(runs), lambda: losses(runs)):
        with pytest.raises(NothingToShow, match=message):
            asked()
    assert choose(runs, 2).depths == [2] and choose(runs, 4).depths == [4]


def test_runs_of_other_held_out_text_or_of_more_tokens_in_as_many_steps_are_not_compared():
    rows = [one_run(scheme) for scheme in ("bhyt", "lns")]
    for row, loss in zip(rows, (4.6, 4.7), strict=True):
        row.loc[len(row)] = row.iloc[-1].to_dict() | {"metric": "bigram_loss", "split": "eval", "value": loss}
    with pytest.raises(NormlabError, match=r"measured on 2 texts .*bigram_loss 4.600, 4.700\): keep"):
        compare(pd.concat(rows, ignore_index=True), "bhyt", "lns")
    long = one_run("lns")
    long["tokens"] *= 2
    with pytest.raises(NormlabError, match="bhyt was trained for .* tokens and lns for .* train them on equally many"):
        compare(pd.concat([one_run("bhyt"), long], ignore_index=True), "bhyt", "lns")
    seeds = [
        one_run("bhyt"),
        one_run("lns", seed=1),
        one_run("bhyt", seed=1).assign(tokens=lambda rows: rows["tokens"] * 2),
    ]
    with pytest.raises(NormlabError, match="Seeds of bhyt .* were trained for .* tokens: keep the runs of one length"):
        compare(pd.concat(seeds, ignore_index=True), "bhyt", "lns")


def test_runs_of_two_recipes_are_no_seeds_of_one_scheme_and_are_said_between_two():
    def run(scheme: str, recipe: str, seed: int = 0) -> pd.DataFrame:
        return one_run(scheme, seed=seed).assign(recipe=f"steps=20 {recipe}")

    alike, other = "warmup=0.1 clip=1", "warmup=0.3 clip=1 beta1=0.9"
    runs = pd.concat([run("bhyt", alike), run("bhyt", other, 1), run("lns", alike)], ignore_index=True)
    with pytest.raises(NothingToShow, match=r"Seeds of bhyt .* were trained differently \(warmup 0.1 and 0.3\): keep"):
        choose(runs)
    diverged = runs.assign(status=runs["status"].mask(runs["seed"] == 1, "diverged"))
    with pytest.raises(NothingToShow, match=r"Seeds of bhyt .* were trained differently \(warmup 0.1 and 0.3\): keep"):
        choose(diverged[diverged["seed"].eq(0) | diverged["step"].le(10)])
    runs = pd.concat([run("bhyt", alike), run("lns", other)], ignore_index=True)
    assert " · trained differently: warmup 0.1 and 0.3 (LNS)\n" in report(compare(runs, "bhyt", "lns"))
    assert "trained differently" not in choose(runs[runs["scheme"] == "lns"]).describe()
    twice = pd.concat([run("bhyt", alike), run("bhyt", other).assign(run="b"), run("lns", alike)], ignore_index=True)
    with pytest.raises(NothingToShow, match="2 runs of bhyt .* differ in warmup 0.1 and 0.3: keep those of one"):
        choose(twice)


def test_what_runs_were_trained_unlike_in_names_schemes_apart_and_depths():
    schemes = ("pre_rmsnorm", "lns", "bhyt", "dyt", "rmsnorm_gain")
    runs = table(schemes, (2, 4), (0,)).assign(recipe="warmup=0.1 clip=5")
    of_two = runs["scheme"].isin(["dyt", "rmsnorm_gain"]) & runs["depth"].eq(4)
    runs["recipe"] = runs["recipe"].mask(of_two, "warmup=0.3 clip=5")
    assert choose(runs, 4).recipes() == "trained differently: warmup 0.1 and 0.3 (DyT; Pre-LN, gain λ/κ)"
    runs["recipe"] = runs["recipe"].mask(runs["depth"] == 2, "warmup=0.1 clip=1")
    said = "warmup 0.1 and 0.3 (DyT; Pre-LN, gain λ/κ), clip 1 at depth 2 and 5 at depth 4"
    assert choose(runs, None).recipes() == f"trained differently: {said}"
    assert choose(runs, 2).recipes() == ""


def test_a_comparison_says_on_how_many_held_out_blocks_its_sides_were_measured():
    sides = [one_run("pre_rmsnorm", seed=seed).assign(recipe="warmup=0.1 probe_blocks=16") for seed in (0, 1)]
    sides += [one_run("lns", seed=seed).assign(recipe=f"warmup=0.1 probe_blocks={8 << seed}") for seed in (0, 1)]
    runs = pd.concat(sides, ignore_index=True)
    said = compare(runs, "lns", "pre_rmsnorm", "grad_l2_total", layer=1).attrs["about"]
    assert said.endswith(" · measured differently: probe_blocks 16 and 8 (LNS)"), "seeds are one group all the same"
    both = runs.assign(recipe=runs["recipe"].mask(runs["scheme"] == "lns", "warmup=0.3 probe_blocks=8"))
    trained = "trained differently: warmup 0.1 and 0.3 (LNS)"
    assert choose(both).recipes() == f"{trained}; measured differently: probe_blocks 16 and 8 (LNS)"


def test_a_comparison_says_that_one_side_s_model_is_changed_or_its_text_streamed():
    plain = "clip=1 stream=false"
    changed = plain.replace("false", "true") + " model.attention_dropout=0.9"
    sides = [one_run("pre_rmsnorm").assign(recipe=plain), one_run("lns").assign(recipe=changed)]
    for order in (sides, sides[::-1]):
        said = choose(pd.concat(order, ignore_index=True)).recipes()
        assert sorted(said.removeprefix("trained differently: ").split(", ")) == [
            "model.attention_dropout 0.9 and default (Pre-LN)",
            "stream false and true (LNS)",
        ]
    alike = pd.concat([side.assign(recipe=changed) for side in sides], ignore_index=True)
    assert choose(alike).recipes() == ""


def test_a_step_without_a_held_out_loss_names_those_that_have_one():
    runs = pd.concat([one_run(scheme) for scheme in ("bhyt", "lns")], ignore_index=True)
    logged = runs[runs["metric"].eq("loss") & runs["step"].eq(20)].assign(split="train", step=15)
    with pytest.raises(NormlabError, match="no step 15 of loss in the table, which has: 0, 10, 20"):
        compare(pd.concat([runs, logged], ignore_index=True), "bhyt", "lns", step=15)


def test_runs_that_differ_in_something_else_are_neither_averaged_nor_paired():
    other = one_run("bhyt").assign(run="bhyt-of-another-gain")
    runs = pd.concat([one_run("bhyt"), other.assign(value=other["value"] + 1), one_run("lns")], ignore_index=True)
    message = "2 runs of bhyt at depth 4, seed 0 and learning rate 0.001 differ in something else"
    assert message in Profiles(runs).missing
    for same_rate in (False, True):
        with pytest.raises(NothingToShow, match=message):
            choose(runs, same_rate=same_rate)
    with pytest.raises(NormlabError, match=message):
        compare(runs, "bhyt", "lns")


def test_learning_rates_that_differ_are_said_beside_what_is_compared():
    runs = pd.concat([one_run("bhyt", lr=1e-2), one_run("lns", lr=1e-3)], ignore_index=True)
    found = compare(runs, "bhyt", "lns", "token_l2_mean")
    assert tuple(found.loc[0, ["lr_a", "lr_b"]]) == (1e-2, 1e-3)
    assert report(found).endswith("one seed: no interval; learning rates 0.01 and 0.001")


def test_schemes_that_are_not_tried_at_as_many_rates_as_the_first_are_left_out_of_that_depth():
    grid = [one_run("pre_rmsnorm", lr=lr) for lr in (1e-3, 2e-3)]
    edge = [one_run(name, lr=lr) for name in ("lns", "bhyt") for lr in (1e-3, 2e-3, 4e-3)]
    runs = pd.concat([*grid, *edge, one_run("dyt", lr=1e-3), one_run("dyt", depth=8, lr=1e-3)], ignore_index=True)
    kept = fully_tried(runs)
    assert set(kept["run"]) == set(runs["run"]) - {"dyt-4-0-0.001"}
    assert set(kept.loc[kept["depth"] == 8, "scheme"]) == {"dyt"}
    each = pd.concat([one_run("bhyt", lr=2e-3), one_run("lns", lr=1e-3)])
    assert fully_tried(each)["run"].nunique() == 2, "one rate each, as in `tiny`"


def test_one_rate_a_depth_is_not_called_each_schemes_own():
    runs = pd.concat([one_run(name, depth, lr=depth / 1000) for name in ("bhyt", "lns") for depth in (2, 4)])
    assert choose(runs, depth=None).describe().endswith("learning rate 0.002 at depth 2, 0.004 at depth 4")
    own = pd.concat([runs, one_run("dyt", lr=1.0)])
    said = "each scheme's learning rate: 0.002 (LNS, BHyT), 0.004 (LNS, BHyT), 1 (DyT)"
    assert choose(own, depth=None).describe().endswith(said)
    many = pd.concat([one_run(f"scheme {number}", lr=number / 1000) for number in range(1, 10)])
    assert choose(many).describe().endswith("each scheme's learning rate: 0.001 to 0.009")


def test_an_interval_that_no_number_can_hold_is_infinite():
    runs = pd.concat([one_run(name, seed=seed) for name in ("bhyt", "lns") for seed in (0, 1)], ignore_index=True)
    runs.loc[(runs["run"] == runs["run"].iloc[0]) & (runs["metric"] == "token_l2_mean"), "value"] = 1e30
    found = compare(runs, "bhyt", "lns", "token_l2_mean", level=0.9999).iloc[0]
    assert found["high"] == math.inf and found["low"] == 0.0


def test_the_report_has_a_verdict_a_row_and_one_seed_has_no_interval():
    runs = table(schemes=("pre_rmsnorm", "lns"))
    mine = (runs["scheme"] == "lns") & (runs["metric"] == "loss") & (runs["split"] == "eval") & (runs["depth"] == 2)
    runs.loc[mine, "value"] += runs.loc[mine, "seed"].map({0: 0.3, 1: -0.5, 2: 0.0})
    runs = pd.concat([runs, *(one_run(name, depth=8) for name in ("lns", "pre_rmsnorm")), one_run("lns", 8, seed=1)])
    head, about, columns, *rows = report(compare(runs, "lns", "pre_rmsnorm")).splitlines()
    assert head == "loss: lns minus pre_rmsnorm, paired by seed" and about.startswith("depth 2, 4, 8")
    assert columns.split() == ["depth", "seeds", "lns", "pre_rmsnorm", "difference", "95%", "interval"]
    assert rows[0].endswith("  undecided") and "[-" in rows[0]
    assert rows[1].split()[:5] == ["4", "3", "4.4", "4.3", "+0.1000"] and rows[1].endswith(
        "[+0.1000, +0.1000]  different: lns is higher"
    )
    assert rows[2].endswith("one seed: no interval; 1 seed without a pair") and "[" not in rows[2]
    ratio = report(compare(table(), "bhyt", "pre_rmsnorm", "token_l2_mean"))
    assert "bhyt over pre_rmsnorm" in ratio and "bhyt is lower" in ratio


def test_an_index_of_no_runs_answers_that_there_is_nothing():
    apart = pd.concat([one_run("bhyt"), one_run("lns").assign(run="twin"), one_run("lns")])  # nothing can be chosen
    for runs in (empty(), apart):
        profiles = Profiles(runs)
        assert profiles.missing and default_view(profiles) is None
        assert (profiles.schemes, profiles.depths, profiles.metrics(), profiles.rates(4)) == ([], [], [], [])
        assert profiles.opening_rate(4) is None and profiles.at(0.1).missing and profiles.at(None) is profiles
        view = View("token_l2_mean", "block_out", "all", 4, 20, ("lns",), rate=0.1)
        assert profiles.lines(view) == profiles.predicted(view) == []
        assert profiles.left_out(view) == profiles.unlike(view) == []
        assert len(profiles.remarks(view)) == 1


def test_magnitudes_are_shown_at_the_deepest_depth_that_shares_a_rate_and_losses_at_the_deepest():
    shallow = [one_run(name, depth=4, lr=lr) for name in ("bhyt", "lns") for lr in (1e-3, 1e-2)]
    runs = pd.concat([*shallow, one_run("bhyt", depth=8, lr=1e-3), one_run("lns", depth=8, lr=1e-2)])
    assert choose(runs, same_rate=True).depths == [4] and choose(runs).depths == [8]
    assert default_view(Profiles(runs)).depth == 4
    apart = pd.concat([one_run("bhyt", depth=8, lr=1e-3), one_run("lns", depth=8, lr=1e-2)])
    assert choose(apart, same_rate=True).depths == [8] and default_view(Profiles(apart)).depth == 8
    lonely = pd.concat([apart, one_run("bhyt", depth=16, lr=1e-3)])
    assert default_view(Profiles(lonely)).depth == 8, "at 16 there is but one of the two"
    begun = pd.concat([table(("lns", "bhyt"), (2,), seeds=(0, 1, 2)), table(("lns", "bhyt"), (4,), seeds=(0,))])
    assert default_view(Profiles(begun)).depth == 2, "one seed of three"
    assert default_view(Profiles(lonely), ["bhyt"]).depth == 16


# Runs of one recipe in two precisions are one group in tables and comparisons, with a remark.


def in_dtype(dtype: str, scheme: str, seed: int, **changes: object) -> pd.DataFrame:
    run = one_run(scheme, seed=seed)
    return run.assign(run=run["run"] + dtype, dtype=dtype, **changes)


def test_runs_in_two_precisions_are_one_group_with_a_remark():
    there = [in_dtype("bfloat16", scheme, seed) for scheme in ("lns", "pre_rmsnorm") for seed in (0, 1)]
    here = [in_dtype("float32", "pre_rmsnorm", 2), in_dtype("float32", "lns", 2)]
    chosen = choose(pd.concat([*there, *here]))
    assert sorted(chosen.runs["seed"]) == [0, 0, 1, 1, 2, 2]
    assert chosen.describe().endswith("· 4 runs in bfloat16 and 2 runs in float32")
    assert "bfloat16" not in choose(pd.concat(there)).describe()


def test_of_twins_in_two_precisions_the_one_in_the_precision_of_most_runs_is_taken():
    runs = [in_dtype("bfloat16", "lns", seed) for seed in (0, 1)] + [in_dtype("float32", "lns", 0)]
    chosen = choose(pd.concat(runs))
    assert set(chosen.runs["dtype"]) == {"bfloat16"}
    assert chosen.describe().endswith("· without the same runs in another precision")
    assert summarize(pd.concat(runs))["dtype"].tolist() == ["bfloat16", "float32", "bfloat16"]
    with_another = choose(pd.concat([*runs, in_dtype("bfloat16", "dyt", 0)]))
    (depth,) = with_another.depths
    assert with_another.of(depth, ["lns"]).precision() == "without the same runs in another precision"
    assert with_another.of(depth, ["dyt"]).precision() == "", "it has no twin"


def test_of_as_many_runs_in_each_precision_all_are_taken_in_one():
    runs = [in_dtype(dtype, scheme, 0) for dtype in ("float32", "bfloat16") for scheme in ("lns", "pre_rmsnorm")]
    for both in (pd.concat(runs), pd.concat(runs[::-1])):
        assert choose(both).runs["dtype"].unique().tolist() == ["bfloat16"]


def test_a_comparison_says_where_its_sides_differ_in_precision():
    runs = pd.concat(
        [in_dtype("bfloat16", "lns", seed) for seed in (0, 1)]
        + [in_dtype("float32", "pre_rmsnorm", seed) for seed in (0, 1)]
    )
    found = compare(runs, "lns", "pre_rmsnorm")
    assert found[["dtype_a", "dtype_b"]].iloc[0].tolist() == ["bfloat16", "float32"]
    assert "precisions bfloat16 and float32" in report(found)
    same = compare(runs.assign(dtype="float32"), "lns", "pre_rmsnorm")
    assert "precision" not in report(same)
    assert found[["estimate", "low", "high"]].equals(same[["estimate", "low", "high"]])


def test_a_value_of_the_model_that_has_layers_is_taken_at_the_one_asked_for():
    runs = table(("lns", "bhyt"), depths=(4,))
    last = runs[(runs["metric"] == "loss") & (runs["split"] == "eval") & (runs["step"] == runs["step"].max())]
    by_layer = [
        last.assign(metric="uniform_attention", split="probe", layer=layer, value=float(layer == 2))
        for layer in (1, 2, 3)
    ]
    runs = pd.concat([runs, *by_layer], ignore_index=True)
    chosen = choose(runs, depth=4)
    ones = [last_values(chosen, "uniform_attention", layer=layer)["value"].mean() for layer in (1, 2, 3, None)]
    assert ones == [0.0, 1.0, 0.0, 0.0]


def test_groups_of_one_depth_have_one_column_of_depths():
    runs = table()
    configs = runs.drop_duplicates("run").set_index("run")[["scheme", "depth", "lr"]]
    found = compare_variants(runs, configs, "lns", "pre_rmsnorm", ["lr", "depth"])
    assert list(found.columns[:3]) == ["lr", "depth", "a"] and found["depth"].tolist() == [2, 4]
    assert shown(found)["depth"].tolist() == [2, 4]


def test_groups_may_share_a_list():
    runs = table(("lns", "bhyt"), (4,), (0, 1))
    configs = runs.drop_duplicates("run").set_index("run")[["scheme", "seed"]]
    configs["exact_layers"] = [[1, 2] if seed else [] for seed in configs["seed"]]
    found = compare_variants(runs, configs, "lns", "bhyt", ["exact_layers"])
    assert found["exact_layers"].tolist() == ["[1, 2]", "[]"] and found["seeds"].tolist() == [1, 1]
    configs["exact_layers"] = [None if seed else [1] for seed in configs["seed"]]
    assert len(compare_variants(runs, configs, "lns", "bhyt", ["exact_layers"])) == 2


def test_a_depth_that_is_no_number_is_one_line():
    with pytest.raises(NormlabError, match="depth is 'all': give a number of blocks"):
        choose(table(), "all")


def test_seeds_of_two_lengths_are_not_averaged():
    runs = [one_run(scheme, seed=seed, steps=(0, 10)) for scheme in ("bhyt", "lns") for seed in (8, 9)]
    both = pd.concat([table(("bhyt", "lns"), depths=(4,)), *runs])
    with pytest.raises(NothingToShow, match="Seeds of bhyt at depth 4 .* were trained for 10 to 20 steps"):
        compare(both, "bhyt", "lns")
    early = one_run("bhyt", seed=8, steps=(0, 10), status="diverged")  # it stopped by itself
    assert len(choose(pd.concat([table(("bhyt",), depths=(4,)), early])).runs) == 4


def test_what_compares_after_training_is_not_asked_of_runs_of_two_lengths():
    runs = table(depths=(4,))
    chosen = choose(runs[(runs["scheme"] != "lns") | (runs["step"] <= 10)], depth=4)
    with pytest.raises(NothingToShow, match="depth 4 were trained for 10 to 20 steps: keep those of one length"):
        last_values(chosen, "loss")
    assert last_values(chosen, "loss", step=10)["value"].notna().all()
    assert "10 to 20 training steps" in chosen.describe()
    diverged = table(depths=(4,), statuses={("lns", 4): "diverged"})
    last_values(choose(diverged[(diverged["scheme"] != "lns") | (diverged["step"] <= 10)], depth=4), "loss")


def test_rates_that_differ_by_a_rounding_are_one():
    seeds = [table(("lns", "bhyt"), (4,), (seed,), lr=rate) for seed, rate in enumerate((3e-4, 0.1 * 0.003))]
    found = compare(pd.concat(seeds, ignore_index=True), "lns", "bhyt").iloc[0]
    assert (found["seeds"], found["unpaired"], found["lr_a"]) == (2, 0, 3e-4)


def test_a_site_without_layers_has_one_value():
    runs = table(("lns", "bhyt"), (4,))
    rows = runs[(runs["metric"] == "token_l2_mean") & (runs["layer"] == 0)]
    rows = rows.assign(site="embed_tokens.weight", metric="parameter_rms", layer=pd.NA, value=rows["seed"] + 1.0)
    rows["value"] *= rows["scheme"].map({"lns": 2.0, "bhyt": 1.0})
    runs = pd.concat([runs, rows.astype({"layer": "Int64"})], ignore_index=True)
    found = compare(runs, "lns", "bhyt", "parameter_rms", site="embed_tokens.weight").iloc[0]
    assert found["seeds"] == 3 and found["estimate"] == pytest.approx(2.0)


def test_a_last_loss_that_is_no_number_is_not_an_earlier_one():
    runs = table(("lns",), (4,), (0,))
    end = (runs["metric"] == "loss") & (runs["split"] == "eval") & (runs["step"] == 20)
    runs.loc[end, "value"] = math.nan
    assert math.isnan(summarize(runs)["eval_loss"].iloc[0]) and summarize(runs)["train_loss"].notna().all()


def test_uniform_attentions_are_of_each_runs_own_last_step_and_counted_once():
    shallow = one_run("lns", 2)
    runs = pd.concat([shallow[shallow["step"] <= 10], one_run("lns", 4)], ignore_index=True)
    ends = runs["step"].eq(runs.groupby("run")["step"].transform("max")) & runs["metric"].eq("token_l2_mean")
    rows = runs[ends].assign(site="model", metric="uniform_attention", value=1.0)
    chosen = choose(pd.concat([runs, rows, rows], ignore_index=True), depth=None)
    found = values_of(chosen, "uniform_attentions").set_index("depth")["value"]
    assert found.to_dict() == {2: 1.0, 4: 3.0}


def test_groups_have_the_level_that_was_asked_for():
    runs = table()
    noise = runs["seed"].map({0: 0.01, 1: -0.02, 2: 0.0})
    runs["value"] += noise.where(runs["scheme"].eq("lns") & runs["metric"].eq("loss"), 0.0)
    configs = runs.drop_duplicates("run").set_index("run")[["scheme", "depth", "lr"]]
    narrow, wide = (compare_variants(runs, configs, "lns", "bhyt", ["lr"], level=level) for level in (0.9, 0.99))
    assert ((wide["high"] - wide["low"]) > (narrow["high"] - narrow["low"])).all()
    own = configs[configs.index.isin(runs.loc[runs["depth"] == 4, "run"])]
    noise = runs["seed"].map({0: 0.05, 1: -0.15, 2: 0.1})
    runs["value"] += noise.where(runs["scheme"].eq("lns") & runs["metric"].eq("loss"), 0.0)
    for level, verdict in ((0.5, DIFFERENT), (0.95, UNDECIDED)):
        found = compare_variants(runs, own, "lns", "bhyt", ["lr"], level=level)
        same = compare(runs, "lns", "bhyt", depth=4, level=level)
        assert found["verdict"].tolist() == same["verdict"].tolist() == [verdict]
        assert f"{level:.0%} interval" in shown(found) and f" {level:.0%} interval" in report(same)
        figure = variant_differences(found.assign(condition="one", group="of one"))
        assert f"{level:.0%} interval" in text_of(figure)
    with pytest.raises(NormlabError, match="level is 95: choose a confidence level between 0 and 1"):
        compare_variants(runs, own, "lns", "bhyt", ["lr"], level=95)
