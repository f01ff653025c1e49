"""Data-centre GPUs by their makers' datasheets, for lower bounds of a kernel's time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str
    """The architecture that kernels are compiled for."""
    bandwidth: float
    """Peak bandwidth of its memory, bytes/s."""
    half_flops: float
    """Peak dense fp16 or bf16 rate of its matrix units, FLOP/s."""
    host_bandwidth: float = 64e9
    """Peak bandwidth of its PCIe link in one direction, bytes/s."""

    def bound(
        self, *, num_bytes: float, operations: float, host_bytes: float = 0
    ) -> tuple[float, str]:
        """The least time of some work in seconds, and its limit (Williams et al., 2009)."""
        times = {
            "memory": num_bytes / self.bandwidth,
            "arithmetic": operations / self.half_flops,
            "host link": host_bytes / self.host_bandwidth,
        }
        limit = max(times, key=times.get)
        return times[limit], limit


GPUS = (
    # NVIDIA A100 Tensor Core GPU datasheet; PCIe Gen4 64 GB/s is both directions.
    Gpu("A100 SXM 80 GB", "sm_80", bandwidth=2.039e12, half_flops=312e12, host_bandwidth=32e9),
    # NVIDIA H100 and H200 Tensor Core GPU datasheets: 1,979 TFLOPS are with sparsity, twice dense.
    Gpu("H100 SXM", "sm_90", bandwidth=3.35e12, half_flops=989.5e12),
    Gpu("H200 SXM", "sm_90", bandwidth=4.8e12, half_flops=989.5e12),
    # NVIDIA Blackwell datasheet, HGX B200: 4.5 PFLOPS are with sparsity, twice dense.
    Gpu("B200 (HGX)", "sm_100", bandwidth=7.7e12, half_flops=2250e12),
    # AMD Instinct MI300X data sheet: 1,307.4 TFLOPS fp16 without sparsity.
    Gpu("MI300X", "gfx942", bandwidth=5.3e12, half_flops=1307.4e12),
)
