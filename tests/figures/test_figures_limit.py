"""Who trains at a great depth: the verdict, the order, and the profiles beside it."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from figures_helpers import UNIGRAM, activation, one_run, table, text_of

from normlab.figures import trains_at_depth
from normlab.schemes import BASELINE, SCHEMES
from normlab.training.grids import planned
from normlab.training.presets import get_preset


def mixed() -> pd.DataFrame:
    statuses = {("bhyt", 4): "diverged", ("pre_rmsnorm", 4): "not_learned", ("lns", 4): "not_learned"}
    runs = table(statuses=statuses, seeds=(0,))
    own = (runs["scheme"] == "lns") & (runs["metric"] == "loss") & (runs["depth"] == 4)
    return runs.assign(value=runs["value"].mask(own, 5.0))  # above the trigram, below the unigram


def test_a_scheme_trains_stalls_or_diverges_by_the_unigram_entropy():
    figure = trains_at_depth(mixed())
    found = {t.meta["outcome"]: t.meta["schemes"] for t in figure.data if t.meta and "outcome" in t.meta}
    assert found["diverges"] == ["bhyt"] and found["stalls"] == ["pre_rmsnorm"]
    assert found["trains"] == ["bhyt_linear", "rmsnorm_gain", "lns"]  # best first: 4.3, 4.4, 5.0
    (dots,) = [t for t in figure.data if t.meta and t.meta.get("outcome") == "trains"]
    assert list(dots.x) == pytest.approx([4.3, 4.4, 5.0])
    assert {shape.x0 for shape in figure.layout.shapes} == {UNIGRAM - 0.05}
    assert "● 3 train, ○ 1 stall, × 1 diverge" in text_of(figure) and "depth 4" in text_of(figure)
    assert not figure.layout.showlegend


def test_where_a_cross_stands_and_in_what_unit_a_panel_is_are_said():
    figure = trains_at_depth(mixed())
    (cross,) = [t for t in figure.data if t.meta and t.meta.get("outcome") == "diverges"]
    assert list(cross.x) == pytest.approx([UNIGRAM + 0.25]) and cross.marker.symbol == "x"
    words = text_of(figure)
    assert "× and losses further up are drawn 0.25 above it" in words
    assert "Held-out loss<br>nats a token" in words and "gradient norm of the batch (nats)" in words
    (_, stream) = (t for t in figure.data if t.type == "heatmap")
    values = [10**tick for tick in stream.colorbar.tickvals]  # whose numbers have that unit, not their logarithms
    assert len(values) > 1 and [float(text) for text in stream.colorbar.ticktext] == pytest.approx(values)


def test_a_loss_within_the_noise_of_the_unigram_entropy_is_no_training():
    runs = mixed()
    runs["value"] = runs["value"].mask(runs["value"] == 5.0, UNIGRAM - 0.04)  # what was lns's loss
    (stalled,) = [t for t in trains_at_depth(runs).data if t.meta and t.meta.get("outcome") == "stalls"]
    assert "lns" in stalled.meta["schemes"]


def test_profiles_run_from_the_first_layer_to_the_last_in_the_rows_order():
    figure = trains_at_depth(mixed())
    gradient, stream = (t for t in figure.data if t.type == "heatmap")
    names = [SCHEMES[name].title for name in ("bhyt_linear", "rmsnorm_gain", "lns", "pre_rmsnorm", "bhyt")]
    assert list(stream.y) == names and list(gradient.y) == names
    row = np.asarray(stream.z)[names.index(SCHEMES["lns"].title)]
    assert row[0] == pytest.approx(math.log10(activation("lns", 0, 20)))
    assert row[-1] == pytest.approx(math.log10(activation("lns", 4, 20)))
    row = np.asarray(gradient.z)[names.index(SCHEMES["lns"].title)]
    assert row[-1] == pytest.approx(math.log10(activation("lns", 4, 0)))  # before training
    assert trains_at_depth(mixed(), depth=2).data[-1].z is not None
    assert "depth 3" in text_of(trains_at_depth(mixed(), depth=3))
    other = one_run("lns").query("metric != 'unigram_entropy'")
    assert not trains_at_depth(other).data


def test_preset_depth_has_all_but_one_scheme_deep_and_a_dozen_at_a_thousand_layers():
    runs = [config for what, config in planned(get_preset("depth")) if what == "runs"]
    near, far, limit = ({c.scheme for c in runs if c.depth == depth} for depth in (16, 256, 1000))
    assert near == far and set(SCHEMES) - far == {"attn_residuals"} and len(limit) == 12 and BASELINE in limit <= far
    assert {(c.width, c.tokens_per_step) for c in runs} == {(32, 256)}
