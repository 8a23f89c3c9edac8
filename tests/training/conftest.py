"""Fixtures of whole training runs, for all tests of this folder."""

from training_fixtures import cache, corpus, done, go, stop, text  # noqa: F401
