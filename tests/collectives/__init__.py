"""Tests of the collectives over both engines."""
