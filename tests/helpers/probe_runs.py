"""Training with a callback in a stock Trainer: shared by the tests of the probes."""

import torch
from transformers import Trainer, TrainingArguments


def data(rows: int = 16) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (rows, 8), generator=generator)
    labels = ids.clone()
    labels[::3, 4:] = -100  # rows with unequal numbers of labels
    return [{"input_ids": i, "labels": l} for i, l in zip(ids, labels, strict=True)]


def train(model, tmp_path, callbacks, **options):
    settings = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
    }
    settings |= {"learning_rate": 1e-3, "report_to": [], "use_cpu": True, "logging_steps": 1, "seed": 0, **options}
    resume, kind = settings.pop("resume", None), settings.pop("trainer", Trainer)
    optimizers = settings.pop("optimizers", (None, None))
    args = TrainingArguments(output_dir=str(tmp_path), disable_tqdm=True, **settings)
    trainer = kind(model=model, args=args, train_dataset=data(), callbacks=callbacks, optimizers=optimizers)
    trainer.train(resume_from_checkpoint=resume)
    return trainer
