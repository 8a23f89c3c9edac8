"""What a notebook does first, in one call: how figures are shown, and which runs it reads.

    RUNS = prepare(RUNS, fast=FAST, images=IMAGES)
"""

from __future__ import annotations

from pathlib import Path

from normlab.errors import NormlabError

RECOMPUTED = Path("../build/recomputed")  # beside notebooks/, as `make` keeps it


def prepare(runs: str | Path, *, fast: bool = True, images: bool = False, preset: str = "tiny") -> Path:
    """Set plotly's renderer, and train the runs first where that is asked for.

    Args:
        runs: folder of runs that the notebook reads.
        fast: False trains `preset` from scratch into `RECOMPUTED`/<preset> instead, with its progress shown; a second
            call goes on where the first one was.
        images: figures as PNG images too, for pages that show notebooks without a kernel.

    Returns:
        The folder of runs to read.

    Raises:
        NormlabError: a run failed, so that no later cell shows half a sweep.
    """
    import plotly.io as pio

    pio.renderers.default = "plotly_mimetype+png" if images else "plotly_mimetype"
    pio.renderers["png"].width = 1280
    if fast:
        return Path(runs)
    from normlab.training.sweep import sweep

    result = sweep(preset, RECOMPUTED / preset)
    if result.failures:
        run, reason = next(iter(result.failures.items()))
        raise NormlabError(f"{len(result.failures)} of the runs of {preset} failed; {run}: {reason}")
    return result.out
