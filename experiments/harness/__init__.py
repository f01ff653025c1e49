"""Runs the grid of an experiment: parallel, resumable, one tidy table at the end."""

from __future__ import annotations

from experiments.harness.experiment import Absent, Cell, Experiment, InputFile, Options, Unavailable
from experiments.harness.sweep import SweepReport, plot_results, run_sweep

__all__ = [
    "Absent",
    "Cell",
    "Experiment",
    "InputFile",
    "Options",
    "SweepReport",
    "Unavailable",
    "plot_results",
    "run_sweep",
]
