"""The runs of a preset, their order, their learning rates, and how long they will take."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest
from sweep_helpers import InProcess, quiet_sweep, small_preset
from training_helpers import write_run

import normlab
from normlab import NormlabError, cli, packed, runs
from normlab.schemes import BASELINE, DEFAULT, DYT, GAIN_CONTROL, LNS, SCHEMES, tagged
from normlab.study.presets import PRESETS, get_preset, init_std
from normlab.training import estimate
from normlab.training import sweep as sweep_module
from normlab.training.config import TrainConfig
from normlab.training.estimate import plan
from normlab.training.grids import Part, Preset, Variant, planned, walk
from normlab.training.rates import Choice, Rates


def test_preset_tiny_has_the_schemes_that_the_report_compares():
    plan = planned(get_preset("tiny"))
    deep, shallow = ({c.scheme for c in plan if c.depth == depth} for depth in (4, 2))
    assert deep == {BASELINE, LNS, DEFAULT, GAIN_CONTROL, DYT} and shallow == {BASELINE, LNS} and len(plan) == 7
    assert all(c.experiment_blocks for c in plan), "notebooks 01 and 04 show what is measured after training"
    assert {c.width for c in plan} == {128}


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
    named = Preset("named", (Part({4: 1}, ("lns",), variants=(Variant(schemes=("lns",)),)),), 0.1)
    with pytest.raises(NormlabError, match="preset named has no runs of bhyt; it has lns"):
        named.only(["lns", "bhyt"], None)


@pytest.mark.parametrize(
    ("preset", "schemes", "depths", "expected"),
    [
        ("tiny", (BASELINE, DEFAULT), [2], {(BASELINE, 2, 4e-3), (DEFAULT, 2, 8e-3)}),
        ("tiny", (DYT, BASELINE), [2, 4], {(s, d, 4e-3) for s in (DYT, BASELINE) for d in (2, 4)}),
        ("tiny", None, [2], {(BASELINE, 2, 4e-3), (LNS, 2, 4e-3)}),
        (
            "tiny",
            None,
            [8],
            {*((s, 8, 4e-3) for s in (BASELINE, LNS, DYT)), (DEFAULT, 8, 8e-3), (GAIN_CONTROL, 8, 1.6e-2)},
        ),
        ("gpu", (BASELINE,), [7], {(BASELINE, 7, 2e-3), (BASELINE, 7, 4e-3)}),
        ("gpu", (GAIN_CONTROL,), [6], {(GAIN_CONTROL, 6, 4e-3)}),
    ],
)
def test_every_scheme_has_a_run_at_a_depth_that_it_is_asked_for_and_each_once(preset, schemes, depths, expected):
    found = [(c.scheme, c.depth, c.lr) for c in planned(get_preset(preset).only(schemes, depths))]
    assert sorted(found) == sorted(expected)


def test_a_scheme_that_no_variant_is_of_is_refused():
    assert "peri_ln" in get_preset("gpu").parts[0].schemes
    with pytest.raises(NormlabError, match="preset gpu has no runs of peri_ln; it has pre_rmsnorm, "):
        get_preset("gpu").only((BASELINE, "peri_ln"), [24])


def test_the_rates_come_first_then_seed_zero_at_every_depth_then_more_seeds(text, tmp_path, monkeypatch):
    fake = InProcess({0.1: 3.0, 0.2: 2.0, 0.4: None})
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    result = quiet_sweep(small_preset(text), tmp_path)
    assert result.choices == {("lns", 2): Choice(0.2, 2.0), ("bhyt", 2): Choice(0.2, 2.0)}
    tried, rest = fake.started[:6], fake.started[6:]
    assert {(c.scheme, c.lr) for c in tried} == {(s, lr) for s in ("lns", "bhyt") for lr in (0.1, 0.2, 0.4)}
    assert {(c.depth, c.seed) for c in tried} == {(2, 0)}
    order = [(0, 1), (0, 4), (1, 1), (1, 2)]  # depth 2 at the best rate is there
    assert [(c.seed, c.depth) for c in rest] == [pair for pair in order for _ in range(2)]
    assert {c.lr for c in rest} == {0.2}
    assert len(result.runs) == 14 and not result.failures
    assert not any(c.keep_weights for c in fake.started)
    assert set(normlab.load_runs(tmp_path / "out")["run"]) == {c.run_id for c in fake.started}


def test_one_rate_is_tried_beyond_a_best_edge_and_the_preset_s_other_parts_take_the_best(text, tmp_path, monkeypatch):
    best = {"lns": 0.8, "bhyt": 0.2, "dyt": 0.05}
    fake = InProcess(lambda config: 2.0 + abs(math.log(config.lr / best[config.scheme])))
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    parts = (Part({2: 1}, tuple(best), kept=(2,)), Part({2: 2}, ("lns", "dyt")), Part({2: 1}, ("bhyt",), rate_of="lns"))
    result = quiet_sweep(small_preset(text, parts=parts), tmp_path)
    tried = {scheme: sorted(c.lr for c in fake.started if (c.scheme, c.seed) == (scheme, 0)) for scheme in best}
    assert tried == {"lns": [0.1, 0.2, 0.4, 0.8], "bhyt": [0.1, 0.2, 0.4, 0.8], "dyt": [0.05, 0.1, 0.2, 0.4]}
    assert [(c.scheme, c.lr) for c in fake.started if c.seed == 1] == [("lns", 0.8), ("dyt", 0.05)]
    assert all(c.keep_weights == (c.seed == 0 and c is not fake.started[-1]) for c in fake.started)
    assert len(result.runs) == len({c.run_id for c in fake.started}) == len(fake.started) == 14


# Which run of lns fails, by its rate.
@pytest.mark.parametrize("rate", [0.1, 0.05], ids=["a rate of the preset", "the one beyond the edge"])
def test_a_scheme_whose_run_failed_has_no_choice_until_it_is_there(rate, text, tmp_path, monkeypatch):
    """As where another sweep holds its lock: without it, the next best rate would be the scheme's label."""
    losses = {0.05: 1.5, 0.1: 1.0, 0.2: 1.01, 0.4: 3.0}
    fake = InProcess(losses, failing=lambda c: (c.scheme, c.lr) == ("lns", rate))
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    preset = small_preset(text, parts=(Part({2: 2}, ("lns", "bhyt")),))
    with pytest.warns(UserWarning, match="lns at depth 2: no rate was chosen, as one of its runs failed; start again"):
        result = quiet_sweep(preset, tmp_path)
    assert result.choices == {("bhyt", 2): Choice(0.1, 1.0)} and len(result.failures) == 1
    assert {c.scheme for c in fake.started if c.seed == 1} == {"bhyt"}
    fake.failing = lambda config: False
    again = quiet_sweep(preset, tmp_path)
    assert again.choices == {(name, 2): Choice(0.1, 1.0) for name in ("lns", "bhyt")} and not again.failures


