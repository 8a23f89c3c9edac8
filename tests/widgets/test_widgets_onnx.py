"""The ONNX graph answers as Python does, under every change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_widgets_model import LENGTH, TOLERANCES, random_change, tiny

import normlab
from normlab.cli import main
from normlab.release import shipped_models
from normlab.widgets.change import Change, ask, changed
from normlab.widgets.onnx_export import change_input, write_onnx


def compare(model: Any, path: Path, tokens: torch.Tensor, changes: list[Change]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path))
    depth = model.config.num_hidden_layers
    for change in changes:
        given = {"tokens": tokens.numpy(), "change": change_input(change, depth).numpy()}
        logits, sizes = session.run(None, given)
        with changed(model, change), torch.no_grad():
            expected = model(input_ids=tokens).logits
        assert np.abs(logits - expected.numpy()).max() <= TOLERANCES["logits"], change
        profile = ask(model, tokens, change).profile("token_l2_mean", "block_out").to_numpy()
        assert np.abs(sizes / profile - 1).max() <= TOLERANCES["sizes"], change


def test_a_change_goes_in_and_logits_and_sizes_come_out(tmp_path):
    pytest.importorskip("onnxscript")
    source, tokens = random.Random(0), torch.arange(LENGTH - 5)[None]
    model = tiny("bhyt")
    compare(model, write_onnx(model, tmp_path / "bhyt.onnx"), tokens, [random_change(4, source) for _ in range(8)])


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_models())
def test_every_shipped_model_under_random_changes(tmp_path, name):
    assert main(["export", name, str(tmp_path), "--onnx"]) == 0
    tokens = normlab.load_held_out(name)[5:6, :64]
    changes = [random_change(8, random.Random(f"{name} {turn}")) for turn in range(200)]
    compare(normlab.load_model(name), tmp_path / "model.onnx", tokens, changes)
