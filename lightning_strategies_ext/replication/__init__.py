"""Single-process data parallelism: replicas of the module, each of which processes a part of the batch."""
