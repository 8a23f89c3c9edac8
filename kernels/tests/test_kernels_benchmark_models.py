"""The benchmark of whole models holds one model at a time."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_harness import DEVICE

pytest.importorskip("normlab", reason="whole models are normlab's: pip install -e .")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import measure  # noqa: E402
import models  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the benchmark itself is run")


@pytest.mark.parametrize("section", [models.step_section, models.generate_section])
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_gone_before_the_next_is_made(
    monkeypatch: pytest.MonkeyPatch, section: Callable, fails: bool
) -> None:
    made: list[weakref.ref] = []
    build = models.build

    def counted(*arguments: Any) -> Any:
        assert [model for model in made if model() is not None] == []
        model = build(*arguments)
        if fails:
            model.forward = None  # not by monkeypatch, which would keep the model
        made.append(weakref.ref(model))
        return model

    size = {"depth": 1, "width": 64, "length": 4, "batch": 1, "prompt": 2}
    monkeypatch.setattr(models, "shape", lambda device: size)
    monkeypatch.setattr(models, "variants", lambda everything: iter([("pre_rmsnorm", "eager")] * 3))
    monkeypatch.setattr(models, "build", counted)
    rows = list(section(measure.Clock(torch.device("cpu"), 0.0), torch.float32, 0.0, float("inf")))
    assert len(made) == 3 and len(rows) in (3, 9) and all(("note" in row) == fails for row in rows)
