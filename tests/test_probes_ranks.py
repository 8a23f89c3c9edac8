"""Two gloo ranks under torchrun, a DistributedDataParallel model: the merged table equals one rank's on all data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from probe_ranks import METRIC_NAMES, whole_batch
from probe_zoo import tiny_llama

from normlab.probes import LayerStats, record


def test_two_ranks_merge_to_the_table_of_one(tmp_path):
    script, out = Path(__file__).with_name("probe_ranks.py"), tmp_path / "merged.parquet"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(out),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr[-2000:]
    merged = LayerStats.load(out)
    model = tiny_llama()
    with record(model, METRIC_NAMES) as rec:
        model(**whole_batch()).loss.backward()
    keys = ["site", "layer", "metric", "mask"]
    expected = rec.stats().to_pandas().set_index(keys)["value"].to_dict()
    assert merged.to_pandas().set_index(keys)["value"].to_dict() == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert (
        merged.manifest["forward_passes"] == 2 and merged.manifest["loss_tokens"] == rec.stats().manifest["loss_tokens"]
    )
