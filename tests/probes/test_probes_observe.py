"""`observe` in other people's loops, and `explain`: which layer left its past first."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pandas
import pytest
import torch
from probe_zoo import tiny_llama, token_batch

import normlab
from normlab.errors import NormlabError
from normlab.probes.observe import DEPARTS, Readings

KEYS = ["step", "site", "layer", "metric", "mask"]


def test_only_every_so_many_steps_are_measured_and_hooks_are_removed():
    model = tiny_llama()
    with normlab.observe(model, every=3, metrics=["rms"], start=6) as observer:
        for step in range(6, 13):
            observer.step(model(**token_batch()).loss.item(), step)
    assert observer.to_pandas()["step"].unique().tolist() == [6, 9, 12]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def reading(step: int, sizes: dict[int, float], metric: str = "rms", site: str = "block_out") -> pandas.DataFrame:
    rows = [(step, site, layer, metric, "all", value) for layer, value in sizes.items()]
    return pandas.DataFrame(rows, columns=[*KEYS, "value"])


def calm(readings: Readings, count: int, seed: int = 0) -> None:
    noise = np.random.default_rng(seed)
    for step in range(count):
        growth = 1 + step / 200
        readings.add(reading(step, {layer: layer * growth * noise.normal(1, 0.01) for layer in range(1, 5)}))


def test_the_first_layer_in_forward_order_is_named():
    readings = Readings()
    calm(readings, 20)
    assert readings.explain().verdict.startswith("no site left its past in 20 readings")
    readings.add(reading(20, {1: 1.1, 2: 2.2, 3: 9.0, 4: 40.0}))
    explanation = readings.explain()
    assert explanation.verdict.startswith("layer 3, ") and "at step 20" in explanation.verdict
    assert explanation.table["layer"].tolist() == [3, 4] and (explanation.table["z"].abs() > DEPARTS).all()
    assert explanation.plot("rms").data[0].type == "heatmap"


def test_a_departure_is_found_after_an_earlier_one_has_passed():
    readings = Readings()
    calm(readings, 20)
    readings.add(reading(20, {1: 5.0, 2: 2.2, 3: 3.3, 4: 4.4}))
    for step in range(21, 50):
        readings.add(reading(step, {layer: 1.1 * layer for layer in range(1, 5)}))
    readings.add(reading(50, {1: 1.1, 2: 2.2, 3: 3.3, 4: 44.0}))
    assert readings.explain(since=40).verdict.startswith("layer 4, ")
    assert readings.explain().verdict.startswith("layer 1, ")


def test_a_value_that_is_not_finite_leaves_at_once():
    readings = Readings()
    calm(readings, 3)
    readings.add(reading(3, {1: 1.0, 2: float("nan"), 3: float("inf"), 4: 1.0}))
    assert "layer 2, " in readings.explain().verdict and "not finite" in readings.explain().verdict


def test_memory_is_bounded_and_the_file_stays_when_the_process_is_killed(tmp_path):
    readings = Readings(keep=5, path=tmp_path / "last.csv")
    calm(readings, 12)
    assert pandas.read_csv(tmp_path / "last.csv")["step"].unique().tolist() == [7, 8, 9, 10, 11]
    assert readings.to_pandas()["step"].nunique() == 12
    script = (
        "import sys, torch, normlab\n"
        "from probe_zoo import tiny_llama, token_batch\n"
        "model = tiny_llama()\n"
        "observer = normlab.observe(model, every=1, metrics=['rms'], path=sys.argv[1])\n"
        "for step in range(10**6): observer.step(model(**token_batch()).loss.item(), step)\n"
    )
    left = tmp_path / "left.csv"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(left)], env={**__import__("os").environ, "PYTHONPATH": ":".join(sys.path)}
    )
    deadline = time.monotonic() + 120
    while not left.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert {"block_out"} <= set(pandas.read_csv(left)["site"])


def test_a_spike_of_the_loss_is_explained_at_once():
    model, batch = tiny_llama(), token_batch()
    with normlab.observe(model, every=1, metrics=["rms"]) as observer:
        for step in range(30):
            model(**batch)
            observer.step(2.0 + 0.01 * (step % 2), step)
        assert observer.spike is None
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1000)
        model(**batch)
        observer.step(9.0, 30)
    assert observer.spike is not None and observer.spike.verdict.startswith("layer 2, ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 1.5}, "every is 1.5"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"metrics": ["size"]}, "size"),
    ],
)
def test_bad_options_are_one_line(options, words):
    with pytest.raises(NormlabError, match=words):
        normlab.observe(tiny_llama(), **options)
