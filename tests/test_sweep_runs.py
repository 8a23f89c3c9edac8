"""Many runs: which ones, in which order, on how many workers, and what a failing or killed one does to the others."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import training_helpers
from training_helpers import TINY, tiny, write_run, write_text

import normlab
from normlab import NormlabError, runs
from normlab.schemes import SCHEMES
from normlab.training import sweep as sweep_module
from normlab.training import workers as workers_module
from normlab.training.config import TrainConfig
from normlab.training.plan import plan
from normlab.training.presets import PRESETS, Part, Preset, Search, get_preset
from normlab.training.sweep import default_workers, planned, sweep


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


@pytest.fixture
def configs(text: Path) -> list[TrainConfig]:
    return [tiny(text, seed=seed) for seed in range(4)]


class InProcess:
    """In place of the workers: writes runs at once and remembers the order.

    `losses`: final held-out loss by learning rate, or a function of the configuration. `failing`: which runs raise.
    """

    def __init__(
        self,
        losses: dict[float, float | None] | Callable[[TrainConfig], float | None] | None = None,
        failing: Callable[[TrainConfig], bool] = lambda config: False,
    ) -> None:
        table = losses or {}
        self.loss = table if callable(table) else lambda config: table.get(config.lr, 2.0)
        self.failing = failing
        self.started: list[TrainConfig] = []

    def __call__(self, configs: Sequence[TrainConfig], out: Path, workers: Any, cache_dir: Any) -> Iterator[tuple]:
        for config in configs:
            self.started.append(config)
            if self.failing(config):
                yield config, RuntimeError("it broke\nin many lines")
            else:
                yield config, runs.read_run(write_run(config, out, self.loss(config)))


def _sweep(what: Any, tmp_path: Path, **options: Any) -> sweep_module.SweepResult:
    return sweep(what, tmp_path / "out", cache_dir=tmp_path / "cache", progress=False, **options)


def _preset(text: Path, **fields: Any) -> Preset:
    shared = {name: value for name, value in TINY.items() if name != "depth"} | {"corpus": str(text)}
    defaults = dict(
        parts=(Part({1: 2, 2: 2, 4: 1}, ("lns", "bhyt")),),
        rate=Search((0.1, 0.2, 0.4), (2,), {"seed": 9, "held_out": "validation"}),
    )
    return Preset("test", **{**defaults, "fields": shared, **fields})


# --- which runs ---


def test_preset_trained_is_the_promised_sweep() -> None:
    preset = get_preset("trained")
    core, further, *deep = preset.parts
    assert set(core.schemes) >= {"pre_rmsnorm", "lns", "lns_gain", "bhyt", "bhyt_exact", "rmsnorm_gain"}
    assert core.depths == {4: 3, 8: 1, 16: 3} and set(further.depths) == {4, 16}
    assert set(further.schemes) >= {
        "peri_ln",
        "dyt",
        "pre_rmsnorm_scaled_init",
        "mix_ln",
        "post_rmsnorm",
        "bhyt_linear",
    }
    assert [(set(part.depths), len(part.schemes)) for part in deep] == [({32}, 4), ({64}, 2)]
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


def test_preset_tiny_has_the_schemes_that_the_report_compares() -> None:
    plan = planned(get_preset("tiny"))
    assert {what for what, _ in plan} == {"runs"}
    schemes, depths = ({getattr(c, name) for _, c in plan} for name in ("scheme", "depth"))
    assert len(schemes) >= 6 and len(depths) >= 3 and len(plan) == len(schemes) * len(depths)
    assert {scheme.name for scheme in SCHEMES.values() if scheme.is_control} <= schemes
    assert {c.width for _, c in plan} == {128}


def test_every_preset_names_known_schemes() -> None:
    assert all(set(part.schemes) <= set(SCHEMES) for preset in PRESETS.values() for part in preset.parts)
    with pytest.raises(NormlabError, match="unknown scheme"):
        get_preset("tiny").only(("nonorm",), None)
    with pytest.raises(NormlabError, match=f"unknown preset 'huge'; known are {', '.join(PRESETS)}"):
        get_preset("huge")


def test_some_schemes_and_depths_of_a_preset_and_what_it_lacks_in_its_first_part() -> None:
    parts = (Part({4: 3, 16: 3}, ("lns", "bhyt")), Part({32: 1}, ("lns",)))
    preset = Preset("test", parts, 0.1)
    chosen = preset.only(("bhyt", "dyt"), (32, 4, 7))
    assert [(part.schemes, dict(part.depths)) for part in chosen.parts] == [(("bhyt", "dyt"), {32: 1, 4: 3, 7: 1})]
    assert [dict(part.depths) for part in preset.only(None, (32, 4)).parts] == [{4: 3}, {32: 1}]


def test_the_search_comes_first_then_seed_zero_at_every_depth_then_more_seeds(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = InProcess({0.1: 3.0, 0.2: 2.0, 0.4: None})
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    result = _sweep(_preset(text), tmp_path)
    assert result.learning_rates == {("lns", 2): 0.2, ("bhyt", 2): 0.2}
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
    assert set(normlab.load_runs(tmp_path / "out" / runs.SEARCH)["run"]) == {c.run_id for c in searched}


def test_the_grid_of_rates_grows_until_the_best_lies_inside(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = {("lns", 2): 0.05, ("bhyt", 2): 0.2, ("lns", 4): 1.6, ("bhyt", 4): 0.4}
    fake = InProcess(lambda config: abs(math.log(config.lr / best[config.scheme, 2 if config.depth < 4 else 4])))
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    preset = _preset(text, rate=Search((0.1, 0.2, 0.4), (2, 4)))
    result = _sweep(preset, tmp_path)
    assert result.learning_rates == best
    tried = {pair: {c.lr for c in fake.started if c.seed == 0 and (c.scheme, c.depth) == pair} for pair in best}
    assert tried["lns", 2] == {0.025, 0.05, 0.1, 0.2, 0.4} and tried["lns", 4] == {0.1, 0.2, 0.4, 0.8, 1.6, 3.2}
    assert {(c.depth, c.lr) for c in fake.started if c.scheme == "lns" and c.seed == 1} == {(1, 0.05), (2, 0.05)}


def test_a_grid_of_rates_stops_growing_where_nothing_learns_or_the_loss_falls_for_ever() -> None:
    search = Search((0.1, 0.2, 0.4), (2,))
    assert search.next_rate({0.1: math.inf, 0.2: math.inf, 0.4: math.inf}) is None
    losses = {0.1: 3.0, 0.2: 2.0, 0.4: 1.0}
    while (rate := search.next_rate(losses)) is not None:
        losses[rate] = min(losses.values()) - 1
    assert sorted(losses) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    assert search.next_rate({0.1: 1.0, 0.2: 1.0, 0.4: 2.0}) == 0.05, "a tie goes to the smaller rate"


def test_a_depth_takes_the_rate_of_the_deepest_searched_depth_not_above_it() -> None:
    search = Search((0.1,), (4, 16))
    assert [search.depth_for(depth) for depth in (2, 4, 8, 15, 16, 64)] == [4, 4, 4, 4, 16, 16]


def test_a_sweep_tells_what_it_will_do_before_it_starts(text: Path, tmp_path: Path) -> None:
    preset = _preset(text)
    out = tmp_path / "out"
    first = plan(preset, out, workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False)
    assert not out.exists() and not first.table["done"].any() and (first.table["hours"] > 0).all()
    order = [(what, config.run_id) for what, config in planned(preset, threads=1, keep_weights=False)]
    assert list(first.table[["what", "run"]].itertuples(index=False, name=None)) == order
    searched = [config for what, config in planned(preset, threads=1) if what == "search"]
    write_run(searched[0], out / runs.SEARCH, measured={"wall_s": 7200.0, "resumed_from_step": 0, "tokens_per_s": 1.0})
    second = plan(preset, out, workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False)
    at_two = second.table[second.table["depth"] == 2]
    assert set(at_two["hours"]) == {2.0}, "finished runs of that shape say how long one takes"
    assert list(second.table["done"]) == [row.run == searched[0].run_id for row in second.table.itertuples()]
    words = second.in_words()
    assert words.startswith("   6 search depth 2 ") and "16 runs, " in words and "with 2 workers" in words


def test_a_sweep_started_again_trains_only_what_is_missing(
    configs: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = InProcess(failing=lambda config: config.seed == 2)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    first = _sweep(configs, tmp_path)
    assert len(fake.started) == 4 and list(first.failures) == [configs[2].run_id]
    fake.failing = lambda config: False
    second = _sweep(configs, tmp_path)
    assert fake.started[4:] == [replace(configs[2], threads=default_workers()[1])]
    assert [run.name for run in second.runs] == [config.run_id for config in configs] and not second.failures


def test_a_failing_run_is_reported_and_stops_no_other(
    configs: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = InProcess(failing=lambda config: config.seed == 0)
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    result = _sweep(configs, tmp_path)
    assert [run.name for run in result.runs] == [config.run_id for config in configs[1:]]
    assert result.failures == {configs[0].run_id: "RuntimeError: it broke"}


def test_a_scheme_whose_search_failed_is_left_out_of_the_grid(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = InProcess(failing=lambda config: config.scheme == "lns")
    monkeypatch.setattr(sweep_module, "finish_in_any_order", fake)
    result = _sweep(_preset(text), tmp_path)
    assert {run.manifest["config"]["scheme"] for run in result.runs} == {"bhyt"}
    assert len(result.failures) == 3


def test_a_damaged_or_different_run_in_the_way_is_a_failure_of_that_run(
    configs: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "finish_in_any_order", InProcess())
    out = tmp_path / "out"
    manifest = write_run(configs[0], out) / runs.MANIFEST
    manifest.write_text(manifest.read_text()[:100])
    corpus = runs.read_run(write_run(configs[1], out)).manifest["corpus"]
    write_run(configs[2], out)
    runs.write_json(
        out / configs[1].run_id / runs.MANIFEST,
        runs.read_run(out / configs[1].run_id).manifest | {"corpus": corpus | {"content_hash": "other"}},
    )
    result = _sweep(configs, tmp_path)
    assert len(result.runs) == 2
    assert "manifest.json cannot be read" in result.failures[configs[0].run_id]
    assert "has content_hash 'other'" in result.failures[configs[1].run_id]


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, (1, 1)), (2, (2, 1)), (3, (2, 1)), (16, (2, 8))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert default_workers() == expected
    assert default_workers(4) == (4, 4)
    assert sweep_module.share_cores(8, None) == (8, 2)
    assert sweep_module.share_cores(32, None) == (32, 1)
    assert sweep_module.share_cores(3, 7) == (3, 7)
    assert sweep_module.share_cores("ray", None) == ("ray", 1)
    for workers, threads in ((0, None), ("some", None), (2, 0)):
        with pytest.raises(NormlabError):
            sweep_module.share_cores(workers, threads)


def test_bad_input_is_refused_before_any_run_starts(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "finish_in_any_order", lambda *_: pytest.fail("started"))
    with pytest.raises(NormlabError, match="does not exist"):
        _sweep([tiny(tmp_path / "missing.txt")], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NormlabError, match="is a file"):
        sweep([tiny(text)], tmp_path / "file", progress=False)


# --- processes ---


def test_a_real_sweep_in_two_processes_equals_the_same_runs_in_this_one(text: Path, tmp_path: Path) -> None:
    configs = [tiny(text, scheme=scheme, keep_weights=False, threads=1) for scheme in ("lns", "bhyt", "dyt")]
    lock = tmp_path / "out" / runs.PARTIAL / f"{configs[2].run_id}.lock"
    with runs.exclusive(lock):
        result = normlab.sweep(
            configs, tmp_path / "out", workers=2, threads=1, cache_dir=tmp_path / "cache", progress=False
        )
    assert [run.name for run in result.runs] == [config.run_id for config in configs[:2]]
    assert "another process is training" in result.failures[configs[2].run_id]
    for config, run in zip(configs, result.runs, strict=False):
        alone = normlab.train(config, tmp_path / "alone", cache_dir=tmp_path / "cache", progress=False)
        assert (alone.path / runs.STATS).read_bytes() == (run.path / runs.STATS).read_bytes()
    assert set(normlab.load_runs(tmp_path / "out").scheme) == {"lns", "bhyt"}


def test_a_killed_worker_costs_no_run(
    configs: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "train_one", training_helpers.die_the_first_time)
    result = _sweep(configs[:3], tmp_path, workers=2, threads=1)
    assert (tmp_path / "died-1").exists()
    assert len(result.runs) == 3 and not result.failures


def test_a_run_that_kills_its_worker_every_time_is_given_up_and_takes_no_other_with_it(
    configs: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "train_one", training_helpers.always_die)
    result = _sweep(configs[1:3], tmp_path, workers=2, threads=1)
    assert [run.name for run in result.runs] == [configs[2].run_id]  # that was in progress beside it
    assert list(result.failures) == [configs[1].run_id]
    assert "its process was killed" in result.failures[configs[1].run_id]


SLEEPING_SWEEP = """
import signal
import sys
import training_helpers
from pathlib import Path
from normlab.training import workers
from normlab.training.sweep import sweep

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    workers.train_one = training_helpers.work_for_ever
    root = Path(sys.argv[1])
    configs = [training_helpers.tiny(root / "text.txt", seed=seed) for seed in range(2)]
    sweep(configs, root / "out", workers=2, threads=1, cache_dir=root / "cache", progress=False)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_sweep(how: signal.Signals, text: Path, tmp_path: Path) -> None:
    script = tmp_path / "sleeping.py"
    script.write_text(SLEEPING_SWEEP)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, script, tmp_path], env=environment, stderr=subprocess.DEVNULL)
    files = [tmp_path / f"worker-{seed}" for seed in range(2)]
    _wait(lambda: all(file.exists() and file.read_text() for file in files) or process.poll() is not None, 300)
    workers = [int(file.read_text()) for file in files]
    assert len(set(workers)) == 2 and all(map(_alive, workers))
    process.send_signal(how)
    process.wait(60)
    _wait(lambda: not any(map(_alive, workers)), 30)


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# --- Ray ---


