"""The runs of a preset, their order, their learning rates, and how long they will take."""

import math
from dataclasses import replace

import pytest
from sweep_helpers import InProcess, quiet_sweep, small_preset
from training_helpers import write_run

import normlab
from normlab import NormlabError, cli, runs, store
from normlab.schemes import BASELINE, DEFAULT, DYT, GAIN_CONTROL, LNS, SCHEMES, tagged
from normlab.study.presets import PRESETS, get_preset, init_std
from normlab.training import estimate
from normlab.training import sweep as sweep_module
from normlab.training.config import TrainConfig
from normlab.training.estimate import plan
from normlab.training.grids import Choice, LeagueSearch, Part, Preset, Reported, Search, planned


def test_preset_trained_chooses_on_other_blocks_and_seeds_than_it_reports():
    preset = get_preset("trained")
    core, _, further, *_ = preset.parts
    plan = planned(preset)
    reported = [config for what, config in plan if what == "runs"]
    search = [config for what, config in plan if what == "search"]
    assert min(c.steps * c.tokens_per_step for c in reported) >= 6e6 and all(c.experiment_blocks for c in reported)
    assert {(c.scheme, c.depth) for c in search} == {
        (s, d) for p in (core, further) for s in p.schemes for d in (4, 16)
    }
    assert not {c.seed for c in reported} & {c.seed for c in search}
    assert ({c.held_out for c in reported}, {c.held_out for c in search}) == ({"test"}, {"validation"})
    assert {c.depth for c in reported if c.keep_weights} == {8}


def test_preset_tiny_has_the_schemes_that_the_report_compares():
    plan = planned(get_preset("tiny"))
    assert {what for what, _ in plan} == {"runs"}
    deep, shallow = ({c.scheme for _, c in plan if c.depth == depth} for depth in (4, 2))
    assert deep == {BASELINE, LNS, DEFAULT, GAIN_CONTROL, DYT} and shallow == {BASELINE, LNS} and len(plan) == 7
    assert all(c.experiment_blocks for _, c in plan), "notebooks 01 and 04 show what is measured after training"
    assert {c.width for _, c in plan} == {128}


@pytest.mark.slow
def test_every_scheme_of_the_tiny_sweep_learns(tmp_path):
    found = normlab.sweep(get_preset("tiny"), tmp_path, progress=False).runs
    assert [run.status for run in found] == ["finished"] * 7


def test_every_preset_names_known_schemes():
    assert all(set(part.schemes) <= set(SCHEMES) for preset in PRESETS.values() for part in preset.parts)
    with pytest.raises(NormlabError, match="unknown scheme"):
        get_preset("tiny").only(("nonorm",), None)
    with pytest.raises(NormlabError, match=f"unknown preset 'huge'; known are {', '.join(PRESETS)}"):
        get_preset("huge")


def test_some_schemes_and_depths_of_a_preset_and_what_it_lacks_in_its_first_part():
    parts = (Part({4: 3, 16: 3}, ("lns", "bhyt")), Part({32: 1}, ("lns",)))
    preset = Preset("test", parts, 0.1)
    chosen = preset.only(("bhyt", "dyt"), (32, 4, 7))
    assert [(part.schemes, dict(part.depths)) for part in chosen.parts] == [(("bhyt", "dyt"), {32: 1, 4: 3, 7: 1})]
    assert [dict(part.depths) for part in preset.only(None, (32, 4)).parts] == [{4: 3}, {32: 1}]
    with pytest.raises(NormlabError, match="preset gains has no runs of lns; it has bhyt_exact, rmsnorm_gain"):
        get_preset("gains").only(["lns", "bhyt_exact"], None)


