"""Run under torchrun: each rank measures its share of the rows; rank 0 saves the merged statistics to argv[1]."""

from __future__ import annotations

import faulthandler
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from probe_zoo import tiny_llama, token_batch

from normlab.probes import METRICS, record

METRIC_NAMES = list(METRICS)


def whole_batch() -> dict[str, torch.Tensor]:
    return token_batch(6)


def main() -> None:
    faulthandler.dump_traceback_later(240, exit=True)  # a rank that waits for ever says where
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(tiny_llama())
    share = {name: value[rank::ranks] for name, value in whole_batch().items()}
    with record(model, METRIC_NAMES) as rec:
        model(**share).loss.backward()
    merged = rec.stats().across_ranks()
    if rank == 0:
        merged.save(sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
