"""Runs the grid of an experiment: parallel, resumable, one tidy table at the end."""

from __future__ import annotations

from experiments.harness.experiment import (
    Absent,
    Cell,
    Experiment,
    InputFile,
    Options,
    Repeated,
    Unavailable,
)
from experiments.harness.ray_cluster import NoCluster, RayCluster
from experiments.harness.store import FolderInUse
from experiments.harness.sweep import OptionsError, SweepReport, plot_results, run_sweep
from experiments.harness.workers import LastingWorker

__all__ = [
    "Absent",
    "Cell",
    "Experiment",
    "FolderInUse",
    "InputFile",
    "LastingWorker",
    "NoCluster",
    "Options",
    "OptionsError",
    "RayCluster",
    "Repeated",
    "SweepReport",
    "Unavailable",
    "plot_results",
    "run_sweep",
]
