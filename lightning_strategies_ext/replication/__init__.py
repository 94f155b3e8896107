"""Single-process data parallelism: replicas of the module each run on a part of the batch."""
