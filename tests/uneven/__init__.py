"""Ranks with different numbers of batches."""