def test_the_best_schemes_are_known_once_every_scheme_is_decided(text, tmp_path, monkeypatch):
    order = {"lns": 2.0, "bhyt": 2.9, "dyt": 2.1, "peri_ln": 2.2}
    fake = InProcess(lambda config: order[config.scheme] + abs(math.log(config.lr / 0.2)) / 10)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    fake.failing = lambda config: config.scheme == "dyt" and config.lr == 0.1
    preset = small_preset(text, parts=(Part({2: 1}, tuple(order)), Part({2: 2}, tuple(order), best=2)))
    with pytest.warns(UserWarning, match="dyt at depth 2: no rate was chosen"):
        quiet_sweep(preset, tmp_path)
    assert not any(c.seed for c in fake.started)
    fake.failing = lambda config: False
    quiet_sweep(preset, tmp_path)
    assert [(c.scheme, c.lr) for c in fake.started if c.seed] == [("lns", 0.2), ("dyt", 0.2)]


@pytest.mark.parametrize(
    "preset",
    [
        Preset("test", (Part({1: 1}, ("lns", "bhyt"), best=1),), 0.1),
        Preset("test", (Part({1: 2}, ("lns",)),), Rates((0.1, 0.2), (1,))),
    ],
)
def test_a_choice_without_a_held_out_loss_is_refused_before_anything_is_trained(preset, text, tmp_path, monkeypatch):
    fake = InProcess()
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    fields = {"corpus": str(text), "eval_every": 0}
    words = "preset test chooses by the held-out loss, and runs of lns at depth 1 have none: give eval_every"
    for call in (lambda preset: quiet_sweep(preset, tmp_path), lambda preset: plan(preset, tmp_path / "out")):
        with pytest.raises(NormlabError, match=words):
            call(replace(preset, fields=fields))
    assert not fake.started
    # The validation half is measured at the end all the same.
    assert planned(replace(preset, fields=fields | {"store_all": True, "held_out": "test"}))
    assert planned(Preset("test", (Part({1: 2}, ("lns",)),), 0.1, fields)), "nothing is chosen"


