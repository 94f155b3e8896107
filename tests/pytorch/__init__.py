"""The Trainer's face."""
