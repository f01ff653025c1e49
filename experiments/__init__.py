"""Experiments: grids of cells that become one table, its environment and its figures.

An experiment is one file that ends in an ``Experiment``, listed in ``registry.py``.  The machinery
that runs it, resumes it and writes its results is in ``harness/``.
"""