class FakeRay(types.ModuleType):
    """The part of Ray's interface that a sweep uses, run in threads of this process."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.running, self.cpus = False, []

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **options: Any) -> None:
        self.running = True

    def shutdown(self) -> None:
        self.running = False

    def remote(self, function: Callable) -> Any:
        ray = self

        class Task:
            def options(self, num_cpus: int) -> Task:
                ray.cpus.append(num_cpus)
                return self

            def remote(self, *arguments: Any) -> Any:
                return _Reference(function, arguments)

        return Task()

    def wait(self, references: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return [references[-1]], references[:-1]

    def get(self, reference: Any) -> Any:
        reference.thread.join()
        if reference.error is not None:
            wrapped = RuntimeError("ray::train_one() failed on some node")
            wrapped.cause = reference.error  # type: ignore[attr-defined]
            raise wrapped
        return reference.value


class _Reference:
    def __init__(self, function: Callable, arguments: tuple) -> None:
        self.value, self.error = None, None
        self.thread = threading.Thread(target=self._run, args=(function, arguments))
        self.thread.start()

    def _run(self, function: Callable, arguments: tuple) -> None:
        try:
            self.value = function(*arguments)
        except Exception as error:
            self.error = error


def _fail_one(config: TrainConfig, out: str, cache_dir: str | None) -> str:
    if config.seed == 1:
        raise NormlabError("this one cannot")
    return str(write_run(config, out))


def test_ray_runs_what_processes_would(
    configs: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(workers_module, "train_one", _fail_one)
    result = _sweep(configs, tmp_path, workers="ray", threads=3)
    assert [run.name for run in result.runs] == [c.run_id for c in configs if c.seed != 1]
    assert result.failures == {configs[1].run_id: "this one cannot"}
    assert ray.cpus == [3] * 4 and not ray.running


def test_without_ray_the_message_names_what_to_install(
    configs: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NormlabError, match=r"pip install 'normlab\[ray\]'"):
        _sweep(configs, tmp_path, workers="ray")


@pytest.mark.slow
def test_ray_itself_runs_a_sweep(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    configs = [tiny(text, seed=seed, keep_weights=False) for seed in range(2)]
    result = _sweep(configs, tmp_path, workers="ray", threads=1)
    assert [run.name for run in result.runs] == [config.run_id for config in configs], result.failures
