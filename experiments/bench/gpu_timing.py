"""Times of GPU work, and the card's peak rates with which they are compared.

Every sample starts with a cold L2: a buffer larger than L2 is read first. With ``launch="graph"`` a
sample is one replay of a CUDA graph, so its time excludes launches and Python. With
``launch="eager"`` a sample is a call on an idle GPU, and its time includes both. Times are measured
by the device, between two events. Without a CUDA device nothing is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

LaunchMode = Literal["graph", "eager"]
Ceiling = Literal["device", "device_to_host", "host_to_device"]
_MIN_SAMPLES, _MAX_SAMPLES = 7, 300
_FLUSH_BYTES = 256 * 2**20
_COPIED_BYTES, _TRANSFERRED_BYTES = 2**31, 2**28
_MATMUL_SIZE = 8192
_TOLERANCE = 1.05
"""A share of a measured peak up to this value counts as noise."""


class Times(NamedTuple):
    """Quantiles of a call's time, as columns of a table.  Defaults: nothing was timed."""

    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    samples: int = 0


class ImpossibleTime(Exception):
    """The time is shorter than its bytes or operations take at the card's measured peak."""


def time_call(
    call: Callable[[], object], *, launch: LaunchMode = "graph", budget_ms: float = 60.0
) -> Times:
    """Time a call on the current CUDA device.

    budget_ms: device time of all samples, including flushes of L2. At least 7 samples are taken.
    Raises RuntimeError if there is no CUDA device or a graph cannot be captured.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device to time on")
    for _ in range(2):  # compile, and load modules
        call()
    torch.cuda.synchronize()
    timed = _captured(call) if launch == "graph" else call
    flush = _l2_buffer().sum  # reads only: dirty lines would be written back during the call

    def sample(count: int) -> tuple[list[float], float]:
        """Times of ``count`` calls, and the total time, in milliseconds."""
        pairs = []
        for _ in range(count):
            pairs.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            flush()
            if launch == "eager":  # otherwise the flush would hide the call's host time
                torch.cuda.synchronize()
            pairs[-1][0].record()
            timed()
            pairs[-1][1].record()
        torch.cuda.synchronize()
        whole = pairs[0][0].elapsed_time(pairs[-1][1])
        return [start.elapsed_time(end) for start, end in pairs], whole

    _, total_ms = sample(3)
    count = max(_MIN_SAMPLES, min(_MAX_SAMPLES, int(budget_ms / max(total_ms / 3, 1e-3))))
    times, _ = sample(count)
    p20, p50, p80 = (1e3 * np.quantile(times, (0.2, 0.5, 0.8))).tolist()
    return Times(p20, p50, p80, count)


def _captured(call: Callable[[], object]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@functools.lru_cache(maxsize=1)
def _l2_buffer() -> torch.Tensor:
    return torch.zeros(max(_FLUSH_BYTES, 4 * _l2_bytes()), dtype=torch.int8, device="cuda")


def _l2_bytes() -> int:
    return torch.cuda.get_device_properties().L2_cache_size


@functools.lru_cache(maxsize=1)
def device_bandwidths() -> dict[str, float]:
    """Bytes read and written per second by a sum, a copy and an addition in place.

    One of them alone is no upper bound: on an H100 some kernels are faster than a copy.
    """
    x = torch.empty(_COPIED_BYTES // 4, device="cuda").normal_()
    y = torch.empty_like(x)
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "read": (1, x.sum), "copy": (2, lambda: y.copy_(x)), "update": (2, lambda: y.add_(1))
    }  # fmt: skip
    return {name: times * x.nbytes / _seconds(work) for name, (times, work) in works.items()}


def _seconds(work: Callable[[], object], launch: LaunchMode = "graph") -> float:
    """Median time of a call, in seconds."""
    return 1e-6 * (time_call(work, launch=launch, budget_ms=100).p50_us or 0.0)


@functools.lru_cache
def _link_bandwidth(ceiling: Ceiling) -> float:
    on_device = torch.zeros(_TRANSFERRED_BYTES, dtype=torch.uint8, device="cuda")
    other = torch.zeros(_TRANSFERRED_BYTES, dtype=torch.uint8, pin_memory=True)
    source, target = (other, on_device) if ceiling == "host_to_device" else (on_device, other)
    call = functools.partial(target.copy_, source, non_blocking=True)
    return source.nbytes / _seconds(call, "eager")


@functools.lru_cache(maxsize=1)
def matmul_rate() -> float:
    """FLOP per second of an 8192 x 8192 x 8192 bf16 matrix product of random data."""
    size = _MATMUL_SIZE
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out))


def timed_columns(
    times: Times, *, num_bytes: float, flops: float, ceiling: Ceiling = "device", launch: LaunchMode
) -> dict[str, Any]:
    """Columns: ``times`` of a call, and its rates.  The rates are None if there are no times.

    num_bytes, flops: the minimum that the call must move and compute. The peaks, measured in this
    process, are ``matmul_rate`` and the rate of the device's memory, or of the link to the host
    (``ceiling``), in bytes per second. The fractions are shares of these peaks.
    ``above_peak`` explains a fraction above 1.  Raises ImpossibleTime if there is no explanation.
    """
    columns: dict[str, Any] = {"launch": launch, "l2": "cold", "bytes": num_bytes, "flops": flops}
    columns |= times._asdict()
    names = ("gb_per_s", "tflop_per_s", "peak_gb_per_s", "peak_tflop_per_s")
    columns |= dict.fromkeys((*names, "bandwidth_fraction", "matmul_fraction", "above_peak"))
    if times.p50_us is None:
        return columns
    on_device = ceiling == "device"
    peak = max(device_bandwidths().values()) if on_device else _link_bandwidth(ceiling)
    rate, seconds = matmul_rate(), times.p50_us * 1e-6
    share = max(num_bytes / seconds / peak, flops / seconds / rate)
    if num_bytes / seconds > peak and num_bytes <= _l2_bytes():
        columns["above_peak"] = "its bytes fit L2, so what it writes need not reach memory in time"
    elif share > _TOLERANCE:
        raise ImpossibleTime(
            f"{times.p50_us:.1f} us for {num_bytes:.3g} bytes and {flops:.3g} operations is "
            f"{share:.2f} of the measured peak"
        )
    elif share > 1:
        columns["above_peak"] = "noise of the measured peak"
    return {
        **columns,
        "gb_per_s": num_bytes / seconds / 1e9,
        "tflop_per_s": flops / seconds / 1e12,
        "peak_gb_per_s": peak / 1e9,
        "peak_tflop_per_s": rate / 1e12,
        "bandwidth_fraction": num_bytes / seconds / peak,
        "matmul_fraction": flops / seconds / rate,
    }
