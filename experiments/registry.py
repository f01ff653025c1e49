"""The experiments by name.  To add an experiment, write its file and add a line here."""

from __future__ import annotations

import importlib

from experiments.harness import Experiment

_MODULES = (  # the report has this order
    "memory_waste",
    "serving",
    "eviction",
    "eviction_serving",
    "tier",
    "sessions",
    "hybrid",
    "sharing",
    "shared_prefix",
    "block_size",
    "preemption",
    "overhead",
    "gpu.kernel_latency",
    "kernel_accuracy",
    "published_serving",
    "engine",
    "fp8_quality",
)

_experiments = (importlib.import_module(f"experiments.{name}").EXPERIMENT for name in _MODULES)
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _experiments}
