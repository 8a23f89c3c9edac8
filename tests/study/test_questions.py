"""Decisions stated beforehand, on tables made so that each answer is known."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from normlab.errors import NormlabError
from normlab.schemes import SCHEMES
from normlab.study import questions

PRE, LNS = "pre_rmsnorm", "lns"
RATES = (0.001, 0.004, 0.008)
NOISE = np.random.default_rng(0).normal(0, 0.002, size=1000)


class Table:
    """Rows of `load_runs`, one run at a time."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.noise: Iterator[float] = iter(NOISE)

    def add(self, scheme: str, depth: int, seed: int, lr: float, loss: float, name: str = "", **more: float) -> str:
        """One run: its held-out loss, and further values of the last step by metric."""
        run = name or f"{scheme}-d{depth}-lr{lr:g}-s{seed}"
        about = {"run": run, "scheme": scheme, "depth": depth, "width": 128, "seed": seed, "lr": lr}
        about |= {"status": "finished", "dtype": "float32", "mask": "all", "tokens": 1024, "layer": pd.NA, "step": 3000}
        self.about = about
        self.put("loss", loss + next(self.noise), split="eval")
        self.put("bigram_loss", 4.6, split="eval")
        self.put("trigram_loss", 4.0, split="eval")
        for metric, value in more.items():
            self.put(metric, value + next(self.noise))
        return run

    def put(self, metric: str, value: float, site: str = "model", **more: Any) -> None:
        self.rows.append(self.about | {"metric": metric, "site": site, "split": "probe", "value": value} | more)

    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows).astype({"layer": "Int64"})


def depth_and_rate(loss: float = 0.0, seen: float = 0.0, seeds: int = 4, gain: float = 0.0, base: float = 3.5) -> Table:
    """LNS's losses differ from Pre-LN's by `loss` and `seen`, and by `gain` less at 4 blocks."""
    table = Table()
    for scheme, is_lns in ((PRE, 0), (LNS, 1)):
        for depth, rates in ((16, RATES), (4, RATES[1:])):
            for lr in rates:
                for seed in range(seeds):
                    more = is_lns * (loss + (gain if depth == 4 else 0.0)) + (0.1 if depth == 4 else 0.0)
                    table.add(scheme, depth, seed, lr, base + more, seen_loss=base - 0.1 + is_lns * seen)
    return table


@pytest.mark.parametrize(
    ("loss", "seen", "seeds", "verdict", "says"),
    [
        (-0.05, -0.05, 4, "different", "better at equal rates"),
        (-0.05, 0.0, 4, "different", "better at equal rates: it generalizes better"),
        (-0.05, 0.05, 4, "different", "better at equal rates: it generalizes better"),
        (0.0, 0.0, 4, "equivalent", "equivalent: its lead is rate tolerance"),
        (0.05, 0.0, 4, "different", "not better at equal rates"),
        (-0.05, 0.0, 3, "different", "incomplete: 3 of 4 seeds"),
    ],
)
def test_a1_is_lns_better_at_equal_rates(loss, seen, seeds, verdict, says):
    row = questions.equal_rates(depth_and_rate(loss, seen, seeds).frame()).iloc[0]
    assert (row["verdict"], row["says"]) == (verdict, says)


def test_a1_has_one_value_per_seed_the_mean_over_both_rates():
    runs = depth_and_rate(-0.03).frame()
    table = questions.equal_rates(runs)
    held = runs.query("metric == 'loss' and depth == 16 and lr > 0.001").groupby(["scheme", "seed"])["value"].mean()
    expected = stats.ttest_rel(held[LNS], held[PRE])
    low, high = expected.confidence_interval(0.95)
    assert table[["estimate", "low", "high"]].iloc[0].tolist() == pytest.approx(
        [(held[LNS] - held[PRE]).mean(), low, high]
    )
    assert table["seeds"].tolist() == [4, 4] and table["says"].iloc[1] == ""
    assert table[["files_low", "files_high"]].isna().all(axis=None)  # these runs store no file's loss


def test_the_interval_over_files_weighs_them_by_their_tokens():
    table = Table()
    for scheme, gaps in ((PRE, (0.0, 0.0)), (LNS, (-0.1, 0.3))):
        for seed in range(2):
            table.add(scheme, 16, seed, 0.004, 3.5)
            for file, gap, tokens in zip(("a.py", "b.py"), gaps, (3000, 1000), strict=True):
                table.put("file_loss", 3.5 + gap, file, split="eval")
                table.put("file_tokens", tokens, file, split="eval")
    low, high = questions.over_files(table.frame(), LNS, PRE, 16)
    assert (low, high) == pytest.approx((-0.1, 0.3))  # two files: a quarter of the samples has one of them twice
    same = table.frame().query("site != 'b.py'")
    assert questions.over_files(same, LNS, PRE, 16) == pytest.approx((-0.1, -0.1))


