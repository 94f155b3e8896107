"""A stage of the Trainer as a task for workers, and the transfer of its results."""
