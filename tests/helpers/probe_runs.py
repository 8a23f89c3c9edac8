"""Training with a callback in a stock Trainer, and two ranks as processes: shared by the tests of the probes."""

import os
import subprocess

import psutil
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
    resume = settings.pop("resume", None)
    args = TrainingArguments(output_dir=str(tmp_path), disable_tqdm=True, **settings)
    trainer = Trainer(model=model, args=args, train_dataset=data(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def run_with_descendants(command: list[str], timeout: float) -> tuple[int, str]:
    """Exit code and error output. After `timeout` seconds all its descendants are killed with it. torchrun starts ranks
    in other sessions, where no signal to the group reaches them."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **streams)
    try:
        errors = process.communicate(timeout=timeout)[1]
        return process.returncode, errors
    except BaseException:
        descendants = psutil.Process(process.pid).children(recursive=True)
        for each in [process, *descendants]:
            each.kill()
        process.communicate()
        psutil.wait_procs(descendants, timeout=30)
        raise
