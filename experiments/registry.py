"""The experiments by name: to add one, write its file and a line here."""

from __future__ import annotations

import importlib

from experiments.harness import Experiment

_MODULES = (
    "block_size",
    "chat_story",
    "clock_check",
    "eviction",
    "eviction_serving",
    "fp8_quality",
    "kernel_accuracy",
    "kernel_counters",
    "gpu.kernel_latency",
    "kernel_resources",
    "kernel_time",
    "memory_waste",
    "overhead",
    "preemption",
    "published_serving",
    "queue_informed",
    "serving",
    "shared_prefix",
    "sharing",
    "transformers_speed",
)

EXPERIMENTS: dict[str, Experiment] = {}
for _module in _MODULES:
    _experiment = importlib.import_module(f"experiments.{_module}").EXPERIMENT
    EXPERIMENTS[_experiment.name] = _experiment
