"""Tests of elastic training."""
