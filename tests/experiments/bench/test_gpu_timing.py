"""The sampling of times, on a clock that the test turns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.bench import gpu_timing


class Device:
    """Work takes device time as it is issued; events read the clock in milliseconds."""

    def __init__(self, durations) -> None:
        self.now, self.log, self.durations = 0.0, [], iter(durations)

    def flush(self) -> None:
        self.now += 0.5
        self.log.append("flush")

    def call(self) -> None:
        self.now += next(self.durations)
        self.log.append("call")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def event(self):
        device = self

        class Event:
            def record(self) -> None:
                self.at = device.now
                device.log.append("event")

            def elapsed_time(self, end) -> float:
                return end.at - self.at

        return Event()

    def measure(self, budget_ms: float, waits: bool = False) -> gpu_timing.Times:
        device = {"flush": self.flush, "event": self.event, "synchronize": self.synchronize}
        return gpu_timing.measure(self.call, **device, waits=waits, budget_ms=budget_ms)


def test_quantiles_of_the_calls_alone():
    """By three samples of 0.5 ms to flush and 1 ms to call, 15 ms are enough for ten."""
    durations = [1.0] * 3 + [0.1 * k for k in range(1, 11)]
    times = Device(durations).measure(budget_ms=14.0)
    assert times.samples == 10
    expected = 1e3 * np.quantile(durations[3:], (0.2, 0.5, 0.8))
    assert (times.p20, times.p50, times.p80) == pytest.approx(tuple(expected))


@pytest.mark.parametrize("waits", [False, True], ids=["captured", "eager"])
def test_l2_is_overwritten_before_each_sample_and_outside_its_time(waits):
    """An eager call begins when the flush is done."""
    device = Device([0.2] * 1000)
    times = device.measure(budget_ms=7.0, waits=waits)
    sample = ["flush", *["synchronize"] * waits, "event", "call", "event"]
    assert device.log == [*sample * 3, "synchronize", *sample * times.samples, "synchronize"]
    assert times.p50 == pytest.approx(200.0)


@pytest.mark.parametrize(("call_ms", "samples"), [(0.3, 50), (1000.0, 7), (0.0, 300)])
def test_the_budget_sets_the_number_of_samples_within_bounds(call_ms, samples):
    budget_ms = 1e4 if call_ms == 0 else 40.0
    counted = Device([call_ms] * 2000).measure(budget_ms=budget_ms).samples
    assert counted == pytest.approx(samples, rel=0.3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_nothing_is_timed_without_a_gpu():
    with pytest.raises(RuntimeError, match="no CUDA device"):
        gpu_timing.time_call(lambda: None)
    row = gpu_timing.timed_columns(lambda: None, num_bytes=8, flops=2, launch="graph", budget_ms=1)
    assert row["bytes"] == 8
    assert row["p50_us"] is None
    assert row["samples"] == 0
    assert row["bandwidth_fraction"] is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("launch", ["graph", "eager"])
def test_times_on_a_gpu(launch):
    x = torch.zeros(2**26, device="cuda")
    times = gpu_timing.time_call(lambda: x.add_(1), launch=launch, budget_ms=20)
    assert 0 < times.p20 <= times.p50 <= times.p80
    assert 0.2 < 2 * x.nbytes / (times.p50 * 1e-6) / gpu_timing.copy_bandwidth() < 1.3