def test_the_best_schemes_at_one_rate_are_those_of_seed_zero_and_none_that_diverged(text, tmp_path, monkeypatch):
    losses = {"lns": 2.3, "bhyt": None, "dyt": 2.1, "peri_ln": 2.2}
    fake = InProcess(lambda config: losses[config.scheme])
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    preset = small_preset(text, parts=(Part({1: 2}, ("lns",)), Part({1: 2}, tuple(losses), best=2)), rate=0.1)
    assert len(planned(preset)) == 2 + 3 + 1, "lns is the first of those not known yet"
    with pytest.warns(UserWarning, match="bhyt at depth 1: its runs diverged at every rate"):
        result = quiet_sweep(preset, tmp_path)
    started = [(c.scheme, c.seed) for c in fake.started]
    assert started[:2] == [("lns", 0), ("lns", 1)] and {c.lr for c in fake.started} == {0.1}
    assert started[2:] == [("bhyt", 0), ("dyt", 0), ("peri_ln", 0), ("dyt", 1), ("peri_ln", 1)]
    losses |= {"dyt": None, "peri_ln": None}
    with pytest.warns(UserWarning, match="its runs diverged"):
        quiet_sweep(replace(preset, parts=preset.parts[1:]), tmp_path / "again")
    assert [(c.scheme, c.seed) for c in fake.started[7:] if c.seed] == [("lns", 1)]
    assert result.choices["dyt", 1] == Choice(0.1, 2.1)


@pytest.mark.parametrize(
    ("losses", "beyond"),
    [
        ({0.1: 3.0, 0.2: 2.0, 0.4: 1.0}, 0.8),
        ({0.1: 1.0, 0.2: 1.0, 0.4: 2.0}, 0.05),  # a tie goes to the smaller rate
        ({0.1: 2.0, 0.2: 1.0, 0.4: 1.04}, None),
        ({0.1: math.inf, 0.2: math.inf, 0.4: math.inf}, None),
        ({0.1: 3.0, 0.2: 2.0, 0.4: 1.0, 0.8: 0.9}, None),
    ],
)
def test_at_most_one_rate_is_tried_beyond_the_best(losses, beyond):
    assert Rates((0.1, 0.2, 0.4), (2,)).beyond(losses) == beyond


def test_a_depth_takes_the_rate_of_the_deepest_tried_depth_not_above_it():
    rates = Rates((0.1,), (4, 16))
    assert [rates.depth_for(depth) for depth in (2, 4, 8, 15, 16, 64)] == [4, 4, 4, 4, 16, 16]


AT_ONE_RATE, CHANGED, LARGER = (
    Variant({"lr": 0.1}),
    Variant({"model": {"lam_input": 9.0}}),
    Variant({"model": {"lam_input": 12.0}}),
)


def losses_known(preset: Preset) -> set[tuple[str, float, int, bool]]:
    """Scheme, rate, seed, and whether the model is changed, of all runs. 0.2 is best, and 0.4 for changed models."""
    runs_by_id: dict[str, TrainConfig] = {}

    def train(configs):
        runs_by_id.update((config.run_id, config) for config in configs)
        return {c.run_id: abs(math.log(c.lr / (0.4 if c.model else 0.2))) for c in configs}

    walk(preset, train)
    return {(c.scheme, c.lr, c.seed, bool(c.model)) for c in runs_by_id.values()}


@pytest.mark.parametrize("first", [True, False])
def test_runs_with_a_rate_of_their_own_neither_need_a_choice_nor_make_one(first, text):
    parts = Part({2: 1}, ("lns",), (AT_ONE_RATE,)), Part({2: 2}, ("lns",), (AT_ONE_RATE, Variant()))
    found = losses_known(small_preset(text, parts=parts if first else parts[::-1]))
    assert found == {("lns", lr, 0, False) for lr in (0.1, 0.2, 0.4)} | {("lns", lr, 1, False) for lr in (0.1, 0.2)}
    fixed = small_preset(text, parts=parts[:1])
    assert not fixed.tried(parts[0]) and losses_known(fixed) == {("lns", 0.1, 0, False)}


def test_a_rate_that_is_chosen_for_a_changed_model_is_for_that_model_alone(text):
    def found(*variants: Variant) -> set[float]:
        parts = tuple(Part({2: 2}, ("bhyt",), (variant,)) for variant in variants)
        return {lr for _, lr, seed, _ in losses_known(small_preset(text, parts=parts)) if seed == 1}

    assert found(CHANGED, CHANGED) == {0.4} and found(Variant(), CHANGED) == {0.2}
    for other in (Variant(), LARGER):
        with pytest.raises(NormlabError, match="rate of bhyt at depth 2 on models with {'lam_input': 9.0}, and"):
            found(CHANGED, other)


