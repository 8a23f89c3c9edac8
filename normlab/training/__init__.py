"""Training: a corpus, one run, many runs.

config.py     TrainConfig, what decides a run's numbers
corpus.py     load_corpus: text as packed blocks of token ids; stdlib.py: the default text
trainer.py    train: one run; callbacks.py: what is measured on the way
background.py BackgroundRun: one run in a process of its own, watched, paused, stopped and continued
presets.py    PRESETS: sweeps as data
sweep.py      sweep: many runs; workers.py: several at once
bench.py      whole training steps against each other
"""
