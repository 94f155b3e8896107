"""Ranks that change."""
