"""Tests of the strategies for the Trainer."""
