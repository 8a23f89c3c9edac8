"""Two gloo ranks under torchrun, a DistributedDataParallel model: the merged table equals one rank's on all data."""

from __future__ import annotations

import pytest
from probe_ranks import METRIC_NAMES, whole_batch
from probe_runs import run_on_two_ranks
from probe_zoo import near, tiny_llama

from normlab.probes import LayerStats, record

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


# Two forks of one process import torch once; torchrun starts three.
@pytest.mark.parametrize("started", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["forked", "torchrun"])
def test_two_ranks_merge_to_the_table_of_one(tmp_path, started):
    merged = LayerStats.load(run_on_two_ranks(tmp_path / "merged.parquet", started=started))
    model = tiny_llama()
    with record(model, METRIC_NAMES) as rec:
        model(**whole_batch()).loss.backward()
    keys = ["site", "layer", "metric", "mask"]
    expected = rec.stats().to_pandas().set_index(keys)["value"].to_dict()
    assert merged.to_pandas().set_index(keys)["value"].to_dict() == near(expected)
    assert (
        merged.manifest["forward_passes"] == 2 and merged.manifest["loss_tokens"] == rec.stats().manifest["loss_tokens"]
    )
