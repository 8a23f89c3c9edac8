"""Two ranks, under torchrun or forked: each measures its share of the rows; rank 0 saves the merged statistics to
argv[1]."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# DistributedDataParallel imports this, if nothing has before, once there is a group, which its default arguments then
# keep alive: the group's threads would go on after `destroy_process_group` and can hang the interpreter's exit.
import torch.distributed.nn.functional
from probe_zoo import tiny_llama, token_batch

from normlab.probes import METRICS, record

METRIC_NAMES = list(METRICS)


def whole_batch() -> dict[str, torch.Tensor]:
    return token_batch(6)


def threads() -> list[str]:
    """Names of this process's threads, those of C++ included; none where there is no /proc."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def fork(rank: int, out: str) -> None:
    """What torchrun does for a rank of two."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    main(f"file://{out}.group")


def main(meet: str = "env://") -> None:
    faulthandler.dump_traceback_later(120, exit=True)  # a rank that waits for ever says where
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", meet, timedelta(seconds=60), world_size=ranks, rank=rank)
    model = torch.nn.parallel.DistributedDataParallel(tiny_llama())
    share = {name: value[rank::ranks] for name, value in whole_batch().items()}
    with record(model, METRIC_NAMES) as rec:
        model(**share).loss.backward()
    merged = rec.stats().across_ranks()
    if rank == 0:
        merged.save(sys.argv[1])
    del model, rec  # they hold the group
    gc.collect()
    dist.destroy_process_group()
    if left := [name for name in threads() if "gloo" in name]:
        sys.exit(f"rank {rank}: the group's threads are left: {', '.join(left)}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torch.multiprocessing.start_processes(fork, (sys.argv[1],), nprocs=2, start_method="fork")
