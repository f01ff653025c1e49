"""What a launch did, counted as it runs: instructions, memory transactions, bank conflicts.

A request is one instruction of one warp. In global memory it moves sectors of 32 bytes, which lie
in lines of 128. Shared memory has 32 banks of 4 bytes; threads that want 4 bytes or less are served
all 32 at once, of 8 bytes 16 at a time, of 16 bytes (and rows of ldmatrix) 8 at a time, and each
such pass takes as many wavefronts as the busiest bank has different words. A bank conflict is a
wavefront beyond one per pass. These are counts of what the PTX asks for: the machine code, which
ptxas makes, may join, split or drop instructions, and caches are not looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import numba
import numpy as np

from kernels.executor.ptx import Instruction

_CLASSES = (
    ("tensor core", r"mma|wgmma\.mma_async"),
    ("asynchronous copy", r"cp\.async\.c[ag]"),
    ("global load", r"ld\.global"),
    ("global store", r"st\.global"),
    ("shared memory", r"(ld|st)\.shared|ldmatrix|stmatrix"),
    ("parameter", r"ld\.param"),
    ("synchronisation", r"bar|barrier|fence|cp\.async|wgmma"),
    ("exchange", r"shfl|redux|elect"),
    ("control", r"bra|ret|exit|trap"),
    ("conversion", r"cvt"),
    ("move", r"mov"),
    ("floating point", r"\w+\.(\w+\.)*(f16|f32|f64|bf16|f16x2|bf16x2|f32x2)$"),
    ("integer", r""),
)


def class_of(one: Instruction) -> str:
    """The class that an instruction is counted in."""
    return next(name for name, pattern in _CLASSES if re.match(pattern, one.opcode))


@dataclass
class Counts:
    """Exact counts of one launch; requests and instructions are those of warps."""

    instructions: dict[str, int] = field(default_factory=dict)
    """Warp instructions by class."""
    requests: int = 0
    """Warp instructions that access global memory, asynchronous copies among them."""
    sectors: int = 0
    """32-byte sectors, counted once in each request."""
    lines: int = 0
    """128-byte lines, counted once in each request."""
    read_bytes: int = 0
    """Bytes that threads ask for, however many ask for the same."""
    written_bytes: int = 0
    distinct_lines: int = 0
    """Different 128-byte lines that the launch touches: the least traffic that can do."""
    wavefronts: int = 0
    """Of shared memory."""
    bank_conflicts: int = 0
    """Wavefronts beyond one per pass."""
    tensor_operations: int = 0
    """Multiplications and additions of tensor-core instructions."""
    barriers: int = 0
    """bar.sync, counted once for each warp."""

    @property
    def sectors_per_request(self) -> float:
        """4 where 32 threads read 4 bytes each side by side."""
        return self.sectors / self.requests if self.requests else 0.0


@numba.njit(cache=True)
def _count_places(addresses, mask, sizes, unit, totals):
    """Add the different blocks of `unit` bytes of each warp's request to totals[1], requests to
    totals[0]."""
    seen = np.empty(32 * 17, np.uint64)
    for warp in range(len(addresses) // 32):
        found, active = 0, False
        for thread in range(32 * warp, 32 * warp + 32):
            size = sizes[thread] if len(sizes) > 1 else sizes[0]
            if not mask[thread] or size == 0:
                continue
            active = True
            first = addresses[thread] // np.uint64(unit)
            last = (addresses[thread] + np.uint64(size - 1)) // np.uint64(unit)
            block = first
            while block <= last:
                known = False
                for number in range(found):
                    if seen[number] == block:
                        known = True
                        break
                if not known:
                    seen[found] = block
                    found += 1
                block += np.uint64(1)
        totals[1] += found
        totals[0] += active


@numba.njit(cache=True)
def _count_wavefronts(addresses, mask, size, totals):
    """Add a shared access's wavefronts to totals[0], those beyond one per pass to totals[1]."""
    at_once = 32 if size <= 4 else 128 // size
    words = np.empty(128, np.int64)
    per_bank = np.empty(32, np.int64)
    for first in range(0, len(addresses), at_once):
        found = 0
        per_bank[:] = 0
        for thread in range(first, first + at_once):
            if not mask[thread]:
                continue
            for word in range(
                np.int64(addresses[thread]) // 4, (np.int64(addresses[thread]) + size + 3) // 4
            ):
                known = False
                for number in range(found):
                    if words[number] == word:
                        known = True
                        break
                if not known:
                    words[found] = word
                    found += 1
                    per_bank[word % 32] += 1
        if found:
            totals[0] += per_bank.max()
            totals[1] += per_bank.max() - 1


class Tally:
    """Counts of accesses while a launch runs."""

    def __init__(self):
        self._sectors, self._lines = np.zeros((2, 2), np.int64)
        self._wavefronts = np.zeros(2, np.int64)
        self._bytes = Counter()

    def global_access(self, addresses, mask, sizes, kind: str) -> None:
        """kind: "read" or "written"; sizes: bytes of each thread, or of all."""
        _count_places(addresses, mask, sizes, 32, self._sectors)
        _count_places(addresses, mask, sizes, 128, self._lines)
        self._bytes[kind] += int((np.broadcast_to(sizes, len(mask)) * mask).sum())

    def shared_access(self, addresses, mask, size: int) -> None:
        """An access of `size` bytes of each thread."""
        _count_wavefronts(addresses, mask, size, self._wavefronts)

    def finish(self, launch) -> Counts:
        """The counts of a launch that has run."""
        instructions, operations, barriers = Counter(), 0, 0
        for one, times in zip(
            launch.kernel.program.instructions, launch.executed.tolist(), strict=False
        ):
            instructions[class_of(one)] += times
            barriers += times * (one.opcode == "bar.sync")
            if shape := re.search(r"mma.*\.m(\d+)n(\d+)k(\d+)\.", one.opcode):
                warps = 4 if one.parts[0] == "wgmma" else 1  # that do it together
                m, n, k = map(int, shape.groups())
                operations += 2 * m * n * k * times // warps
        return Counts(
            instructions={name: n for name, n in instructions.items() if n},
            requests=int(self._sectors[0]),
            sectors=int(self._sectors[1]),
            lines=int(self._lines[1]),
            read_bytes=self._bytes["read"],
            written_bytes=self._bytes["written"],
            distinct_lines=launch.memory.distinct_lines(),
            wavefronts=int(self._wavefronts[0]),
            bank_conflicts=int(self._wavefronts[1]),
            tensor_operations=operations,
            barriers=barriers,
        )
