"""Tests of ranks with different numbers of batches."""
