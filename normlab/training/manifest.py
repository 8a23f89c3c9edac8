"""A run's manifest: all that its numbers depend on, and what came of it.

`manifest_of(config, text)`          before the first step
`results_of(training, ...)`          what is added in the end
`require_same(manifest, ...)`        NormlabError naming the first difference of a finished run
`environment()`, `commit()`          versions and machine; the commit of the code
"""

from __future__ import annotations

import contextlib
import math
import platform
import shlex
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from normlab import __version__, runs
from normlab.training.config import AUTO, TrainConfig, require
from normlab.training.distributed import device_of
from normlab.training.text.corpus import LATER

if TYPE_CHECKING:
    from normlab.training.loop import Training
    from normlab.training.measure import Measurements


def manifest_of(config: TrainConfig, text: Mapping[str, Any]) -> dict[str, Any]:
    """A run's manifest before its first step. text: `Corpus.identity(config)`."""
    return {
        "schema": runs.SCHEMA_VERSION,
        "run": config.run_id,
        "config": config.to_dict(),
        "corpus": dict(text),
        "environment": environment(config.device),
        "commit": commit(),
        "command": f"normlab train {shlex.join(config.to_arguments())}",
    }


def results_of(training: Training, measurements: Measurements, diverged: bool) -> dict[str, Any]:
    """The results of a run: its end, its tokens, and its model.

    `status` is explained in `Run.status`. `eval_loss` is the last held-out loss: None if it is not finite or was never
    measured. A run whose held-out loss was never measured counts as learned. diverged: a training loss, or a weight
    after the last step, is not finite. A diverged run has no `validation_loss`.
    """
    config, loss = training.config, measurements.log.last("loss", "eval")
    chosen_by = measurements.log.last("validation_loss", "eval")
    count_losses = measurements.on.count_losses
    if diverged or not all(each is None or math.isfinite(each) for each in (loss, chosen_by)):
        status, loss, chosen_by = runs.DIVERGED, None, None
    else:
        learned = loss is None or loss < min(training.corpus.unigram_entropy, *count_losses.values())
        status = runs.FINISHED if learned else runs.NOT_LEARNED
    tokens = training.done * config.tokens_per_step
    facts = training.model.config.to_diff_dict()
    return {
        "status": status,
        "eval_loss": loss,
        **count_losses,
        **({} if chosen_by is None else {"validation_loss": chosen_by}),
        "steps": training.done,
        "tokens": tokens,
        "epochs": None if config.stream else tokens / training.corpus.train_tokens,
        # Saving a model writes these two fields into its configuration.
        "model": {name: value for name, value in facts.items() if name not in ("architectures", "dtype")},
        "parameters": sum(p.numel() for p in training.model.parameters()),
    }


def require_same(manifest: Mapping[str, Any], config: TrainConfig, text: Mapping[str, Any]) -> None:
    """NormlabError naming the first difference between a finished run and `config` on a text of that identity.

    A warning where the run is of an earlier version, which did not write what is compared.
    """
    said = {name: value for name, value in manifest.get("model", {}).items() if name in LATER} | manifest["corpus"]
    unsaid = {name: text[name] for name in LATER if name in text and name not in said}
    if unsaid:
        warnings.warn(
            f"run {manifest['run']} does not say its {', '.join(unsaid)}: it may be of another text", stacklevel=2
        )
    trained = TrainConfig.from_dict(manifest["config"]).identity() | unsaid | said
    for name, value in (config.identity() | dict(text)).items():
        require(
            trained[name] == value or value == AUTO,
            f"run {manifest['run']} has {name} {trained[name]!r}, here it is {value!r}: numbers could not be compared; "
            "use another output directory or delete the run",
        )


def commit(package: Path = Path(__file__).parents[1]) -> str | None:
    """The commit of the checkout that this code is in, with "-dirty" if tracked files differ; None outside one."""
    git = ["git", "-C", str(package)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], check=True, capture_output=True)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
        return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    return None


def environment(device: str = "auto") -> dict[str, str]:
    """Versions and machine: what else the last digits of a number depend on. device: as in `TrainConfig`."""
    import tokenizers
    import transformers

    taken = device_of(TrainConfig(device=device))
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "normlab": __version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if taken.type == "cuda" else taken.type,
    }
