"""Counts of what a launch did: instructions, memory transactions, bank conflicts.

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
from typing import NamedTuple

import numba
import numpy as np

from kernels.executor.ptx import Instruction, Program

_CLASSES = (
    ("tensor core", r"mma|wgmma\.mma_async|tcgen05\.mma"),
    ("asynchronous copy", r"cp\.async\.c[ag]"),
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
    """The class that an instruction is counted in."""
    return next(name for name, pattern in _CLASSES if re.match(pattern, one.opcode))


class ProgramCounts(NamedTuple):
    """Counts of one program of a launch; the fields are explained in `Counts`."""

    instructions: int
    lines: int
    wavefronts: int
    tensor_operations: int
    special_functions: int = 0


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
    distinct_bytes: int = 0
    """Different bytes that the launch touches."""
    distinct_lines: int = 0
    """Different 128-byte lines that the launch touches: the least traffic that can do."""
    wavefronts: int = 0
    """Wavefronts of shared memory."""
    bank_conflicts: int = 0
    """Wavefronts beyond one per pass."""
    tensor_operations: int = 0
    """Multiplications and additions of tensor-core instructions."""
    special_functions: int = 0
    """Exponentials, logarithms, roots, reciprocals, sines and tanh of threads; a multiprocessor
    computes 16 per cycle (CUDA programming guide, throughput of native instructions)."""
    barriers: int = 0
    """bar.sync, counted once for each warp."""
    bytes_in_flight: int = 0
    """Most bytes of one program that asynchronous copies have pending at a time."""
    programs: tuple[ProgramCounts, ...] = ()
    """Counts of each program, in the order of the grid; x runs fastest."""

    @property
    def total(self) -> int:
        """Warp instructions of every class."""
        return sum(self.instructions.values())

    @property
    def l2_bytes(self) -> int:
        """Bytes between the multiprocessors and L2, if L1 keeps nothing from request to request."""
        return 32 * self.sectors

    @property
    def sectors_per_request(self) -> float:
        """4 where 32 threads read 4 bytes each side by side."""
        return self.sectors / self.requests if self.requests else 0.0


@numba.njit(cache=True)
def _count_places(addresses, mask, sizes, unit, programs, totals):
    """Add the different blocks of `unit` bytes of each warp's request to totals[1, program],
    requests to totals[0, program]."""
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
        totals[1, programs[32 * warp]] += found
        totals[0, programs[32 * warp]] += active


@numba.njit(cache=True)
def _count_wavefronts(addresses, mask, size, programs, totals):
    """Add a shared access's wavefronts to totals[0, program], those beyond one per pass to
    totals[1, program]."""
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
            totals[0, programs[first]] += per_bank.max()
            totals[1, programs[first]] += per_bank.max() - 1


def _tensor_operations(one: Instruction) -> int:
    """Multiplications and additions of a tensor-core instruction, for each warp of it."""
    shape = re.search(r"mma.*\.m(\d+)n(\d+)k(\d+)\.", one.opcode)
    if shape is None:
        return 0
    m, n, k = map(int, shape.groups())
    return 2 * m * n * k // (4 if one.parts[0] == "wgmma" else 1)  # four warps do it together


_SPECIAL = re.compile(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\..*approx|div\.(approx|full)")


def _special_functions(one: Instruction) -> int:
    """Special functions of an instruction, for each warp of it."""
    per_thread = 2 if one.opcode.endswith("x2") else 1
    return 32 * per_thread if _SPECIAL.match(one.opcode) else 0


class Tally:
    """Counts of accesses while the programs of a launch run."""

    def __init__(self, program: Program, num_programs: int):
        self._program = program
        self._operations = np.array([_tensor_operations(one) for one in program.instructions])
        self._special = np.array([_special_functions(one) for one in program.instructions])
        self._executed = np.zeros(len(program.instructions), np.int64)
        self._sectors, self._lines, self._wavefronts = np.zeros((3, 2, num_programs), np.int64)
        self._work = np.zeros((3, num_programs), np.int64)
        self._products = np.zeros(num_programs, np.int64)
        self._bytes = Counter()
        self._in_flight = 0

    def global_access(self, batch, addresses, mask, sizes, kind: str) -> None:
        """kind: "read" or "written"; sizes: bytes of each thread, or of all."""
        programs = batch.program_of_thread
        _count_places(addresses, mask, sizes, 32, programs, self._sectors)
        _count_places(addresses, mask, sizes, 128, programs, self._lines)
        self._bytes[kind] += int((np.broadcast_to(sizes, len(mask)) * mask).sum())

    def shared_access(self, batch, addresses, mask, size: int) -> None:
        """An access of `size` bytes of each thread."""
        _count_wavefronts(addresses, mask, size, batch.program_of_thread, self._wavefronts)

    def product(self, program: int, operations: int) -> None:
        """A product whose size is not in its instruction."""
        self._products[program] += operations

    def add(self, batch) -> None:
        """Add what a batch has executed, at its end."""
        self._executed += batch.executed.sum(1)
        work = np.stack([np.ones_like(self._special), self._operations, self._special])
        self._work[:, batch.programs] = work @ batch.executed
        self._in_flight = max(self._in_flight, int(batch.copies.most_in_flight.max()))

    def finish(self, memory) -> Counts:
        """The counts of a launch that has run."""
        instructions, barriers = Counter(), 0
        for one, times in zip(self._program.instructions, self._executed.tolist(), strict=True):
            instructions[class_of(one)] += times
            barriers += times * (one.opcode == "bar.sync")
        distinct_bytes, distinct_lines = memory.touched()
        self._work[1] += self._products
        by_program = (self._work[0], self._lines[1], self._wavefronts[0], *self._work[1:])
        return Counts(
            instructions={name: n for name, n in instructions.items() if n},
            requests=int(self._sectors[0].sum()),
            sectors=int(self._sectors[1].sum()),
            lines=int(self._lines[1].sum()),
            read_bytes=self._bytes["read"],
            written_bytes=self._bytes["written"],
            distinct_bytes=distinct_bytes,
            distinct_lines=distinct_lines,
            wavefronts=int(self._wavefronts[0].sum()),
            bank_conflicts=int(self._wavefronts[1].sum()),
            tensor_operations=int(self._work[1].sum()),
            special_functions=int(self._work[2].sum()),
            barriers=barriers,
            bytes_in_flight=self._in_flight,
            programs=tuple(map(ProgramCounts._make, np.array(by_program).T.tolist())),
        )
