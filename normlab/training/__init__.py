"""Training: a text, one run, many runs.

config.py         TrainConfig, which decides a run's numbers
text/             text as packed blocks of token ids
loop.py           the training loop, from a fresh model to the last step
run.py            train: from a configuration to a run on disk; checkpoint.py: how it resumes
manifest.py       what a run's numbers depend on, and its results
measure.py        what is measured while training; experiments.py: what is measured after it
distributed.py    devices, precision, ranks
progress.py       bars: how far runs are, and when they end
sweep.py          sweep: many runs; grids.py: what they consist of; presets.py: a sweep in minutes
rates.py          how a sweep chooses learning rates
workers.py        several runs at once, on this machine, Ray or Slurm
estimate.py       what a sweep will train, and how long that takes
live.py           BackgroundRun: one run in another process, watched and stopped
keep.py           trained models, published
"""

from normlab.errors import require_packages

# The extra `train`, as pyproject.toml has it.
PACKAGES = ("transformers>=5.4", "accelerate>=1.12", "datasets>=4.0", "tokenizers>=0.22")


def require_training() -> None:
    """NormlabError if a package that training needs besides normlab's dependencies is missing or too old."""
    require_packages("training", PACKAGES, "normlab[train]")
