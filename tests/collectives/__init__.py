"""Collectives over engines."""
