"""Control flow, barriers and exchanges within a warp (PTX ISA 9.7.9.6, 9.7.12, 9.7.13)."""

from __future__ import annotations

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.global_memory import AwaitedMemory
from kernels.executor.operands import DTYPES, Step, Translation, Unsupported, instruction
from kernels.executor.signals import Barrier, Branch, Exit


@instruction("bra")
def _bra(translation: Translation) -> Step:
    translation.expect("uni") if len(translation.parts) > 2 else None
    (label,) = translation.operands
    if label not in translation.program.labels:
        raise Unsupported(f"label {label!r} is not known")
    return lambda batch, mask: Branch(label, mask)


@instruction("ret", "exit")
def _ret(translation: Translation) -> Step:
    return lambda batch, mask: Exit(mask)


@instruction("trap")
def _trap(translation: Translation) -> Step:
    def trap(batch, mask):
        raise batch.fault(FaultKind.TRAP, "reached", int(np.flatnonzero(batch.every(mask))[0]))

    return trap


_BARRIERS = ("bar.sync", "barrier.sync", "barrier.sync.aligned", "barrier.cta.sync.aligned")


@instruction("bar", "barrier")
def _bar(translation: Translation) -> Step:
    opcode, operands = translation.instruction.opcode, translation.operands
    if opcode == "bar.warp.sync":

        def meet(batch, mask):
            batch.whole_warps(mask)

        return meet
    if opcode not in _BARRIERS:
        raise Unsupported("this form of barrier is not known")
    if operands != ("0",) and operands != ("0x0",):
        raise Unsupported("only barrier 0 of all threads is known")
    return lambda batch, mask: Barrier(mask)


@instruction("griddepcontrol")
def _griddepcontrol(translation: Translation) -> Step:
    """9.7.13.13. Launches run one after the other here, so that a wait is over at once; but one
    that may begin early is held to it (`AwaitedMemory`)."""
    if translation.one_of(("wait", "launch_dependents")) == "launch_dependents":
        return lambda batch, mask: None

    def wait(batch, mask):
        if isinstance(batch.memory, AwaitedMemory):
            batch.memory.end_wait(batch, mask)

    return wait


@instruction("shfl")
def _shfl(translation: Translation) -> Step:
    """Take a register of another thread of the warp; in PTX's words, 9.7.9.6: bits 12-8 of c are
    the
    segment mask and bits 4-0 the clamp; out of range a thread gets its own value."""
    mode = translation.one_of(("up", "down", "bfly", "idx"))
    translation.expect("sync", mode)
    target, value, lane, control, _members = translation.operands
    target, in_range = target if isinstance(target, tuple) else (target, "_")
    value, write = translation.read(value, "b32"), translation.write(target, "b32")
    lane, control = translation.read(lane, "u32"), translation.read(control, "u32")
    write_in_range = translation.write(in_range, "pred")

    def shuffle(batch, mask):
        threads = np.arange(batch.num_threads)
        own = threads & 31
        by, bits = lane(batch).astype(np.int64) & 31, control(batch).astype(np.int64)
        segment, clamp = bits >> 8 & 31, bits & 31
        least, most = own & segment, (own & segment) | (clamp & ~segment)
        wanted = {
            "up": own - by,
            "down": own + by,
            "bfly": own ^ by,
            "idx": least | (by & ~segment),
        }[mode]
        valid = wanted >= most if mode == "up" else wanted <= most
        origin = np.where(valid, wanted, own) | (threads & ~31)
        if mask is not None and not mask[origin[mask]].all():
            thread = int(threads[mask][~mask[origin[mask]]][0])
            raise batch.fault(
                FaultKind.DIVERGENCE, "the thread that is read from does not take part", thread
            )
        write(batch, mask, batch.full(value(batch))[origin])
        write_in_range(batch, mask, valid)

    return shuffle


_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("redux")
def _redux(translation: Translation) -> Step:
    """One value of all threads of the warp (9.7.13.6)."""
    kind = translation.kind
    name = translation.one_of(_REDUCTIONS)
    translation.expect("sync", name)
    target, value, members = translation.operands
    value, write = translation.read(value, kind), translation.write(target, kind)
    members = translation.read(members, "u32")
    reduce, dtype = _REDUCTIONS[name].reduce, DTYPES[kind]

    def reduction(batch, mask):
        batch.whole_warps(mask)
        chosen = batch.full(members(batch))
        if not (chosen[batch.every(mask)] == np.uint32(0xFFFFFFFF)).all():
            thread = int(np.flatnonzero(batch.every(mask) & (chosen != 0xFFFFFFFF))[0])
            raise batch.fault(FaultKind.DIVERGENCE, "of a part of the warp", thread)
        by_warp = batch.full(value(batch)).reshape(-1, 32)
        write(batch, mask, np.repeat(reduce(by_warp, axis=1, dtype=dtype), 32))

    return reduction


@instruction("elect")
def _elect(translation: Translation) -> Step:
    """One thread of the warp, the first one here, gets true (9.7.13.7)."""
    translation.expect("sync")
    target, _members = translation.operands
    target, elected = target
    write, write_elected = translation.write(target, "b32"), translation.write(elected, "pred")

    def elect(batch, mask):
        batch.whole_warps(mask)
        write(batch, mask, np.zeros(1, np.uint32))
        write_elected(batch, mask, np.arange(batch.num_threads) % 32 == 0)

    return elect
