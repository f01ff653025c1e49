"""Runs the grid of an experiment in parallel, resumes it, and writes one tidy table."""

# ruff: noqa: F401 (the names that experiments import)

from __future__ import annotations

from experiments.harness.experiment import Experiment, InputFile, Unavailable
from experiments.harness.grid import (
    Absent,
    Axis,
    Count,
    Lengths,
    Natural,
    Needs,
    Options,
    Percent,
    Positive,
    Repeated,
    arg,
    check_names,
    grid,
    one_of,
)
from experiments.harness.ray_cluster import NoCluster, RayCluster
from experiments.harness.store import FolderInUse
from experiments.harness.sweep import OptionsError, SweepReport, plot_results, run_sweep
