"""Training: a corpus, one run, many runs.

fields.py       a field of a configuration, said once: default, range, meaning
corpus.py       load_corpus: text as packed blocks of token ids
documents.py    where the text comes from; stdlib.py, english.py and packages.py: texts at hand; stream.py: read while
                training
config.py       TrainConfig, what decides a run's numbers
batches.py      which blocks a run trains on, in which order
trainer.py      train: one run; build.py: what it trains with; manifest.py: what is kept of it beside its tables;
                callbacks.py: what is measured on the way; stored.py: what more where all is to be stored;
                experiments.py: what is measured at its end
background.py   BackgroundRun: one run in a process of its own, watched, paused, stopped and continued
presets.py      PRESETS: sweeps as data; grids.py: what they are made of
sizes.py        SIZES: the papers' models with their recipes; needs.py: what a run needs before it starts
sweep.py        sweep: many runs; plan.py: what it will do and how long that takes
workers.py      several runs at once; clusters.py: on many machines
"""

from normlab.errors import require_packages

# The extra `train`, as pyproject.toml has it.
PACKAGES = ("transformers>=5.4", "accelerate>=1.12", "datasets>=4.0", "tokenizers>=0.22")


def require_training() -> None:
    """NormlabError where a package that training needs beside normlab's own is missing or too old."""
    require_packages("training", PACKAGES, "normlab[train]")
