"""The first call of every notebook, and the pages made of executed notebooks.

prepare        set how tables and figures are shown; return the folder of runs to read
comparable     the runs of a folder that figures and claims compare
folded         tables below a line that opens them
folder         a folder of shipped data, in a checkout or downloaded
time_kernels   time the kernels on this machine
train_small    train a small model, where none comes with normlab
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.errors import NormlabError
from normlab.release import shipped

if TYPE_CHECKING:
    import pandas as pd

    from normlab.training.grids import Preset

# Seen from notebooks/ in a checkout.
SHIPPED = Path("../data")
RECOMPUTED = Path("../build/recomputed")
BENCHMARKS = Path("../kernels/benchmarks/run.py")


def prepare(
    runs: str | Path = ".",
    *,
    fast: bool = True,
    images: bool = False,
    preset: Preset | None = None,
    recompute: Callable[[], Path] | None = None,
) -> Path:
    """Show tables in full, and return the folder that the notebook reads.

    Plotly chooses how figures are shown, as it knows Jupyter, Colab, VS Code and others.

    Args:
        runs: folder of runs or of tables; see `folder`.
        fast: False trains `preset` (`tiny` by default) into `RECOMPUTED`/<its name> first. A second call resumes.
        images: show figures as PNG images too, for pages that show notebooks without a kernel.
        recompute: called in place of that training; returns the folder to read.

    Raises:
        NormlabError: a run failed, so no later cell shows half a sweep; or `folder` found nothing.
    """
    import pandas as pd

    # No bar for every file of weights. transformers reads the variable when it is imported, which is slow.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()
    pd.set_option("display.max_colwidth", None)
    import plotly.io as pio

    from normlab.figures.theme import CONFIG

    pio.renderers["plotly_mimetype"].config = CONFIG
    if images:
        pio.renderers.default = "plotly_mimetype+png"
        pio.renderers["png"].width = 1280
    if fast:
        return folder(runs)
    if recompute is not None:
        return recompute()
    from normlab.training.presets import TINY
    from normlab.training.sweep import sweep

    preset = TINY if preset is None else preset
    result = sweep(preset, RECOMPUTED / preset.name)
    if result.failures:
        run, reason = next(iter(result.failures.items()))
        raise NormlabError(f"{len(result.failures)} of the runs of {preset.name} failed; {run}: {reason}")
    return RECOMPUTED / preset.name


def folder(path: str | Path) -> Path:
    """`path`, or its copy from normlab's release if it is below `SHIPPED` and not there.

    Raises:
        NormlabError: the release cannot be reached.
    """
    path = Path(path)
    return shipped(path.name) if path.parent == SHIPPED and not path.exists() else path


def comparable(runs: str | Path, rate: float | None = None) -> pd.DataFrame:
    """The runs of a folder that figures and claims compare.

    Left out are runs that change their scheme's model, and of the others schemes that `fully_tried` leaves out.

    Args:
        rate: the runs of one learning rate; None: all. Of these sizes are compared at a rate that all schemes share,
            and losses at each scheme's best.
    """
    from normlab.analysis.selection import at_rate, fully_tried
    from normlab.runs import load_runs

    return fully_tried(at_rate(load_runs(runs, variants=False), rate))


class Html(str):
    """Text that a notebook shows as HTML."""

    def _repr_html_(self) -> str:
        return str(self)


def folded(summary: str, *tables: pd.DataFrame) -> Html:
    """Tables below a line that opens them. An index without names of its own is left out, and so are missing values.

    Args:
        summary: the line.
    """
    import pandas as pd

    def page(table: pd.DataFrame) -> str:
        return table.to_html(
            index=not isinstance(table.index, pd.RangeIndex),
            border=0,
            na_rep="",
            float_format="{:.4g}".format,
            sparsify=False,
        )

    return Html(f"<details><summary>{escape(summary)}</summary>{''.join(map(page, tables))}</details>")


def time_kernels() -> Path:
    """Time the row norms on this machine, on its GPU if it has one.

    Needs a checkout. Returns the folder of the tables, `RECOMPUTED`/bench.

    Raises:
        NormlabError: there are no benchmarks, or they failed.
    """
    import torch

    if not BENCHMARKS.is_file():
        raise NormlabError(f"no {BENCHMARKS} here: the kernels are timed from a checkout, in its folder notebooks/")
    out = RECOMPUTED / "bench"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = [str(BENCHMARKS), "--device", device, "--sections", "rows", "--out", str(out)]
    if status := subprocess.run([sys.executable, *command]).returncode:
        raise NormlabError(f"python {' '.join(command)} ended with status {status}")
    return out


def train_small(scheme: str, **fields: Any) -> Path:
    """Train a small model on the default corpus and return its folder.

    `normlab.load_model` and `normlab.load_held_out` read it like a model that comes with normlab.

    Args:
        fields: of `TrainConfig`.
    """
    from normlab.training.config import TrainConfig
    from normlab.training.keep import keep
    from normlab.training.run import train

    folder = Path(tempfile.mkdtemp())
    config = TrainConfig(scheme=scheme, probe_every=0, checkpoint_every=0, **fields)
    train(config, folder / "runs", progress=False)
    (kept,) = keep(folder / "runs", folder / "models")
    return kept