@pytest.mark.parametrize("fields", [{"steps": 2}, {"log_every": 10}, {"keep_weights": True}, {"model": {}}])
def test_a_rate_that_is_tried_otherwise_than_on_another_model_is_for_all_runs(fields, text):
    parts = Part({2: 1}, ("bhyt",), (Variant(fields),)), Part({2: 2}, ("bhyt",), (Variant(), CHANGED))
    at_best = {("bhyt", 0.2, seed, changed) for seed in (0, 1) for changed in (False, True)}
    assert losses_known(small_preset(text, parts=parts)) == at_best | {("bhyt", lr, 0, False) for lr in (0.1, 0.4)}


def test_rates_are_tried_on_the_unchanged_model_wherever_it_comes_in_a_part(text):
    orders = (CHANGED, Variant()), (Variant(), CHANGED)
    first, last = (losses_known(small_preset(text, parts=(Part({2: 2}, ("bhyt",), order),))) for order in orders)
    assert first == last and {lr for _, lr, _, changed in first if changed} == {0.2}


def test_a_scheme_at_one_rate_is_among_the_best_by_its_run_there_and_gives_that_rate_to_no_other_part(text):
    variants = Variant({"lr": 0.8}, ("bhyt",)), Variant(schemes=("lns",))
    best, all_of_bhyt = Part({2: 2}, ("bhyt", "lns"), variants, best=1), Part({2: 2}, ("bhyt",))
    assert [(c.scheme, c.lr) for c in planned(small_preset(text, parts=(best,)))][0] == ("bhyt", 0.8)
    tried = {("lns", lr, 0, False) for lr in (0.1, 0.2, 0.4)} | {("bhyt", 0.8, 0, False)}
    assert losses_known(small_preset(text, parts=(best,))) == tried | {("lns", 0.2, 1, False)}
    both = losses_known(small_preset(text, parts=(best, all_of_bhyt)))
    assert {lr for scheme, lr, seed, _ in both if (scheme, seed) == ("bhyt", 1)} == {0.2}


def test_a_rate_that_cannot_be_chosen_is_refused_before_anything_is_trained(text, tmp_path, monkeypatch):
    fake = InProcess()
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    one_for_all = small_preset(text, parts=(Part({2: 1}, ("lns", "bhyt")),))
    one_for_all = replace(one_for_all, fields={**one_for_all.fields, "lr": 0.1})
    without_source = small_preset(text, parts=(Part({2: 1}, ("lns",), rate_of="bhyt"), Part({2: 1}, ("bhyt",))))
    for preset, words in (
        (one_for_all, "preset test tries rates of lns at depth 2, and all its runs there are given lr 0.1: leave"),
        (without_source, "test gives lns the rate of bhyt, which is not tried before at depth 2: train bhyt too"),
    ):
        for call in (lambda preset: quiet_sweep(preset, tmp_path), planned):
            with pytest.raises(NormlabError, match=words):
                call(preset)
    assert not fake.started


def test_schemes_of_the_grid_are_trained_as_in_all_of_it_or_refused():
    grid = get_preset("grid")
    with pytest.raises(NormlabError, match="gives bhyt_linear the rate of bhyt_exact, .*: train bhyt_exact too"):
        planned(grid.only(["bhyt_linear"], None))
    both, whole = planned(grid.only(["bhyt_linear", "bhyt_exact"], None)), planned(grid)
    changed = {c.run_id for c in both if c.model}
    assert changed == {c.run_id for c in whole if "gamma0" in c.model} and len(changed) == 8


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


def test_steps_are_timed_for_each_width_batch_and_block_length(monkeypatch, text):
    monkeypatch.setattr(estimate, "_step_seconds", lambda c, *_: c.depth * c.width * c.batch_size**2 * c.block_length)
    one = TrainConfig(corpus=str(text), steps=1, eval_every=0, probe_every=0)
    kinds = {}, {"width": 512}, {"batch_size": 16}, {"batch_size": 4, "block_length": 2 * one.block_length}
    configs = [replace(one, depth=depth, **kind) for kind in kinds for depth in (2, 4, 16)]
    seconds = estimate._Seconds([])
    seconds.measure(configs[3:], None, False)
    assert [math.isnan(seconds.of(config)) for config in configs] == [True] * 3 + [False] * 9
    seconds.measure(configs, None, False)
    for config in configs:
        assert seconds.of(config) == pytest.approx(estimate._step_seconds(config))


