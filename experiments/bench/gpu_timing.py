"""Times of GPU work, and the two rates of the card that they are compared with.

Every sample starts with a cold L2: a buffer larger than it is read first, as
`triton.testing.do_bench` overwrites one (`do_bench_cudagraph` does neither). With
``launch="graph"`` the work is captured in a CUDA graph and a sample is one replay, so neither
launches nor Python are in the time. With ``launch="eager"`` a sample is a call on an idle GPU, so
both are. Times are of the device's clock, between two events. Without a CUDA device there are no
times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

Launch = Literal["graph", "eager"]
Ceiling = Literal["copy", "device_to_host", "host_to_device"]
_MIN_SAMPLES, _MAX_SAMPLES = 7, 300
_FLUSH_BYTES = 256 * 2**20
_COPIED_BYTES, _TRANSFERRED_BYTES = 2**31, 2**28
_MATMUL_SIZE = 8192


class Times(NamedTuple):
    """Quantiles of one call's time, as columns of a table; the defaults where nothing was timed."""

    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    samples: int = 0


def time_call(
    call: Callable[[], object], *, launch: Launch = "graph", budget_ms: float = 60.0
) -> Times:
    """Time ``call``, which works on the current CUDA device.

    budget_ms: device time to spend on samples, the overwriting of L2 included; at least 7 samples
    are taken.  Raises RuntimeError without a CUDA device, and for a graph of work that cannot be
    captured.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device to time on")
    for _ in range(2):  # compile, and load modules
        call()
    torch.cuda.synchronize()
    timed = _captured(call) if launch == "graph" else call
    flush = _l2_buffer().sum  # reads: written lines would be written back during the call

    def sample(count: int) -> tuple[list[float], float]:
        """``count`` times of the call, and the time of all this, in milliseconds."""
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in pairs:
            flush()
            if launch == "eager":  # or the flush would hide the host's work for the call
                torch.cuda.synchronize()
            start.record()
            timed()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs], pairs[0][0].elapsed_time(end)

    _, total_ms = sample(3)
    per_sample = max(total_ms / 3, 1e-3)
    count = max(_MIN_SAMPLES, min(_MAX_SAMPLES, int(budget_ms / per_sample)))
    times, _ = sample(count)
    return Times(*map(float, 1e3 * np.quantile(times, (0.2, 0.5, 0.8))), samples=count)


def _captured(call: Callable[[], object]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@functools.lru_cache(maxsize=1)
def _l2_buffer() -> torch.Tensor:
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    return torch.zeros(max(_FLUSH_BYTES, 4 * l2_bytes), dtype=torch.int8, device="cuda")


@functools.lru_cache
def copy_bandwidth(ceiling: Ceiling = "copy") -> float:
    """Bytes per second of a large copy on the device, or between it and pinned host memory.

    On the device bytes read and bytes written both count.
    """
    num_elements = (_COPIED_BYTES if ceiling == "copy" else _TRANSFERRED_BYTES) // 2
    on_device = torch.empty(num_elements, dtype=torch.bfloat16, device="cuda").normal_()
    if ceiling == "copy":
        other = torch.empty_like(on_device)
    else:
        other = torch.empty(num_elements, dtype=torch.bfloat16, pin_memory=True)
    source, target = (other, on_device) if ceiling == "host_to_device" else (on_device, other)
    times = time_call(
        lambda: target.copy_(source, non_blocking=True),
        launch="graph" if ceiling == "copy" else "eager",
        budget_ms=100,
    )
    return (2 if ceiling == "copy" else 1) * source.nbytes / (times.p50_us * 1e-6)


@functools.lru_cache(maxsize=1)
def matmul_rate() -> float:
    """FLOP per second of an 8192 x 8192 x 8192 bf16 matrix product of random data."""
    size = _MATMUL_SIZE
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    seconds = time_call(lambda: torch.mm(a, b, out=out), budget_ms=100).p50_us * 1e-6
    return 2 * size**3 / seconds


def timed_columns(
    call: Callable[[], object],
    *,
    num_bytes: float,
    flops: float,
    ceiling: Ceiling = "copy",
    launch: Launch,
    budget_ms: float,
) -> dict[str, Any]:
    """Columns: times of ``call`` and rates that follow; without a CUDA device all None.

    num_bytes, flops: the least that the call must move and compute. The peaks are measured with a
    copy and a matrix product on this card in this process; the fractions are shares of them.
    """
    columns = {
        "launch": launch,
        "l2": "cold",
        "bytes": num_bytes,
        "flops": flops,
        **Times()._asdict(),
    }
    names = ("gb_per_s", "tflop_per_s", "peak_gb_per_s", "peak_tflop_per_s")
    columns |= dict.fromkeys((*names, "bandwidth_fraction", "matmul_fraction"))
    if not torch.cuda.is_available():
        return columns
    bandwidth, rate = copy_bandwidth(ceiling), matmul_rate()
    times = time_call(call, launch=launch, budget_ms=budget_ms)
    seconds = times.p50_us * 1e-6
    return {
        **columns,
        **times._asdict(),
        "gb_per_s": num_bytes / seconds / 1e9,
        "tflop_per_s": flops / seconds / 1e12,
        "peak_gb_per_s": bandwidth / 1e9,
        "peak_tflop_per_s": rate / 1e12,
        "bandwidth_fraction": num_bytes / seconds / bandwidth,
        "matmul_fraction": flops / seconds / rate,
    }
