"""Ranks that run out of training batches before the others. It knows no engine."""
