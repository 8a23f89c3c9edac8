"""What `normlab bench` divides by what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from training_helpers import tiny

from normlab.bench import training as bench
from normlab.models import NormlabForCausalLM


def test_operations_of_a_step_are_those_that_pytorch_counts() -> None:
    config = tiny(Path("no.txt"), depth=3)
    model = NormlabForCausalLM(config.model_config(300, 0))
    ids = torch.randint(300, (config.batch_size, config.block_length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    attention = 12 * config.depth * config.width * config.block_length * config.tokens_per_step  # not counted on a CPU
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == bench.step_flops(model, config) - attention


@pytest.mark.slow
def test_the_bench_sets_each_precision_against_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PEAK_SIZE", 256)
    table = bench.bench(1, schemes=(), depth=1, width=32, cache_dir=tmp_path, progress=False).set_index("what")
    shares = table["peak_share"].dropna()
    assert list(shares.index) == [f"{name} step" for name in bench.PRECISIONS]
    assert (shares == 1 / table.loc[shares.index, "ratio"]).all() and (table["tokens_per_s"] > 0).all()
    step = table.loc["float32 step"]
    assert step["tokens_per_s"] * step["seconds"] == pytest.approx(8 * 128)
