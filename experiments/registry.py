"""The experiments by name: to add one, write its file and a line here."""

from __future__ import annotations

from experiments import (
    block_size,
    engine_overhead,
    eviction,
    eviction_serving,
    kernel_accuracy,
    kernel_resources,
    launch_overhead,
    manager_overhead,
    memory_waste,
    preemption,
    replay_speed,
    serving,
    shared_prefix,
    sharing,
)
from experiments.gpu import (
    cascade,
    engine_throughput,
    kernel_latency,
    large_accuracy,
    tile_sweep,
)
from experiments.harness import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        block_size.EXPERIMENT,
        cascade.EXPERIMENT,
        engine_overhead.EXPERIMENT,
        engine_throughput.EXPERIMENT,
        eviction.EXPERIMENT,
        eviction_serving.EXPERIMENT,
        kernel_accuracy.EXPERIMENT,
        kernel_latency.EXPERIMENT,
        kernel_resources.EXPERIMENT,
        launch_overhead.EXPERIMENT,
        large_accuracy.EXPERIMENT,
        manager_overhead.EXPERIMENT,
        memory_waste.EXPERIMENT,
        preemption.EXPERIMENT,
        replay_speed.EXPERIMENT,
        serving.EXPERIMENT,
        shared_prefix.EXPERIMENT,
        sharing.EXPERIMENT,
        tile_sweep.EXPERIMENT,
    )
}
