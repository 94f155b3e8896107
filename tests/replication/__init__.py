"""Tests of replicas in one process."""
