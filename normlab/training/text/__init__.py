"""Text to train on.

source.py   documents of every kind of source: the standard library, packages, files, addresses, hub data sets
tokens.py   tokenizers, and baselines that only count
corpus.py   a prepared corpus: packed blocks, held-out splits, cache
stream.py   blocks that are read while training
"""
