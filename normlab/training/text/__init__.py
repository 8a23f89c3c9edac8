"""Text to train on.

source.py   documents of every kind of source: the standard library, packages, files, addresses, hub data sets
corpus.py   a prepared corpus: tokenizer, packed blocks, held-out splits, cache
ngrams.py   baselines that only count tokens
stream.py   blocks that are read while training
"""