def test_files_of_runs_without_a_common_seed_have_no_interval():
    table = Table()
    for seed, scheme in enumerate((PRE, LNS)):
        table.add(scheme, 16, seed, 0.004, 3.5)
        table.put("file_loss", 3.5, "a.py", split="eval")
        table.put("file_tokens", 1000, "a.py", split="eval")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(questions.over_files(table.frame(), LNS, PRE, 16)).all()


def test_a1_a_run_in_a_second_precision_does_not_stand_for_one_at_the_other_rate():
    runs = depth_and_rate(-0.05).frame()
    own = runs[runs["scheme"].eq(LNS) & runs["depth"].eq(16) & runs["lr"].eq(0.004)]
    twins = own.assign(run=own["run"] + "-twin", dtype="bfloat16")
    both = questions.equal_rates(pd.concat([runs, twins]))
    pd.testing.assert_frame_equal(both, questions.equal_rates(runs))
    at_one = runs[~(runs["scheme"].eq(LNS) & runs["depth"].eq(16) & runs["lr"].eq(0.008))]
    with pytest.raises(NormlabError, match="no runs of LNS"):
        questions.equal_rates(pd.concat([at_one, twins]))
    with pytest.raises(NormlabError, match="Several runs of lns at depth 16, seed 0"):
        questions.equal_rates(pd.concat([runs, twins.assign(dtype="float32")]))
    costs, more = skip_costs(runs, 0.05), skip_costs(twins, 9.0)
    pd.testing.assert_frame_equal(
        questions.deep_blocks(pd.concat([runs, twins]), pd.concat([costs, more])), questions.deep_blocks(runs, costs)
    )


def skip_costs(runs: pd.DataFrame, deep: float) -> pd.DataFrame:
    """Skip costs and Jacobians: LNS's costs differ from Pre-LN's by `deep` in blocks 9-15 and by 5 in the others."""
    rows, noise = [], iter(np.random.default_rng(1).normal(0, 0.002, 10_000))
    about = runs[runs["depth"] == 16].drop_duplicates("run")
    for run in about.itertuples():
        for layer in range(1, 17):
            more = (deep if 9 <= layer <= 15 else 5.0) * (run.scheme == LNS)
            for metric in ("skip_delta_loss", "jacobian_identity"):
                value = 0.1 + (more if metric == "skip_delta_loss" else 0.0) + next(noise)
                rows.append((run.run, run.scheme, 16, 128, run.seed, metric, "block", layer, pd.NA, value))
    columns = ["run", "scheme", "depth", "width", "seed", "metric", "part", "layer", "other", "value"]
    return pd.DataFrame(rows, columns=columns)


def test_a2_does_lns_wake_deep_layers():
    runs = depth_and_rate().frame()
    for deep, says in ((0.05, "LNS wakes deep layers"), (-0.05, "not shown that LNS wakes deep layers")):
        table = questions.deep_blocks(runs, skip_costs(runs, deep))
        assert len(table) == 9 and table["lr"].tolist() == [*RATES] * 3
        assert table["says"].tolist() == [says] * 3 + [""] * 6
        assert table["estimate"].iloc[:3].tolist() == pytest.approx([deep] * 3, abs=0.01)
        assert table["estimate"].iloc[3:6].tolist() == pytest.approx([7 * 5.0] * 3, abs=0.05)  # the sum of blocks 2-8
    unlearned = depth_and_rate(base=4.5).frame()
    assert questions.deep_blocks(unlearned, skip_costs(unlearned, 0.05))["says"].iloc[0] == (
        "nothing: 8 of 8 runs have not learned"
    )


def test_runs_that_a_question_does_not_compare_do_not_void_its_answer():
    runs = depth_and_rate(gain=0.05).frame()
    losses = runs["metric"].eq("loss")
    slow = runs.assign(value=runs["value"].mask(losses & runs["lr"].eq(0.001), 4.5))
    assert questions.depth_gain(slow)["says"].item() == "LNS gains more from depth"
    nothing = "nothing: 8 of 8 runs have not learned"
    assert questions.deep_blocks(slow, skip_costs(slow, 0.05))["says"].iloc[:3].tolist() == [
        nothing, "LNS wakes deep layers", "LNS wakes deep layers"
    ]  # fmt: skip
    shallow = runs.assign(value=runs["value"].mask(losses & runs["depth"].eq(4), 4.5))
    assert questions.depth_gain(shallow)["says"].item() == "nothing: 16 of 32 runs have not learned"


