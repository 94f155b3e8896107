"""Benchmarks of this package against alternatives. Each program prints a table, writes JSON, and draws a plot."""
