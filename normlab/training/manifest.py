"""What a run's numbers depend on, beside its weights: configuration, text, versions, commit."""

from __future__ import annotations

import contextlib
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

import torch

from normlab import __version__, runs
from normlab.training.config import TrainConfig
from normlab.training.corpus import Corpus


def manifest_of(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """A run's manifest before it begins: all that its numbers depend on."""
    return {
        "schema": runs.SCHEMA_VERSION,
        "run": config.run_id,
        "config": config.to_dict(),
        "corpus": corpus.identity(),
        "environment": environment(config.device),
        "commit": commit(),
        "command": f"normlab train {shlex.join(config.to_arguments())}",
    }


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
