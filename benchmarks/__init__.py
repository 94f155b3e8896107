"""Benchmarks of this package against alternatives. Each program prints a table, writes JSON, and draws a plot.

``python -m benchmarks.plots`` redraws the plots from the JSON files, without measurements.
"""
