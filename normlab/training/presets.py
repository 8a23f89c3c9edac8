"""A sweep in minutes, and the initial weights that fit a width."""

from __future__ import annotations

import math

from normlab.schemes import BASELINE, DEFAULT, DYT, GAIN_CONTROL, LNS
from normlab.training.config import INIT_STD
from normlab.training.grids import Part, Preset, Variant


def init_std(width: int) -> float:
    """0.02 sqrt(512/width), 0.04 at 128: initial weights that keep a matrix's gain as it is where 0.02 fits.

    The preset `pilot` chose it, on Pre-LN."""
    return round(INIT_STD * math.sqrt(512 / width), 3)


# Rates at which each learns in so short a run.
_RATES = (
    Variant({"lr": 4e-3}, (BASELINE, LNS, DYT)),
    Variant({"lr": 8e-3}, (DEFAULT,)),
    Variant({"lr": 1.6e-2}, (GAIN_CONTROL,)),
)

TINY = Preset(
    "tiny",
    parts=(
        Part({4: 1}, (BASELINE, LNS, DEFAULT, GAIN_CONTROL, DYT), variants=_RATES),
        Part({2: 1}, (BASELINE, LNS), variants=_RATES),
    ),
    # Nearly bytes: there a small model comes below the trigram of the whole text within a minute. Many small batches
    # of short rows get there with the least work. Initial weights as large as these bring DyT there too.
    rate=4e-3,  # every variant has its own
    fields={
        "init_std": 0.057,
        "vocab_size": 320,
        "characters": 1_500_000,
        "block_length": 64,
        "steps": 1000,
        "checkpoint_every": 500,
        "probe_every": 200,
        "eval_every": 200,
        "eval_blocks": 128,
        "experiment_blocks": 8,
    },
)
