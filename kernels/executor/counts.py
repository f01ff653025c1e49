"""Counts of a launch: instructions, memory transactions, bank conflicts.

A request is one memory instruction of one warp. A request to global memory moves 32-byte sectors,
which lie in 128-byte lines. Shared memory has 32 banks of 4 bytes. It serves a request in passes:
32 threads at once for accesses of up to 4 bytes, 16 threads for 8 bytes, 8 threads for 16 bytes and
for rows of ldmatrix. A pass takes one wavefront for each different word in its busiest bank. A bank
conflict is a wavefront beyond the first of a pass.

All counts refer to the PTX. The machine code from ptxas may merge, split or drop instructions.
Caches are not modelled.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kernels.executor.ptx import Instruction, Program

_CLASSES = (
    ("tensor core", r"mma|wgmma\.mma_async|tcgen05\.mma"),
    ("asynchronous copy", r"cp\.async\.(c[ag]|bulk\.tensor)"),
    ("global load", r"ld\.global"),
    ("global store", r"st\.global"),
    ("shared memory", r"(ld|st)\.shared|ldmatrix|stmatrix"),
    ("parameter", r"ld\.param"),
    ("synchronisation", r"bar|barrier|fence|cp\.async|wgmma|mbarrier|tcgen05\.(?!ld|st)"),
    ("exchange", r"shfl|redux|elect"),
    ("control", r"bra|ret|exit|trap"),
    ("conversion", r"cvt"),
    ("move", r"mov|tcgen05"),
    ("floating point", r"\w+\.(\w+\.)*(f16|f32|f64|bf16|f16x2|bf16x2|f32x2)$"),
    ("integer", r""),
)


def class_of(one: Instruction) -> str:
    """Name of the class that counts this instruction."""
    return next(name for name, pattern in _CLASSES if re.match(pattern, one.opcode))


@dataclass
class Counts:
    """Exact counts of one launch. Instructions and requests are counted per warp."""

    instructions: dict[str, int] = field(default_factory=dict)
    """Warp instructions by class."""
    requests: int = 0
    """Warp instructions that access global memory, including asynchronous copies."""
    sectors: int = 0
    """32-byte sectors, counted once per request."""
    lines: int = 0
    """128-byte lines, counted once per request."""
    read_bytes: int = 0
    """Bytes read from global memory, counted for each thread."""
    written_bytes: int = 0
    """Bytes written to global memory, counted for each thread."""
    distinct_bytes: int = 0
    """Different bytes of global memory that the launch accesses."""
    distinct_lines: int = 0
    """Different 128-byte lines that the launch accesses: a lower bound of the DRAM traffic."""
    wavefronts: int = 0
    """Shared-memory wavefronts."""
    bank_conflicts: int = 0
    """Shared-memory wavefronts beyond the first of each pass."""
    tensor_operations: int = 0
    """Multiplications and additions of tensor-core instructions."""
    barriers: int = 0
    """bar.sync instructions, counted once per warp."""
    bytes_in_flight: int = 0
    """Largest number of bytes that the asynchronous copies of one program have pending."""

    @property
    def total(self) -> int:
        """Warp instructions of all classes."""
        return sum(self.instructions.values())

    @property
    def sectors_per_request(self) -> float:
        """Sectors per request: 4 if 32 threads access 4 consecutive bytes each."""
        return self.sectors / self.requests if self.requests else 0.0


_NO_BLOCK = np.uint64(2**64 - 1)


def _different(blocks: np.ndarray, mask: np.ndarray, per_row: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows of `per_row` blocks, sorted; mask of the first of equal blocks of masked threads)."""
    rows = np.where(mask, blocks, _NO_BLOCK).reshape(-1, per_row)
    rows.sort(axis=1)
    first = rows != _NO_BLOCK
    first[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    return rows, first


def _wavefronts(addresses, mask, size: int) -> tuple[int, int]:
    """(wavefronts, bank conflicts) of a shared-memory access of `size` bytes per thread."""
    at_once, per_thread = (32, 1) if size <= 4 else (128 // size, size // 4)
    words = addresses[:, None] // np.uint64(4) + np.arange(per_thread, dtype=np.uint64)
    rows, first = _different(words, mask[:, None], at_once * per_thread)
    by_bank = np.zeros((len(rows), 32), np.int64)
    np.add.at(by_bank, (np.nonzero(first)[0], (rows[first] % np.uint64(32)).astype(np.int64)), 1)
    wavefronts = by_bank.max(1)
    return int(wavefronts.sum()), int(np.maximum(wavefronts - 1, 0).sum())


def _tensor_operations(one: Instruction) -> int:
    """Multiplications and additions of a tensor-core instruction, per warp."""
    shape = re.search(r"mma.*\.m(\d+)n(\d+)k(\d+)\.", one.opcode)
    if shape is None:
        return 0
    m, n, k = map(int, shape.groups())
    return 2 * m * n * k // (4 if one.parts[0] == "wgmma" else 1)  # shared by four warps


class Tally:
    """Accumulates counts while the programs of a launch run."""

    def __init__(self, program: Program):
        self._program = program
        self._counts: Counter[str] = Counter()  # fields of `Counts` that are sums over accesses
        self.bytes_in_flight = 0

    def global_access(self, addresses, mask, sizes, kind: str) -> None:
        """Count an access to global memory. kind: "read" or "written". sizes: bytes per thread, one
        element if all are equal. An aligned access lies in one sector."""
        _, sectors = _different(addresses // np.uint64(32), mask, 32)
        _, lines = _different(addresses // np.uint64(128), mask, 32)
        num_bytes = int((np.broadcast_to(sizes, len(mask)) * mask).sum())
        self._counts.update({f"{kind}_bytes": num_bytes, "requests": int(sectors.any(1).sum())})
        self._counts.update(sectors=int(sectors.sum()), lines=int(lines.sum()))

    def shared_access(self, addresses, mask, size: int) -> None:
        """Count an access to shared memory of `size` bytes per thread."""
        wavefronts, conflicts = _wavefronts(addresses, mask, size)
        self._counts.update(wavefronts=wavefronts, bank_conflicts=conflicts)

    def products(self, operations: int) -> None:
        """Count matrix products whose size is not part of the opcode (tcgen05.mma)."""
        self._counts["tensor_operations"] += operations

    def box(self, addresses: np.ndarray, size: int) -> None:
        """Count a bulk copy, one request, of `size` bytes at each address."""
        places = addresses.reshape(-1)
        sectors, lines = (len(np.unique(places // np.uint64(block))) for block in (32, 128))
        self._counts.update(read_bytes=size * len(places), requests=1, sectors=sectors, lines=lines)

    def finish(self, memory, executed: np.ndarray) -> Counts:
        """The counts of the launch, after all its programs have ended. executed: how many warps
        have executed each instruction."""
        counts, instructions = self._counts.copy(), Counter[str]()
        for one, times in zip(self._program.instructions, executed.tolist(), strict=True):
            instructions[class_of(one)] += times
            counts["barriers"] += times * (one.opcode == "bar.sync")
            counts["tensor_operations"] += times * _tensor_operations(one)
        distinct_bytes, distinct_lines = memory.touched()
        return Counts(
            {name: times for name, times in instructions.items() if times},
            distinct_bytes=distinct_bytes,
            distinct_lines=distinct_lines,
            bytes_in_flight=self.bytes_in_flight,
            **counts,
        )