@pytest.mark.parametrize(("factor", "says"), [(1.6, "paper-like"), (1.4, "not paper-like")])
def test_a3_does_the_stream_grow_as_in_the_papers(factor, says):
    table = Table()
    for scheme, grows in ((PRE, 4.0 * factor), (LNS, 4.0)):
        for lr in RATES[:2]:
            for seed in range(4):
                table.add(scheme, 16, seed, lr, 3.5)
                for layer, size in ((1, 77.0), (2, 3.0), (16, 3.0 * grows)):
                    table.put("token_l2_mean", size * (1 + next(table.noise)), "block_out", layer=layer)
    rows = questions.growth_curve(table.frame()).set_index("lr")
    assert rows.loc[0.001, "estimate"] == pytest.approx(factor, rel=0.01)
    assert rows["says"].tolist() == [says, ""]


def test_a4_does_lns_gain_more_from_depth():
    for gain, says in ((0.05, "LNS gains more from depth"), (-0.05, "not shown that LNS gains more")):
        row = questions.depth_gain(depth_and_rate(gain=gain).frame()).iloc[0]
        assert row["estimate"] == pytest.approx(gain, abs=0.005) and row["says"] == says and row["seeds"] == 4


def gains(dead: dict[tuple[str, str], int], seeds: int = 6) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Runs of the preset `gains`, so many of each scheme and change with a uniform attention, and their settings."""
    table, configs = Table(), {}
    fields = dict(zip(questions.CHANGES, ({}, {"gain_lr_ratio": 0.1}, {"qk_norm": "rms_head"}), strict=True))
    for number, ((scheme, change), count) in enumerate(dead.items()):
        for seed in range(seeds):
            run = table.add(
                scheme, 4, seed, 0.004, 3.9 - 0.1 * (change != questions.UNCHANGED), f"r{number}-{seed}", copy_loss=2.0
            )
            for layer in range(1, 5):  # block 1 is not looked at
                is_dead = layer == 1 or (layer == 3 and seed < count)
                table.put("uniform_attention", float(is_dead), layer=layer)
                table.put("uniform_attention", 1.0, layer=layer, step=2000)
            configs[run] = {"gain_lr_ratio": 1.0} | fields[change]
    return table.frame(), pd.DataFrame.from_dict(configs, orient="index")


def test_b_a_cure_of_dead_gains_is_one_in_each_scheme():
    unchanged, tenth, by_head = questions.CHANGES
    counts = {("bhyt_exact", unchanged): 6, ("bhyt_exact", tenth): 1, ("bhyt_exact", by_head): 0}
    counts |= {("rmsnorm_gain", unchanged): 6, ("rmsnorm_gain", tenth): 0, ("rmsnorm_gain", by_head): 2}
    table = questions.dead_gains(*gains(counts)).set_index(["scheme", "change"])
    assert table["uniform"].to_dict() == counts and set(table["models"]) == {6}
    assert table.loc[("bhyt_exact", tenth), "p"] == pytest.approx(0.01515, abs=1e-5)
    assert table["says"].xs(tenth, level="change").tolist() == ["a cure"] * 2
    assert table["says"].xs(by_head, level="change").tolist() == ["no cure"] * 2  # not in each scheme
    assert table.loc[("bhyt_exact", tenth), ["loss_verdict", "copy_verdict"]].tolist() == ["different", "equivalent"]
    assert table.loc[("bhyt_exact", tenth), "loss"] == pytest.approx(-0.1, abs=0.01)
    assert math.isnan(table.loc[("bhyt_exact", unchanged), "loss"])


def test_b_says_what_is_missing_and_what_was_not_ill():
    unchanged, tenth, _ = questions.CHANGES
    counts = {(scheme, change): 5 for scheme in ("bhyt_exact", "rmsnorm_gain") for change in (unchanged, tenth)}
    few = questions.dead_gains(*gains(counts, seeds=5))
    assert set(few.query("change == @tenth")["says"]) == {"incomplete: 20 of 24 models"}
    whole = questions.dead_gains(*gains(counts))
    assert set(whole.query("change == @tenth")["says"]) == {
        "undecided: not every unchanged model has a uniform attention"
    }


@pytest.mark.parametrize(
    ("apart", "says"),
    [
        ({0.2}, "the bound matters as published"),
        ({0.2, 5.0}, "the bound matters as published"),
        ({5.0}, "the bound matters where it acts"),
        ({1.0, 5.0}, "different at g = 1 and 5, for which no words were fixed"),
        (set(), "undecided"),
    ],
)
def test_c_does_the_bound_matter(apart, says):
    table, configs = Table(), {}
    for scheme in ("bhyt_exact", "bhyt_linear", "rmsnorm_gain"):
        for g in questions.GAINS:
            for seed in range(4):
                loss = 3.5 - 0.1 * (g in apart and scheme == "bhyt_exact")
                run = table.add(scheme, 8, seed, 0.008, loss, f"{scheme}-{g}-{seed}")
                table.put("token_l2_mean", 30.0 * (1 + next(table.noise)), "block_out", layer=8)
                configs[run] = {"lam_input": math.nan if scheme == "rmsnorm_gain" else 10 * g}
    rows = questions.tanh(table.frame(), pd.DataFrame.from_dict(configs, orient="index"))
    assert len(rows) == 6 and rows["g"].tolist() == [*questions.GAINS] * 2
    assert rows["says"].tolist() == [says, "", "", "undecided", "", ""]
    begun = {run: config for run, config in configs.items() if config["lam_input"] == 2.0}
    runs = table.frame().query("run in @begun")
    loss, size = questions.tanh(runs, pd.DataFrame.from_dict(begun, orient="index")).itertuples()
    assert size.says == "incomplete: 1 of 3 gains"
    assert loss.says == ("the bound matters as published" if 0.2 in apart else size.says)


def test_d_a_set_of_the_best_and_what_is_below_it():
    finals, search = Table(), Table()
    for scheme, loss, seeds in ((PRE, 3.40, 3), (LNS, 3.40, 3), ("bhyt", 3.80, 3), ("mhc", 3.90, 1)):
        for seed in range(seeds):
            finals.add(scheme, 8, seed, 0.004, loss)
    tried = {PRE: (3.7, 3.6, 3.8), LNS: (3.7, 3.6), "mhc": (4.1,), "dyt": (4.4, 4.3, 4.5), "keel": (4.0,)}
    for scheme, losses in tried.items():
        for lr, loss in zip((0.002, 0.004, 0.008), losses, strict=False):
            search.add(scheme, 8, 1000, lr, loss)
    table = questions.league(finals.frame(), search.frame()).set_index("scheme")
    assert table["in_set"].to_dict() == {PRE: True, LNS: True, "bhyt": False, "mhc": False, "keel": False, "dyt": False}
    words = {
        "bhyt": "not the best",
        "mhc": "too few final runs",
        "keel": "search unfinished",
        "dyt": "only searched",
    }
    assert {name: table.loc[name, "says"] for name in words} == words
    assert table.loc[PRE, ["rate", "inside"]].tolist() == [0.004, True] and not table.loc[LNS, "inside"]
    assert list(table.index)[2:] == list(words)


def test_d_a_scheme_that_lost_a_final_run_is_in_no_set():
    finals = Table()
    for scheme, losses in ((PRE, (3.4, 3.4, 3.4)), (LNS, (3.5, 3.5, 3.5)), ("bhyt", (3.2, 3.2, math.nan))):
        for seed, loss in enumerate(losses):
            finals.add(scheme, 8, seed, 0.004, loss)
    runs = finals.frame()
    runs["status"] = runs["status"].mask(runs["run"].eq("bhyt-d8-lr0.004-s2"), "diverged")
    table = questions.league(runs, runs.iloc[:0]).set_index("scheme")
    assert table["says"].to_dict() == {
        "bhyt": questions.LOST,
        PRE: "may be the best",
        LNS: "not the best",
    }
    assert math.isnan(table.loc["bhyt", "p"])


def test_questions_of_unfinished_presets_say_what_is_missing():
    table = Table()
    for scheme, lr in ((PRE, 0.004), (LNS, 0.008)):
        table.add(scheme, 16, 0, lr, 3.5, seen_loss=3.4)
        for layer in (2, 16):
            table.put("token_l2_mean", 30.0, "block_out", layer=layer)
    with pytest.raises(NormlabError, match="no runs of Pre-LN, LNS"):
        questions.equal_rates(table.frame())
    with pytest.raises(NormlabError, match="Pre-LN and LNS share no lr"):
        questions.growth_curve(table.frame())


def test_d_below_is_a_scheme_that_as_many_others_beat_as_get_final_runs():
    finals, search = Table(), Table()
    always = {PRE: 3.0, LNS: 3.1, "bhyt": 3.2}  # they take nobody's place
    others = [name for name in SCHEMES if name not in always][:14]
    for scheme, loss in always.items() | zip(others, np.linspace(3.5, 4.8, 14), strict=True):
        for lr, more in ((0.002, 0.01), (0.004, 0.0), (0.008, 0.01)):
            search.add(scheme, 8, 1000, lr, loss + more)
    finals.add(others[4], 8, 0, 0.004, 3.3)
    says = questions.league(finals.frame(), search.frame()).set_index("scheme")["says"]
    assert says[others[4]] == "too few final runs" and set(says[list(always)]) == {"only searched"}
    assert says[others[11]] == "only searched" and set(says[others[12:]]) == {"below at 2M tokens"}


def test_d_predictions_are_one_family_that_those_not_run_yet_belong_to():
    finals, search = Table(), Table()
    for scheme, losses in (("pre_rmsnorm", (3.40, 3.41, 3.45)), ("gatednorm", (3.30, 3.33, 3.30))):
        for seed, loss in enumerate(losses):
            finals.add(scheme, 8, seed, 0.004, loss)
    for scheme, loss in (("pre_rmsnorm", 3.6), ("post_rmsnorm", 6.9)):
        search.add(scheme, 8, 1000, 0.004, loss)
    table = questions.predictions(finals.frame(), search.frame())
    assert table.loc[0, "high"] < 0 and table.loc[0, "verdict"] == "undecided"
    assert table["says"].tolist() == ["undecided", "not run", "Post-LN ends above a bigram model"]


def test_d_predictions_of_others():
    finals, search = Table(), Table()
    for scheme, loss in (("pre_rmsnorm", 3.4), ("gatednorm", 3.2), ("peri_ln", 3.4)):
        for seed in range(3):
            finals.add(scheme, 8, seed, 0.004, loss)
    for scheme, loss in (("pre_rmsnorm", 3.6), ("post_rmsnorm", 3.9)):
        search.add(scheme, 8, 1000, 0.004, loss)
    table = questions.predictions(finals.frame(), search.frame())
    assert table["says"].tolist() == ["holds", "undecided", "one seed each: as predicted"]
    nothing = questions.predictions(finals.frame().iloc[:0], search.frame())
    assert nothing["says"].tolist() == ["not run", "not run", "one seed each: as predicted"]
    assert nothing["seeds"].tolist() == [0, 0, 1]


def test_a_question_asked_of_other_runs_is_one_line():
    with pytest.raises(NormlabError, match="no runs of LNS that this question asks of"):
        questions.equal_rates(depth_and_rate().frame().query("scheme != 'lns'"))


def test_c_asked_of_runs_that_set_no_gain_is_one_line():
    with pytest.raises(NormlabError, match="no run sets lam_input"):
        questions.tanh(depth_and_rate().frame(), pd.DataFrame({"lr": [0.004]}, index=["a"]))


def test_d_two_final_runs_of_one_seed_are_one_seed_and_a_seed_of_one_scheme_alone_is_no_obstacle():
    finals = Table()
    for scheme, loss in ((PRE, 3.4), (LNS, 3.2)):
        for seed in range(3):
            finals.add(scheme, 8, seed, 0.004, loss)
    finals.add("bhyt", 8, 7, 0.004, 3.1)
    finals.add("bhyt", 8, 7, 0.004, 3.1, name="twin")
    runs = finals.frame()
    runs["dtype"] = runs["dtype"].mask(runs["run"].eq("twin"), "bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = questions.league(runs, runs.iloc[:0]).set_index("scheme")
    assert table.loc["bhyt", "says"] == "too few final runs" and table.loc["bhyt", "seeds"] == 1
    assert table.loc[LNS, "says"] == "may be the best"
    with pytest.raises(NormlabError, match="Several runs of bhyt at depth 8, seed 7"):
        questions.league(finals.frame(), runs.iloc[:0])


def test_d_a_scheme_that_diverged_at_every_rate_decides_no_prediction():
    search = Table()
    for scheme, loss in ((PRE, 3.6), ("gatednorm", 3.4), ("peri_ln", 3.9)):
        search.add(scheme, 8, 1000, 0.004, loss)
    runs = search.frame()
    runs["status"] = runs["status"].mask(runs["scheme"].eq("peri_ln"), "diverged")
    for known in (runs, runs[runs["metric"] != "bigram_loss"]):
        table = questions.predictions(runs.iloc[:0], known)
        assert table["says"].tolist() == ["one seed each: as predicted", "not run", "not run"]
        assert math.isnan(table.loc[1, "estimate"])
