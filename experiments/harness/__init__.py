"""Runs the grid of an experiment: parallel, resumable, one tidy table at the end."""

from __future__ import annotations

from experiments.harness.experiment import Experiment, InputFile, Unavailable
from experiments.harness.grid import (
    Absent,
    Axis,
    Count,
    GridOnly,
    Lengths,
    Natural,
    Needs,
    Options,
    Percent,
    Positive,
    Repeated,
    grid,
    one_of,
)
from experiments.harness.ray_cluster import NoCluster, RayCluster
from experiments.harness.store import FolderInUse
from experiments.harness.sweep import OptionsError, SweepReport, plot_results, run_sweep
from experiments.harness.workers import LastingWorker

__all__ = [
    "Absent",
    "Axis",
    "Count",
    "Experiment",
    "FolderInUse",
    "GridOnly",
    "InputFile",
    "LastingWorker",
    "Lengths",
    "Natural",
    "Needs",
    "NoCluster",
    "Options",
    "OptionsError",
    "Percent",
    "Positive",
    "RayCluster",
    "Repeated",
    "SweepReport",
    "Unavailable",
    "grid",
    "one_of",
    "plot_results",
    "run_sweep",
]
