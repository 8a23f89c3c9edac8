"""A step in parts, or with activations computed twice: less memory, the same run."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from training_helpers import tiny

from normlab import NormlabError, runs, store
from normlab.models import NormlabForCausalLM
from normlab.training.checkpoint import list_files
from normlab.training.config import TrainConfig


@pytest.fixture(scope="module")
def config(text: Path) -> TrainConfig:
    return tiny(text, batch_size=4, probe_every=8, eval_every=8)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """(training, blocks) of every forward pass of the first block."""
    seen: list[tuple[bool, int]] = []
    build = NormlabForCausalLM.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        first = self.model.layers[0].mlp
        first.register_forward_pre_hook(lambda module, args: seen.append((module.training, len(args[0]))))

    monkeypatch.setattr(NormlabForCausalLM, "__init__", watched)
    return seen


@pytest.fixture(scope="module")
def plain(config: TrainConfig, go: Callable, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return pd.read_parquet(go(config, tmp_path_factory.mktemp("plain")).path / runs.STATS)


def test_a_step_in_parts_takes_the_same_blocks_to_the_same_losses(config, plain, go, batches, tmp_path):
    run = go(dataclasses.replace(config, accumulate=2), tmp_path)
    assert run.name == config.run_id
    assert [size for training, size in batches if training] == [2] * 2 * config.steps
    table = pd.read_parquet(run.path / runs.STATS)
    assert table["value"].to_numpy() == pytest.approx(plain["value"].to_numpy(), rel=1e-3, abs=1e-5)
    losses = [each.query("metric == 'loss'")["value"].to_numpy() for each in (table, plain)]
    assert abs(losses[0] - losses[1]).max() <= 1e-5


def test_activations_computed_twice_give_the_same_bits(config, plain, go, batches, tmp_path):
    run = go(dataclasses.replace(config, gradient_checkpointing=True), tmp_path)
    assert run.name == config.run_id
    assert [training for training, _ in batches].count(True) == 2 * config.steps
    assert pd.read_parquet(run.path / runs.STATS).equals(plain)


def test_a_run_begun_before_a_field_was_added_goes_on(config, go, stop, tmp_path):
    stop(config, tmp_path, 5)
    begun = tmp_path / store.PARTIAL / config.run_id / "checkpoint-5" / "begun.json"
    manifest = json.loads(begun.read_text())
    store.write_json(begun, {**manifest, "config": {k: v for k, v in manifest["config"].items() if k != "accumulate"}})
    (begun.parent / "files.json").unlink()
    list_files(begun.parent)
    assert go(config, tmp_path).manifest["measured"]["resumed_from_step"] == 5


def test_a_gpu_that_is_not_there_is_one_line(text, go, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NormlabError, match="device is 'cuda', and PyTorch sees no GPU here"):
        go(tiny(text, device="cuda"), tmp_path)