def test_the_search_comes_first_then_seed_zero_at_every_depth_then_more_seeds(text, tmp_path, monkeypatch):
    fake = InProcess({0.1: 3.0, 0.2: 2.0, 0.4: None})
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    result = quiet_sweep(small_preset(text), tmp_path)
    assert result.choices == {("lns", 2): Choice(0.2), ("bhyt", 2): Choice(0.2)}
    searched, rest = fake.started[:6], fake.started[6:]
    assert {(c.scheme, c.lr) for c in searched} == {(s, lr) for s in ("lns", "bhyt") for lr in (0.1, 0.2, 0.4)}
    assert {(c.depth, c.seed, c.held_out) for c in searched} == {(2, 9, "validation")}
    order = [(0, 1), (0, 2), (0, 4), (1, 1), (1, 2)]
    assert [(c.seed, c.depth) for c in rest] == [pair for pair in order for _ in range(2)]
    assert {(c.lr, c.held_out) for c in rest} == {(0.2, "all")}
    assert len(result.runs) == 10 and not result.failures
    assert not any(c.keep_weights for c in fake.started)
    there = set(normlab.load_runs(tmp_path / "out")["run"])
    assert there == {c.run_id for c in rest}, "runs of the search are not reported"
    assert set(normlab.load_runs(tmp_path / "out" / store.SEARCH)["run"]) == {c.run_id for c in searched}


def test_the_grid_of_rates_grows_until_the_best_lies_inside(text, tmp_path, monkeypatch):
    best = {("lns", 2): 0.05, ("bhyt", 2): 0.2, ("lns", 4): 1.6, ("bhyt", 4): 0.4}
    fake = InProcess(lambda config: abs(math.log(config.lr / best[config.scheme, 2 if config.depth < 4 else 4])))
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    preset = small_preset(text, rate=Search((0.1, 0.2, 0.4), (2, 4)))
    result = quiet_sweep(preset, tmp_path)
    assert {pair: choice.lr for pair, choice in result.choices.items()} == best
    tried = {pair: {c.lr for c in fake.started if c.seed == 0 and (c.scheme, c.depth) == pair} for pair in best}
    assert tried["lns", 2] == {0.025, 0.05, 0.1, 0.2, 0.4} and tried["lns", 4] == {0.1, 0.2, 0.4, 0.8, 1.6, 3.2}
    assert {(c.depth, c.lr) for c in fake.started if c.scheme == "lns" and c.seed == 1} == {(1, 0.05), (2, 0.05)}


def test_settings_of_a_scheme_are_searched_with_its_rate_and_the_best_are_kept(text, tmp_path, monkeypatch):
    best = {1.0: 0.2, 0.5: 0.8, 2.0: 0.2}  # rate by alpha0, the loss lowest at 0.5

    def loss(config: TrainConfig) -> float:
        alpha = config.model.get("alpha0", 1.0)
        return abs(math.log(config.lr / best[alpha])) + abs(alpha - 0.5)

    fake = InProcess(loss)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    result = quiet_sweep(small_preset(text, parts=(Part({2: 2}, ("dyt",)),)), tmp_path)
    assert result.choices == {("dyt", 2): Choice(0.8, {"model": {"alpha0": 0.5}})}
    searched = [c for c in fake.started if c.held_out == "validation"]
    assert {c.model.get("alpha0") for c in searched} == {None, 0.5, 2.0} and {c.warmup for c in searched} > {0.3}
    assert len(searched) == 4 * 3 + 2
    assert [(c.seed, c.lr, c.model) for c in fake.started[len(searched) :]] == [
        (seed, 0.8, {"alpha0": 0.5}) for seed in (0, 1)
    ]


