"""The skip map shows what the probes measured, and answers slider and click alike."""

from typing import Any

import numpy as np
import pytest
import torch
from widget_helpers import TOKENS, model_of

from normlab.probes import skip_future_effect, skip_sensitivity
from normlab.widgets import SkipMap

BATCHES = [{"input_ids": TOKENS}]


def traces_of(widget: SkipMap) -> dict[str, Any]:
    return {trace.name: trace for trace in widget.figure.data}


def test_it_shows_what_was_measured_and_answers_the_slider():
    model = model_of("lns", 4)
    cost = skip_sensitivity(model, BATCHES, progress=False)
    effect = skip_future_effect(model, BATCHES, progress=False)
    widget = SkipMap(model, BATCHES, name="lns")
    traces = traces_of(widget)
    assert list(traces["cost"].y) == pytest.approx(cost["skip_delta_loss"].tolist())
    assert list(traces["cost"].error_y.array) == pytest.approx((cost["high"] - cost["skip_delta_loss"]).tolist())
    assert traces["cost"].line.color == "#009e73"
    heat = np.array(traces["effect"].z, dtype=float)
    assert list(traces["effect"].x) == [1, 2, 3] and list(traces["effect"].y) == [2, 3, 4]
    assert heat[2, 0] == pytest.approx(effect.query("skipped == 1 and layer == 4")["value"].item())
    assert np.isnan(heat[0, 1])  # block 2 cannot change when block 2 is skipped
    widget.block.value = 2
    traces = traces_of(widget)
    assert list(traces["column"].x) == [3, 4] and list(traces["chosen"].x) == [2]
    assert f"{cost['skip_delta_loss'].iloc[1]:+.4f}" in widget.message.value


def test_a_click_chooses_the_block_under_it():
    widget = SkipMap(model_of("lns", 3), BATCHES)
    for trace, block, shown in (("effect", 2, 2), ("column", 3, 2), ("cost", 3, 3)):
        widget.plot._handle_custom_msg({"trace": trace, "x": block}, [])  # as a page sends it
        assert widget.block.value == shown
        assert list(traces_of(widget)["column"].x) == list(range(shown + 1, 4))
    assert "no block comes after it" in widget.message.value


def test_a_model_of_one_block_has_a_cost_and_no_later_blocks():
    widget = SkipMap(model_of("lns", 1), BATCHES)
    traces = traces_of(widget)
    assert len(traces["cost"].y) == 1 and traces["effect"].z is None and not traces["column"].x
    assert "one block" in widget.figure.layout.annotations[-1].text
    assert widget.block.disabled and "no block comes after it" in widget.message.value


def test_a_broken_model_is_said_to_be_so():
    model = model_of("lns", 3)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    widget = SkipMap(model, BATCHES)
    assert "the model is broken" in widget.message.value and "nan" not in widget.message.value
    assert "NaN" not in widget.figure.to_json()
    assert "the model is broken" in widget.static().layout.annotations[-1].text
    traces = traces_of(widget)
    assert list(traces["cost"].y) == [None] * 3 and list(traces["chosen"].y) == [None]


def test_what_has_no_number_is_said_in_words():
    widget = SkipMap(model_of("lns"), BATCHES)
    widget.cost.loc[widget.cost["layer"] == 2, ["skip_delta_loss", "low", "high"]] = float("nan")
    widget.block.value = 2
    assert "without block 2 the loss is not finite" in widget.message.value and "nan" not in widget.message.value
    widget = SkipMap(model_of("lns"), [{"input_ids": TOKENS[:1]}])  # one row has no interval
    assert "nan" not in widget.message.value and "without block 1:" in widget.message.value
