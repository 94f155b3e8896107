"""Launchers and workers: how the processes of a job start, and how they run stages."""
