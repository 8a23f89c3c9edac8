"""Two forked ranks run the recipes of docs/loops.md under DDP, FSDP2 and tensor parallelism, and record a pass.

In FOLDER: ddp.csv, fsdp.csv, tp.csv, the observer's table, from rank 0; piped.csv and whole.csv, those of two stages of
a pipeline and of a model that FSDP2 holds whole; recorded.parquet, the merged statistics of `record`.
"""

import faulthandler
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import loop_recipes
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: its default arguments hold what they find
from probe_toys import Numbered, X
from probe_zoo import tiny_llama, token_batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from normlab.probes import METRICS, record


def share(names: dict[str, Any]) -> None:
    """Every second row of each batch, for this rank; and an optimizer of the weights as they are now."""
    names["loader"] = [{n: x[dist.get_rank() :: 2] for n, x in batch.items()} for batch in names["loader"]]
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.01)


def replicated(names: dict[str, Any]) -> None:
    names["model"] = DistributedDataParallel(names["model"])
    share(names)


def sharded(names: dict[str, Any]) -> None:
    for block in names["model"].model.layers:
        fully_shard(block)
    fully_shard(names["model"])
    share(names)


def tensor_parallel(names: dict[str, Any]) -> None:
    """Attention and MLP split over heads and features; both ranks see all rows."""
    names["mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {name: ColwiseParallel() for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    for block in names["model"].model.layers:
        parallelize_module(block, names["mesh"]["tp"], plan)
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.01)


def piped() -> Any:
    """Two blocks a stage; each row is a micro-batch."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    model = Numbered(0, 1) if rank == 0 else Numbered(2, 3)
    stage = PipelineStage(model, rank, 2, X.device)
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loop_recipes.loss_of, scale_grads=False)
    return loop_recipes.trained_by_adam(model, lambda: schedule.step(X) if rank == 0 else schedule.step(target=0 * X))


def held_whole() -> Any:
    """FSDP2 that leaves parameters whole after a pass."""
    model, row = Numbered(0, 1, 2, 3), X[dist.get_rank()][None]
    for module in (*model.layers.values(), model):
        fully_shard(module, reshard_after_forward=False)
    return loop_recipes.trained_by_adam(model, lambda: loop_recipes.loss_of(model(row), 0 * row).backward())


def rank_main(rank: int, folder: str) -> None:
    faulthandler.dump_traceback_later(180, exit=True)  # a rank that waits for ever says where
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/group", timedelta(seconds=60), world_size=2, rank=rank)
    tables = {
        "ddp": loop_recipes.run(loop_recipes.PLAIN, replicated),
        "fsdp": loop_recipes.run(loop_recipes.PLAIN, sharded),
        "tp": loop_recipes.run("Tensor parallelism", tensor_parallel),
    }
    tables |= {"piped": piped(), "whole": held_whole()}
    model = DistributedDataParallel(tiny_llama())
    with record(model, list(METRICS)) as rec:
        model(**{name: value[rank::2] for name, value in token_batch(6).items()}).loss.backward()
    merged = rec.stats().across_ranks()
    if rank == 0:
        merged.save(Path(folder) / "recorded.parquet")
        for name, table in tables.items():
            table.to_csv(Path(folder) / f"{name}.csv", index=False)
    dist.barrier()
    os._exit(0)  # meshes hold the group for good, and its threads may hang the exit


def both_ranks(folder: str) -> None:
    """Run them; their errors are in FOLDER/errors."""
    os.dup2(os.open(f"{folder}/errors", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  (the process's own)
    exec(loop_recipes.SETUP, {})  # imports what the recipes need once, before the fork
    torch.multiprocessing.start_processes(rank_main, (folder,), nprocs=2, start_method="fork")
