"""Tests of failure detection, stop agreements, and stage exits."""