def test_a_run_that_diverged_early_tells_no_hours(text, tmp_path):
    preset, out = small_preset(text), tmp_path / "out"
    options = dict(workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False)
    first, second = planned(preset, threads=1, keep_weights=False)[:2]
    measured = {"wall_s": 7200.0, "resumed_from_step": 0, "tokens_per_s": 1.0}
    write_run(first, out, eval_loss=None, measured=measured | {"wall_s": 1.0})
    assert plan(preset, out, **options).table["hours"].isna().all()
    write_run(second, out, measured=measured)
    table = plan(preset, out, **options).table
    assert set(table.loc[table["depth"] == 2, "hours"]) == {2.0} and table["done"].sum() == 2


def test_a_run_of_before_there_were_precisions_is_in_a_plan(text, tmp_path):
    preset, out = small_preset(text), tmp_path / "out"
    config = replace(planned(preset, threads=1, keep_weights=False)[0], dtype="float32")
    manifest = write_run(config, out) / runs.MANIFEST
    old = json.loads(manifest.read_text())
    del old["config"]["dtype"]
    manifest.write_text(json.dumps(old))
    table = plan(preset, out, workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False).table
    assert list(table.loc[table["done"], "run"]) == [config.run_id]


def test_a_sweep_lists_its_runs_and_the_hours_that_finished_runs_tell(text, tmp_path, monkeypatch):
    preset, out = small_preset(text), tmp_path / "out"
    monkeypatch.setattr(estimate, "train", lambda *_, **__: pytest.fail("it trained"))
    options = dict(workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False)
    first = plan(preset, out, **options)
    assert not out.exists() and not first.table["done"].any() and first.table["hours"].isna().all()
    order = planned(preset, threads=1, keep_weights=False)
    assert list(first.table["run"]) == [config.run_id for config in order]
    write_run(order[0], out, measured={"wall_s": 7200.0, "resumed_from_step": 0, "tokens_per_s": 1.0})
    second = plan(preset, out, **options)
    at_two = second.table["depth"] == 2
    assert set(second.table[at_two]["hours"]) == {2.0} and second.table[~at_two]["hours"].isna().all()
    assert list(second.table["done"]) == [row.run == order[0].run_id for row in second.table.itertuples()]
    words = second.in_words().splitlines()
    assert words[0].startswith("   6 runs depth 2 ") and "2.00 h at most   12.00 h in all, 1 done" in words[0]
    assert words[-2:] == ["14 runs, 13 left", "how long they take is not known: --time times a few steps first"]
    of_four = plan(preset, out, **options | {"threads": 4})
    assert of_four.table["hours"].equals(second.table["hours"])  # what a core takes, on however many


def test_a_plan_takes_the_rates_that_finished_trials_decide(text, tmp_path, monkeypatch):
    """Also packed ones. lns and bhyt are best at an edge, and a further rate is tried."""
    best = {"lns": 0.1, "bhyt": 0.4, "dyt": 0.2}
    fake = InProcess(lambda config: 2.0 + abs(math.log(config.lr / best[config.scheme])))
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    parts = (Part({2: 2}, tuple(best)), Part({1: 1}, tuple(best), best=1))
    preset, out = small_preset(text, parts=parts), tmp_path / "out"
    options = dict(workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False)
    assert len(plan(preset, out, **options).table) == 3 * 3 + 3 + 1
    trained = [run.name for run in quiet_sweep(preset, tmp_path, workers=2, threads=1).runs]
    further = {(c.scheme, c.lr): c.run_id for c in fake.started if (c.seed, c.depth) == (0, 2)}
    assert {scheme: lr for scheme, lr in further if lr not in (0.1, 0.2, 0.4)} == {"lns": 0.05, "bhyt": 0.8}
    # Without one that decides: the middle rate, or the best known where only the rate beyond is missing.
    for scheme, rate, then in (("dyt", 0.4, 0.2), ("lns", 0.05, 0.1), ("lns", 0.2, 0.2)):
        missing = further[scheme, rate]
        (out / missing).rename(tmp_path / missing)
        table = plan(preset, out, **options).table
        assert set(table.query("seed == 1 and scheme == @scheme")["lr"]) == {then}
        assert missing in set(table[~table["done"]]["run"])
        (tmp_path / missing).rename(out / missing)
    packed.pack(out)
    after = plan(preset, out, **options)
    assert list(after.table["run"]) == trained and after.table["done"].all()
    assert after.in_words().splitlines()[-2].startswith(f"{len(trained)} runs, 0 left;")


