"""The sampling of times, on a clock that the test turns."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.bench import gpu_timing
from experiments.bench.gpu_timing import ImpossibleTime


class Device:
    """Work takes device time as it is issued; events read the clock in milliseconds."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.log = 0.0, []
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now
                device.log.append("event")

            def elapsed_time(self, end) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("synchronize"))
        monkeypatch.setattr(gpu_timing, "_l2_buffer", lambda: SimpleNamespace(sum=self.flush))
        monkeypatch.setattr(gpu_timing, "_captured", lambda call: call)

    def flush(self) -> None:
        self.now += 0.5
        self.log.append("flush")

    def time(self, durations, **options) -> gpu_timing.Times:
        """Times of a call that takes these milliseconds, one after another."""
        durations = iter(durations)

        def call() -> None:
            self.now += next(durations)
            self.log.append("call")

        return gpu_timing.time_call(call, **options)


@pytest.fixture
def fake(monkeypatch) -> Device:
    return Device(monkeypatch)


def test_quantiles_of_the_calls_alone(fake):
    """By three samples of 0.5 ms to flush and 1 ms to call, 15 ms are enough for ten."""
    durations = [1.0] * 5 + [0.1 * k for k in range(1, 11)]
    times = fake.time(durations, budget_ms=14.0)
    assert times.samples == 10
    expected = 1e3 * np.quantile(durations[5:], (0.2, 0.5, 0.8))
    assert times[:3] == pytest.approx(tuple(expected))


@pytest.mark.parametrize("launch", ["graph", "eager"])
def test_l2_is_flushed_before_each_sample_and_outside_its_time(launch, fake):
    """An eager call begins when the flush is done."""
    times = fake.time([0.2] * 1000, budget_ms=7.0, launch=launch)
    sample = ["flush", *["synchronize"] * (launch == "eager"), "event", "call", "event"]
    first = ["call", "call", "synchronize", *sample * 3, "synchronize"]
    assert fake.log == [*first, *sample * times.samples, "synchronize"]
    assert times.p50_us == pytest.approx(200.0)


@pytest.mark.parametrize(("call_ms", "samples"), [(0.3, 50), (1000.0, 7), (0.0, 300)])
def test_the_budget_sets_the_number_of_samples_within_bounds(call_ms, samples, fake):
    budget_ms = 1e4 if call_ms == 0 else 40.0
    counted = fake.time([call_ms] * 2000, budget_ms=budget_ms).samples
    assert counted == pytest.approx(samples, rel=0.3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_nothing_is_timed_without_a_gpu():
    with pytest.raises(RuntimeError, match="no CUDA device"):
        gpu_timing.time_call(lambda: None)
    row = gpu_timing.timed_columns(gpu_timing.Times(), num_bytes=8, flops=2, launch="graph")
    assert row["bytes"] == 8
    for column in (*gpu_timing.Times._fields, "gb_per_s", "bandwidth_fraction", "matmul_fraction"):
        assert not row[column], column


@pytest.mark.parametrize(
    ("num_bytes", "flops", "l2_bytes", "above_peak"),
    [(90, 30, 0, None), (104, 0, 0, "noise"), (9, 104, 0, "noise"), (200, 0, 300, "fit L2"),
     (200, 0, 0, ImpossibleTime), (0, 106, 0, ImpossibleTime)],
)  # fmt: skip
def test_no_time_is_shorter_than_its_bytes_and_operations_need(
    num_bytes, flops, l2_bytes, above_peak, monkeypatch
):
    """In 100 ns, at 1 GB and 1 GFLOP per second; a memcpy alone is slower on an H100."""
    monkeypatch.setattr(gpu_timing, "device_bandwidths", lambda: {"copy": 8e8, "read": 1e9})
    monkeypatch.setattr(gpu_timing, "matmul_rate", lambda: 1e9)
    monkeypatch.setattr(gpu_timing, "_l2_bytes", lambda: l2_bytes)
    times, work = gpu_timing.Times(p50_us=0.1), {"num_bytes": num_bytes, "flops": flops}
    if above_peak is ImpossibleTime:
        with pytest.raises(ImpossibleTime, match="of the measured peak"):
            gpu_timing.timed_columns(times, **work, launch="graph")
        return
    row = gpu_timing.timed_columns(times, **work, launch="graph")
    assert row["bandwidth_fraction"] == pytest.approx(num_bytes / 100)
    assert row["above_peak"] == above_peak or above_peak in row["above_peak"]


@pytest.mark.parametrize("launch", ["graph", "eager"])
def test_times_on_a_gpu(launch, device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    x = torch.zeros(2**26, device="cuda")
    times = gpu_timing.time_call(lambda: x.add_(1), launch=launch, budget_ms=20)
    assert 0 < times.p20_us <= times.p50_us <= times.p80_us
    rate = 2 * x.nbytes / (times.p50_us * 1e-6)
    assert 1e9 < rate < 50e12, "bytes per second; other tests may use the GPU at the same time"