def test_rates_that_the_search_does_not_tell_apart_are_run_at_full_length_and_the_best_there_is_taken(
    text, tmp_path, monkeypatch
):
    short = {0.05: 2.1, 0.1: 2.0, 0.2: 2.01, 0.4: 2.02, 0.8: 2.03, 1.6: 2.2}
    full = {0.1: 1.9, 0.2: 1.8, 0.4: 1.7, 0.8: 1.0}  # 0.8 comes fourth, and is not run

    def loss(config: TrainConfig) -> float | None:
        if config.scheme == "bhyt":
            return 2.0 + 0.1 * abs(math.log2(config.lr / 0.2))  # told apart
        if config.scheme == "dyt":
            return None if config.steps == 12 else 2.0 + 0.1 * abs(math.log2(config.lr / 0.2))
        return (full if config.steps == 12 else short)[config.lr]

    fake = InProcess(loss)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    search = Search((0.1, 0.2, 0.4), (2,), {"seed": 9, "held_out": "validation"}, finals={"steps": 12})
    preset = small_preset(text, parts=(Part({2: 1}, ("lns", "bhyt", "dyt")),), rate=search)
    result = quiet_sweep(preset, tmp_path)
    finals = [c for c in fake.started if c.steps == 12]
    assert [(c.scheme, c.lr, c.seed, c.held_out) for c in finals if c.scheme != "dyt"] == [
        ("lns", rate, 9, "validation") for rate in (0.1, 0.2, 0.4)
    ]
    # Finals that diverge decide nothing: the best of the search stays, of equal settings the first.
    assert {c.model.get("alpha0") for c in finals if c.scheme == "dyt"} == {None, 0.5, 2.0}
    assert result.choices == {
        ("lns", 2): Choice(0.4),
        ("bhyt", 2): Choice(0.2),
        ("dyt", 2): Choice(0.2),
    }
    written = {path.name for path in runs.find_runs(tmp_path / "out" / store.FINALS)}
    assert written == {c.run_id for c in finals} and not result.failures
    reported = set(normlab.load_runs(tmp_path / "out")["run"])
    assert reported == {c.run_id for c in fake.started if c.held_out != "validation"}


# Which trial of lns fails, by its rate and steps.
MISSING = {"a rate of the grid": (0.1, 8), "a rate that the grid grows by": (0.05, 8), "a final": (0.2, 12)}


@pytest.mark.parametrize("case", MISSING)
def test_a_search_that_lacks_a_trial_chooses_nothing_until_it_is_there(case, text, tmp_path, monkeypatch):
    """As where another sweep holds its lock: without it, the next best rate would be the scheme's label."""
    losses = {0.05: 1.5, 0.1: 1.0, 0.2: 1.01, 0.4: 3.0}
    fake = InProcess(losses, failing=lambda c: (c.lr, c.steps) == MISSING[case] and c.scheme == "lns" and c.seed == 9)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    search = Search((0.1, 0.2, 0.4), (2,), {"seed": 9}, finals={"steps": 12})
    preset = small_preset(text, parts=(Part({2: 1}, ("lns", "bhyt")),), rate=search)
    with pytest.warns(UserWarning, match="lns at depth 2: no rate was chosen, as a run of its search failed; start"):
        result = quiet_sweep(preset, tmp_path)
    assert result.choices == {("bhyt", 2): Choice(0.1)} and len(result.failures) == 1
    assert {run.manifest["config"]["scheme"] for run in result.runs} == {"bhyt"}
    assert [c.lr for c in fake.started if c.scheme == "lns"].count(MISSING[case][0]) <= 2
    fake.failing = lambda config: False
    again = quiet_sweep(preset, tmp_path)
    assert again.choices == {("lns", 2): Choice(0.1), ("bhyt", 2): Choice(0.1)} and not again.failures


def test_the_best_of_a_search_are_known_once_every_scheme_is_decided(text, tmp_path, monkeypatch):
    order = {"lns": 2.0, "bhyt": 2.9, "dyt": 2.1}
    fake = InProcess(lambda config: order[config.scheme], failing=lambda c: c.scheme == "dyt" and c.lr == 0.002)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    part = Part({2: 1}, tuple(order), best=1, always=("bhyt",))
    search = LeagueSearch((0.002, 0.008), (2,), {"seed": 9})
    with pytest.warns(UserWarning, match="dyt at depth 2: no rate was chosen"):
        result = quiet_sweep(small_preset(text, parts=(part,), rate=search), tmp_path)
    assert {run.manifest["config"]["scheme"] for run in result.runs} == {"bhyt"}


def test_a_grid_of_rates_stops_growing_where_nothing_learns_or_the_loss_falls_for_ever():
    search = Search((0.1, 0.2, 0.4), (2,))
    assert search.next_rate({0.1: math.inf, 0.2: math.inf, 0.4: math.inf}) is None
    losses = {0.1: 3.0, 0.2: 2.0, 0.4: 1.0}
    while (rate := search.next_rate(losses)) is not None:
        losses[rate] = min(losses.values()) - 1
    assert sorted(losses) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    assert search.next_rate({0.1: 1.0, 0.2: 1.0, 0.4: 2.0}) == 0.05, "a tie goes to the smaller rate"
    assert search.next_rate({0.1: 2.0, 0.2: 1.0, 0.4: 1.04}) == 0.8, "an edge that a seed could have made the best"
    assert search.next_rate({0.1: 2.0, 0.2: 1.0, 0.4: 1.06}) is None