@pytest.mark.parametrize("threads", [1, 4])
def test_core_hours_are_shared_by_all_threads_of_all_workers(threads):
    row = {"scheme": "lns", "depth": 2, "tokens": 1e6, "hours": 12.0, "done": False}
    assert estimate.Plan(pd.DataFrame([row, row]), 2, threads).in_words().splitlines()[-2:] == [
        "2 runs, 2 left; 24.0 core-hours, 24.0 left",
        f"about {12.0 / threads:.1f} hours with 2 workers",
    ]


def test_a_sweep_takes_at_least_as_long_as_its_longest_run_and_tokens_that_differ_are_a_range():
    row = {"scheme": "lns", "depth": 2, "done": False}
    rows = [row | {"tokens": 6e4, "hours": 1.0}, row | {"tokens": 6.4e6, "hours": 10.0}]
    rows.append({"scheme": "lns", "depth": 4, "tokens": 6e4, "hours": 50.0, "done": True})
    words = estimate.Plan(pd.DataFrame(rows), 8, 2).in_words().splitlines()
    assert " 0.06M to 6.40M tokens each " in words[0] and " 0.06M tokens each " in words[1]
    assert words[-2:] == ["3 runs, 2 left; 61.0 core-hours, 11.0 left", "about 5.0 hours with 8 workers"]
    done = estimate.Plan(pd.DataFrame(rows[2:]), 8, 2).in_words().splitlines()
    assert done[-1] == "about 0.0 hours with 8 workers"


@pytest.mark.parametrize(("hours", "expected"), [([1.0, 1.0, 1.0], 2), ([4.0, 1.0, 1.0, 1.0, 1.0], 4)])
def test_the_first_worker_that_is_free_takes_the_next_run(hours, expected):
    table = pd.DataFrame({"scheme": "lns", "depth": 2, "tokens": 1e6, "hours": hours, "done": False})
    of_two = estimate.Plan(table, 2, 1)
    assert of_two.hours_left == expected
    assert of_two.in_words().endswith(f"about {expected:.1f} hours with 2 workers")
    assert math.isnan(estimate.Plan(table.assign(hours=math.nan), 2, 1).hours_left)


def test_steps_are_timed_where_that_is_asked_for(text, tmp_path, capsys):
    options = dict(workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False)
    timed = plan(small_preset(text), tmp_path / "out", time=True, **options)
    assert not (tmp_path / "out").exists() and (timed.table["hours"] > 0).all()
    assert "core-hours" in timed.in_words() and " hours with 2 workers" in timed.in_words()
    assert cli.main(["sweep", "--time", "--out", str(tmp_path / "out")]) == 2
    assert "--time would change nothing without --dry-run" in capsys.readouterr().err


def test_a_sweep_chooses_by_the_validation_half_where_a_run_reports_the_other(tmp_path):
    config = TrainConfig(scheme="lns", depth=1, steps=1)
    corpus = {"unigram_entropy": 6.5}
    run = runs.read_run(write_run(config, tmp_path, eval_loss=3.0, corpus=corpus, validation_loss=2.5))
    assert (run.choice_loss, run.eval_loss) == (2.5, 3.0)
    plain = runs.read_run(write_run(replace(config, seed=1), tmp_path, eval_loss=3.0, corpus=corpus))
    assert plain.choice_loss == 3.0


def test_every_run_of_the_grid_has_one_recipe():
    weights, grid, league = (planned(get_preset(name)) for name in ("initial_weights", "grid", "league"))
    assert {(c.corpus, c.dtype, c.steps, c.gain_lr_ratio, c.clip, c.store_all) for c in (*weights, *grid, *league)} == {
        ("packages", "bfloat16", 6000, 1.0, 5.0, True)
    }
    assert {c.init_std for c in grid} == {0.04} == {init_std(128)}
    of_wide_models = {c.scheme for c in weights if c.init_std is None}
    assert of_wide_models == {"pre_rmsnorm", "dyt", "bhyt", "peri_ln"}
    assert {c.warmup for c in grid if c.scheme not in tagged("warmed_up")} == {0.1}
    assert {c.run_id for c in league} <= {c.run_id for c in grid}, "a row of the league is one more of the grid"
