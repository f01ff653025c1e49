"""A bound of a launch's time on a GPU, from what its programs were counted to do.

No time is measured. Every part of a GPU is taken to work at its peak without a pause, so that a
launch can take no less than the slowest of them:

    issue         a multiprocessor issues 4 warp instructions per cycle
    LSU           and serves one wavefront of shared memory, or one 128-byte line of a request to
                  global memory, per cycle
    tensor cores  and does 2,048 (sm_80) or 4,096 (sm_90) multiplications and additions of 16-bit
                  numbers per cycle
    DRAM          moves every line that the launch touches once, at the datasheet's bandwidth

(A100 and H100 whitepapers; CUDA programming guide.) Programs are put on the multiprocessors one by
one, each on the one with the least work, in the order of the grid: with few programs, or a long
one, some multiprocessors idle at the end. Latency, caches, occupancy, what ptxas makes of the PTX
and clocks below the peak are left out.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.bench.gpus import Gpu
    from kernels.executor import Counts

_ISSUED = 4
_TENSOR_OPERATIONS = {"sm_80": 2048, "sm_90": 4096}
LINE = 128
"""Bytes of a line."""


@dataclass(frozen=True)
class ModelledTime:
    """Seconds that a launch takes at least."""

    parts: dict[str, float]
    """By part of the GPU, were the work spread evenly over all multiprocessors."""
    placed: float
    """Until the last multiprocessor is done, without DRAM."""

    @property
    def bound(self) -> float:
        return max(self.placed, self.parts["DRAM"])

    @property
    def bound_by(self) -> str:
        """The slowest part; "tail" if multiprocessors that idle cost more."""
        slowest = max(self.parts, key=self.parts.get)
        return "tail" if self.bound > 1.05 * self.parts[slowest] else slowest


def modelled_time(counts: Counts, gpu: Gpu, num_multiprocessors: int) -> ModelledTime:
    """The bound for one launch on ``gpu``."""
    tensor_rate = _TENSOR_OPERATIONS[gpu.arch]
    clock = gpu.half_flops / (num_multiprocessors * tensor_rate)
    cycles = [
        (
            program.instructions / _ISSUED,
            program.wavefronts + program.lines,
            program.tensor_operations / tensor_rate,
        )
        for program in counts.programs
    ]
    even = [sum(of_part) / num_multiprocessors / clock for of_part in zip(*cycles, strict=True)]
    parts = dict(zip(("issue", "LSU", "tensor cores"), even, strict=True))
    parts["DRAM"] = LINE * counts.distinct_lines / gpu.bandwidth
    return ModelledTime(parts, _placed(cycles, num_multiprocessors) / clock)


def _placed(cycles: list[tuple[float, ...]], num_multiprocessors: int) -> float:
    """Cycles of the busiest multiprocessor; its parts work side by side."""
    busy = [(0.0, number, (0.0,) * len(cycles[0])) for number in range(num_multiprocessors)]
    for program in cycles:
        _, number, before = busy[0]
        after = tuple(a + b for a, b in zip(before, program, strict=True))
        heapq.heapreplace(busy, (max(after), number, after))
    return max(busy)[0]