def test_a_depth_takes_the_rate_of_the_deepest_searched_depth_not_above_it():
    search = Search((0.1,), (4, 16))
    assert [search.depth_for(depth) for depth in (2, 4, 8, 15, 16, 64)] == [4, 4, 4, 4, 16, 16]


@pytest.mark.parametrize(("at_four", "deep"), [(0.4, 1.0), (1.5, 4.5), (9.0, 8.0)])
def test_no_noise_of_the_clock_makes_a_deep_run_cost_nothing_or_more_than_all_its_blocks(
    monkeypatch, text, at_four, deep
):
    monkeypatch.setattr(estimate, "_step_seconds", lambda config, *_: {2: 1.0, 4: at_four}[config.depth])
    one = TrainConfig(corpus=str(text), steps=1, eval_every=0, probe_every=0)
    configs = [replace(one, depth=depth) for depth in (2, 4, 16)]
    seconds = estimate._Seconds([])
    seconds.measure(configs, None, False)
    assert seconds.of(configs[-1]) == pytest.approx(deep)


def test_a_sweep_lists_its_runs_and_the_hours_that_finished_runs_tell(text, tmp_path, monkeypatch):
    preset, out = small_preset(text), tmp_path / "out"
    monkeypatch.setattr(estimate, "train", lambda *_, **__: pytest.fail("it trained"))
    options = dict(workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False)
    first = plan(preset, out, **options)
    assert not out.exists() and not first.table["done"].any() and first.table["hours"].isna().all()
    order = [(what, config.run_id) for what, config in planned(preset, threads=1, keep_weights=False)]
    assert list(first.table[["what", "run"]].itertuples(index=False, name=None)) == order
    searched = [config for what, config in planned(preset, threads=1) if what == "search"]
    write_run(searched[0], out / store.SEARCH, measured={"wall_s": 7200.0, "resumed_from_step": 0, "tokens_per_s": 1.0})
    second = plan(preset, out, **options)
    at_two = second.table["depth"] == 2
    assert set(second.table[at_two]["hours"]) == {2.0} and second.table[~at_two]["hours"].isna().all()
    assert list(second.table["done"]) == [row.run == searched[0].run_id for row in second.table.itertuples()]
    words = second.in_words().splitlines()
    assert words[0].startswith("   6 search depth 2 ") and "2.00 h at most   12.00 h in all, 1 done" in words[0]
    assert words[-2:] == ["16 runs, 15 left", "how long they take is not known: --time times a few steps first"]


def test_steps_are_timed_where_that_is_asked_for(text, tmp_path, capsys):
    options = dict(workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False)
    timed = plan(small_preset(text), tmp_path / "out", time=True, **options)
    assert not (tmp_path / "out").exists() and (timed.table["hours"] > 0).all()
    assert "core-hours" in timed.in_words() and " hours with 2 workers" in timed.in_words()
    assert cli.main(["sweep", "--time", "--out", str(tmp_path / "out")]) == 2
    assert "--time would change nothing without --dry-run" in capsys.readouterr().err


def test_every_run_of_the_recipe_reads_one_text_once_and_stores_all():
    for name in ("gains", "depth_and_rate", "league", "tanh"):
        for what, config in planned(get_preset(name)):
            assert (config.corpus, config.store_all, config.clip) == ("packages", True, 5.0)
            assert config.probe_every > 0 and config.steps * config.tokens_per_step < 13e6
            searched = (config.held_out, config.seed == 1000) == ("validation", True)
            assert searched == (what == "search") and (searched or config.held_out == "test")
            assert config.gain_lr_ratio == 0.1 or name == "gains"


