"""A stage of the Trainer as a job for workers, and how its results come back."""
