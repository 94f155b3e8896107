"""Helpers of several test modules; the most used one is ``from tests.support.ranks import run_ranks``."""
