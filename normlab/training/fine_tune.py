"""A short continued training that writes nothing: `fine_tune(model, blocks, steps, ...)`."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from normlab.models import NormlabForCausalLM
from normlab.training.batches import Blocks, SeededOrder


class _Trainer(Trainer):
    """Data in the seed's order, and weight decay as the model says."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        batch = self.args.train_batch_size * self.args.world_size
        return SeededOrder(len(self.train_dataset), self.args.max_steps * batch, self.args.seed)  # type: ignore

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return self.accelerator.unwrap_model(model).decay_parameter_names()


def fine_tune(
    model: NormlabForCausalLM,
    blocks: np.ndarray,
    steps: int,
    batch_size: int,
    lr: float,
    weight_decay: float,
    seed: int,
) -> None:
    """Train a model in place on rows of token ids, in the order of `seed`: AdamW, the rate constant after a tenth of
    the steps. It is left in evaluation mode."""
    with tempfile.TemporaryDirectory() as unused:
        arguments = TrainingArguments(
            output_dir=unused,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=lr,
            weight_decay=weight_decay,
            adam_beta2=0.95,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=math.ceil(steps / 10),
            seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            log_level="error",
        )
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # else the batch is as many times larger
        set_seed(seed)
        trainer = _Trainer(model=model, args=arguments, train_dataset=Blocks(blocks))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.eval()
