"""Notebooks: what each does first, in one call (how tables are shown, which runs it reads), and what becomes of them.

    RUNS = prepare(RUNS, fast=FAST, images=IMAGES)

`folder` finds what comes with normlab away from a checkout, too; `train_small` makes the model of a notebook that asks
for a trained one, where none comes with normlab.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normlab.errors import NormlabError
from normlab.release import shipped

SHIPPED = Path("../data")  # beside notebooks/, as in a checkout
RECOMPUTED = Path("../build/recomputed")  # beside notebooks/, as `make` keeps it
BENCHMARKS = Path("../kernels/benchmarks/run.py")  # likewise


def prepare(
    runs: str | Path = ".",
    *,
    fast: bool = True,
    images: bool = False,
    preset: str = "tiny",
    recompute: Callable[[], Path] | None = None,
) -> Path:
    """Show the text of tables in full, and figures as images where asked; make what the notebook reads where asked.

    Otherwise plotly chooses how figures are shown, as it knows Jupyter, Colab, VS Code and others.

    Args:
        runs: folder that the notebook reads, of runs or of tables; see `folder`.
        fast: False trains `preset` from scratch into `RECOMPUTED`/<preset> instead, with its progress shown; a second
            call goes on where the first one was.
        images: figures as PNG images too, for pages that show notebooks without a kernel.
        recompute: called in place of that training; returns the folder to read.

    Returns:
        The folder to read.

    Raises:
        NormlabError: a run failed, so that no later cell shows half a sweep; or `folder` found nothing.
    """
    import pandas as pd

    # No bar for every file of weights: transformers reads the variable when it is imported, which takes long.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()
    pd.set_option("display.max_colwidth", None)
    if images:
        import plotly.io as pio

        pio.renderers.default = "plotly_mimetype+png"
        pio.renderers["png"].width = 1280
    if fast:
        return folder(runs)
    if recompute is not None:
        return recompute()
    from normlab.training.sweep import sweep

    result = sweep(preset, RECOMPUTED / preset)
    if result.failures:
        run, reason = next(iter(result.failures.items()))
        raise NormlabError(f"{len(result.failures)} of the runs of {preset} failed; {run}: {reason}")
    return RECOMPUTED / preset


def folder(path: str | Path) -> Path:
    """`path`; where it is below the `SHIPPED` of a checkout and there is none, the same from normlab's release
    (`normlab.release.shipped`, which raises NormlabError where that cannot be reached)."""
    path = Path(path)
    return shipped(path.name) if path.parent == SHIPPED and not path.exists() else path


def time_kernels() -> Path:
    """Time the row norms on this machine, on its GPU where there is one, and compile the kernels for one target, into
    `RECOMPUTED`/bench: what the kernels' notebook reads. It needs a checkout.

    Raises:
        NormlabError: no benchmarks beside the notebooks, or one that failed.
    """
    import torch

    if not BENCHMARKS.is_file():
        raise NormlabError(f"no {BENCHMARKS} here: the kernels are timed from a checkout, in its folder notebooks/")
    out = RECOMPUTED / "bench"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timing = [str(BENCHMARKS), "--device", device, "--sections", "rows", "--out", str(out)]
    compiling = ["-m", "normlab_kernels.ahead_of_time", "--targets", "sm_90", "--out", str(out / "aot.csv")]
    for command in (timing, compiling):
        status = subprocess.run([sys.executable, *command]).returncode
        if status:
            raise NormlabError(f"python {' '.join(command)} ended with status {status}")
    return out


def train_small(scheme: str, **fields: Any) -> Path:
    """Train a small model on the default corpus, in seconds where the fields of `TrainConfig` say so, and return its
    folder, which `normlab.load_model` and `normlab.load_held_out` read as they do a model that comes with normlab."""
    from normlab.training.config import TrainConfig
    from normlab.training.keep import keep
    from normlab.training.run import train

    folder = Path(tempfile.mkdtemp())
    config = TrainConfig(scheme=scheme, probe_every=0, checkpoint_every=0, **fields)
    train(config, folder / "runs", progress=False)
    (kept,) = keep(folder / "runs", folder / "models")
    return kept
