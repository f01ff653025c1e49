"""Undefined values: unwritten registers, quotients by zero, and shifts by the width or more (PTX
clamps such shifts, LLVM leaves them undefined).

Compiled code contains undefined values that are never used (under a mask, or in the unused half of
a packed pair), so an undefined value alone is no fault. The register gets an alternate, a second
possible value. Instructions that depend on the register run twice, once with each value. A fault is
raised if a value differs from its alternate and is used as an address, as a condition, as an
operand of a store or atomic instruction on global memory, or as the place of a TMA box.

An undefined value is not detected if both values give the same result, for example in a comparison.
Alternates are not propagated through memory, exchanges between threads or tensor cores.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.ptx import Instruction

_NOT_FOLLOWED = re.compile(r"shfl|redux|vote|elect|mma|wgmma|tcgen05|ld|ldmatrix|atom|mbarrier")
_USED = re.compile(r"(st|red|atom)\b.*\.global|cp\.async\.bulk")
_ALL_BITS = np.uint64(2**64 - 1)


@dataclass
class Effects:
    """Indices of the registers that one instruction reads, uses as addresses, and writes."""

    reads: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


def alternate(width: int) -> np.ndarray:
    """The alternate value of an undefined register of this width."""
    dtype = np.bool_ if width == 1 else f"u{width // 8}"
    return np.array([0x5A5A5A5A5A5A5A5A & ((1 << width) - 1)], dtype)


def following(step, one: Instruction, effect: Effects):
    """(registers of a step, a step that also computes the alternates of its results). The second
    step is needed only if one of these registers has an alternate."""
    guard = [one.predicate[0].index] if one.predicate else []
    sources = {*effect.reads, *effect.addresses, *guard}
    concerned = frozenset({*sources, *effect.writes})
    used = effect.reads if _USED.match(one.opcode) else []
    follows = bool(effect.writes) and not _NOT_FOLLOWED.match(one.opcode)
    bits = re.search(r"\d+$", one.opcode)  # a wider register is truncated to its low bits
    stored = np.uint64(2 ** int(bits[0]) - 1 if bits else _ALL_BITS)

    def run(batch, mask):
        alternates, registers, live = batch.alternates, batch.registers, batch.undefined
        if not guard and live.isdisjoint(sources):
            for index in live.intersection(effect.writes):
                _define(batch, index, mask)
            return step(batch, mask)
        threads = batch.every(mask)
        _check(batch, threads, guard, "condition")
        if guard:
            taken = batch.full(registers[guard[0]])
            threads = threads & (~taken if one.predicate[1] else taken)
        _check(batch, threads, effect.addresses, "address")
        _check(batch, threads, used, "operand", stored)
        reasons = [batch.alternates[index][1] for index in effect.reads if index in live]
        again = {}
        if follows and reasons:
            saved = {index: registers[index] for index in {*effect.reads, *effect.writes}}
            for index in saved.keys() & alternates.keys():
                values, _, where = alternates[index]
                registers[index] = np.where(where, values, registers[index])
            step(batch, mask)
            again = {index: registers[index] for index in effect.writes}
            for index, held in saved.items():
                registers[index] = held
            for index in effect.writes:
                batch.forget(index)
        else:
            for index in live.intersection(effect.writes):
                _define(batch, index, threads)
        signal = step(batch, mask)
        for index, values in again.items():
            held = registers[index]
            if index in alternates or not isinstance(held, np.ndarray):
                continue  # made undefined by this instruction, or written asynchronously
            where = values != held
            if where.any():
                batch.set_alternate(index, values, reasons[0], where)
                live.add(index)
        return signal

    return concerned, run


def _define(batch, index: int, threads: np.ndarray | None) -> None:
    """Note that `threads` of the group (None: all threads of the batch) write a register."""
    if threads is None:
        batch.forget(index)
        return
    values, why, where = batch.alternates[index]
    batch.forget(index)
    left_of = batch.left_of if threads is batch.mask else {}
    if id(where) not in left_of:
        left_of[id(where)] = where, where & ~threads & batch.running
    left = left_of[id(where)][1]
    if left.any():
        batch.set_alternate(index, values, why, left)
        if threads is not batch.mask and (left & batch.every(batch.mask)).any():
            batch.undefined.add(index)


def _check(batch, threads, indices: list[int], role: str, bits=_ALL_BITS) -> None:
    for index in indices:
        if index in batch.undefined:
            values, why, where = batch.alternates[index]
            wrong = threads & where & ((values ^ batch.registers[index]) & bits != 0)
            batch.refuse(wrong, FaultKind.UNDEFINED, f"the {role} is undefined: {why}")
