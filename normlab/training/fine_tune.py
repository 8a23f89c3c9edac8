"""A short continued training that writes nothing: `fine_tune(model, blocks, steps, ...)`."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from transformers import get_scheduler, set_seed

from normlab.models import NormlabForCausalLM
from normlab.training.loop import block_order, parameter_groups


def fine_tune(
    model: NormlabForCausalLM,
    blocks: np.ndarray,
    steps: int,
    batch_size: int,
    lr: float,
    weight_decay: float,
    seed: int,
) -> None:
    """Train a model in place on rows of token ids, in the order of `seed`.

    AdamW; the rate is constant after a tenth of the steps. The model is left in evaluation mode.
    """
    set_seed(seed)
    groups = parameter_groups(model, weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    schedule = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=math.ceil(steps / 10))
    order = block_order(len(blocks), seed)
    model.train()
    for _ in range(steps):
        rows = list(itertools.islice(order, batch_size))
        ids = torch.from_numpy(blocks[rows].astype(np.int64)).to(model.device)
        labels = torch.tensor(float(ids[:, 1:].numel()), device=model.device)
        model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
    model.eval()
