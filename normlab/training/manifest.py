"""A run's manifest.

`manifest_of(config, corpus)`   what its numbers depend on, beside its weights: configuration, text, versions, commit
`results_of(config, built)`     what came out: how it ended, tokens, the model
"""

from __future__ import annotations

import contextlib
import math
import platform
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from normlab import __version__, runs
from normlab.models import NormlabForCausalLM
from normlab.training.build import Built
from normlab.training.config import TrainConfig


def manifest_of(config: TrainConfig, corpus: Mapping[str, Any]) -> dict[str, Any]:
    """A run's manifest before it begins: all that its numbers depend on. corpus: `Corpus.identity()`."""
    return {
        "schema": runs.SCHEMA_VERSION,
        "run": config.run_id,
        "config": config.to_dict(),
        "corpus": dict(corpus),
        "environment": environment(config.device),
        "commit": commit(),
        "command": f"normlab train {shlex.join(config.to_arguments())}",
    }


def results_of(config: TrainConfig, built: Built, model: NormlabForCausalLM, train_tokens: int) -> dict[str, Any]:
    """What came out, once the last step is done: how the run ended, after how many tokens (train_tokens: those of an
    epoch), and what model it trained."""
    steps = built.trainer.state.global_step
    tokens = steps * config.tokens_per_step
    return {
        **_outcome(built),
        **built.measured_on.count_losses,
        "steps": steps,
        "tokens": tokens,
        "epochs": None if config.stream else tokens / train_tokens,
        "model": _model_facts(model.config),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _outcome(built: Built) -> dict[str, Any]:
    """`status` and `eval_loss`, the last held-out loss: None where it is not finite, or was never measured (then
    learning is taken for granted). See `Run.status`."""
    loss = built.log.last("loss", "eval")
    if built.stop.diverged or (loss is not None and not math.isfinite(loss)):
        return {"status": runs.DIVERGED, "eval_loss": None}
    learned = loss is None or loss < built.measured_on.count_losses["trigram_loss"]
    return {"status": runs.FINISHED if learned else runs.NOT_LEARNED, "eval_loss": loss}


def _model_facts(config: Any) -> dict[str, Any]:
    """The model's configuration without the two fields that saving a checkpoint writes into it: whether a process saved
    one before its run ended must not show."""
    return {name: value for name, value in config.to_diff_dict().items() if name not in ("architectures", "dtype")}


def commit(package: Path = Path(__file__).parents[1]) -> str | None:
    """The commit of the checkout that this code is in, with "-dirty" where tracked files differ from it; None outside
    one."""
    git = ["git", "-C", str(package)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], check=True, capture_output=True)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
        return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    return None


def environment(device: str = "auto") -> dict[str, str]:
    """Versions and machine: what else the last digits of a number depend on."""
    import tokenizers
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "normlab": __version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and device != "cpu" else "cpu",
    }
