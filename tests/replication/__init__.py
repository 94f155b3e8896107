"""Replicas in one process."""
