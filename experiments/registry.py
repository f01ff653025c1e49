"""The experiments by name: to add one, write its file and a line here."""

from __future__ import annotations

from experiments import eviction, kernel_accuracy, memory_waste, replay_speed
from experiments.harness import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        eviction.EXPERIMENT,
        kernel_accuracy.EXPERIMENT,
        memory_waste.EXPERIMENT,
        replay_speed.EXPERIMENT,
    )
}
