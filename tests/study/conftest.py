"""Fixtures of whole training runs, for all tests of this folder."""

from training_fixtures import cache, text  # noqa: F401
