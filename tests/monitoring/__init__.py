"""Tests of the monitoring of steps and exchanges."""
