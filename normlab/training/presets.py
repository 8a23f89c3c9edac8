"""A sweep in minutes, and the initial weights that fit a width."""

from __future__ import annotations

import math

from normlab.schemes import BASELINE, DEFAULT, DYT, GAIN_CONTROL, LNS
from normlab.training.config import INIT_STD
from normlab.training.grids import Part, Preset, Variant


def init_std(width: int) -> float:
    """0.02 sqrt(512/width), 0.04 at 128: initial weights that keep a matrix's gain as it is where 0.02 fits.

    The preset `initial_weights` chose it, on Pre-LN."""
    return round(INIT_STD * math.sqrt(512 / width), 3)


TINY = Preset(
    "tiny",
    parts=(
        Part({4: 1}, (BASELINE, LNS, DYT)),
        # Small gains learn at larger rates in so short a run.
        Part({4: 1}, (DEFAULT,), variants=(Variant({"lr": 8e-3}),)),
        Part({4: 1}, (GAIN_CONTROL,), variants=(Variant({"lr": 1.6e-2}),)),
        Part({2: 1}, (BASELINE, LNS)),
    ),
    # Nearly bytes: there a small model comes below the trigram of the whole text within a minute. Many small batches
    # of short rows get there with the least work. Initial weights as large as these bring DyT there too.
    rate=4e-3,
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
