"""Control flow and exchanges within a warp (PTX ISA 9.7.9.6, 9.7.12, 9.7.13)."""

import operator

import numpy as np

from kernels.executor.accesses import REDUCTIONS
from kernels.executor.faults import FaultKind
from kernels.executor.operands import DTYPES, Signal, Step, Translation, Unsupported, instruction


@instruction("bra")
def _bra(translation: Translation) -> Step:
    translation.expect("uni")
    (label,) = translation.operands
    if label not in translation.program.labels:
        raise Unsupported(f"label {label!r} is not defined")
    return lambda batch, mask: Signal("branch", mask, label)


@instruction("ret", "exit")
def _ret(translation: Translation) -> Step:
    return lambda batch, mask: Signal("exit", mask)


@instruction("trap")
def _trap(translation: Translation) -> Step:
    return lambda batch, mask: batch.refuse(batch.every(mask), FaultKind.TRAP, "reached")


@instruction("griddepcontrol")
def _griddepcontrol(translation: Translation) -> Step:
    """9.7.13.13. Launches run one after another, so a wait returns at once. In a dependent launch,
    global memory raises Fault for accesses before the wait."""
    if translation.one_of(("wait", "launch_dependents")) == "launch_dependents":
        return lambda batch, mask: None

    def wait(batch, mask):
        batch.early &= ~batch.every(mask)

    return wait


def _member_masks(batch, mask, members: np.ndarray) -> np.ndarray:
    """The member mask of each thread. Raises Fault unless the active threads are exactly the
    members that have not exited (.sync)."""
    active, masks = batch.every(mask), batch.full(members)
    here = np.packbits(active.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)
    running = np.packbits(batch.running.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)
    here, running = here.repeat(32), running.repeat(32)
    if (wrong := active & (masks & running != here)).any():
        thread = int(np.argmax(wrong))
        detail = f"the member mask is {masks[thread]:#x}, the active mask is {here[thread]:#x}"
        raise batch.fault(FaultKind.DIVERGENCE, detail, thread)
    return masks & here


_SHIFTED = {"up": operator.sub, "down": operator.add, "bfly": operator.xor}


@instruction("shfl")
def _shfl(translation: Translation) -> Step:
    """Read a register of another lane (9.7.9.6). Bits 12-8 of operand c are the segment mask, bits
    4-0 the clamp. Out of range, a lane gets its own value."""
    mode = translation.one_of(("up", "down", "bfly", "idx"))
    translation.expect("sync", mode)
    target, value, *others = translation.operands
    target, in_range = target if isinstance(target, tuple) else (target, "_")
    value, write = translation.read(value, "b32"), translation.write(target, "b32")
    lane, control, members = (translation.read(operand, "u32") for operand in others)
    write_in_range = translation.write(in_range, "pred")

    def shuffle(batch, mask):
        _member_masks(batch, mask, members(batch))
        threads = np.arange(batch.num_threads)
        own = threads & 31
        by, bits = lane(batch).astype(np.int64) & 31, control(batch).astype(np.int64)
        segment, clamp = bits >> 8 & 31, bits & 31
        least, most = own & segment, (own & segment) | (clamp & ~segment)
        wanted = least | (by & ~segment) if mode == "idx" else _SHIFTED[mode](own, by)
        valid = wanted >= most if mode == "up" else wanted <= most
        origin = np.where(valid, wanted, own) | (threads & ~31)
        if mask is not None:
            detail = "the source lane is not active"
            batch.refuse(mask & ~mask[origin], FaultKind.DIVERGENCE, detail)
        write(batch, mask, batch.full(value(batch))[origin])
        write_in_range(batch, mask, valid)

    return shuffle


@instruction("redux")
def _redux(translation: Translation) -> Step:
    """Reduce a value over the member threads of the warp (9.7.13.6)."""
    kind = translation.kind
    name = translation.one_of(REDUCTIONS)
    translation.expect("sync", name)
    target, value, members = translation.operands
    value, write = translation.read(value, kind), translation.write(target, kind)
    members = translation.read(members, "u32")
    reduce, dtype = REDUCTIONS[name].reduce, DTYPES[kind]

    def reduction(batch, mask):
        chosen = _member_masks(batch, mask, members(batch)).reshape(-1, 32)
        values = batch.full(value(batch)).reshape(-1, 32)
        results = np.zeros_like(values)
        active = batch.every(mask).reshape(-1, 32)
        for warp in np.flatnonzero(active.any(1)):
            for bits in np.unique(chosen[warp, active[warp]]):
                inside = bits >> np.arange(32, dtype=np.uint32) & 1 == 1
                results[warp, inside] = reduce(values[warp, inside], dtype=dtype)
        write(batch, mask, results.reshape(-1))

    return reduction


@instruction("elect")
def _elect(translation: Translation) -> Step:
    """True for the lowest member lane of the warp (9.7.13.7)."""
    translation.expect("sync")
    (target, elected), members = translation.operands
    write, write_elected = translation.write(target, "b32"), translation.write(elected, "pred")
    members = translation.read(members, "u32")

    def elect(batch, mask):
        chosen = _member_masks(batch, mask, members(batch))
        lowest = chosen & (~chosen + np.uint32(1))
        lane = np.arange(batch.num_threads, dtype=np.uint32) % 32
        write(batch, mask, np.log2(np.maximum(lowest, 1)).astype(np.uint32))
        write_elected(batch, mask, lowest == np.uint32(1) << lane)

    return elect


@instruction("vote")
def _vote(translation: Translation) -> Step:
    """The member threads of the warp in which a predicate holds, as bits (9.7.13.4)."""
    translation.expect("sync", translation.one_of(("ballot",)))
    target, predicate, members = translation.operands
    predicate, members = translation.read(predicate, "pred"), translation.read(members, "u32")
    write = translation.write(target, translation.kind)

    def vote(batch, mask):
        chosen = _member_masks(batch, mask, members(batch))
        holds = np.packbits(batch.full(predicate(batch)).reshape(-1, 32), axis=1, bitorder="little")
        write(batch, mask, holds.view(np.uint32).repeat(32) & chosen)

    return vote