def test_a_grid_reports_the_runs_that_choose_its_rates_and_tries_one_rate_beyond_an_edge(text, tmp_path, monkeypatch):
    best = {"lns": 0.8, "bhyt": 0.2, "dyt": 0.05}
    fake = InProcess(lambda config: 2.0 + abs(math.log(config.lr / best[config.scheme])))
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    parts = (Part({2: 1}, tuple(best), kept=(2,)), Part({2: 2}, ("lns", "dyt")), Part({2: 1}, ("bhyt",), rate_of="lns"))
    preset = small_preset(text, parts=parts, rate=Reported((0.1, 0.2, 0.4), (2,)))
    result = quiet_sweep(preset, tmp_path)
    tried = {scheme: sorted(c.lr for c in fake.started if (c.scheme, c.seed) == (scheme, 0)) for scheme in best}
    assert tried == {"lns": [0.1, 0.2, 0.4, 0.8], "bhyt": [0.1, 0.2, 0.4, 0.8], "dyt": [0.05, 0.1, 0.2, 0.4]}
    assert [(c.scheme, c.lr) for c in fake.started if c.seed == 1] == [("lns", 0.8), ("dyt", 0.05)]
    assert all(c.keep_weights == (c.seed == 0 and c is not fake.started[-1]) for c in fake.started)
    assert len(result.runs) == len({c.run_id for c in fake.started}) == len(fake.started) == 14
    assert not (tmp_path / "out" / store.SEARCH).exists()


def test_a_sweep_chooses_by_the_validation_half_where_a_run_reports_the_other(tmp_path):
    config = TrainConfig(scheme="lns", depth=1, steps=1)
    corpus = {"unigram_entropy": 6.5}
    run = runs.read_run(write_run(config, tmp_path, eval_loss=3.0, corpus=corpus, validation_loss=2.5))
    assert (run.choice_loss, run.eval_loss) == (2.5, 3.0)
    plain = runs.read_run(write_run(replace(config, seed=1), tmp_path, eval_loss=3.0, corpus=corpus))
    assert plain.choice_loss == 3.0


def test_every_run_of_the_grid_has_one_recipe():
    plan = [config for name in ("pilot", "grid") for _, config in planned(get_preset(name))]
    assert {(c.corpus, c.dtype, c.steps, c.gain_lr_ratio, c.clip, c.store_all) for c in plan} == {
        ("packages", "bfloat16", 6000, 1.0, 5.0, True)
    }
    assert {c.init_std for c in plan} == {0.04, 0.057, 0.08} and init_std(128) == 0.04
    assert {c.warmup for c in plan if c.scheme not in tagged("warmed_up")} == {0.1}


def test_the_league_tries_a_third_rate_between_two_alike_or_beyond_the_better():
    search = get_preset("league").rate
    assert isinstance(search, Search)
    for losses, third in (
        ({0.002: 3.0, 0.008: 3.04}, 0.004),
        ({0.002: 3.0, 0.008: 3.06}, 0.001),
        ({0.002: 3.1, 0.008: 3.0}, 0.016),
        ({0.002: 3.0, 0.008: math.inf}, 0.001),
        ({0.002: math.inf, 0.008: math.inf}, None),
        ({0.002: 3.1, 0.008: 3.0, 0.016: 2.9}, None),
    ):
        assert search.next_rate(losses) == third
    assert search.next_rate({}) is None, "both runs failed"


def test_the_best_of_a_search_and_those_always_run_come_into_its_finals(text, tmp_path, monkeypatch):
    order = {"lns": 2.0, "bhyt": 2.9, "dyt": 2.1, "peri_ln": 2.2, "mix_ln": 2.3}
    fake = InProcess(lambda config: order[config.scheme] + abs(math.log(config.lr / 0.004)) / 10)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    preset = small_preset(
        text,
        parts=(Part({2: 1}, tuple(order), best=2, always=("bhyt",)),),
        rate=LeagueSearch((0.002, 0.008), (2,), {"seed": 9}),
    )
    result = quiet_sweep(preset, tmp_path)
    assert {run.manifest["config"]["scheme"] for run in result.runs} == {"lns", "dyt", "bhyt"}
    assert {run.manifest["config"]["lr"] for run in result.runs} == {0.004}
    assert result.choices["dyt", 2].loss == pytest.approx(2.1)
