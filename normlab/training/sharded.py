"""A model split over the ranks (FSDP2): of weights, gradients and optimizer state each rank holds its share.

`shard(model, device)`      split every block, and what is left as one
`gathered(model)`           the same model, whole, on every rank
`save`, `load_weights`, `load_optimizer`
                            checkpoints of torch.distributed.checkpoint, read by any number of ranks, one included

`torch.distributed.fsdp.fully_shard` itself, on CPUs and GPUs alike: accelerate applies it on GPUs only, to blocks that
its own configuration names, and would write checkpoints of another form.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from normlab.models import NormlabForCausalLM

WEIGHTS, OPTIMIZER = "weights", "optimizer"


def shard(model: NormlabForCausalLM, device: torch.device) -> None:
    """Split the parameters over all ranks, in place. They are DTensors then; their names stay."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gathered(model: NormlabForCausalLM) -> NormlabForCausalLM:
    """A copy with whole weights; every rank has to ask for it."""
    weights = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
    whole = NormlabForCausalLM(model.config)
    whole.load_state_dict(weights)
    whole.to(device=model.device)  # type: ignore[call-arg]
    return whole.train(model.training)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank writes its share."""
    weights, optimized = states.get_state_dict(model, optimizer)
    with _alone() as alone:
        dcp.save({WEIGHTS: weights, OPTIMIZER: optimized}, checkpoint_id=folder, no_dist=alone)


def load_weights(folder: Path, model: nn.Module) -> None:
    """Weights and buffers of a checkpoint into a model, split or whole."""
    weights = states.get_model_state_dict(model)
    _load({WEIGHTS: weights}, folder)
    states.set_model_state_dict(model, weights)


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's state, of the model's parameters by their names."""
    optimized = states.get_optimizer_state_dict(model, optimizer)
    _load({OPTIMIZER: optimized}, folder)
    states.set_optimizer_state_dict(model, optimizer, optimized)


def _load(wanted: dict[str, Any], folder: Path) -> None:
    with _alone() as alone:
        dcp.load(wanted, checkpoint_id=folder, no_dist=alone)


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """Whether this is the only process; PyTorch warns of it at every checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield not dist.is_initialized()
