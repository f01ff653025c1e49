"""Experiments that need a GPU."""
