"""Trace replay: serial (in Python and compiled by numba) and overlapping, with exact bounds."""
