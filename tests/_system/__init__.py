"""Helpers of the operating system."""
