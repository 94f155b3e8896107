"""The strategies' faces for the Trainer: what Lightning calls, and in which order."""
