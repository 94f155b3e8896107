"""Tests of the behavior of Lightning that :mod:`lightning_strategies_ext._lightning` requires, for new releases."""
