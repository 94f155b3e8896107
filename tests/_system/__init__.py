"""Tests of the helpers for the operating system."""
