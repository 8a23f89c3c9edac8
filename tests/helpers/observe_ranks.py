"""Two forked ranks train a tiny model with an observer, under DDP, FSDP2 and tensor parallelism.

python observe_ranks.py FOLDER          ddp.csv, fsdp.csv, tp.csv: the observer's table, from rank 0
"""

from __future__ import annotations

import faulthandler
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: its default arguments hold what they find
from probe_zoo import tiny_llama, token_batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import normlab

METRICS = ("token_l2_mean", "rms", "max_abs", "grad_l2_mean")


def train(model: torch.nn.Module, batch: dict[str, torch.Tensor], **options: object) -> normlab.probes.observe.Observer:
    """Two steps of SGD, both measured."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    observer = normlab.observe(model, every=1, metrics=METRICS, **options)
    for step in range(2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        observer.step(loss.item(), step)
    observer.close()
    return observer


def even_batch() -> dict[str, torch.Tensor]:
    """Rows with as many labels each: then the ranks' mean losses average to the whole one."""
    ids = token_batch(4)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def tensor_parallel(model: torch.nn.Module, mesh: object) -> torch.nn.Module:
    """Attention and MLP split over heads and features."""
    plan = {name: ColwiseParallel() for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    return model


def rank_main(rank: int, folder: str) -> None:
    faulthandler.dump_traceback_later(120, exit=True)  # a rank that waits for ever says where
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/group", timedelta(seconds=60), world_size=2, rank=rank)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    share = {name: value[rank::2] for name, value in even_batch().items()}
    sharded = tiny_llama()
    for block in sharded.model.layers:
        fully_shard(block)
    fully_shard(sharded)
    tables = {
        "ddp": train(torch.nn.parallel.DistributedDataParallel(tiny_llama()), share),
        "fsdp": train(sharded, share),
        "tp": train(tensor_parallel(tiny_llama(), mesh["tp"]), even_batch(), group=mesh["dp"].get_group()),
    }
    if rank == 0:
        for name, observer in tables.items():
            observer.to_pandas().to_csv(Path(folder) / f"{name}.csv", index=False)
    dist.barrier()
    os._exit(0)  # meshes hold the group for good, and its threads may hang the exit


if __name__ == "__main__":
    torch.multiprocessing.start_processes(rank_main, (sys.argv[1],), nprocs=2, start_method="fork")
