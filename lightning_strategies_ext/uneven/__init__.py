"""Uneven inputs: ranks that run out of training batches before other ranks. Independent of the engine."""
